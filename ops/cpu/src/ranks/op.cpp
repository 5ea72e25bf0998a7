// quantbench::cpu_ranks_sum: the sum of a vector over processes of one machine, through memory that
// they share. It takes some microseconds, and gloo's sockets some hundred, twice for each layer.
//
// Each rank writes its numbers into a place of its own, then counts up its round, then waits until all
// have. There are two places for each rank, used in turns: who writes into one for round r + 2 has seen
// every rank begin round r + 1, and so end its reading of round r.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <ctime>

#include "common/signal.h"

namespace {

using torch::stable::Tensor;

struct alignas(128) Round {
  std::atomic<uint32_t> number;
};

class Shared {
 public:
  Shared(int file, char* memory, int64_t rank, int64_t size, int64_t capacity)
      : file(file), rank(rank), size(size), capacity(capacity),
        rounds(reinterpret_cast<Round*>(memory)),
        places(reinterpret_cast<float*>(memory + size * sizeof(Round))) {}

  static int64_t bytes(int64_t size, int64_t capacity) {
    return size * sizeof(Round) + 2 * size * capacity * sizeof(float);
  }

  void sum(const float* x, float* y, int64_t count) {
    for (int64_t done = 0; done < count; done += capacity)
      some(x + done, y + done, count - done < capacity ? count - done : capacity);
  }

 private:
  const int file;
  const int64_t rank, size, capacity;
  Round* const rounds;
  float* const places;
  uint32_t round = 0;

  float* place(int64_t of) const { return places + (2 * of + round % 2) * capacity; }

  void some(const float* x, float* y, int64_t count) {
    ++round;
    std::memcpy(place(rank), x, count * sizeof(float));
    rounds[rank].number.store(round, std::memory_order_release);
    for (int64_t other = 0; other < size; ++other) wait_for(other);
    std::memcpy(y, place(0), count * sizeof(float));
    for (int64_t other = 1; other < size; ++other) {
      const float* from = place(other);
      for (int64_t i = 0; i < count; ++i) y[i] += from[i];
    }
  }

  bool has_come(int64_t other) const {
    return int32_t(rounds[other].number.load(std::memory_order_acquire) - round) >= 0;
  }

  // Awake for as long as a layer may take; then asleep, and looking whether the other still runs.
  void wait_for(int64_t other) const {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::microseconds ALONE{50}, AWAKE{5000};
    constexpr std::chrono::milliseconds LOOK{100};
    Clock::time_point start = Clock::now();
    while (!has_come(other)) {
      const auto waited = Clock::now() - start;
      if (waited < ALONE) {
        for (int i = 0; i < 16 && !has_come(other); ++i) pause_briefly();
      } else if (waited < AWAKE) {
        sched_yield();
      } else {
        const timespec nap{0, 100000};
        nanosleep(&nap, nullptr);
        if (waited < LOOK) continue;
        STD_TORCH_CHECK(has_come(other) || runs(other), "another rank has ended: rank ", other);
        start = Clock::now() - AWAKE;
      }
    }
  }

  // A process that has ended, however it did, holds no lock.
  bool runs(int64_t other) const {
    struct flock lock {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = other, lock.l_len = 1;
    return fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }
};

Tensor sum(const Tensor& x, int64_t handle) {
  STD_TORCH_CHECK(x.is_contiguous() && x.scalar_type() == torch::headeronly::ScalarType::Float,
                  "x has to be float32, contiguous");
  Tensor y = torch::stable::new_empty(x, x.sizes());
  reinterpret_cast<Shared*>(handle)->sum(static_cast<const float*>(x.const_data_ptr()),
                                         static_cast<float*>(y.mutable_data_ptr()), x.numel());
  return y;
}

}  // namespace

// A handle for cpu_ranks_sum, or 0. The file is the same for all ranks; the first to come makes it as
// large as it has to be, all zeros. `capacity`: numbers that are summed at once.
extern "C" __attribute__((visibility("default"))) int64_t quantbench_ranks_open(
    const char* path, int64_t rank, int64_t size, int64_t capacity) {
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return 0;
  const int64_t bytes = Shared::bytes(size, capacity);
  struct flock lock {};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
  void* memory = MAP_FAILED;
  if (!ftruncate(file, bytes) && !fcntl(file, F_OFD_SETLK, &lock))
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    close(file);
    return 0;
  }
  return reinterpret_cast<int64_t>(
      new Shared(file, static_cast<char*>(memory), rank, size, capacity));
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_ranks_sum", TORCH_BOX(&sum));
}
