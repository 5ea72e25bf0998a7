// How weights are packed (ops/cpu/linear.py), and what the op (linear/op.cpp) hands to a variant of its
// inner loop. The words token, block, unit, quad and chunk are explained, and a unit is drawn, in
// ../README.md.
//
// A packed weight is one piece of memory in the order in which it is read: a header, then blocks of
// ROWS rows. A block is its chunks of columns, one after the other; a chunk is its scales, where scales
// belong to columns, then its units of UNIT columns. Where a format has one scale per row, they follow
// a block's chunks. Where scales are codes, a block starts with what multiplies them: 16 scales for every
// OUTER columns, and 16 for their zero points. A vector of 16 lanes holds one row in each lane, so that sums of products need no
// additions across lanes.
#pragma once

#include <cstdint>

#include "common/number.h"
#include "common/streams.h"

constexpr int ROWS = 16, UNIT = 32, QUADS = UNIT / 4, HALF = QUADS / 2;
constexpr int OUTER = 256;          // columns whose scales, where they are codes, are multiplied by one number
constexpr int LARGEST_CHUNK = 256;  // columns: sums of that many products of 8 and 16 bits fit 32 bits
constexpr int TABLE = 16;           // codes that a table has values for
constexpr int TILE = 4;             // most tokens that go through a loop of few tokens together
static inline int tile_of(int64_t tokens, int most = TILE) { return tokens >= most ? most : tokens >= 2 ? 2 : 1; }

enum class Coding : int32_t { integer, fp6, bytes, table, sparse, fp8 };
enum class Scales : int32_t { row, bf16, f16, f32, codes };  // row: float32, one per row; codes: int8
enum class Rounding : int32_t { none, int8, int8_asymmetric };  // of activations

struct Header {
  uint64_t magic;
  int64_t rows, columns;
  Coding coding;
  int32_t bits;
  Scales scales;
  int32_t scale_columns;  // columns of a scale; fewer than UNIT: several in a unit
  int32_t zeros;          // 1: behind each scale, a zero point of the same type; 2: the code of 0 in it
  Rounding rounding;
  float factor;           // of everything
  int32_t from_zero;      // 1: an integer is its code, not the code less half of the number of codes
  int32_t table[TABLE];   // of Coding::bytes: signed integers of 8 bits; of Coding::table: of 24
  char more[8];
};
static_assert(sizeof(Header) == 128);
constexpr uint64_t MAGIC = 0x31306c62746e6171;

// A scale's size; 0 where scales belong to rows.
static inline int bytes_of(Scales scales) {
  return scales == Scales::row ? 0 : scales == Scales::f32 ? 4 : scales == Scales::codes ? 1 : 2;
}

static inline bool as_floats(Coding coding) { return coding == Coding::fp8; }

// How the inner loop takes x: floats; words; high and low bytes where codes have at most 7 bits, or 8; the same
// of eight numbers. Portable C++ has words only, AVX2 has no products of 8 bits by 8,
// NEON none of words.
enum class XLayout { floats, words, pairs, bytes, eights };
static inline XLayout x_layout(const Header& h) {
  if (h.coding == Coding::integer && h.bits < 8) return XLayout::pairs;
  return as_floats(h.coding)          ? XLayout::floats
         : h.coding == Coding::fp6    ? XLayout::words
         : h.coding == Coding::sparse ? XLayout::eights
                                      : XLayout::bytes;
}

struct Geometry {
  int64_t blocks, chunks;
  int units;       // of a chunk
  int last_units;  // of the last chunk
  bool fine;       // every unit has a scale, or several, in products of integers
  int x_units;     // units of x whose integers have the same scale: a chunk, or OUTER columns where `fine`
  int64_t x_chunks;
  int sum_columns;  // columns of x whose integers are added up: those of a scale of the weight
  int scale_bytes;  // of a chunk
  int unit_bytes;
  int outer_bytes;        // of OUTER columns, at the beginning of a block; 0 where scales are no codes
  int64_t head_bytes;     // of all of a block's
  int64_t block_bytes;
  int64_t padded_columns;  // up to whole units
};

Geometry geometry(const Header&);

static inline int x_units(const Geometry& g, int64_t chunk) {
  const int64_t left = g.padded_columns / UNIT - chunk * g.x_units;
  return left < g.x_units ? int(left) : g.x_units;
}
static inline int64_t sums_of(const Geometry& g) {
  return (g.padded_columns + g.sum_columns - 1) / g.sum_columns;
}

// What is wrong with a header that has a size of `bytes` behind it, or null. `geometry` takes only
// those with which nothing is wrong.
const char* wrong(const Header&, int64_t bytes);

// Scales that a unit has, where it has several. `static`: see INLINE in common/variant.h.
static inline int fine_scales(const Header& header) { return UNIT / header.scale_columns; }

// Where in a block lies what multiplies the scales of a unit.
static inline const uint8_t* outer_at(const Geometry& g, const uint8_t* block, int64_t unit) {
  return block + unit / (OUTER / UNIT) * g.outer_bytes;
}

// The products of some tokens.
struct Problem {
  const Header* header;
  Geometry geometry;
  const uint8_t* blocks;
  bool plain;       // the blocks are 16 rows each of a weight as torch has it, of x's type
  int64_t tokens;   // rows of x as the inner loop sees them; a float32 row counts twice
  // The next three are tiles of TILE, 2 or 1 tokens, one behind the other; a tile has columns by
  // tokens.
  int32_t* quads;   // integer formats: (quads, tile, 2)
  int32_t* sums;    // (padded columns / sum_columns, tile)
  float* scales;    // (x_chunks, tile)
  float* floats;    // other formats: (padded columns, tile); plain weights: (tokens, padded columns)
  void* tiles;      // x as loops over many tokens take it
  float* token_scales;  // (outputs,): of activations that are rounded
  int64_t outputs;      // tokens, or half of them
  Number type;          // of x and y
  const void* x;        // (outputs, columns), its strides in elements
  int64_t x_row, x_step;
  float* row;           // (padded columns,): one row of x at a time
  void* y;              // (outputs, rows)
};

// One variant of an inner loop.
struct LinearLoop {
  // Makes rows first to last of x, whole tiles of them, into what `multiply` wants.
  void (*prepare)(const Problem&, int64_t first, int64_t last);
  // Multiplies by the blocks first to last, or by groups of them; a plain weight's few tokens by its rows.
  void (*multiply)(const Problem&, int64_t first, int64_t last);
  // For a loop over many tokens, which has its own layout of x:
  int tokens = 0;        // of a tile of x
  int x_bytes = 0;       // for each number of x, of padded columns
  int side_by_side = 1;  // blocks of a group
  // Its instructions in a loop, on numbers in registers and a few lines: how many products these were. Null: not written.
  int64_t (*spin)(const Header&, int64_t rounds) = nullptr;
};

VARIANTS(LinearLoop, few);
OPTIONAL_VARIANT LinearLoop few_avxvnni();
OPTIONAL_VARIANT LinearLoop few_neon_i8mm();
VARIANTS(LinearLoop, plain, Number);
OPTIONAL_VARIANT LinearLoop plain_avx512bf16(Number);
OPTIONAL_VARIANT LinearLoop plain_amx();
VARIANTS(LinearLoop, many);
OPTIONAL_VARIANT LinearLoop many_avx512bf16();
VARIANTS(LinearLoop, integers);
OPTIONAL_VARIANT LinearLoop integers_avxvnni();
OPTIONAL_VARIANT LinearLoop many_amx();
OPTIONAL_VARIANT LinearLoop many_bytes_amx();

// The loop for a number of tokens (linear/choose.cpp). as_one: a loop that gives each token the bits that it gets alone.
LinearLoop loop_for(const Header&, const Geometry&, Number x, int64_t tokens, bool as_one);
LinearLoop loop_for_plain(Number type, int64_t columns, int64_t tokens, bool as_one);
