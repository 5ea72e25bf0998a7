// Threads that do one thing after another together, and meet in between: an op of a hundred small
// products would otherwise wake them and join them a hundred times.
//
// All members have to run at the same time: torch's OpenMP does that. There may be fewer than torch
// has threads set (OMP_THREAD_LIMIT, or threads that are in use already: then one).
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <exception>

#include "common/barrier.h"

class Team {
 public:
  struct Member {
    Team& team;
    int64_t index, count;

    // Until all members have come here. Meanwhile `idle` is called until it returns false.
    template <typename F>
    void meet(F idle) const {
      team.barrier.meet(count, idle);
    }
  };

  // Calls `work` with each member, on a separate thread. If it throws in one of them, the others
  // stop where they meet next, and the first exception is thrown here.
  template <typename F>
  void run(F work) {
    const int64_t wanted = torch::stable::get_num_threads();
    torch::stable::parallel_for(0, wanted, 1, [&](int64_t begin, int64_t end) {
      // How many of the wanted indices a thread got: the first thread's range tells.
      if (begin == 0) indices_each.set(uint32_t(end));
      indices_each.wait_while(0);
      const int64_t each = indices_each.value();
      barrier.join();
      try {
        work(Member{*this, begin / each, (wanted + each - 1) / each});
      } catch (const Barrier::Ended&) {
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        barrier.end();
      }
    });
    if (error) std::rethrow_exception(error);
  }

 private:
  Barrier barrier;
  Signal indices_each;
  std::atomic<bool> failed{false};
  std::exception_ptr error;
};
