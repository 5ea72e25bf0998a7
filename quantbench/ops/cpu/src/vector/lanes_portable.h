// Vectors of floats in what every compiler has for its own target. Included in a variant's namespace.
constexpr int LANES = 4;
typedef float Vector __attribute__((vector_size(16)));
typedef int32_t Integers __attribute__((vector_size(16)));

inline Vector load(const float* p) { Vector v; __builtin_memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Vector v) { __builtin_memcpy(p, &v, sizeof v); }
inline Vector all(float x) { return Vector{x, x, x, x}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }  // b if either is NaN
inline Vector zero_below(Vector x, float limit, Vector y) { return x < all(limit) ? all(0) : y; }
inline Vector power_of_two(Vector biased) {
  return (Vector)(((Integers)biased << 23) + 0x3f800000);
}
inline float largest(Vector v) {
  float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
inline float sum(Vector v) { return (v[0] + v[1]) + (v[2] + v[3]); }
inline void store_sums(float* p, Vector a, Vector b, Vector c, Vector d) {
  p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
}
