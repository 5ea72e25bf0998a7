// A number that one thread sets and others wait for: awake at first, because most waits end within
// microseconds, then asleep, because the thread that they wait for may need their core. Setting it
// makes a system call only while somebody sleeps.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

// Tells the core that this thread only waits.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // some 10 ns; `yield` does nothing on most cores
#endif
}

class Signal {
 public:
  uint32_t value() const { return number.load(std::memory_order_acquire); }

  void set(uint32_t to) {
    // Either this thread sees the sleeper, or the sleeper sees the new number: both orders are total.
    number.store(to, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  // Returns once the number is no longer `old`. `yielding`: whether the thread that is waited for may
  // need this core. Where it does not, yielding would give the core to other processes, for whole time
  // slices.
  void wait_while(uint32_t old, bool yielding = false) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    while (value() == old) {
      if (Clock::now() - start > AWAKE) return sleep_while(old);
      if (yielding) sched_yield();
      else
        for (int i = 0; i < 16 && value() == old; ++i) pause_briefly();
    }
  }

 private:
  static constexpr std::chrono::microseconds AWAKE{50};

  std::atomic<uint32_t> number{0};
  std::atomic<uint32_t> sleepers{0};

  void sleep_while(uint32_t old) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (number.load(std::memory_order_seq_cst) == old) futex(FUTEX_WAIT_PRIVATE, old);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  void futex(int operation, uint32_t value) {
    static_assert(sizeof number == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
    syscall(SYS_futex, &number, operation, value, nullptr, nullptr, 0);
  }
};
