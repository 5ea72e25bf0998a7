// A thread reads its share of a weight at several places in turn, because a core keeps more lines on
// their way from memory then: see bandwidth/op.cpp. Here is the one definition of these places.
#pragma once

#include <cstdint>

struct Streams {
  static constexpr int COUNT = 4;
  int64_t begin[COUNT + 1];  // stream s: units begin[s] to begin[s + 1], the first the longest

  __attribute__((always_inline)) Streams(int64_t first, int64_t last) {
    for (int s = 0; s <= COUNT; ++s) begin[s] = first + ((last - first) * s + COUNT - 1) / COUNT;
  }
};
