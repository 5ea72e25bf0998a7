// Loops over a row of activations: read as float32, rounded once.
//
// Variants: portable avx2 avx512vnni neon-dotprod

#include "step/rows.h"

namespace {
#include "vector/wide.h"

constexpr int64_t LANES = 16;

// The number at `index` and those behind it, of n in all: zeros where there are none.
template <Number N>
inline Floats read(const char* row, int64_t index, int64_t n) {
  const char* p = row + index * size_of(N);
  if (n - index >= LANES) return read_floats(N, p);
  char some[LANES * 4] = {};
  __builtin_memcpy(some, p, (n - index) * size_of(N));
  return read_floats(N, some);
}

template <Number N>
inline void write(char* row, int64_t index, int64_t n, Floats v) {
  write_floats(N, row + index * size_of(N), v, n - index < LANES ? n - index : LANES);
}

template <Number N>
void norm(const char* x, const float* weight, float epsilon, int64_t n, char* to) {
  Floats squares{};
  for (int64_t i = 0; i < n; i += LANES) {
    const Floats v = read<N>(x, i, n);
    squares += v * v;
  }
  const float scale = 1 / __builtin_sqrtf(total(squares) / float(n) + epsilon);
  for (int64_t i = 0; i < n; i += LANES)
    write<N>(to, i, n, read<N>(x, i, n) * scale * read<Number::f32>((const char*)weight, i, n));
}

template <Number N>
void add(const char* a, const char* b, float factor, int64_t n, char* to) {
  for (int64_t i = 0; i < n; i += LANES)
    write<N>(to, i, n, read<N>(a, i, n) + read<N>(b, i, n) * factor);
}

template <Number N>
void rotate(char* x, const float* cos, const float* sin, int64_t half) {
  char* second = x + half * size_of(N);
  for (int64_t i = 0; i < half; i += LANES) {
    const Floats a = read<N>(x, i, half), b = read<N>(second, i, half);
    const Floats c = read<Number::f32>((const char*)cos, i, half);
    const Floats s = read<Number::f32>((const char*)sin, i, half);
    write<N>(x, i, half, a * c - b * s);
    write<N>(second, i, half, b * c + a * s);
  }
}

// e^x: 2^n e^r with |r| <= ln 2 / 2, and Taylor's series of e^r to r^7 (off by 5e-9). From x = 88 on
// e^88, below -87 e^-87.
inline Floats exponential(Floats x) {
  constexpr float SHIFT = 12582912;  // 1.5 · 2^23: adding it leaves an integer in the low bits
  x = clamped(x, -87, 88);
  const Floats shifted = x * 1.44269504f + SHIFT, n = shifted - SHIFT;
  const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  constexpr float SERIES[] = {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 0.5f, 1, 1};
  Floats y = all(1 / 5040.f);
  for (float coefficient : SERIES) y = y * r + coefficient;
  const Bits power = (Bits)((Ints)shifted - 0x4b400000 + 127) << 23;
  return y * (Floats)power;
}

template <Number N, Gate G>
void gate(const char* gates, const char* up, int64_t n, char* to) {
  for (int64_t i = 0; i < n; i += LANES) {
    const Floats x = read<N>(gates, i, n);
    if constexpr (G == SQUARED_RELU) {
      write<N>(to, i, n, select(x < 0.0f, Floats{}, x * x));
      continue;
    }
    // GELU's 1 + tanh(√(2/π) (x + 0.044715 x³)), as a sigmoid of twice that
    const Floats s = G == GELU ? x * (x * x * 0.0713548163f + 1.59576912f) : x;
    write<N>(to, i, n, x / (exponential(-s) + 1.0f) * read<N>(up, i, n));
  }
}

template <Number N>
void widen(const char* x, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += LANES) write<Number::f32>((char*)to, i, n, read<N>(x, i, n));
}

template <Number N>
void narrow(const float* x, int64_t n, char* to) {
  for (int64_t i = 0; i < n; i += LANES) write<N>(to, i, n, read<Number::f32>((const char*)x, i, n));
}

template <Number N>
float dot(const char* a, const char* b, int64_t n) {
  constexpr int64_t PREFETCHED = 2048;  // bytes ahead in b: what lies behind it is read next
  Floats sums[4] = {};  // several, because each addition waits for the one before
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    for (int64_t line = 0; line < 4 * LANES * size_of(N); line += 64)
      __builtin_prefetch(b + i * size_of(N) + PREFETCHED + line);
    for (int64_t s = 0; s < 4; ++s)
      sums[s] += read<N>(a, i + s * LANES, n) * read<N>(b, i + s * LANES, n);
  }
  for (; i < n; i += LANES) sums[0] += read<N>(a, i, n) * read<N>(b, i, n);
  return total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <Number N>
void add_weighed(const char* x, float weight, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += LANES)
    write<Number::f32>((char*)to, i, n, read<Number::f32>((const char*)to, i, n) + read<N>(x, i, n) * weight);
}

#include "step/encode.h"

template <Number N>
Rows rows_of() {
  constexpr Encode dense = as_they_are<N>;
  return {N,        norm<N>,   add<N>, rotate<N>,      {gate<N, SILU>, gate<N, GELU>, gate<N, SQUARED_RELU>},
          widen<N>, narrow<N>, dot<N>, add_weighed<N>, {dense, dense, dense, to_int8<N>, to_fp8<N>, to_int4<N>}};
}

}  // namespace

Rows NAMED(rows)(Number type) {
  switch (type) {
    case Number::f32: return rows_of<Number::f32>();
    case Number::bf16: return rows_of<Number::bf16>();
    default: return rows_of<Number::f16>();
  }
}
