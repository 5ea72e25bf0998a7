// quantbench::cpu_ranks_sum and cpu_ranks_gather: what processes of one machine exchange through memory
// that they share (common/ranks.h).

#include "common/ranks.h"

#include <sched.h>
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>
#include <unistd.h>

#include <vector>

#include "common/products.h"

using torch::stable::Tensor;

Tensor gather_rows(const Tensor& x, LocalRanks& ranks, const std::vector<int64_t>& widths) {
  STD_TORCH_CHECK(int64_t(widths.size()) == ranks.size && x.dim() == 2 && x.is_contiguous() &&
                      x.size(1) == widths[ranks.rank],
                  "x has to be (rows, width), contiguous, and there is a width for each rank");
  std::vector<int64_t> lengths;
  int64_t all = 0;
  for (int64_t width : widths) {
    lengths.push_back(width * x.element_size());
    all += width;
  }
  Tensor y = torch::stable::new_empty(x, {x.size(0), all});
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(y.mutable_data_ptr());
  for (int64_t row = 0; row < x.size(0); ++row)
    ranks.gather(from + row * lengths[ranks.rank], to + row * all * x.element_size(), lengths.data());
  return y;
}

namespace {

Tensor sum(const Tensor& x, int64_t handle) {
  STD_TORCH_CHECK(x.is_contiguous() && x.scalar_type() == torch::headeronly::ScalarType::Float,
                  "x has to be float32, contiguous");
  Tensor y = torch::stable::new_empty(x, x.sizes());
  LocalRanks::of(handle)->sum(static_cast<const float*>(x.const_data_ptr()),
                              static_cast<float*>(y.mutable_data_ptr()), x.numel(),
                              [] { return false; });
  return y;
}

Tensor gather(const Tensor& x, int64_t handle, std::vector<int64_t> widths) {
  return gather_rows(x, *LocalRanks::of(handle), widths);
}

bool share_cores(int64_t ranks) {
  cpu_set_t cores;
  return !sched_getaffinity(0, sizeof cores, &cores) && CPU_COUNT(&cores) < ranks;
}

}  // namespace

// A handle of ranks that share memory, or 0. The file is the same for all ranks; the first to come makes
// it as large as it has to be, all zeros. `capacity`: bytes that a rank exchanges at once.
extern "C" __attribute__((visibility("default"))) int64_t quantbench_ranks_open(
    const char* path, int64_t rank, int64_t size, int64_t capacity) {
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return 0;
  const int64_t bytes = LocalRanks::bytes(size, capacity);
  struct flock lock {};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
  void* memory = MAP_FAILED;
  if (!ftruncate(file, bytes) && !fcntl(file, F_OFD_SETLK, &lock))
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    close(file);
    return 0;
  }
  return reinterpret_cast<int64_t>(new LocalRanks(file, static_cast<char*>(memory), rank, size,
                                                  capacity, share_cores(size)));
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_ranks_sum", TORCH_BOX(&sum));
  library.impl("cpu_ranks_gather", TORCH_BOX(&gather));
}
