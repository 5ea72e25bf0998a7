// Plain bfloat16 weights times x in AMX: a tile of the weight, 16 rows by 32 columns, is loaded from
// where it lies, and a tile of x has 16 tokens, two columns of each side by side.
//
// Variants: amx

#include "linear/layout.h"

namespace {
#include "vector/wide.h"

#include "common/tiles.h"

constexpr int SIDE = 16;         // rows of a tile, and tokens
constexpr int BLOCK = 2 * SIDE;  // rows of the weight, and tokens, that go together
constexpr int TILE_BYTES = SIDE * 64;
constexpr int AHEAD = 8;         // tiles along a row that are prefetched

// Which tile register holds what: three are of the first 16 rows, three of the others. Macros, because GCC
// pastes the text into the instruction.
#define SUM_00 0
#define SUM_01 1  // of the first 16 rows and the second 16 tokens
#define WEIGHT_0 2
#define SUM_10 3
#define SUM_11 4
#define WEIGHT_1 5
#define X_0 6
#define X_1 7

// Tiles of x (columns / UNIT) of SIDE tokens.
void prepare_tiles(const Problem& problem, int64_t first, int64_t last) {
  const auto* x = static_cast<const uint16_t*>(problem.x);
  char* to = static_cast<char*>(problem.tiles) + first * problem.header->columns * 2;
  for (int64_t tile = first; tile < last; tile += SIDE)
    for (int64_t k = 0; k < problem.header->columns; k += UNIT, to += TILE_BYTES) {
      __m512i v[SIDE] = {};
      for (int t = 0; t < SIDE && tile + t < problem.outputs; ++t) {
        const uint16_t* from = x + (tile + t) * problem.x_row + k * problem.x_step;
        alignas(64) uint16_t copy[UNIT];
        for (int i = 0; i < UNIT && problem.x_step != 1; ++i) copy[i] = from[i * problem.x_step];
        v[t] = _mm512_loadu_si512(problem.x_step == 1 ? from : copy);
      }
      transpose(v);
      for (int i = 0; i < SIDE; ++i) _mm512_store_si512(to + 64 * i, v[i]);
    }
}

// 16 rows by 16 tokens of results, the last ones of each perhaps not there.
void put(const Problem& problem, const float* sums, int64_t token, int64_t row) {
  __m512i v[SIDE];
  for (int i = 0; i < SIDE; ++i) v[i] = _mm512_load_si512(sums + SIDE * i);
  transpose(v);
  const int64_t tokens = problem.outputs - token, rows = problem.header->rows - row;
  for (int t = 0; t < SIDE && t < tokens; ++t) {
    const HalfWords halves = as_bf16((Floats)v[t]);
    char* to = static_cast<char*>(problem.y) + ((token + t) * problem.header->rows + row) * 2;
    __builtin_memcpy(to, &halves, 2 * (rows < SIDE ? rows : SIDE));
  }
}

// 32 rows of the weight, or its last ones, times 16 tokens or 32. `next` points to the rows after them.
template <bool TWO>
void block_by_tokens(const Problem& problem, const char* weight, const char* next, int64_t row,
                     int64_t token) {
  alignas(64) float sums[4][SIDE * SIDE];
  const int64_t rows = problem.header->rows;
  const int64_t steps = problem.header->columns / UNIT, row_bytes = problem.header->columns * 2;
  const int64_t second = rows - row > SIDE ? SIDE * row_bytes : 0;  // the first again if it is the last
  const char* x = static_cast<const char*>(problem.tiles) + token / SIDE * steps * TILE_BYTES;
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
    _tile_loadd(WEIGHT_1, from + second, row_bytes);
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
    if (token + i / 2 * SIDE < problem.outputs && row + i % 2 * SIDE < rows)
      put(problem, sums[i], token + i / 2 * SIDE, row + i % 2 * SIDE);
}

// For a block of the weight's rows, `rows` from the first to the weight's end.
void configure(int64_t rows) {
  auto some = [](int64_t rows) { return int(rows < 1 ? 1 : rows < SIDE ? rows : SIDE); };
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile)
    shapes.set(tile, tile < SUM_10 ? some(rows) : tile < X_0 ? some(rows - SIDE) : SIDE, 64);
  configure(shapes);
}

void multiply_tiles(const Problem& problem, int64_t first, int64_t last) {
  const int64_t block_bytes = BLOCK * problem.header->columns * 2;
  for (int64_t block = first; block < last; ++block) {
    const int64_t row = block * BLOCK, rows = problem.header->rows - row;
    const char* weight = reinterpret_cast<const char*>(problem.blocks) + block * block_bytes;
    const char* next = rows > BLOCK ? weight + block_bytes : weight;
    if (block == first || rows < BLOCK) configure(rows);
    for (int64_t token = 0; token < problem.outputs; token += BLOCK)
      if (problem.outputs - token > SIDE) block_by_tokens<true>(problem, weight, next, row, token);
      else block_by_tokens<false>(problem, weight, next, row, token);
  }
  _tile_release();
}

}  // namespace

LinearLoop plain_amx() { return {prepare_tiles, multiply_tiles, SIDE, 2, BLOCK / ROWS}; }
