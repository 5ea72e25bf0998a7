// Vectors of 64 bytes in what every compiler has: it cuts them into the registers there are.
// Included in a version's namespace; wide_*.h has what needs instructions of its own.

typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int8_t SignedBytes __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));
typedef int16_t SignedWords __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t HalfWords __attribute__((vector_size(32)));

template <class V>
inline V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

inline Floats all(float x) { return Floats{} + x; }
inline Ints all(int32_t x) { return Ints{} + x; }
inline Bytes all_bytes(uint8_t x) { return Bytes{} + x; }
inline Floats floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Bytes shifted by less than 8 bits, with bits of their neighbours where zeros belong.
template <int BITS>
inline Bytes shifted(Bytes v) {
  if constexpr (BITS > 0) return (Bytes)((Words)v << BITS);
  else if constexpr (BITS < 0) return (Bytes)((Words)v >> -BITS);
  else return v;
}

// The low and the high halves of pairs of bfloat16, as floats.
inline Floats low_half(Bits pairs) { return (Floats)(pairs << 16); }
inline Floats high_half(Bits pairs) { return (Floats)(pairs & 0xffff0000u); }

// Rounded to the nearest, ties to even; NaN stays NaN.
inline HalfWords as_bf16(Floats v) {
  Bits bits = (Bits)v, nan = (Bits)(v != v);
  Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return __builtin_convertvector((~nan & rounded) | (nan & 0x7fc0u), HalfWords);
}
