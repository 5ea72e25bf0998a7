// Linear layers of many tokens: which inner loop runs.

#include "linear/many/choose.h"

#include <cstdint>

#include "common/isa.h"

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

// From how many rows of x on vectors of float32 are faster with VNNI: measured on weights of 2048 x 2048
// (docs/LOG.md). The few rows' loop takes an integer product for each part of a weight and each word of x.
int64_t floats_from(const Header& header, Number x) {
  if (as_floats(header.coding)) return 12;
  const int parts = header.coding == Coding::table ? 3 : header.coding == Coding::fp6 ? 2 : 1;
  const int words = x == Number::f32 && !rounded(header) ? 2 : 1;
  switch (parts * words) {
    case 1: return INT64_MAX;
    case 2: return 48;
    default: return 12;
  }
}

constexpr int64_t PLAIN_FROM = 24;  // tokens; measured on weights of 2048 x 2048 and 3072 x 576

typedef ManyVariant (*Choice)();  // null: the few rows' loop

Choice choice(const Header& header, const Geometry& g, Number x, int64_t rows) {
  if (isa() >= Isa::amx) {
    const bool bytes = fits_bytes(header, g, x), tiles = fits_tiles(header, x);
    if (bytes && (rows <= 16 || !tiles))
      return rows >= bytes_from(header, g) ? many_bytes_amx : nullptr;
    if (tiles) return rows >= tiles_from(header, x) ? many_amx : nullptr;
  }
  if (isa() >= Isa::avx512vnni)
    return rows >= floats_from(header, x) ? many_avx512vnni : nullptr;
  if (isa() >= Isa::avx2) return rows >= 5 ? many_avx2 : nullptr;
  return rows >= 5 ? many_portable : nullptr;
}

}  // namespace

std::optional<ManyVariant> many_for(const Header& header, const Geometry& g, Number x, int64_t tokens) {
  const Choice chosen = choice(header, g, x, tokens);
  return chosen ? std::optional(chosen()) : std::nullopt;
}

std::optional<ManyVariant> many_for_plain(int64_t tokens) {
  return tokens >= PLAIN_FROM ? std::optional(BEST_VARIANT(many)()) : std::nullopt;
}
