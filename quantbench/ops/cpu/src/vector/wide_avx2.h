// AVX2 and F16C: the same functions as in vector/wide_portable.h. Included after vector/wide_halves.h
// and vector/wide.h.

inline Bytes lookup16(const uint8_t* table, Bytes index) {  // the index's high bits have to be 0
  const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return by_register<Bytes>([=](auto at) { return _mm256_shuffle_epi8(numbers, (__m256i)at); }, index);
}

inline bool any_zero(Bytes v) {
  __m256i zero = _mm256_setzero_si256();
  return _mm256_movemask_epi8(_mm256_or_si256(_mm256_cmpeq_epi8((__m256i)v.a, zero),
                                              _mm256_cmpeq_epi8((__m256i)v.b, zero))) != 0;
}

inline Floats from_f16(HalfWords h) {
  __m256i halves = (__m256i)h;
  __m256 a = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  __m256 b = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  return {(Floats::Half)a, (Floats::Half)b};
}
inline HalfWords as_f16(Floats v) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  __m128i a = _mm256_cvtps_ph((__m256)v.a, NEAREST);
  __m128i b = _mm256_cvtps_ph((__m256)v.b, NEAREST);
  return (HalfWords)_mm256_set_m128i(b, a);
}

// Unsigned bytes times signed ones, and words times words: neighbouring products are added up.
inline SignedWords pair_bytes(Bytes a, Bytes b) {
  return by_register<SignedWords>([](auto a, auto b) { return _mm256_maddubs_epi16((__m256i)a, (__m256i)b); }, a, b);
}
inline Ints pair_words(SignedWords a, SignedWords b) {
  return by_register<Ints>([](auto a, auto b) { return _mm256_madd_epi16((__m256i)a, (__m256i)b); }, a, b);
}

// 8 bytes, by indices of 3 bits for each byte.
inline Bytes picked(int64_t eight, Bytes index) {
  const __m256i numbers = _mm256_set1_epi64x(eight);
  return by_register<Bytes>([=](auto at) { return _mm256_shuffle_epi8(numbers, (__m256i)at); }, index);
}

#if LEVEL == LEVEL_avxvnni
inline Ints add_bytes(Ints sum, Bytes a, Bytes b) {
  return by_register<Ints>([](auto sum, auto a, auto b) {
    return _mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
  }, sum, a, b);
}
inline Ints add_words(Ints sum, Bytes a, Bytes b) {
  return by_register<Ints>([](auto sum, auto a, auto b) {
    return _mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
  }, sum, a, b);
}
#include "vector/wide_vnni.h"
#else
using ByteSums = SignedWords;
inline SignedWords add_bytes(SignedWords sum, Bytes a, Bytes b) { return sum + pair_bytes(a, b); }
inline Ints total(Ints sum, SignedWords more) { return sum + pair_words(more, SignedWords{} + 1); }

// Quads of codes up to MOST times x, its four high bytes and its four low ones for each quad. As many pairs of
// products are added up in 16 bits as fit.
#define PAIRS
template <int MOST, int COUNT>
INLINE void dot_pairs(Ints& sum, const Bytes* codes, const int32_t* x, int stride) {
  constexpr int FIT = 127 / MOST < COUNT ? 127 / MOST : COUNT;
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; i += FIT) {
    SignedWords high{}, low{};
#pragma GCC unroll 4
    for (int k = i; k < i + FIT; ++k, x += stride) {
      high = add_bytes(high, codes[k], (Bytes)all(x[0]));
      low = add_bytes(low, codes[k], (Bytes)all(x[1]));
    }
    sum = total(sum + pair_words(high, SignedWords{} + 256), low);
  }
}

inline void dot_words(Ints& a, Ints& b, Bytes even, Bytes odd, const int32_t* x) {
  a += pair_words((SignedWords)even, (SignedWords)all(x[0]));
  b += pair_words((SignedWords)odd, (SignedWords)all(x[1]));
}
#include "vector/wide_words.h"

// From the low and the high bytes of words: the words of rows 0, 1, 4 and 5 of each 8, then those of the others.
INLINE void interleave(Bytes& low, Bytes& high) {
  const Bytes a = low, b = high;
  low = by_register<Bytes>([](auto a, auto b) { return _mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }, a, b);
  high = by_register<Bytes>([](auto a, auto b) { return _mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }, a, b);
}

// COUNT quads of such words, of 14 bits, times 16-bit x in the order of its columns: the products of four quads add
// up in 32 bits, and are added to a and b in units of 256.
template <int COUNT>
INLINE void dot_long(Ints& a, Ints& b, const Bytes* low, const Bytes* high, const int32_t* x, int stride) {
  static_assert(COUNT <= 4);
  Ints some{}, others{};
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i, x += stride) {
    int64_t quad;
    __builtin_memcpy(&quad, x, sizeof quad);
    const __m256i four = _mm256_set1_epi64x(quad);
    const SignedWords numbers{(SignedWords::Half)four, (SignedWords::Half)four};
    some += pair_words((SignedWords)low[i], numbers), others += pair_words((SignedWords)high[i], numbers);
  }
  a += some >> 8, b += others >> 8;
}
// The sums of 16 rows.
inline Ints in_order(Ints a, Ints b) {
  return by_register<Ints>([](auto a, auto b) { return _mm256_hadd_epi32((__m256i)a, (__m256i)b); }, a, b);
}
#endif
