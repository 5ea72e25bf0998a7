// Where the members of a team wait for each other. A member that cannot go on ends the barrier for
// all of them: nobody waits for it.
#pragma once

#include "common/signal.h"

class Barrier {
 public:
  struct Ended {};  // what `meet` throws when another member has called `end`

  // Called by each member before it meets the others: tells whether members share a core.
  void join() {
    const unsigned core = unsigned(sched_getcpu()) % (64 * WORDS);
    const uint64_t bit = uint64_t(1) << core % 64;
    if (cores[core / 64].fetch_or(bit, std::memory_order_acq_rel) & bit)
      shared.store(true, std::memory_order_relaxed);
  }

  // Returns when `members` threads have called it. Meanwhile `idle` is called until it returns false.
  template <typename F>
  void meet(int64_t members, F idle) {
    const uint32_t now = round.value();
    if (now == ENDED) throw Ended();
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
      arrived.store(0, std::memory_order_relaxed);
      // Nobody has ended this round: who would end it has arrived here as well.
      round.set(now + 1);
      return;
    }
    while (round.value() == now && idle()) {
    }
    round.wait_while(now, shared.load(std::memory_order_relaxed));
    if (round.value() == ENDED) throw Ended();
  }

  void end() { round.set(ENDED); }

 private:
  static constexpr uint32_t ENDED = UINT32_MAX;
  static constexpr int WORDS = 16;  // 1024 cores; those beyond share a bit
  std::atomic<uint64_t> cores[WORDS] = {};
  std::atomic<bool> shared{false};
  // Lines come in pairs: 128 bytes.
  alignas(128) std::atomic<int64_t> arrived{0};
  alignas(128) Signal round;
};
