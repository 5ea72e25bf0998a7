// Products of many tokens in integers: 16-bit x times weights widened to words, or, where the machine multiplies bytes
// and the scheme rounds x to 8 bits, bytes times bytes. docs/prompts.md draws a tile and says why.
//
// Variants: portable avx2 avxvnni avx512vnni neon-dotprod

#include "linear/layout.h"

namespace {
#include "linear/inner.h"
#include "linear/many/tile.h"

// Bytes of the machine's vectors. MANY: tokens of a tile; its last one may have 1/3 or 2/3 of them. BESIDE: the blocks
// whose rows are multiplied together. MANY sums of BESIDE blocks have to fit the registers.
#if LEVEL >= LEVEL_avx512vnni
constexpr int NATIVE = 64, MANY = 12, BESIDE = 2;
#elif LEVEL > LEVEL_portable
constexpr int NATIVE = 32, MANY = 6, BESIDE = 1;
#else
constexpr int NATIVE = 16, MANY = LEVEL < LEVEL_portable ? 6 : 3, BESIDE = 1;
#endif
typedef int32_t Lanes __attribute__((vector_size(NATIVE)));
typedef float Native __attribute__((vector_size(NATIVE)));

constexpr int TOGETHER = 2;       // blocks that x is read once for
constexpr int MOST_TOKENS = 240;  // that go through weights together
constexpr int FAR = 4096;         // bytes: how far ahead weights are prefetched, about the next stretch of 8-bit ones
constexpr int STEP = BESIDE * ROWS, WIDTH = NATIVE / 4, PIECES = STRETCH * UNIT / 8;

// EACH: numbers in a lane of 32 bits, 2 words or 4 bytes. Where x's bytes have no sign, X_ZERO is added to them.
constexpr int X_ZERO = LEVEL < LEVEL_portable ? 0 : 128;
template <int EACH>
INLINE Lanes plus_products(Lanes sum, Lanes w, int32_t x) {
#if LEVEL >= LEVEL_avx512vnni
  const __m512i numbers = _mm512_set1_epi32(x);
  return (Lanes)(EACH == 2 ? _mm512_dpwssd_epi32((__m512i)sum, numbers, (__m512i)w)
                           : _mm512_dpbusd_epi32((__m512i)sum, numbers, (__m512i)w));
#elif LEVEL == LEVEL_avxvnni
  const __m256i numbers = _mm256_set1_epi32(x);
  return (Lanes)(EACH == 2 ? _mm256_dpwssd_avx_epi32((__m256i)sum, numbers, (__m256i)w)
                           : _mm256_dpbusd_avx_epi32((__m256i)sum, numbers, (__m256i)w));
#elif LEVEL == LEVEL_avx2
  return sum + (Lanes)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#elif LEVEL < LEVEL_portable
  return (Lanes)vdotq_s32((int32x4_t)sum, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  for (int i = 0; i < 4; ++i) sum += (w << (24 - 8 * i) >> 24) * (x >> 8 * i & 255);
  return sum;
#endif
}

// Whether x is multiplied as bytes.
inline bool in_bytes(const Header& header) {
  return LEVEL != LEVEL_avx2 && header.rounding != Rounding::none && header.coding != Coding::fp6;
}

// Whether all products of a row are summed in 32 bits: |x| is at most 255, |w| at most 128.
inline bool in_one_sum(const Header& header) {
  return header.scales == Scales::row && header.rounding != Rounding::none && header.columns <= 1 << 16 &&
         header.coding != Coding::fp6;
}

// Columns whose products are summed in 32 bits before they are scaled; of fp6 at most 128 fit.
inline int piece_of(const Header& header, const Geometry& g) {
  return header.coding == Coding::fp6 && g.sum_columns > 128 ? UNIT : g.sum_columns;
}

inline int tokens_of_tile(const Problem& problem, int64_t tile) {
  const int64_t left = problem.outputs - tile * MANY;
  return left > MANY * 2 / 3 ? MANY : left > MANY / 3 ? MANY * 2 / 3 : MANY / 3;
}

// A tile of x, of T tokens.
struct Tokens {
  int32_t* lanes;    // (padded columns / EACH, T)
  float* scales;     // (chunks, T)
  float* sums;       // (pieces, T): of the numbers, scaled
  float* offsets;    // (T,): what was added to bytes
  static constexpr int BYTES = 4;  // of each number, at most: pieces have 8 columns or more

  Tokens(const Problem& problem, int64_t tile, int T) {
    const int64_t padded = problem.geometry.padded_columns;
    const int64_t pieces = padded / piece_of(*problem.header, problem.geometry) + 1;
    lanes = reinterpret_cast<int32_t*>(static_cast<char*>(problem.tiles) + tile * MANY * padded * BYTES);
    scales = reinterpret_cast<float*>(lanes + padded / (in_bytes(*problem.header) ? 4 : 2) * T);
    sums = scales + pieces * T;
    offsets = sums + pieces * T;
  }
};

void prepare_integers(const Problem& problem, int64_t first, int64_t last) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const bool rounded = header.rounding != Rounding::none, bytes = in_bytes(header);
  for (int64_t token = first; token < last; ++token) {
    const int64_t tile = token / MANY, t = token % MANY;
    const int T = tokens_of_tile(problem, tile), piece = piece_of(header, g);
    if (t >= T) continue;
    const Tokens to(problem, tile, T);
    int32_t* lanes = to.lanes + t;
    int64_t index = t, zero = 0;
    float* row = problem.row;
    if (token < problem.outputs) read_row(problem, token);
    else __builtin_memset(row, 0, g.padded_columns * sizeof(float));
    if (rounded && token < problem.outputs)
      problem.token_scales[token] = round_row(header.rounding, row, g.padded_columns, &zero);
    const int16_t offset = int16_t(zero + X_ZERO);
    to.offsets[t] = offset;
    for (int64_t chunk = 0; chunk < g.x_chunks; ++chunk) {
      const int units = x_units(g, chunk), columns = units * UNIT;
      alignas(64) int16_t integers[LARGEST_CHUNK];
      const float scale = rounded ? 1.0f : power(largest(row, units));
      to_integers(row, units, scale, integers);
      to.scales[chunk * T + t] = scale;
      for (int k = 0; k < columns && header.zeros; k += piece, index += T) {
        int32_t sum = 0;
        for (int i = k; i < k + piece && i < columns; ++i) sum += integers[i];
        to.sums[index] = float(sum) * scale;
      }
      if (bytes) {
        for (int k = 0; k < columns; k += 4, lanes += T) {
          uint8_t quad[4];
          for (int i = 0; i < 4; ++i) quad[i] = uint8_t(integers[k + i] + offset);
          __builtin_memcpy(lanes, quad, 4);
        }
      } else {
        for (int k = 0; k < columns; k += 4, lanes += 2 * T) {
          int32_t pairs[2];
          arrange_words(integers + k, pairs);
          lanes[0] = pairs[0], lanes[T] = pairs[1];
        }
      }
      row += columns;
    }
  }
}

// Some chunks of BESIDE blocks.
struct Weights {
  alignas(64) int32_t lanes[STRETCH * UNIT / 2 * STEP];  // (columns / EACH, BESIDE, ROWS)
  alignas(64) float scales[PIECES * STEP], zeros[PIECES * STEP], sums[PIECES * STEP];  // (pieces, BESIDE, ROWS)
  int columns;
};

// Makes those of one block; returns where its next chunk is.
typedef const uint8_t* (*ToIntegers)(const Problem&, const uint8_t* p, int64_t first, int64_t last, int beside, Weights&);

template <class C, int EACH>
const uint8_t* to_integers(const Problem& problem, const uint8_t* p, int64_t first, int64_t last, int beside,
                           Weights& to) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const C codes(header);
  const int centre = centre_of<C>(header, 0), piece = piece_of(header, g);
  const uint8_t *block = p - (p - problem.blocks) % g.block_bytes, *end = block + g.block_bytes;
  int32_t* lanes = to.lanes + beside * ROWS;
  int64_t at = beside * ROWS;
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const ScaleAndZero outer = read_outer(header, outer_at(g, block, chunk * g.units));
    const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
    const int count = header.scale_columns < UNIT && header.scales != Scales::row ? fine_scales(header) : 1;
    const uint8_t* scales = p;
    for (int i = 0; i < count; ++i) {
      const ScaleAndZero by = read_scale(header, scales, outer);
      for (int k = 0; k < units * UNIT / count; k += piece, at += STEP)
        store(to.scales + at, by.scale), store(to.zeros + at, by.zero);
    }
    p += g.scale_bytes;
    for (int line = 0; line < units * C::BYTES; line += 64) {
      const uint8_t* ahead = p + FAR + line;
      read_ahead(ahead < end ? ahead : ahead + (TOGETHER - 1) * g.block_bytes);
    }
    for (int half = 0; half < 2 * units; ++half) {
      Bytes read[C::PARTS][HALF];
      codes.read(p, half % 2, read);
      if (half % 2) p += C::BYTES;
#pragma GCC unroll 4
      for (int q = 0; q < HALF; ++q, lanes += 4 / EACH * STEP)
        if constexpr (EACH == 4) {
          store(lanes, read[0][q] - uint8_t(centre));
        } else {
          Words even = (Words)read[0][q], odd = even;
          if constexpr (WORDS<C>) odd = (Words)read[1][q];
          else even = (even & uint16_t(255)) - uint16_t(centre), odd = (odd >> uint16_t(8)) - uint16_t(centre);
          store(lanes, even), store(lanes + STEP, odd);
        }
    }
  }
  return p;
}

template <int EACH>
inline ToIntegers integer_maker(const Header& header) {
  return with_format(header, []<class C>(Format<C>) -> ToIntegers {
    if constexpr (requires { requires C::PARTS == 1 || WORDS<C>; } && (EACH == 2 || !WORDS<C>))
      return to_integers<C, EACH>;
    return nullptr;
  });
}

// How products become results: all of a row are one sum of int32; or sums of pieces are scaled, and so, where x was not
// rounded to 8 bits, are those of a chunk of x.
enum class Sums { whole, pieces, chunks };

// A tile of x times BESIDE blocks, added to sums (T, BESIDE, ROWS).
template <int EACH, int T, Sums SUMS>
__attribute__((noinline)) void add_products(const Problem& problem, const Tokens& x, int64_t column, const Weights& weights, float* sums) {
  constexpr int VECTORS = STEP / WIDTH;
  const Geometry& g = problem.geometry;
  const int columns = weights.columns, chunk = SUMS == Sums::chunks ? g.x_units * UNIT : columns;
  const int piece = SUMS == Sums::whole ? columns : piece_of(*problem.header, g);
  const int32_t *numbers = x.lanes + column / EACH * T, *lanes = weights.lanes;
  for (int from = 0, at = 0; from < columns; from += chunk) {
    const int end = from + chunk < columns ? from + chunk : columns;
    alignas(64) float scaled[T * STEP];
    if (SUMS == Sums::chunks) __builtin_memset(scaled, 0, sizeof scaled);
    for (int k = from; k < end; k += piece, at += STEP) {
      const int count = (end - k < piece ? end - k : piece) / EACH;
      Lanes products[T][VECTORS] = {};
      for (int i = 0; i < count; ++i, numbers += T, lanes += STEP) {
        Lanes w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) w[v] = load<Lanes>(lanes + v * WIDTH);
        add_tile(products, w, [&](Lanes sum, Lanes by, int t) { return plus_products<EACH>(sum, by, numbers[t]); });
      }
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) {
          float* to = (SUMS == Sums::chunks ? scaled : sums) + t * STEP + v * WIDTH;
          if constexpr (SUMS == Sums::whole) {
            store(to, load<Lanes>(to) + products[t][v]);
          } else {
            Native sum = __builtin_convertvector(products[t][v], Native);
            // Exact: at most 256 products of 8 bits by 8.
            if (EACH == 4) sum -= load<Native>(weights.sums + at + v * WIDTH) * x.offsets[t];
            store(to, load<Native>(to) + sum * load<Native>(weights.scales + at + v * WIDTH));
          }
        }
    }
    for (int i = 0; SUMS == Sums::chunks && i < T * STEP; i += WIDTH) {
      const float scale = x.scales[(column + from) / chunk * T + i / STEP];
      store(sums + i, load<Native>(sums + i) + load<Native>(scaled + i) * scale);
    }
  }
}

// The same of the weights' zero points.
template <int T>
void add_zeros(const float* x, const float* zeros, int pieces, float* sums) {
  for (int v = 0; v < STEP; v += WIDTH) {
    Native totals[T];
    for (int t = 0; t < T; ++t) totals[t] = load<Native>(sums + t * STEP + v);
    for (int piece = 0; piece < pieces; ++piece) {
      const Native zero = load<Native>(zeros + piece * STEP + v);
      for (int t = 0; t < T; ++t) totals[t] += zero * x[piece * T + t];
    }
    for (int t = 0; t < T; ++t) store(sums + t * STEP + v, totals[t]);
  }
}

// TOGETHER blocks times tiles of x.
template <int EACH>
struct Group {
  const Problem& problem;
  const ToIntegers make;
  Weights weights[TOGETHER / BESIDE];
  alignas(64) int32_t of_rows[TOGETHER * ROWS];  // sums of all of a row's weights
  alignas(64) float sums[MOST_TOKENS / MANY][TOGETHER / BESIDE][MANY * STEP];

  explicit Group(const Problem& problem) : problem(problem), make(integer_maker<EACH>(*problem.header)) {}

  void multiply(int64_t block, int64_t first, int64_t last) {
    const Geometry& g = problem.geometry;
    const int64_t step = chunks_at_once(g);
    const int count = g.blocks - block < TOGETHER ? int(g.blocks - block) : TOGETHER;
    const int parts = (count + BESIDE - 1) / BESIDE;
    const uint8_t* at[TOGETHER] = {};
    for (int b = 0; b < count; ++b) at[b] = problem.blocks + (block + b) * g.block_bytes + g.head_bytes;
    __builtin_memset(sums, 0, (last - first) * sizeof sums[0]);
    __builtin_memset(of_rows, 0, sizeof of_rows);
    if (count % BESIDE) __builtin_memset(weights, 0, sizeof weights);
    int64_t column = 0;
    for (int64_t chunk = 0; chunk < g.chunks; chunk += step) {
      const int64_t end = chunk + step < g.chunks ? chunk + step : g.chunks;
      const int columns = units_of(g, chunk, end) * UNIT;
      for (int b = 0; b < count; ++b) at[b] = make(problem, at[b], chunk, end, b % BESIDE, weights[b / BESIDE]);
      for (int part = 0; part < parts; ++part) {
        weights[part].columns = columns;
        if (EACH == 4) sum_weights(weights[part], of_rows + part * STEP);
      }
      for (int64_t tile = first; tile < last; ++tile) {
        const int T = tokens_of_tile(problem, tile);
        const Tokens x(problem, tile, T);
        for (int part = 0; part < parts; ++part)
          if (T == MANY) tile_by_blocks<MANY>(x, column, weights[part], sums[tile - first][part]);
          else if (T == MANY / 3) tile_by_blocks<MANY / 3>(x, column, weights[part], sums[tile - first][part]);
          else tile_by_blocks<MANY * 2 / 3>(x, column, weights[part], sums[tile - first][part]);
      }
      column += columns;
    }
    for (int64_t token = first * MANY; token < last * MANY && token < problem.outputs; ++token)
      for (int b = 0; b < count; ++b) finish(token, first, block, b);
  }

  template <int T>
  void tile_by_blocks(const Tokens& x, int64_t column, const Weights& weights, float* to) const {
    const Header& header = *problem.header;
    if (in_one_sum(header)) return add_products<EACH, T, Sums::whole>(problem, x, column, weights, to);
    if (header.rounding == Rounding::none) add_products<EACH, T, Sums::chunks>(problem, x, column, weights, to);
    else add_products<EACH, T, Sums::pieces>(problem, x, column, weights, to);
    const int piece = piece_of(header, problem.geometry);
    if (header.zeros)
      add_zeros<T>(x.sums + column / piece * T, weights.zeros, (weights.columns + piece - 1) / piece, to);
  }

  void sum_weights(Weights& of, int32_t* rows) const {
    const int piece = piece_of(*problem.header, problem.geometry);
    for (int row = 0; row < STEP; row += WIDTH) {
      const int32_t* lanes = of.lanes + row;
      Lanes all_pieces = load<Lanes>(rows + row);
      for (int k = 0, at = row; k < of.columns; k += piece, at += STEP) {
        Lanes sum{};
        for (int i = k; i < k + piece && i < of.columns; i += 4, lanes += STEP)
          sum = plus_products<4>(sum, load<Lanes>(lanes), 0x01010101);
        all_pieces += sum;
        store(of.sums + at, __builtin_convertvector(sum, Native));
      }
      store(rows + row, all_pieces);
    }
  }

  void finish(int64_t token, int64_t first, int64_t block, int b) const {
    const int64_t tile = token / MANY, t = token % MANY;
    const float* at = sums[tile - first][b / BESIDE] + t * STEP + b % BESIDE * ROWS;
    Floats v = load<Floats>(at);
    if (in_one_sum(*problem.header)) {
      Ints sum = load<Ints>(at);
      if (EACH == 4) {
        const Tokens x(problem, tile, tokens_of_tile(problem, tile));
        sum -= load<Ints>(of_rows + b * ROWS) * int32_t(x.offsets[t]);
      }
      v = floats(sum);
    }
    put_rows(problem, v * (row_scales(problem, block + b) * problem.header->factor), token, block + b);
  }
};

template <int EACH>
void multiply_integers(const Problem& problem, int64_t first, int64_t last) {
  const int64_t tiles = (problem.outputs + MANY - 1) / MANY, together = MOST_TOKENS / MANY;
  Group<EACH> work(problem);
  for (int64_t tile = 0; tile < tiles; tile += together)
    for (int64_t group = first; group < last; ++group)
      work.multiply(group * TOGETHER, tile, tile + together < tiles ? tile + together : tiles);
}

void multiply_integers(const Problem& problem, int64_t first, int64_t last) {
#if LEVEL != LEVEL_avx2
  if (in_bytes(*problem.header)) return multiply_integers<4>(problem, first, last);
#endif
#if LEVEL > LEVEL_portable
  multiply_integers<2>(problem, first, last);
#endif
}

template <int EACH>
int64_t spin(int64_t rounds) {
  int32_t x[MANY] = {};
  const auto plus = [&](Lanes sum, Lanes w, int t) { return plus_products<EACH>(sum, w, x[t]); };
  return rounds * MANY * STEP * EACH + spin_tile<MANY, STEP / WIDTH, Lanes>(rounds, &x, plus);
}

int64_t spin(const Header& header, int64_t rounds) {
#if LEVEL != LEVEL_avx2
  if (in_bytes(header)) return spin<4>(rounds);
#endif
#if LEVEL > LEVEL_portable
  return spin<2>(rounds);
#endif
  return 0;
}

}  // namespace

LinearLoop NAMED(integers)() { return {prepare_integers, multiply_integers, MANY, Tokens::BYTES, TOGETHER, spin}; }
