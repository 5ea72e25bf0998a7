// Vectors of floats in AVX2 and FMA. Included in a variant's namespace.
constexpr int LANES = 8;
typedef __m256 Vector;

inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }  // b if either is NaN
inline Vector zero_below(Vector x, float limit, Vector y) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, all(limit), _CMP_LT_OQ), y);
}
inline Vector power_of_two(Vector biased) {
  __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3f800000)));
}
inline __m128 sums(Vector a, Vector b, Vector c, Vector d) {
  Vector all_four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(all_four), _mm256_extractf128_ps(all_four, 1));
}
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  _mm_storeu_ps(p, sums(a, b, c, d));
}
inline float sum(Vector v) { return _mm_cvtss_f32(sums(v, v, v, v)); }
inline float largest(Vector v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
