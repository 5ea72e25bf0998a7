// Plain bfloat16 weights times x in AMX: a tile of the weight, 16 rows by 32 columns, is loaded from
// where it lies, and a tile of x has 16 tokens, two columns of each side by side.
//
// Variants: amx

#include "plain/plain.h"

namespace {
#include "vector/wide.h"

#include "common/tiles.h"

constexpr int SIDE = 16;      // rows of a tile, and tokens
constexpr int COLUMNS = 32;   // of a tile
constexpr int BLOCK = 2 * SIDE;  // rows of the weight, and tokens, that go together
constexpr int TILE_BYTES = SIDE * 64;
constexpr int AHEAD = 8;  // tiles along a row that are prefetched

// Which tile register holds what. Macros, because GCC pastes the text into the instruction.
#define SUM_00 0
#define SUM_01 1  // of the first 16 rows and the second 16 tokens
#define SUM_10 2
#define SUM_11 3
#define WEIGHT_0 4
#define WEIGHT_1 5
#define X_0 6
#define X_1 7

inline const char* token_at(const Plain& problem, int64_t token) {
  return problem.x + token * problem.x_row * 2;
}

void prepare_tile(const Plain& problem, int64_t tile) {
  alignas(64) char copy[SIDE][64] = {};
  for (int64_t k = 0; k < problem.columns; k += COLUMNS) {
    __m512i v[SIDE];
    for (int t = 0; t < SIDE; ++t) {
      const int64_t token = tile * SIDE + t;
      if (token >= problem.tokens) {
        v[t] = _mm512_setzero_si512();
      } else if (problem.x_step == 1) {
        v[t] = _mm512_loadu_si512(token_at(problem, token) + 2 * k);
      } else {
        for (int i = 0; i < COLUMNS; ++i)
          __builtin_memcpy(copy[t] + 2 * i, token_at(problem, token) + 2 * (k + i) * problem.x_step,
                           2);
        v[t] = _mm512_load_si512(copy[t]);
      }
    }
    transpose(v);
    char* to = problem.tiles + (tile * (problem.columns / COLUMNS) + k / COLUMNS) * TILE_BYTES;
    for (int i = 0; i < SIDE; ++i) _mm512_store_si512(to + 64 * i, v[i]);
  }
}

// 16 rows by 16 tokens of results, the last ones of each perhaps not there.
void put(const Plain& problem, const float* sums, int64_t token, int64_t row) {
  __m512i v[SIDE];
  for (int i = 0; i < SIDE; ++i) v[i] = _mm512_load_si512(sums + SIDE * i);
  transpose(v);
  const int64_t tokens = problem.tokens - token, rows = problem.rows - row;
  for (int t = 0; t < SIDE && t < tokens; ++t) {
    const HalfWords halves = as_bf16((Floats)v[t]);
    char* to = static_cast<char*>(problem.y) + ((token + t) * problem.rows + row) * 2;
    __builtin_memcpy(to, &halves, 2 * (rows < SIDE ? rows : SIDE));
  }
}

// 32 rows of the weight times all tokens. `next` points to the rows after them.
template <bool TWO>
void block_by_tokens(const Plain& problem, const char* weight, const char* next, int64_t row,
                     int64_t token) {
  alignas(64) float sums[4][SIDE * SIDE];
  const int64_t steps = problem.columns / COLUMNS, row_bytes = problem.columns * 2;
  const char* x = problem.tiles + token / SIDE * steps * TILE_BYTES;
  _tile_zero(SUM_00);
  _tile_zero(SUM_10);
  _tile_zero(SUM_01);
  _tile_zero(SUM_11);
  for (int64_t k = 0; k < steps; ++k) {
    const char* from = weight + 64 * k;
    if (!TWO) {  // of several blocks of tokens the first brings the weights near
      const char* ahead = k + AHEAD < steps ? from + 64 * AHEAD : next + 64 * (k + AHEAD - steps);
      for (int i = 0; i < BLOCK; ++i) __builtin_prefetch(ahead + i * row_bytes);
    }
    _tile_loadd(WEIGHT_0, from, row_bytes);
    _tile_loadd(WEIGHT_1, from + SIDE * row_bytes, row_bytes);
    _tile_loadd(X_0, x + k * TILE_BYTES, 64);
    _tile_dpbf16ps(SUM_00, WEIGHT_0, X_0);
    _tile_dpbf16ps(SUM_10, WEIGHT_1, X_0);
    if (TWO) {
      _tile_loadd(X_1, x + (steps + k) * TILE_BYTES, 64);
      _tile_dpbf16ps(SUM_01, WEIGHT_0, X_1);
      _tile_dpbf16ps(SUM_11, WEIGHT_1, X_1);
    }
  }
  _tile_stored(SUM_00, sums[0], 64);
  _tile_stored(SUM_10, sums[1], 64);
  if (TWO) {
    _tile_stored(SUM_01, sums[2], 64);
    _tile_stored(SUM_11, sums[3], 64);
  }
  compiler_barrier();
  for (int i = 0; i < (TWO ? 4 : 2); ++i)
    if (token + i / 2 * SIDE < problem.tokens && row + i % 2 * SIDE < problem.rows)
      put(problem, sums[i], token + i / 2 * SIDE, row + i % 2 * SIDE);
}

void prepare_tiles(const Plain& problem, int64_t first, int64_t last) {
  for (int64_t tile = first; tile < last; ++tile) prepare_tile(problem, tile);
}

void multiply_tiles(const Plain& problem, int64_t first, int64_t last) {
  const int64_t row_bytes = problem.columns * 2;
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, SIDE, 64);
  configure(shapes);
  for (int64_t block = first; block < last; ++block) {
    const int64_t row = block * BLOCK;
    const char* weight = problem.weight + row * row_bytes;
    if (problem.rows - row < BLOCK) weight = problem.rest;
    const char* next = problem.rows - row < 2 * BLOCK ? weight : weight + BLOCK * row_bytes;
    for (int64_t token = 0; token < problem.tokens; token += BLOCK)
      if (problem.tokens - token > SIDE) block_by_tokens<true>(problem, weight, next, row, token);
      else block_by_tokens<false>(problem, weight, next, row, token);
  }
  _tile_release();
}

}  // namespace

PlainVariant plain_amx() { return {prepare_tiles, multiply_tiles}; }
