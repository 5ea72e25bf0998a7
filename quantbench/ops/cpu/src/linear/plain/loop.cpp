// The inner loop over plain weights, as torch has them, for a few tokens.
//
// Variants: portable avx2 avx512vnni avx512bf16 neon-dotprod

#include "linear/layout.h"

namespace {
#include "vector/wide.h"

constexpr int WHOLE = 32;         // columns at a time
constexpr int STREAMS = Streams::COUNT;  // rows at a time, far apart
constexpr int PREFETCHED = 1024;  // bytes ahead in each of them, for one token

// Whether numbers are multiplied as they are, in pairs. Denormal ones count as zeros then.
template <Number N>
constexpr bool IN_PAIRS = LEVEL == LEVEL_avx512bf16 && N == Number::bf16;

template <Number N>
constexpr int PER_FLOAT = IN_PAIRS<N> ? 2 : 1;  // numbers of x in the room of a float

// 32 columns as two vectors. Of bfloat16 the first has the even columns, the second the odd ones; of pairs
// each has all.
template <Number N>
inline void read_whole(const char* p, Floats& a, Floats& b) {
  if constexpr (IN_PAIRS<N>) {
    a = load<Floats>(p), b = a;
  } else if constexpr (N == Number::bf16) {
    Bits pairs = load<Bits>(p);
    a = low_half(pairs), b = high_half(pairs);
  } else if constexpr (N == Number::f16) {
    a = from_f16(load<HalfWords>(p)), b = from_f16(load<HalfWords>(p + 32));
  } else {
    a = load<Floats>(p), b = load<Floats>(p + 64);
  }
}

// Adds their products with 32 numbers of x.
template <Number N>
inline void add_products(Floats& sum, Floats a, Floats b, const float* x) {
#if LEVEL == LEVEL_avx512bf16
  if constexpr (IN_PAIRS<N>) {
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, load<__m512bh>(x));
    return;
  }
#endif
  sum += a * load<Floats>(x);
  sum += b * load<Floats>(x + 16);
}

// The last columns, with zeros behind them.
template <Number N>
inline void read_rest(const char* p, int64_t columns, Floats& a, Floats& b) {
  alignas(64) char copy[WHOLE * 4] = {};
  __builtin_memcpy(copy, p, columns * size_of(N));
  read_whole<N>(copy, a, b);
}

template <Number N>
void prepare(const Problem& problem, int64_t first, int64_t last) {
  const int64_t columns = problem.header->columns, padded = problem.geometry.padded_columns;
  for (int64_t token = first; token < last; ++token) {
    const char* row = static_cast<const char*>(problem.x) + token * problem.x_row * size_of(N);
    float* to = problem.floats + token * padded / PER_FLOAT<N>;
    for (int64_t k = 0; k < padded; k += WHOLE, to += WHOLE / PER_FLOAT<N>) {
      alignas(64) char copy[WHOLE * 4] = {};
      const char* from = row + k * size_of(N);
      if (problem.x_step != 1 || columns - k < WHOLE) {
        const int64_t left = columns - k < WHOLE ? columns - k : WHOLE;
        for (int64_t i = 0; i < left; ++i)
          __builtin_memcpy(copy + i * size_of(N), row + (k + i) * problem.x_step * size_of(N), size_of(N));
        from = copy;
      }
      Floats a, b;
      read_whole<N>(from, a, b);
      store(to, a);
      if (!IN_PAIRS<N>) store(to + 16, b);
    }
  }
}

// The streams of which a tile asks for lines, and how far ahead.
struct Asked {
  int64_t bytes;
  int first, last;
};

// STREAMS rows times T tokens.
template <Number N, int T>
void rows_by_tile(const Problem& problem, const char* const* rows, Asked asked, const float* x,
                  Floats (*sums)[TILE]) {
  const int64_t columns = problem.header->columns, padded = problem.geometry.padded_columns;
  const int64_t whole = columns / WHOLE * WHOLE;
  Floats sum[STREAMS][T] = {};
  auto add = [&](int64_t k, int s, Floats a, Floats b) {
    for (int t = 0; t < T; ++t) add_products<N>(sum[s][t], a, b, x + (t * padded + k) / PER_FLOAT<N>);
  };
  for (int64_t k = 0; k < whole; k += WHOLE) {
    for (int s = asked.first; s < asked.last; ++s)
      for (int line = 0; line < WHOLE * size_of(N); line += 64)
        read_ahead(rows[s] + asked.bytes + k * size_of(N) + line);
    for (int s = 0; s < STREAMS; ++s) {
      Floats a, b;
      read_whole<N>(rows[s] + k * size_of(N), a, b);
      add(k, s, a, b);
    }
  }
  if (whole < columns)
    for (int s = 0; s < STREAMS; ++s) {
      Floats a, b;
      read_rest<N>(rows[s] + whole * size_of(N), columns - whole, a, b);
      add(whole, s, a, b);
    }
  for (int s = 0; s < STREAMS; ++s)
    for (int t = 0; t < T; ++t) sums[s][t] = sum[s][t];
}

// Rows first to last: cut in STREAMS, of which each step does one row each.
template <Number N>
void multiply(const Problem& problem, int64_t first, int64_t last) {
  const int64_t row_bytes = problem.header->columns * size_of(N);
  const char* weight = reinterpret_cast<const char*>(problem.blocks);
  const Streams cut(first, last);
  // Memory works while several tiles compute: each asks for its part of the streams' next rows.
  const int64_t ahead = problem.tokens > 1 ? row_bytes : PREFETCHED;
  const int64_t tiles = (problem.tokens + TILE - 1) / TILE, part = (STREAMS + tiles - 1) / tiles;
  int64_t row[STREAMS];
  for (int64_t step = 0; const int streams = cut.next(step, row); ++step) {
    const char* rows[STREAMS];
    for (int s = 0; s < STREAMS; ++s)  // a stream that has ended repeats the first
      rows[s] = weight + row[s < streams ? s : 0] * row_bytes;
    for (int64_t token = 0; token < problem.tokens;) {
      const int tile = tile_of(problem.tokens - token);
      const float* x = problem.floats + token * problem.geometry.padded_columns / PER_FLOAT<N>;
      const int64_t asked = token / TILE * part;
      const Asked by_tile{ahead, int(asked), int(asked + part < STREAMS ? asked + part : STREAMS)};
      Floats sums[STREAMS][TILE];
      if (tile == 4) rows_by_tile<N, 4>(problem, rows, by_tile, x, sums);
      else if (tile == 2) rows_by_tile<N, 2>(problem, rows, by_tile, x, sums);
      else rows_by_tile<N, 1>(problem, rows, by_tile, x, sums);
      for (int s = 0; s < streams; ++s)
        for (int t = 0; t < tile; ++t) {
          char* to = static_cast<char*>(problem.y) + ((token + t) * problem.header->rows + row[s]) * size_of(N);
          write_floats(N, to, all(total(sums[s][t])), 1);
        }
      token += tile;
    }
  }
}

}  // namespace

LinearLoop NAMED(plain)(Number type) {
  switch (type) {
    case Number::f32: return {prepare<Number::f32>, multiply<Number::f32>};
    case Number::f16: return {prepare<Number::f16>, multiply<Number::f16>};
    default: return {prepare<Number::bf16>, multiply<Number::bf16>};
  }
}
