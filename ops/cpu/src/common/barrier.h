// Where the members of a team wait for each other. A member that cannot go on ends the barrier for
// all of them: nobody waits for it.
#pragma once

#include "common/signal.h"

class Barrier {
 public:
  struct Ended {};  // what `meet` throws when another member has called `end`

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
    round.wait_while(now, idle);
    if (round.value() == ENDED) throw Ended();
  }

  void end() { round.set(ENDED); }

 private:
  static constexpr uint32_t ENDED = UINT32_MAX;
  // Lines come in pairs: 128 bytes.
  alignas(128) std::atomic<int64_t> arrived{0};
  alignas(128) Signal round;
};
