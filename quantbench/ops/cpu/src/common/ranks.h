// Processes of one machine that compute one model together: they exchange numbers through memory that
// they share. It takes some microseconds, and gloo's sockets some hundred, twice for each layer.
//
// Each rank writes into its place, then counts up its round, then waits until all have. There
// are two places for each rank, used in turns: who writes into one for round r + 2 has seen every rank
// start round r + 1, and so end its reading of round r. All ranks have to make the same calls.
//
// A rank that cannot go on calls `abandon`, and a rank that has ended holds no lock on its byte of the
// memory's file any more. Those that wait look for both ten times a second, and throw.
#pragma once

#include <fcntl.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <vector>

#include "common/signal.h"

class LocalRanks {
 public:
  const int64_t rank, size;

  // capacity: bytes that a rank exchanges at once. yielding: whether ranks share cores.
  LocalRanks(int file, char* memory, int64_t rank, int64_t size, int64_t capacity, bool yielding)
      : rank(rank), size(size), file(file), capacity(capacity), yielding(yielding),
        rounds(reinterpret_cast<Line*>(memory)), failed(rounds[size].failed),
        places(memory + (size + 1) * sizeof(Line)) {}

  static int64_t bytes(int64_t size, int64_t capacity) {
    return (size + 1) * sizeof(Line) + 2 * size * capacity;
  }

  // The ranks of a handle (quantbench_ranks_open); null for 0.
  static LocalRanks* of(int64_t handle) { return reinterpret_cast<LocalRanks*>(handle); }

  // y = the sum of all ranks' x, added in the order of ranks: the same bits for all. y may be x. While
  // others are waited for, `idle` is called until it returns false.
  template <typename F>
  void sum(const float* x, float* y, int64_t count, F idle) {
    const int64_t most = capacity / sizeof(float);
    for (int64_t done = 0; done < count; done += most) {
      const int64_t some = count - done < most ? count - done : most;
      exchange(x + done, some * sizeof(float), idle);
      std::memcpy(y + done, place(0), some * sizeof(float));
      for (int64_t other = 1; other < size; ++other) {
        const auto* from = reinterpret_cast<const float*>(place(other));
        for (int64_t i = 0; i < some; ++i) y[done + i] += from[i];
      }
    }
  }

  // y = all ranks' x, one behind the other. lengths: the bytes of each rank's x.
  void gather(const char* x, char* y, const int64_t* lengths) {
    int64_t longest = 0;
    for (int64_t other = 0; other < size; ++other)
      if (lengths[other] > longest) longest = lengths[other];
    for (int64_t done = 0; done < longest; done += capacity) {
      auto some = [&](int64_t of) {
        const int64_t left = lengths[of] - done;
        return left < 0 ? 0 : left < capacity ? left : capacity;
      };
      exchange(x + done, some(rank), [] { return false; });
      char* to = y + done;
      for (int64_t other = 0; other < size; to += lengths[other++])
        std::memcpy(to, place(other), some(other));
    }
  }

  // No rank can go on: every call of this or another rank throws from now on, those that wait as well.
  void abandon() {
    uint32_t none = 0;
    failed.compare_exchange_strong(none, uint32_t(rank) + 1);
  }

 private:
  // Lines come in pairs: 128 bytes.
  struct alignas(128) Line {
    SharedSignal round;
    std::atomic<uint32_t> failed;  // of the line behind all rounds: the first rank that failed, from 1
  };

  const int file;
  const int64_t capacity;
  const bool yielding;
  Line* const rounds;
  std::atomic<uint32_t>& failed;
  char* const places;
  uint32_t round = 0;

  char* place(int64_t of) const { return places + (2 * of + round % 2) * capacity; }

  template <typename F>
  void exchange(const void* x, int64_t bytes, F idle) {
    check();
    ++round;
    std::memcpy(place(rank), x, bytes);
    rounds[rank].round.set(round);
    for (int64_t other = 0; other < size; ++other) wait_for(other, idle);
  }

  template <typename F>
  void wait_for(int64_t other, F& idle) {
    constexpr timespec LOOK{0, 100'000'000};
    SharedSignal& theirs = rounds[other].round;
    const uint32_t before = round - 1;
    while (theirs.value() == before && idle()) {
    }
    while (theirs.value() == before) {
      theirs.wait_while(before, yielding, &LOOK);
      if (theirs.value() != before) return;
      check();
      STD_TORCH_CHECK(runs(other) || theirs.value() != before, "another rank has ended: rank ", other);
    }
  }

  void check() const {
    const uint32_t which = failed.load(std::memory_order_relaxed);
    STD_TORCH_CHECK(!which, "another rank has failed: rank ", which - 1);
  }

  // A process that has ended, however it did, holds no lock.
  bool runs(int64_t other) const {
    struct flock lock {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = other, lock.l_len = 1;
    return fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
  }
};

// All ranks' x (rows, width) side by side. widths: each rank's.
torch::stable::Tensor gather_rows(const torch::stable::Tensor& x, LocalRanks& ranks,
                                  const std::vector<int64_t>& widths);
