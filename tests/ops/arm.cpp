// Products by the kernels of linear layers, as a program without torch: tests/ops/test_arm.py compiles it with
// them for ARM and runs it in an emulator. It reads products from its input and writes their results.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "common/isa.h"
#include "common/products.h"

// torch's part in them, which is to register ops.
extern "C" {
AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, TorchLibraryHandle*) {
  return 0;
}
AOTITorchError torch_library_impl(TorchLibraryHandle, const char*, void (*)(StableIValue*, uint64_t, uint64_t), uint64_t) {
  return 0;
}
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle) { return 0; }
const char* quantbench_isa();
int quantbench_use_isa(const char*);
}

namespace {

constexpr int MEMBERS = 3;  // of a team, one after the other

struct Request {
  int64_t packed, type, tokens, rows, columns, as_one, bytes;  // bytes: of the weight
};

bool read(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && !quantbench_use_isa(arguments[1])) return std::printf("not %s\n", arguments[1]), 1;
  std::fprintf(stderr, "%s\n", quantbench_isa());
  for (Request r; read(&r, sizeof r);) {
    const Number type = Number(r.type);
    std::vector<char> x(r.tokens * r.columns * size_of(type)), weight(r.bytes), y(r.tokens * r.rows * size_of(type), -1);
    if (!read(x.data(), x.size()) || !read(weight.data(), weight.size())) return 1;
    const auto product = r.packed ? packed_product(weight.data(), r.bytes, type, r.tokens, r.as_one)
                                  : plain_product(weight.data(), r.rows, r.columns, type, r.tokens, r.as_one);
    Scratch scratch;
    char* prepared = scratch.reserve(product->x_bytes);
    product->prepare({x.data(), r.columns, 1}, prepared, 0, product->tiles());
    for (int member = 0; member < MEMBERS; ++member) product->share(prepared, y.data(), member, MEMBERS);
    std::fwrite(y.data(), 1, y.size(), stdout);
    std::fflush(stdout);
  }
}
