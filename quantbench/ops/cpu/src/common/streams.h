// A thread reads its share of a weight interleaved from several places, because a core keeps more lines on
// their way from memory then: see bandwidth/op.cpp. Here is the one definition of these places.
//
// No two neighbouring streams are as long as each other: they would start at equal distances, and the
// loops for several tokens, which go from stream to stream, then read as little as 0.6 times as fast,
// whatever the distance is. A processor's prefetcher may take such steps for a stride and fetch what
// lies behind the last stream. One unit of difference is enough (docs/LOG.md).
#pragma once

#include <cstdint>

// Asks for the line at p, which is read soon: into the second cache. A core has a few dozen places for lines on
// their way to the first, which loads and the processor's own prefetcher need (docs/LOG.md).
static inline __attribute__((always_inline)) void read_ahead(const void* p) { __builtin_prefetch(p, 0, 2); }

struct Streams {
  static constexpr int COUNT = 4;
  static constexpr int64_t UNEVEN_FROM = 64;  // units: for fewer, one more round costs what it gains
  int64_t begin[COUNT + 1];  // stream s: units begin[s] to begin[s + 1], the first the longest

  __attribute__((always_inline)) Streams(int64_t first, int64_t last) {
    const int64_t units = last - first;
    if (units < UNEVEN_FROM) {
      for (int s = 0; s <= COUNT; ++s) begin[s] = first + (units * s + COUNT - 1) / COUNT;
      return;
    }
    // Each a unit shorter than the one before; the last has what is left, but is not the longest.
    const int64_t longest = (units + 6) / 4;
    static_assert(COUNT == 4);
    begin[0] = first;
    begin[1] = begin[0] + longest;
    begin[2] = begin[1] + longest - 1;
    begin[3] = begin[2] + longest - 2;
    begin[4] = last;
  }

  // The next unit of each stream that has one, after `round` of them. Returns how many streams do.
  __attribute__((always_inline)) int next(int64_t round, int64_t (&unit)[COUNT]) const {
    int count = 0;
    for (int s = 0; s < COUNT; ++s)
      if (begin[s] + round < begin[s + 1]) unit[count++] = begin[s] + round;
    return count;
  }
};
