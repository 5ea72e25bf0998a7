// Vectors of 64 bytes. Included in a variant's namespace. Here is what every compiler has; wide_halves.h
// makes each of registers of 32 or 16 bytes, and the end includes what needs an instruction set's own instructions.

#if LEVEL == LEVEL_avx2 || LEVEL == LEVEL_avxvnni || LEVEL < LEVEL_portable
#include "vector/wide_halves.h"
#endif

#ifdef HALVES
template <class T>
using Wide = Halves<T, 64>;
using HalfWords = Piece<uint16_t, 32>;
#else
typedef uint16_t HalfWords __attribute__((vector_size(32)));
template <class T>
struct WideOf {
  typedef T Type __attribute__((vector_size(64)));
};
template <class T>
using Wide = typename WideOf<T>::Type;

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

template <class Mask, class V>
inline V select(Mask mask, V a, V b) { return mask ? a : b; }

template <class V, class From>
inline V converted(From v) { return __builtin_convertvector(v, V); }
#endif

using Bytes = Wide<uint8_t>;
using Words = Wide<uint16_t>;
using SignedWords = Wide<int16_t>;
using Bits = Wide<uint32_t>;
using Ints = Wide<int32_t>;
using Floats = Wide<float>;

inline Floats all(float x) { return Floats{} + x; }
inline Ints all(int32_t x) { return Ints{} + x; }
inline float total(Floats v) {
  float lanes[16];
  store(lanes, v);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
inline int32_t largest(Ints v) {
  int32_t lanes[16], found;
  store(lanes, v);
  found = lanes[0];
  for (int32_t lane : lanes) found = lane > found ? lane : found;
  return found;
}
inline Floats clamped(Floats v, float least, float most) {  // NaN stays NaN
  v = select(v < least, all(least), v);
  return select(v > most, all(most), v);
}
inline Floats floats(Ints v) { return converted<Floats>(v); }

// Bytes shifted by less than 8 bits, to the right if `bits` is negative, with bits of their neighbours
// where zeros belong: x86 shifts no bytes.
#if LEVEL < LEVEL_portable
constexpr bool ZEROS_SHIFTED_IN = true;
INLINE Bytes shifted(Bytes v, int bits) { return bits > 0 ? v << uint8_t(bits) : bits < 0 ? v >> uint8_t(-bits) : v; }
#else
constexpr bool ZEROS_SHIFTED_IN = false;
INLINE Bytes shifted(Bytes v, int bits) {
  return bits > 0 ? (Bytes)((Words)v << bits) : bits < 0 ? (Bytes)((Words)v >> -bits) : v;
}
#endif

// The low and the high halves of pairs of bfloat16, as floats.
inline Floats low_half(Bits pairs) { return (Floats)(pairs << 16); }
inline Floats high_half(Bits pairs) { return (Floats)(pairs & 0xffff0000u); }

// Rounded to the nearest, ties to even; NaN stays NaN.
inline HalfWords as_bf16(Floats v) {
  Bits bits = (Bits)v, nan = (Bits)(v != v);
  Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return converted<HalfWords>((~nan & rounded) | (nan & 0x7fc0u));
}

#if LEVEL >= LEVEL_avx512vnni
#include "vector/wide_avx512vnni.h"
#elif LEVEL > LEVEL_portable
#include "vector/wide_avx2.h"
#elif LEVEL < LEVEL_portable
#include "vector/wide_neon.h"
#else
#include "vector/wide_portable.h"
#endif

#if LEVEL > LEVEL_portable
// Unsigned bytes times signed ones, as words: those at even places, and at odd ones.
inline void multiply_bytes(Bytes a, Bytes b, Bytes& even, Bytes& odd) {
  even = (Bytes)pair_bytes(a, (Bytes)((Words)b & 0xff)), odd = (Bytes)pair_bytes(a, (Bytes)((Words)b & 0xff00));
}
#endif

// 16 numbers of a type as floats; the first `count` of 16 floats as numbers of a type, rounded once.
INLINE Floats read_floats(Number type, const void* from) {
  if (type == Number::f32) return load<Floats>(from);
  const HalfWords halves = load<HalfWords>(from);
  return type == Number::f16 ? from_f16(halves) : (Floats)(converted<Bits>(halves) << 16);
}
INLINE void write_floats(Number type, void* to, Floats v, int64_t count = 16) {
  alignas(64) char some[64];
  void* at = count < 16 ? some : to;
  if (type == Number::f32) store(at, v);
  else store(at, type == Number::f16 ? as_f16(v) : as_bf16(v));
  if (count < 16) __builtin_memcpy(to, some, count * size_of(type));
}
