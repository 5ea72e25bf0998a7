// Linear layers of many tokens. A thread takes some blocks' weights for a stretch of columns, as
// plain numbers in a form that multiplies fast, and multiplies all tokens by them before it goes on:
// in tiles of bfloat16 where there is AMX (linear_many_amx.h), else in vectors of float32
// (linear_many_part.h).
#pragma once

#include "linear.h"

// Rows of x from which on this is faster than reading the weight once for every few of them.
int64_t many_from(const Header&, Number x);

// `problem` says what x, the weight and y are.
void linear_of_many(const Problem& problem);

// Of one inner loop. x is laid out tile by tile of `tokens` tokens: (padded columns, tokens) float32,
// or for AMX (units, tokens, UNIT) bfloat16.
struct ManyVersion {
  int tokens;
  int x_bytes;       // of a number of x
  int side_by_side;  // blocks that go through the inner loop together
  void (*prepare)(const Problem&, void* x, int64_t first, int64_t last);  // tiles
  // Such groups of blocks, `first` to `last`.
  void (*multiply)(const Problem&, const void* x, int64_t first, int64_t last);
};

ManyVersion many_portable();
ManyVersion many_avx2();
ManyVersion many_avx512vnni();
ManyVersion many_amx();
