// Products of many tokens in vectors of float32; with AVX512_BF16 of bfloat16, two columns side by side.
//
// Variants: portable avx2 avx512vnni avx512bf16 neon-dotprod

#include "linear/layout.h"

namespace {
#include "linear/inner.h"
#include "linear/many/tile.h"

// Native: the machine's vector of floats. MANY: the tokens that weights are multiplied by at a time. BESIDE:
// the blocks whose rows lie side by side. The sums of MANY tokens and BESIDE blocks have to fit the registers.
#if LEVEL >= LEVEL_avx512vnni
typedef float Native __attribute__((vector_size(64)));
constexpr int MANY = 12, BESIDE = 2;
#elif LEVEL == LEVEL_avx2
typedef float Native __attribute__((vector_size(32)));
constexpr int MANY = 6, BESIDE = 1;
#else
typedef float Native __attribute__((vector_size(16)));
constexpr int MANY = LEVEL < LEVEL_portable ? 6 : 3, BESIDE = 1;
#endif

// Cell: a number of x or of the weight as it is multiplied. TOGETHER: columns in one product.
#if LEVEL == LEVEL_avx512bf16
typedef uint16_t Cell;
constexpr int TOGETHER = 2;

inline Cell cell(float x) { return load<uint32_t>(&x) >> 16; }  // bfloat16s and small integers alone

inline Native plus_products(Native sum, Native w, const Cell* x) {
  return (Native)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(load<int>(x)));
}

// Weights (columns, BESIDE, ROWS) in place.
inline void make_cells(float* weights, int columns) {
  constexpr int STEP = BESIDE * ROWS;
  for (int k = 0; k < columns; k += TOGETHER)
    for (int i = 0; i < STEP; i += ROWS) {
      __m512i words[TOGETHER];
      for (int of = 0; of < TOGETHER; ++of) {
        const __m512 numbers = _mm512_loadu_ps(weights + (k + of) * STEP + i);
        words[of] = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(numbers));
      }
      const __m512i pairs = _mm512_or_si512(words[0], _mm512_slli_epi32(words[1], 16));
      _mm512_storeu_si512(weights + k / TOGETHER * STEP + i, pairs);
    }
}
#else
typedef float Cell;
constexpr int TOGETHER = 1;
inline Cell cell(float x) { return x; }
inline Native plus_products(Native sum, Native w, const Cell* x) { return sum + w * *x; }
inline void make_cells(float*, int) {}
#endif

constexpr int MOST_TOKENS = 240;  // that go through weights together: their sums fit the first cache

// Some chunks of a block as float32, (columns, BESIDE, ROWS), before scales of rows and the factor.
// Returns where the next chunk is.
typedef const uint8_t* (*ToFloats)(const Problem&, const uint8_t* p, int64_t first, int64_t last,
                                   float* to);

// A unit's columns, one after the other.
template <class C>
struct IntegerColumns {
  static constexpr int BYTES = C::BYTES;
  C codes;
  static constexpr int PARTS = WORDS<C> ? 1 : C::PARTS;
  int32_t centre[PARTS];
  explicit IntegerColumns(const Header& header) : codes(header) {
    for (int part = 0; part < PARTS; ++part) centre[part] = centre_of<C>(header, part);
  }

  template <class F>
  INLINE void read(const uint8_t* p, F next) const {
    Bytes read[C::PARTS][HALF];
    for (int column = 0; column < UNIT; ++column) {
      if (column % (UNIT / 2) == 0) codes.read(p, column / (UNIT / 2), read);
      Floats value{};
      for (int part = 0; part < PARTS; ++part) {
        const Bits quad = (Bits)read[WORDS<C> ? column % 2 : part][column / 4 % HALF];
        const Ints code = WORDS<C> ? (Ints)(quad << (column & 2 ? 0 : 16)) >> 16
                                   : (Ints)(quad >> (column % 4 * 8) & 255u);
        Floats piece = floats(code - centre[part]) * float(C::WEIGHT[part]);
        value = part ? value + piece : piece;
      }
      next(column, value);
    }
  }
};

template <class C>
const uint8_t* to_floats(const Problem& problem, const uint8_t* p, int64_t first, int64_t last,
                         float* to) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const C columns(header);
  const bool scaled = header.scales != Scales::row;
  // A table's integers have 24 bits: times a large x they could overflow a float32.
  const float factor = header.coding == Coding::table ? header.factor : 1.0f;
  const int columns_of_a_scale = scaled && header.scale_columns < UNIT ? header.scale_columns : UNIT;
  const uint8_t* block = p - (p - problem.blocks) % g.block_bytes;
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const ScaleAndZero outer = read_outer(header, outer_at(g, block, chunk * g.units));
    const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
    const uint8_t* scales = p;
    ScaleAndZero by = read_scale(header, scales, outer);
    p += g.scale_bytes;
    for (int unit = 0; unit < units; ++unit, p += C::BYTES, to += UNIT * BESIDE * ROWS)
      columns.read(p, [&](int column, Floats value) {
        if (column && column % columns_of_a_scale == 0) by = read_scale(header, scales, outer);
        value *= factor;
        store(to + column * BESIDE * ROWS, scaled ? value * by.scale + by.zero : value);
      });
  }
  return p;
}

// Four rows of four numbers become columns.
inline void turn_four(const float* from, int64_t from_row, float* to, int64_t to_row) {
#if LEVEL > LEVEL_portable
  __m128 rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = _mm_load_ps(from + i * from_row);
  _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
  for (int i = 0; i < 4; ++i) _mm_store_ps(to + i * to_row, rows[i]);
#else
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4; ++k) to[k * to_row + i] = from[i * from_row + k];
#endif
}

// The same of a plain weight.
const uint8_t* rows_to_floats(const Problem& problem, const uint8_t* p, int64_t first, int64_t last,
                              float* to) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const int64_t row_bytes = g.block_bytes / ROWS, size = row_bytes / header.columns;
  const int64_t rows = header.rows - (p - problem.blocks) / g.block_bytes * ROWS;
  const int64_t column = first * g.units * UNIT, columns = units_of(g, first, last) * UNIT;
  const int64_t left = header.columns - column < columns ? header.columns - column : columns;
  alignas(64) float numbers[ROWS][STRETCH * UNIT];
  for (int r = 0; r < ROWS; ++r) {
    const char* from = reinterpret_cast<const char*>(p + r * row_bytes);
    read_numbers(problem.type, from, 1, r < rows ? left : 0, columns, numbers[r]);
  }
  for (int64_t k = 0; k < columns; k += 4, to += 4 * BESIDE * ROWS)
    for (int r = 0; r < ROWS; r += 4) turn_four(numbers[r] + k, STRETCH * UNIT, to + r, BESIDE * ROWS);
  return p + left * size;
}

inline ToFloats float_maker(const Problem& problem) {
  if (problem.plain) return rows_to_floats;
  return with_format(*problem.header, []<class C>(Format<C>) -> ToFloats {
    if constexpr (std::is_same_v<C, Float8>) return to_floats<Float8>;
    else return to_floats<IntegerColumns<C>>;
  });
}

// A tile of MANY tokens times BESIDE blocks, added to sums (MANY, BESIDE, ROWS). In the machine's own
// vectors: wider ones, which the compiler cuts up, it keeps in memory.
inline void add_products(const Cell* x, const float* weights, int columns, float* sums) {
  constexpr int LANES = sizeof(Native) / sizeof(float), PIECES = BESIDE * ROWS / LANES;
  Native products[MANY][PIECES] = {};
  for (int k = 0; k < columns; k += TOGETHER, x += MANY * TOGETHER, weights += BESIDE * ROWS) {
    Native w[PIECES];
#pragma GCC unroll 8
    for (int i = 0; i < PIECES; ++i) w[i] = load<Native>(weights + i * LANES);
    add_tile(products, w, [&](Native sum, Native by, int t) { return plus_products(sum, by, x + t * TOGETHER); });
  }
#pragma GCC unroll 16
  for (int t = 0; t < MANY; ++t)
#pragma GCC unroll 8
    for (int i = 0; i < PIECES; ++i, sums += LANES) store(sums, load<Native>(sums) + products[t][i]);
}

// Tiles of x, (padded columns / TOGETHER, MANY, TOGETHER) each.
void prepare_floats(const Problem& problem, int64_t first, int64_t last) {
  const Header& header = *problem.header;
  const int64_t padded = problem.geometry.padded_columns;
  for (int64_t token = first; token < last; ++token) {
    Cell* to = static_cast<Cell*>(problem.tiles) + token / MANY * MANY * padded + token % MANY * TOGETHER;
    if (token >= problem.outputs) {
      for (int64_t k = 0; k < padded; k += TOGETHER) __builtin_memset(to + k * MANY, 0, TOGETHER * sizeof(Cell));
      continue;
    }
    read_row(problem, token);
    if (header.rounding != Rounding::none)
      problem.token_scales[token] = round_row(header.rounding, problem.row, padded);
    for (int64_t k = 0; k < padded; k += TOGETHER) {
      Cell cells[TOGETHER];
      for (int i = 0; i < TOGETHER; ++i) cells[i] = cell(problem.row[k + i]);
      __builtin_memcpy(to + k * MANY, cells, sizeof cells);
    }
  }
}

// BESIDE blocks from `block` on, times tiles of x `first` to `last`.
struct Group {
  const Problem& problem;
  const Cell* x;
  const ToFloats make;
  alignas(64) float weights[STRETCH * UNIT * BESIDE * ROWS];
  alignas(64) float sums[MOST_TOKENS / MANY][BESIDE * MANY * ROWS];

  explicit Group(const Problem& problem)
      : problem(problem), x(static_cast<const Cell*>(problem.tiles)), make(float_maker(problem)) {}

  void multiply(int64_t block, int64_t first, int64_t last) {
    const Geometry& g = problem.geometry;
    const int64_t step = chunks_at_once(g), x_tile = g.padded_columns * MANY;
    const int count = g.blocks - block < BESIDE ? int(g.blocks - block) : BESIDE;
    const uint8_t* at[BESIDE] = {};
    for (int b = 0; b < count; ++b) at[b] = problem.blocks + (block + b) * g.block_bytes + g.head_bytes;
    __builtin_memset(sums, 0, (last - first) * sizeof sums[0]);
    if (count < BESIDE) __builtin_memset(weights, 0, sizeof weights);
    const Cell* x_at = x + first * x_tile;
    for (int64_t chunk = 0; chunk < g.chunks; chunk += step) {
      const int64_t end = chunk + step < g.chunks ? chunk + step : g.chunks;
      const int columns = units_of(g, chunk, end) * UNIT;
      for (int b = 0; b < count; ++b)
        at[b] = make(problem, at[b], chunk, end, weights + b * ROWS);
      make_cells(weights, columns);
      for (int64_t tile = first; tile < last; ++tile)
        add_products(x_at + (tile - first) * x_tile, weights, columns, sums[tile - first]);
      x_at += columns * MANY;
    }
    for (int b = 0; b < count; ++b) finish(block, b, first, last);
  }

  void finish(int64_t block, int b, int64_t first, int64_t last) const {
    const Header& header = *problem.header;
    Floats scales = row_scales(problem, block + b);
    if (header.coding != Coding::table) scales *= header.factor;
    for (int64_t token = first * MANY; token < last * MANY && token < problem.outputs; ++token) {
      const float* at = sums[token / MANY - first] + (token % MANY * BESIDE + b) * ROWS;
      put_rows(problem, load<Floats>(at) * scales, token, block + b);
    }
  }
};

void multiply_floats(const Problem& problem, int64_t first, int64_t last) {
  const int64_t tiles = (problem.outputs + MANY - 1) / MANY, together = MOST_TOKENS / MANY;
  Group work(problem);
  for (int64_t tile = 0; tile < tiles; tile += together)
    for (int64_t group = first; group < last; ++group)
      work.multiply(group * BESIDE, tile, tile + together < tiles ? tile + together : tiles);
}

int64_t spin(const Header&, int64_t rounds) {
  constexpr int PIECES = BESIDE * ROWS * sizeof(float) / sizeof(Native);
  Cell x[MANY * TOGETHER] = {};
  const auto plus = [&](Native sum, Native w, int t) { return plus_products(sum, w, x + t * TOGETHER); };
  return rounds * MANY * BESIDE * ROWS * TOGETHER + spin_tile<MANY, PIECES, Native>(rounds, &x, plus);
}

}  // namespace

LinearLoop NAMED(many)() { return {prepare_floats, multiply_floats, MANY, sizeof(Cell), BESIDE, spin}; }
