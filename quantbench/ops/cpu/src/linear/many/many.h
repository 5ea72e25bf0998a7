// Linear layers of many tokens. A thread takes some blocks' weights for a stretch of columns, as
// plain numbers in a form that multiplies fast, and multiplies all tokens by them before it goes on:
// in tiles of bfloat16 where there is AMX (linear/many/bf16_tiles.h), else in vectors of float32
// (linear/many/floats_loop.h).
#pragma once

#include "linear/layout.h"

// One inner loop.
struct ManyVariant {
  int tokens;        // of a tile of x: each loop has its own layout
  int x_bytes;       // that it takes for each number of x, of padded columns
  int side_by_side;  // blocks that go through the inner loop together
  void (*prepare)(const Problem&, void* x, int64_t first, int64_t last);  // tiles
  // Such groups of blocks, `first` to `last`.
  void (*multiply)(const Problem&, void* x, int64_t first, int64_t last);
};

VARIANTS(ManyVariant, many);
OPTIONAL_VARIANT ManyVariant many_avx512bf16();
OPTIONAL_VARIANT ManyVariant many_amx();
OPTIONAL_VARIANT ManyVariant many_bytes_amx();
