// A number that one thread sets and others wait for: awake at first, because most waits end within
// microseconds, then asleep, because the thread that they wait for may need their core. Setting it
// makes a system call only while somebody sleeps. With ACROSS_PROCESSES it is in memory that several
// processes share; memory of zeros is such a signal.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

// Tells the core that this thread only waits.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // some 10 ns; `yield` does nothing on most cores
#endif
}

template <bool ACROSS_PROCESSES>
class SignalOf {
 public:
  uint32_t value() const { return number.load(std::memory_order_acquire); }

  void set(uint32_t to) {
    // Either this thread sees the sleeper, or the sleeper sees the new number: both orders are total.
    number.store(to, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst)) futex(FUTEX_WAKE, INT_MAX, nullptr);
  }

  // Returns once the number is no longer `old`. `yielding`: whether the thread that is waited for may
  // need this core. Where it does not, yielding would give the core to other processes, for whole time
  // slices. `longest`: after some such time asleep it returns, too; null: never.
  void wait_while(uint32_t old, bool yielding = false, const timespec* longest = nullptr) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    while (value() == old) {
      if (Clock::now() - start > AWAKE) return sleep_while(old, longest);
      if (yielding) sched_yield();
      else
        for (int i = 0; i < 16 && value() == old; ++i) pause_briefly();
    }
  }

 private:
  static constexpr std::chrono::microseconds AWAKE{50};

  std::atomic<uint32_t> number{0};
  std::atomic<uint32_t> sleepers{0};

  void sleep_while(uint32_t old, const timespec* longest) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (number.load(std::memory_order_seq_cst) == old)
      if (futex(FUTEX_WAIT, old, longest) && errno == ETIMEDOUT) break;
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  long futex(int operation, uint32_t value, const timespec* longest) {
    static_assert(sizeof number == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
    constexpr int OWNERS = ACROSS_PROCESSES ? 0 : FUTEX_PRIVATE_FLAG;
    return syscall(SYS_futex, &number, operation | OWNERS, value, longest, nullptr, 0);
  }
};

using Signal = SignalOf<false>;
using SharedSignal = SignalOf<true>;
