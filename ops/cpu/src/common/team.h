// Threads that do one thing after another together, and wait for each other in between without
// going to sleep: an op of a hundred small products would wake and join them as many times.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <sched.h>

#include <atomic>
#include <cstdint>


inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Team {
 public:
  struct Member {
    Team& team;
    int64_t index, count;

    // Until all have come here. Meanwhile `idle` is called again and again, while it returns true.
    template <typename F>
    void meet(F idle) const {
      const int64_t round = team.round.load(std::memory_order_relaxed);
      if (team.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        team.arrived.store(0, std::memory_order_relaxed);
        team.round.store(round + 1, std::memory_order_release);
        return;
      }
      bool more = true;
      for (int spins = 0; team.round.load(std::memory_order_acquire) == round; ++spins) {
        if (more) more = idle();
        else if (spins > SPINS) sched_yield();  // others may need this core to get here
        else rest();
      }
    }
  };

  // Calls `work` with each member, on a thread of its own; with one if threads are already in use.
  template <typename F>
  void run(F work) {
    const int64_t wanted = torch::stable::get_num_threads();
    torch::stable::parallel_for(0, wanted, 1, [&](int64_t begin, int64_t end) {
      // There may be fewer than were asked for; the first one's share tells how many.
      if (begin == 0) each.store(end, std::memory_order_release);
      int64_t size;
      while (!(size = each.load(std::memory_order_acquire))) sched_yield();
      work(Member{*this, begin / size, (wanted + size - 1) / size});
    });
  }

 private:
  static constexpr int SPINS = 1 << 14;
  alignas(128) std::atomic<int64_t> arrived{0};
  alignas(128) std::atomic<int64_t> round{0};
  std::atomic<int64_t> each{0};
};
