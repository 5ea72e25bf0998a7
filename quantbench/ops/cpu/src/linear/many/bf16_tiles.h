// Products of tiles. Included in the namespace of linear/many/amx.cpp, after linear/many/weights_to_tiles.h.

constexpr int TOKENS = 16;              // of a tile of x
constexpr int MOST_TILES = 32;          // of x that go through weights together
constexpr int LEAST_TILES = 8;          // for which weights are worth converting, in cache or not
constexpr int64_t X_BYTES = 1 << 20;    // of x that the second-level cache has room for
constexpr int SUMS = TOKENS * ROWS;     // of a tile of results
constexpr int MOST_ASKED = 2 * TOKENS;  // lines of results that are prefetched before they are computed

// Which tile register holds what. Macros, because GCC pastes the text into the instruction.
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define X_0 4
#define X_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

// A tile of x, or two, which are `x_next` apart, times two blocks' tiles. Sums are (2, 2) tiles.
template <bool TWO>
void products(const Bf16* x, int64_t x_next, const Bf16* first, const Bf16* second, int units,
              float* sums, bool more) {
  if (more) {
    _tile_loadd(SUMS_00, sums, 64);
    _tile_loadd(SUMS_01, sums + SUMS, 64);
    if (TWO) _tile_loadd(SUMS_10, sums + 2 * SUMS, 64);
    if (TWO) _tile_loadd(SUMS_11, sums + 3 * SUMS, 64);
  } else {
    _tile_zero(SUMS_00);
    _tile_zero(SUMS_01);
    if (TWO) _tile_zero(SUMS_10);
    if (TWO) _tile_zero(SUMS_11);
  }
  for (int64_t at = 0; at < int64_t(units) * TILE_NUMBERS; at += TILE_NUMBERS) {
    _tile_loadd(X_0, x + at, 64);
    _tile_loadd(WEIGHTS_0, first + at, 64);
    _tile_dpbf16ps(SUMS_00, X_0, WEIGHTS_0);
    _tile_loadd(WEIGHTS_1, second + at, 64);
    _tile_dpbf16ps(SUMS_01, X_0, WEIGHTS_1);
    if (!TWO) continue;
    _tile_loadd(X_1, x + x_next + at, 64);
    _tile_dpbf16ps(SUMS_10, X_1, WEIGHTS_0);
    _tile_dpbf16ps(SUMS_11, X_1, WEIGHTS_1);
  }
  _tile_stored(SUMS_00, sums, 64);
  _tile_stored(SUMS_01, sums + SUMS, 64);
  if (TWO) _tile_stored(SUMS_10, sums + 2 * SUMS, 64);
  if (TWO) _tile_stored(SUMS_11, sums + 3 * SUMS, 64);
}

#undef SUMS_00
#undef SUMS_01
#undef SUMS_10
#undef SUMS_11
#undef X_0
#undef X_1
#undef WEIGHTS_0
#undef WEIGHTS_1

// 32 columns of x in the order that weights are in.
struct Order {
  __m512i words, floats;
  Order() {
    alignas(64) uint16_t word[UNIT], half[UNIT];
    for (int i = 0; i < UNIT; ++i) {
      const int column = i % 4 % 3 == 0 ? i : i ^ 3;
      word[i] = uint16_t(column), half[i] = uint16_t(2 * column + 1);
    }
    words = _mm512_load_si512(word), floats = _mm512_load_si512(half);
  }
};

// Tiles of x, (units, TOKENS, UNIT) each.
void prepare_tiles(const Problem& problem, int64_t first, int64_t last) {
  const Header& header = *problem.header;
  const int64_t columns = header.columns, padded = problem.geometry.padded_columns;
  const bool rounded = header.rounding != Rounding::none;
  const bool plain = problem.type == Number::bf16 && problem.x_step == 1 && !rounded;
  const Order order;
  for (int64_t token = first; token < last; ++token) {
    Bf16* to = static_cast<Bf16*>(problem.tiles) + token / TOKENS * TOKENS * padded + token % TOKENS * UNIT;
    if (token >= problem.outputs) {
      for (int64_t k = 0; k < padded; k += UNIT, to += TILE_NUMBERS) store(to, Bytes{});
      continue;
    }
    if (plain) {
      const Bf16* row = static_cast<const Bf16*>(problem.x) + token * problem.x_row;
      for (int64_t k = 0; k < padded; k += UNIT, to += TILE_NUMBERS) {
        const int64_t left = columns - k;
        const __mmask32 there = left >= UNIT ? 0xffffffffu : (1u << left) - 1;
        store(to, (Words)_mm512_permutexvar_epi16(order.words,
                                                  _mm512_maskz_loadu_epi16(there, row + k)));
      }
      continue;
    }
    read_row(problem, token);
    if (rounded) problem.token_scales[token] = round_row(header.rounding, problem.row, padded);
    for (int64_t k = 0; k < padded; k += UNIT, to += TILE_NUMBERS)
      store(to, (Words)_mm512_permutex2var_epi16(_mm512_loadu_si512(problem.row + k), order.floats,
                                                 _mm512_loadu_si512(problem.row + k + 16)));
  }
}

// Two blocks times tiles of x, `first` to `last`.
struct Pair {
  const Problem& problem;
  const Bf16* x;
  const Values values;
  const ToTiles make;
  int64_t blocks[2];  // the same twice, for a last single block
  alignas(64) Bf16 tiles[2][STRETCH * TILE_NUMBERS];
  alignas(64) float sums[MOST_TILES][2][SUMS];

  explicit Pair(const Problem& problem)
      : problem(problem), x(static_cast<const Bf16*>(problem.tiles)), values(*problem.header),
        make(tile_maker(*problem.header)) {}

  void multiply(int64_t first, int64_t last) {
    const Geometry& g = problem.geometry;
    const int64_t step = chunks_at_once(g), x_tile = g.padded_columns * TOKENS;
    const uint8_t* at[2];
    for (int b = 0; b < 2; ++b) at[b] = problem.blocks + blocks[b] * g.block_bytes + g.head_bytes;
    int64_t x_at = first * x_tile;
    const int64_t end = last * TOKENS < problem.outputs ? last * TOKENS : problem.outputs;
    if (end - first * TOKENS <= MOST_ASKED) ask_for_results(problem, first * TOKENS, end, blocks[0]);
    for (int64_t chunk = 0; chunk < g.chunks; chunk += step) {
      const int64_t next = chunk + step < g.chunks ? chunk + step : g.chunks;
      const int units = units_of(g, chunk, next);
      for (int b = 0; b < 2; ++b) {
        const uint8_t* block_end = problem.blocks + (blocks[b] + 1) * g.block_bytes;
        at[b] = make(problem, values, at[b], block_end, chunk, next, tiles[b]);
      }
      compiler_barrier();
      for (int64_t tile = first; tile < last; tile += 2) {
        const Bf16* from = x + x_at + (tile - first) * x_tile;
        float* to = sums[tile - first][0];
        if (last - tile > 1) products<true>(from, x_tile, tiles[0], tiles[1], units, to, chunk);
        else products<false>(from, x_tile, tiles[0], tiles[1], units, to, chunk);
      }
      compiler_barrier();
      x_at += int64_t(units) * TILE_NUMBERS;
    }
    finish(first, last);
  }

  // Token by token: two blocks are a whole cache line of bfloat16. Rows of results that lie a power
  // of two apart displace each other, so a line that is left half written has to be fetched again.
  void finish(int64_t first, int64_t last) const {
    const int count = blocks[1] == blocks[0] ? 1 : 2;
    Floats scales[2];
    for (int b = 0; b < count; ++b) scales[b] = row_scales(problem, blocks[b]) * values.factor;
    const int64_t end = last * TOKENS < problem.outputs ? last * TOKENS : problem.outputs;
    for (int64_t token = first * TOKENS; token < end; ++token)
      for (int b = 0; b < count; ++b) {
        const float* at = sums[token / TOKENS - first][b] + token % TOKENS * ROWS;
        put_rows(problem, load<Floats>(at) * scales[b], token, blocks[b]);
      }
  }
};

void multiply_tiles(const Problem& problem, int64_t first, int64_t last) {
  const Geometry& g = problem.geometry;
  const int64_t tiles = (problem.outputs + TOKENS - 1) / TOKENS;
  int64_t together = X_BYTES / (g.padded_columns * TOKENS * 2) / 2 * 2;
  together = together < LEAST_TILES ? LEAST_TILES : together > MOST_TILES ? MOST_TILES : together;
  Pair work(problem);
  TileShapes shapes;
  for (int i = 0; i < 8; ++i) shapes.set(i, 16, 64);
  configure(shapes);
  for (int64_t tile = 0; tile < tiles; tile += together)
    for (int64_t pair = first; pair < last; ++pair) {
      work.blocks[0] = 2 * pair;
      work.blocks[1] = 2 * pair + 1 < g.blocks ? 2 * pair + 1 : 2 * pair;
      work.multiply(tile, tile + together < tiles ? tile + together : tiles);
    }
  _tile_release();
}
