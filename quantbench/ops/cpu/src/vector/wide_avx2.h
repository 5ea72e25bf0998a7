// AVX2 and F16C: the same functions as in vector/wide_portable.h. Included after vector/wide_halves.h
// and vector/wide.h.

#include "vector/wide_words.h"

template <class V>
inline V joined(__m256i a, __m256i b) {
  return {(typename V::Half)a, (typename V::Half)b};
}

inline __m256i found16(const uint8_t* table, __m256i index) {
  return _mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), index);
}
inline Bytes lookup16(const uint8_t* table, Bytes index) {  // the index's high bits have to be 0
  return joined<Bytes>(found16(table, (__m256i)index.a), found16(table, (__m256i)index.b));
}
inline __m256i found64(const uint8_t* table, __m256i index) {
  const __m256i low = _mm256_and_si256(index, _mm256_set1_epi8(15));
  const __m256i bit4 = _mm256_slli_epi16(index, 3), bit5 = _mm256_slli_epi16(index, 2);
  __m256i a = _mm256_blendv_epi8(found16(table, low), found16(table + 16, low), bit4);
  __m256i b = _mm256_blendv_epi8(found16(table + 32, low), found16(table + 48, low), bit4);
  return _mm256_blendv_epi8(a, b, bit5);
}
inline Bytes lookup64(const uint8_t* table, Bytes index) {
  return joined<Bytes>(found64(table, (__m256i)index.a), found64(table, (__m256i)index.b));
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
  return joined<Floats>((__m256i)a, (__m256i)b);
}
inline HalfWords as_f16(Floats v) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  __m128i a = _mm256_cvtps_ph((__m256)v.a, NEAREST);
  __m128i b = _mm256_cvtps_ph((__m256)v.b, NEAREST);
  return (HalfWords)_mm256_set_m128i(b, a);
}

// x: the first and third of four 16-bit integers, then the second and fourth.
inline void dot(Ints& a, Ints& b, Bytes codes, const int32_t* x) {
  const __m256i even = _mm256_set1_epi32(x[0]), odd = _mm256_set1_epi32(x[1]);
  const __m256i low = _mm256_set1_epi16(255);
  __m256i first = (__m256i)codes.a, second = (__m256i)codes.b;
  a += joined<Ints>(_mm256_madd_epi16(_mm256_and_si256(first, low), even),
                    _mm256_madd_epi16(_mm256_and_si256(second, low), even));
  b += joined<Ints>(_mm256_madd_epi16(_mm256_srli_epi16(first, 8), odd),
                    _mm256_madd_epi16(_mm256_srli_epi16(second, 8), odd));
}
