// What the op (hqq/op.cpp) hands to a variant of its loop (hqq/loop.cpp): groups of weights, whose scale and
// zero are looked for. ops/hqq.py has the same in torch, and says what is done.
#pragma once

#include <cstdint>

#include "common/number.h"

constexpr int MOST_COLUMNS = 256;  // of a group
constexpr int AT_ONCE = 16;        // groups, each in a lane of a vector
constexpr int ITERATIONS = 20;     // of half-quadratic optimization

struct Fitting {
  int64_t columns;
  int bits;
  bool half;     // scale and zero are stored as float16, else as bfloat16
  double power;  // of an error's size in the proximal operator
  float least[ITERATIONS];     // an error up to this is shrunk to 0
  float inverses[ITERATIONS];  // 1 / β
};

// groups (columns + 2, AT_ONCE): weights, then the scale and the zero of their range. best (2, AT_ONCE).
using FitGroups = void (*)(const Fitting&, const float* groups, float* best);

VARIANTS(FitGroups, hqq);
