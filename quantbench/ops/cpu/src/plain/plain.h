// Linear layers of a few tokens whose weights are as torch has them, (rows, columns), one row behind
// the other: what the op (plain/op.cpp) hands to a variant of its inner loop (plain/loop.h).
#pragma once

#include <cstdint>

#include "common/number.h"
#include "common/streams.h"

struct Plain {
  Number type;  // of x, weight and y
  int64_t tokens, rows, columns, padded;  // padded: columns, up to a whole vector's worth
  const char* x;  // (tokens, columns), its strides in elements
  int64_t x_row, x_step;
  const char* weight;
  void* y;        // (tokens, rows)
  float* floats;  // (tokens, padded): x as the inner loop takes it
  char* tiles;    // (tokens / 16, columns / 32, 1 KB): x as AMX takes it
  char* rest;     // (32, columns): the last rows that AMX takes, with zeros behind them
};

// One variant of the loop: `prepare` makes floats or tiles of some tokens of x, `multiply` does some
// rows of the weight. AMX counts both in its tiles: 16 tokens, and 32 rows.
struct PlainVariant {
  void (*prepare)(const Plain&, int64_t first, int64_t last);
  void (*multiply)(const Plain&, int64_t first, int64_t last);
};

VARIANTS(PlainVariant, plain, Number);
OPTIONAL_VARIANT PlainVariant plain_avx512bf16(Number);
OPTIONAL_VARIANT PlainVariant plain_amx();
