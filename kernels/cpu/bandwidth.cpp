// quantbench::cpu_read: reads a tensor's bytes and does next to nothing with them, on all threads.
// What time it takes is the limit for any kernel that has to read as many.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

using torch::stable::Tensor;

constexpr int64_t PIECE = 1 << 18;  // bytes that a thread takes at a time
constexpr int LINE = 64, PREFETCHED = 4096;

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t mixed(const char* from, int64_t lines) {
  uint64_t words[LINE / 8 * 4] = {};
  for (int64_t i = 0; i + 4 <= lines; i += 4, from += 4 * LINE) {
    for (int line = 0; line < 4; ++line) __builtin_prefetch(from + PREFETCHED + line * LINE);
    uint64_t read[LINE / 8 * 4];
    std::memcpy(read, from, sizeof read);
    for (int w = 0; w < LINE / 8 * 4; ++w) words[w] ^= read[w];
  }
  uint64_t result = 0;
  for (uint64_t word : words) result ^= word;
  return result;
}

int64_t read_bytes(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), "cpu_read takes a contiguous tensor");
  const char* from = static_cast<const char*>(tensor.const_data_ptr());
  const int64_t bytes = tensor.numel() * tensor.element_size(), pieces = bytes / PIECE;
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> result{0};
  auto work = [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
      result ^= mixed(from + i * PIECE, PIECE / LINE);
  };
  torch::stable::parallel_for(0, std::max<int64_t>(1, torch::stable::get_num_threads()), 1, work);
  return static_cast<int64_t>(result.load());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_read", TORCH_BOX(&read_bytes));
}
