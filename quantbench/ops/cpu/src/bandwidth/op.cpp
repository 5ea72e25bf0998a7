// quantbench::cpu_read: reads a tensor's bytes and does next to nothing with them, on all threads.
// Its time is the limit of any kernel that has to read the same bytes.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/streams.h"

namespace {

using torch::stable::Tensor;

typedef uint64_t Line __attribute__((vector_size(64), aligned(8), may_alias));

constexpr int64_t PIECE = 1 << 18;  // bytes that a thread takes at a time
// A core keeps more lines on their way when it reads at several places; measured: 12.6 GB/s at one
// without prefetching, 17 to 19 at two or four with it.
constexpr int STREAMS = 4;
constexpr int64_t STREAM = PIECE / STREAMS, PREFETCHED = 1024;

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t mixed(const char* from) {
  Line mix[STREAMS] = {};
  for (int64_t at = 0; at < STREAM; at += sizeof(Line))
    for (int i = 0; i < STREAMS; ++i) {
      const char* line = from + i * STREAM + at;
      read_ahead(line + PREFETCHED);
      mix[i] ^= *reinterpret_cast<const Line*>(line);
    }
  uint64_t result = 0;
  for (const Line& of_stream : mix)
    for (int i = 0; i < 8; ++i) result ^= of_stream[i];
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
      result ^= mixed(from + i * PIECE);
  };
  torch::stable::parallel_for(0, std::max<int64_t>(1, torch::stable::get_num_threads()), 1, work);
  return static_cast<int64_t>(result.load());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_read", TORCH_BOX(&read_bytes));
}
