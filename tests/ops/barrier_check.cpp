// Checks ops/cpu/src/common/barrier.h on its own; test_cpu_team.py compiles and runs it.

#include "common/barrier.h"

#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

template <typename F>
void on_threads(int count, F work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
}

bool nothing_to_do() { return false; }

// What one member writes before it meets the others, all read afterwards.
void numbers_are_seen() {
  Barrier barrier;
  int numbers[4] = {};
  on_threads(4, [&](int member) {
    for (int round = 1; round <= 2000; ++round) {
      numbers[member] = round * (member + 1);
      barrier.meet(4, nothing_to_do);
      for (int i = 0; i < 4; ++i) check(numbers[i] == round * (i + 1), "a number of another member");
      barrier.meet(4, nothing_to_do);
    }
  });
}

// A member that comes 300 ms late: the others do not keep their cores busy meanwhile.
void waiting_sleeps() {
  Barrier barrier;
  on_threads(3, [&](int member) {
    if (member == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const double before = cpu_seconds();
    barrier.meet(3, nothing_to_do);
    check(cpu_seconds() - before < 0.03, "a waiting member used its core");
  });
}

void idle_is_called_until_it_is_done() {
  Barrier barrier;
  int calls = 0;
  on_threads(2, [&](int member) {
    if (member == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    barrier.meet(2, [&] { return member == 1 && ++calls < 100; });
  });
  check(calls == 100, "idle was called another number of times");
}

// Asleep, awake, or not there yet: the end reaches each member.
void an_end_reaches_everybody() {
  for (int delay : {0, 20}) {
    Barrier barrier;
    std::atomic<int> ended{0};
    on_threads(4, [&](int member) {
      try {
        barrier.meet(4, nothing_to_do);
        if (member == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(delay));
          return barrier.end();
        }
        if (member == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2 * delay));
        barrier.meet(4, nothing_to_do);
      } catch (const Barrier::Ended&) {
        ++ended;
      }
    });
    check(ended == 3, "a member was not told that the barrier has ended");
  }
}

}  // namespace

int main() {
  numbers_are_seen();
  waiting_sleeps();
  idle_is_called_until_it_is_done();
  an_end_reaches_everybody();
}
