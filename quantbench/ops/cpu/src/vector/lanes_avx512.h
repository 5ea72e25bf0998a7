// Vectors of floats in AVX-512. Included in a variant's namespace.
constexpr int LANES = 16;
typedef __m512 Vector;

inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }  // b if either is NaN
inline Vector zero_below(Vector x, float limit, Vector y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(limit), _CMP_NLT_UQ), y);
}
inline Vector power_of_two(Vector biased) {
  __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(biased), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(0x3f800000)));
}
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  Vector ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  Vector cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  Vector x = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));  // abcd, four times
  __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}
inline float sum(Vector v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vector v) { return _mm512_reduce_max_ps(v); }
