// A head's new key or value as the KV caches store it: what `encode` of kv_cache/ computes in Python, bit
// for bit. Included in a variant's namespace, by step/rows_loop.cpp.

// The largest magnitude of n numbers; NaN if one of them is.
template <Number N>
inline float largest(const char* x, int64_t n) {
  Ints most{};
  for (int64_t i = 0; i < n; i += LANES) {
    const Ints magnitude = (Ints)read<N>(x, i, n) & 0x7fffffff;  // ordered as the numbers are, NaN last
    most = select(magnitude > most, magnitude, most);
  }
  return __builtin_bit_cast(float, largest(most));
}

// Stores a scale; returns what numbers are multiplied by: 1 / the scale as it is stored, or 0 where that
// is no finite number.
template <Number N>
inline float stored(float scale, char* scales, int64_t index) {
  write<N>(scales, index, index + 1, all(scale));
  const float inverse = 1 / read<N>(scales, index, index + 1)[0];
  return __builtin_fabsf(inverse) < __builtin_inff() ? inverse : 0;
}

// Rounded to the nearest, ties to even, if it is below 2^22.
inline Ints nearest(Floats v) {
  constexpr float SHIFT = 12582912;  // 1.5 · 2^23: adding it leaves an integer in the low bits
  return (Ints)(v + SHIFT) - 0x4b400000;
}

// Float8 E4M3 of numbers up to 448, rounded to the nearest, ties to even.
inline Ints e4m3(Floats v) {
  const Bits bits = (Bits)v, sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  // Below 2^-6: adding 2^14 leaves multiples of 2^-9 in the low bits.
  const Bits small = (Bits)((Floats)magnitude + 16384.0f) - 0x46800000u;
  const Bits normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  const Bits number = select(magnitude < (121u << 23), small, normal);
  return (Ints)(sign | select(magnitude > 0x7f800000u, Bits{} + 0x7fu, number));
}

// The low bytes of some of n integers, from `index` on.
inline void write_bytes(char* codes, int64_t index, int64_t n, Ints v) {
  int32_t lanes[LANES];
  char bytes[LANES];
  store(lanes, v);
  for (int i = 0; i < LANES; ++i) bytes[i] = char(lanes[i]);
  __builtin_memcpy(codes + index, bytes, n - index < LANES ? n - index : LANES);
}

template <Number N>
void as_they_are(const char* x, int64_t n, char* codes, char*) {
  __builtin_memcpy(codes, x, n * size_of(N));
}

// A scale for all n, the largest magnitude / LARGEST.
template <Number N, int LARGEST, Ints CODE(Floats)>
inline void to_8_bits(const char* x, int64_t n, char* codes, char* scale) {
  const float inverse = stored<N>(largest<N>(x, n) / LARGEST, scale, 0);
  for (int64_t i = 0; i < n; i += LANES)
    write_bytes(codes, i, n, CODE(clamped(read<N>(x, i, n) * inverse, -LARGEST, LARGEST)));
}

template <Number N>
void to_int8(const char* x, int64_t n, char* codes, char* scale) {
  to_8_bits<N, 127, nearest>(x, n, codes, scale);
}

template <Number N>
void to_fp8(const char* x, int64_t n, char* codes, char* scale) {
  to_8_bits<N, 448, e4m3>(x, n, codes, scale);
}

// The first of the numbers of the largest magnitude; NaN if there is one.
inline float extreme(const float* x) {
  const float most = largest<Number::f32>((const char*)x, INT4_GROUP);
  for (int i = 0; i < INT4_GROUP; ++i)
    if (__builtin_fabsf(x[i]) == most) return x[i];
  return most;
}

// A scale for every INT4_GROUP numbers, with which the extreme one has code -8. Codes are stored plus 8, two
// in a byte, the first in its low bits.
template <Number N>
void to_int4(const char* x, int64_t n, char* codes, char* scales) {
  for (int64_t group = 0; group < n / INT4_GROUP; ++group) {
    float numbers[INT4_GROUP];
    uint32_t own[INT4_GROUP];
    widen<N>(x + group * INT4_GROUP * size_of(N), INT4_GROUP, numbers);
    const float inverse = stored<N>(extreme(numbers) / -8, scales, group);
    for (int64_t i = 0; i < INT4_GROUP; i += LANES) {
      const Ints code = nearest(clamped(load<Floats>(numbers + i) * inverse, -8, 7));
      store(own + i, (code + 8) & 15);
    }
    for (int64_t i = 0; i < INT4_GROUP / 2; ++i)
      codes[group * INT4_GROUP / 2 + i] = char(own[2 * i] | own[2 * i + 1] << 4);
  }
}
