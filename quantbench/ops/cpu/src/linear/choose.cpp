// Which inner loop of linear layers runs.

#include "common/isa.h"
#include "linear/layout.h"

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
// With NEON instructions were counted: for each part of 512 weights and row of 16 bits the few rows' loop takes
// 123, with i8mm 105; float32 takes 180, and some 800 to make the weights floats.
int64_t floats_from(const Header& header, Number x) {
  const bool neon = has(Isa::neon_dotprod);
  if (!has(Isa::avx2) && !neon) return 5;
  if (as_floats(header.coding)) return has(Isa::avx512vnni) ? 12 : 6;
  const bool dots = has(Isa::avx512vnni) || has(Isa::avxvnni) || neon;
  const int words = x == Number::f32 && !rounded(header) ? 2 : 1;
  const bool two = header.coding == Coding::fp6 && neon;
  const int parts = header.coding == Coding::table ? 1 + words : two ? 2 : 1;
  switch (parts * words) {
    case 1: return INT64_MAX;  // NEON's alone: x86 has the loop of integers for these
    case 2: return neon ? 12 : dots ? 48 : 9;
    default: return dots && !neon ? 12 : 6;
  }
}

// Whether the loop of many tokens multiplies integers: of 16 bits on x86; of bytes, where x is rounded to them.
bool in_integers(const Header& header, Number x) {
  const bool words = has(Isa::avx2), fp6 = header.coding == Coding::fp6 && (x != Number::f32 || rounded(header));
  return words ? is_integers(header, x) || fp6 : is_integers(header, x) && rounded(header);
}

// From how many rows of x on that is faster than reading the weight once for every four: measured with AVX2 on weights
// of 2048 x 2048 from memory. Products of bytes are half as many as the few rows' loop takes, those of words as many with VNNI.
int64_t integers_from(const Header& header) {
  if (has(Isa::avx512vnni) || has(Isa::avxvnni)) return rounded(header) ? 9 : 17;
  return !has(Isa::avx2) ? 9 : header.bits == 8 ? 5 : 3;
}

LinearLoop best_integers() {
  return isa() == Isa::avxvnni ? integers_avxvnni() : BEST_VARIANT(integers)();
}

// From how many rows of x on pairs of bfloat16 are faster than both: measured likewise, on Zen 5. Products of
// integers, two for a weight, are as fast, and exact.
constexpr int64_t PAIRS_FROM = 33;

constexpr int64_t PLAIN_FROM = 24;  // tokens; measured on weights of 2048 x 2048 and 3072 x 576

LinearLoop best_few() {
  return (isa() == Isa::avxvnni ? few_avxvnni : isa() == Isa::neon_i8mm ? few_neon_i8mm : BEST_VARIANT(few))();
}

}  // namespace

LinearLoop loop_for(const Header& header, const Geometry& g, Number x, int64_t tokens, bool as_one) {
  if (as_one) return best_few();
  if (has(Isa::amx)) {
    const bool bytes = fits_bytes(header, g, x), tiles = fits_tiles(header, x);
    if (bytes && (tokens <= 16 || !tiles))
      return tokens >= bytes_from(header, g) ? many_bytes_amx() : best_few();
    if (tiles) return tokens >= tiles_from(header, x) ? many_amx() : best_few();
  }
  const bool pairs = has(Isa::avx512bf16) && fits_tiles(header, x) && !is_integers(header, x);
  if (pairs && tokens >= PAIRS_FROM) return many_avx512bf16();
  if (in_integers(header, x)) return tokens >= integers_from(header) ? best_integers() : best_few();
  return tokens >= floats_from(header, x) ? BEST_VARIANT(many)() : best_few();
}

LinearLoop loop_for_plain(Number type, int64_t columns, int64_t tokens, bool as_one) {
  if (!as_one && tokens > 1 && isa() == Isa::amx && type == Number::bf16 && columns % UNIT == 0)
    return plain_amx();
  if (!as_one && tokens >= PLAIN_FROM) return BEST_VARIANT(many)();
  return (has(Isa::avx512bf16) ? plain_avx512bf16 : BEST_VARIANT(plain))(type);
}
