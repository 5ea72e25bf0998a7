// Groups of weights, and the scale and zero of each that are looked for: what the op (hqq/op.cpp)
// hands to a variant of its loop (hqq/loop.h). ops/hqq.py has the same in torch, and says what is done.
#pragma once

#include <cstdint>

#include "common/number.h"

constexpr int MOST_COLUMNS = 256;  // of a group
constexpr int AT_ONCE = 16;        // groups, each in a lane of a vector
constexpr int ITERATIONS = 20;     // of half-quadratic optimization

struct Groups {
  Number type;          // of the weights; scale and zero are f16 with f16 weights, else bf16
  int64_t count, columns;
  int bits;
  const char* weights;  // (count, columns)
  uint16_t* scale;      // (count,): of the range, and then the best
  uint16_t* zero;
  double power;         // of an error's size in the proximal operator
  float least[ITERATIONS];     // an error up to this is shrunk to 0
  float inverses[ITERATIONS];  // 1 / β
};

// Blocks of AT_ONCE groups; the last block may have fewer.
using FitGroups = void (*)(const Groups&, int64_t first_block, int64_t last_block);

VARIANTS(FitGroups, hqq);
