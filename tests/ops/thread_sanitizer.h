// Included before every source by `make sanitize-threads`. The thread sanitizer does not see how
// OpenMP starts threads and waits for them; here is what it would have seen.
#pragma once

#include <sanitizer/tsan_interface.h>
#include <torch/csrc/stable/ops.h>

namespace torch::stable {
template <typename F>
void seen_parallel_for(int64_t begin, int64_t end, int64_t grain, const F& work) {
  char started, ended;
  __tsan_release(&started);
  parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    __tsan_acquire(&started);
    work(first, last);
    __tsan_release(&ended);
  });
  __tsan_acquire(&ended);
}
}  // namespace torch::stable

#define parallel_for seen_parallel_for
