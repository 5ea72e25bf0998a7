// Included after vector/wide.h: AVX-512 with VNNI. Same functions as vector/wide_portable.h.

inline __m512i raw(Bytes v) { return (__m512i)v; }

inline Bytes lookup16(const uint8_t* table, Bytes index) {  // the index's high bits have to be 0
  __m512i wide = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (Bytes)_mm512_shuffle_epi8(wide, raw(index));
}

inline bool any_zero(Bytes v) { return _mm512_testn_epi8_mask(raw(v), raw(v)) != 0; }

inline Floats from_f16(HalfWords h) { return (Floats)_mm512_cvtph_ps((__m256i)h); }

inline HalfWords as_f16(Floats v) {
  return (HalfWords)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline SignedWords pair_bytes(Bytes a, Bytes b) {
  return (SignedWords)_mm512_maddubs_epi16(raw(a), raw(b));
}
inline Bytes picked(int64_t eight, Bytes index) {
  return (Bytes)_mm512_shuffle_epi8(_mm512_set1_epi64(eight), raw(index));
}
inline Ints add_bytes(Ints sum, Bytes a, Bytes b) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, raw(a), raw(b));
}
inline Ints add_words(Ints sum, Bytes a, Bytes b) {
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, raw(a), raw(b));
}
#include "vector/wide_vnni.h"
