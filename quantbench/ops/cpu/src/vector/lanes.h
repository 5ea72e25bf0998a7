// Vectors of floats as wide as a register, for attention. Included in a variant's namespace.
#if LEVEL >= LEVEL_avx512
typedef __m512 Vector;
typedef __m512i Register;
#define REGISTER(name) _mm512_##name
#elif LEVEL >= LEVEL_avx2
typedef __m256 Vector;
typedef __m256i Register;
#define REGISTER(name) _mm256_##name
#else
typedef float Vector __attribute__((vector_size(16)));
#endif
constexpr int LANES = sizeof(Vector) / sizeof(float);
typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));

#ifdef REGISTER
inline Vector load(const float* p) { return REGISTER(loadu_ps)(p); }
inline void store(float* p, Vector v) { REGISTER(storeu_ps)(p, v); }
inline Vector all(float x) { return REGISTER(set1_ps)(x); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return REGISTER(fmadd_ps)(a, b, c); }
inline Vector larger(Vector a, Vector b) { return REGISTER(max_ps)(a, b); }  // b if either is NaN
#else
inline Vector load(const float* p) { Vector v; __builtin_memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vector v) { __builtin_memcpy(p, &v, sizeof v); }
inline Vector all(float x) { return Vector{x, x, x, x}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }  // b if either is NaN
#endif
inline Vector zero_below(Vector x, float limit, Vector y) { return x < all(limit) ? all(0) : y; }
inline Vector power_of_two(Vector biased) { return (Vector)(((Integers)biased << 23) + 0x3f800000); }

#if LEVEL >= LEVEL_avx512
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
#elif LEVEL >= LEVEL_avx2
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  Vector four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
}
inline float sum(Vector v) {
  float four[4];
  store_sums(four, v, v, v, v);
  return four[0];
}
inline float largest(Vector v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
#else
inline float sum(Vector v) { return (v[0] + v[1]) + (v[2] + v[3]); }
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
}
inline float largest(Vector v) {
  float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
#endif
