// Included after vector/wide.h: AVX-512 with VNNI and VBMI. Same functions as vector/wide_portable.h.

inline __m512i raw(Bytes v) { return (__m512i)v; }

inline Bytes merged(uint8_t mask, Bytes a, Bytes b) {
  return (Bytes)_mm512_ternarylogic_epi32(_mm512_set1_epi8(char(mask)), raw(a), raw(b), 0xca);
}

inline Bytes lookup16(const uint8_t* table, Bytes index) {  // the index's high bits have to be 0
  __m512i wide = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (Bytes)_mm512_shuffle_epi8(wide, raw(index));
}
inline Bytes lookup64(const uint8_t* table, Bytes index) {
  return (Bytes)_mm512_permutexvar_epi8(raw(index), _mm512_loadu_si512(table));
}

inline bool any_zero(Bytes v) { return _mm512_testn_epi8_mask(raw(v), raw(v)) != 0; }

inline Floats from_f16(HalfWords h) { return (Floats)_mm512_cvtph_ps((__m256i)h); }

inline HalfWords as_f16(Floats v) {
  return (HalfWords)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// 16 integers of 16 bits as signed bytes: 256 times the high byte plus the low byte is the number.
inline void split_bytes(const int16_t* x, __m128i& high, __m128i& low) {
  const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)x));
  high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(wide, _mm512_set1_epi32(128)), 8));
  low = _mm512_cvtepi32_epi8(wide);
}

// x: the high bytes of four 16-bit integers, then the low ones, signed both.
inline void dot(Ints& high, Ints& low, Bytes codes, const int32_t* x) {
  high = (Ints)_mm512_dpbusd_epi32((__m512i)high, raw(codes), _mm512_set1_epi32(x[0]));
  low = (Ints)_mm512_dpbusd_epi32((__m512i)low, raw(codes), _mm512_set1_epi32(x[1]));
}
inline Ints dotted(Ints high, Ints low) { return (high << 8) + low; }
