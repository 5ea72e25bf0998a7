// Included before every source by `make sanitize-threads`. The thread sanitizer does not see how
// OpenMP starts threads and waits for them; here is what it would have seen.
#pragma once

#include <sanitizer/tsan_interface.h>
#include <torch/csrc/stable/ops.h>

namespace torch::stable {
inline char threads_started, threads_ended;  // global: a closure's address is read too early

template <typename F>
void seen_parallel_for(int64_t begin, int64_t end, int64_t grain, const F& work) {
  const auto seen = [&](int64_t first, int64_t last) {
    __tsan_acquire(&threads_started);
    work(first, last);
    __tsan_release(&threads_ended);
  };
  __tsan_release(&threads_started);
  parallel_for(begin, end, grain, seen);
  __tsan_acquire(&threads_ended);
}
}  // namespace torch::stable

#define parallel_for seen_parallel_for
