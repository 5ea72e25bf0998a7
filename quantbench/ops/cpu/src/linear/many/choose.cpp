// Linear layers of many tokens: which inner loop runs, and its share of threads and memory.

#include "linear/many/many.h"

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "common/isa.h"
#include "common/limits.h"
#include "common/scratch.h"

namespace {

bool by_row(const Header& header) { return header.scales == Scales::row; }
bool rounded(const Header& header) { return header.rounding != Rounding::none; }

// Tiles of bfloat16: float32 and float16 have more bits, and rounded activations are promised exact
// products, which weights times scales are not.
bool fits_tiles(const Header& header, Number x) {
  return rounded(header) ? by_row(header) : x == Number::bf16;
}

// One integer for each weight, one of 16 bits for each number of x.
bool is_integers(const Header& header, Number x) {
  const Coding coding = header.coding;
  return (x != Number::f32 || rounded(header)) &&
         (coding == Coding::integer || coding == Coding::bytes || coding == Coding::sparse);
}

// Tiles of bytes: 64 columns, or the 32 that have a scale, are a tile.
bool fits_bytes(const Header& header, const Geometry& g, Number x) {
  const bool whole = g.units == 1 || (g.units % 2 == 0 && g.last_units % 2 == 0);
  return is_integers(header, x) && header.scale_columns >= UNIT && whole;
}

// From how many rows of x on tiles are faster than reading the weight once for every four: measured
// on weights of 2048 x 2048. Scales of few columns are many sums to scale.
int64_t bytes_from(const Header& header, const Geometry& g) {
  return header.coding == Coding::sparse || g.units == 1 ? 12 : g.units == 2 ? 7 : 5;
}
int64_t tiles_from(const Header& header, Number x) {
  return is_integers(header, x) ? 12 : header.coding == Coding::fp8 ? 2 : 3;
}

// From how many rows of x on vectors of float32 are faster: measured on weights of 2048 x 2048 with AVX-512 VNNI
// (docs/LOG.md), counted in cycles on weights in the second cache with AVX2. The few rows' loop takes an integer
// product for each part of a weight and each word of x; float32 rounds rows up to tiles of 6 with AVX2, of 12.
int64_t floats_from(const Header& header, Number x) {
  if (!has(Isa::avx2)) return 5;
  if (as_floats(header.coding)) return has(Isa::avx512vnni) ? 12 : 6;
  const bool vnni = has(Isa::avx512vnni) || has(Isa::avxvnni);
  const int words = x == Number::f32 && !rounded(header) ? 2 : 1;
  const int parts = header.coding == Coding::table ? 1 + words : 1;
  switch (parts * words) {
    case 1: return vnni ? INT64_MAX : header.coding == Coding::fp6 || header.bits == 7 ? 17 : 48;
    case 2: return vnni ? 48 : 9;
    default: return vnni ? 12 : 6;
  }
}

constexpr int64_t PLAIN_FROM = 24;  // tokens; measured on weights of 2048 x 2048 and 3072 x 576

typedef ManyVariant (*Choice)();  // null: the few rows' loop

Choice choice(const Header& header, const Geometry& g, Number x, int64_t rows) {
  if (has(Isa::amx)) {
    const bool bytes = fits_bytes(header, g, x), tiles = fits_tiles(header, x);
    if (bytes && (rows <= 16 || !tiles))
      return rows >= bytes_from(header, g) ? many_bytes_amx : nullptr;
    if (tiles) return rows >= tiles_from(header, x) ? many_amx : nullptr;
  }
  return rows >= floats_from(header, x) ? BEST_VARIANT(many) : nullptr;
}

void multiply_many(Problem problem, const ManyVariant& run) {
  const Geometry& g = problem.geometry;
  const int64_t tiles = (problem.outputs + run.tokens - 1) / run.tokens;
  const int64_t tokens = tiles * run.tokens, padded = g.padded_columns;
  thread_local Scratch scratch;
  scratch.reserve(tokens * (padded * run.x_bytes + sizeof(float)) + 64);
  char* x = scratch.take<char>(tokens * padded * run.x_bytes);
  problem.token_scales = scratch.take<float>(tokens);
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t first, int64_t last) {
    Problem mine = problem;
    thread_local Scratch row;
    row.reserve(padded * sizeof(float));
    mine.row = row.take<float>(padded);
    run.prepare(mine, x, first, last);
  });
  const int64_t groups = (g.blocks + run.side_by_side - 1) / run.side_by_side;
  const bool alone = problem.outputs * padded * problem.header->rows <= limits.alone_products;
  torch::stable::parallel_for(0, groups, alone ? groups : 1, [&](int64_t first, int64_t last) {
    run.multiply(problem, x, first, last);
  });
}

}  // namespace

bool linear_of_many(const Problem& problem) {
  const Choice chosen =
      choice(*problem.header, problem.geometry, problem.type, problem.outputs);
  if (chosen) multiply_many(problem, chosen());
  return chosen;
}

bool plain_of_many(Problem problem, const void* weight, int64_t rows, int64_t columns) {
  if (problem.outputs < PLAIN_FROM) return false;
  Header header{};
  header.rows = rows, header.columns = columns, header.factor = 1;
  header.scales = Scales::f32, header.scale_columns = LARGEST_CHUNK;
  problem.header = &header;
  problem.geometry = geometry(header);
  problem.geometry.block_bytes = ROWS * columns * size_of(problem.type);
  problem.blocks = static_cast<const uint8_t*>(weight);
  problem.plain = true;
  multiply_many(problem, BEST_VARIANT(many)());
  return true;
}
