// The variant's vectors, numbers of other formats as floats, and the exponential. Included in a variant's
// namespace.

#include "vector/lanes.h"

inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// A float of fewer bits as a 32-bit one: `magnitude` is all but its sign, moved to where a 32-bit
// float has it. Exponent 0 means denormals: 1.m less 1, at the smallest exponent.
template <int EXPONENT_BITS>
inline float widened(uint32_t magnitude, uint32_t sign, uint32_t not_finite) {
  constexpr uint32_t up = 128 - (1u << (EXPONENT_BITS - 1));  // between the two biases
  bool denormal = magnitude < (1u << 23);
  uint32_t bits = magnitude + ((denormal ? up + 1 : up) << 23);
  bits = magnitude >= not_finite ? magnitude | 0x7f800000 : bits;
  float x = as_float(bits) - (denormal ? as_float((up + 1) << 23) : 0.0f);
  return as_float(__builtin_bit_cast(uint32_t, x) | sign);
}

inline float from_f16(uint16_t h) {
  return widened<5>((h & 0x7fffu) << 13, (h & 0x8000u) << 16, 0x7c00u << 13);
}

inline float from_fp8(uint8_t b) {  // E4M3: all ones is NaN, and there is no infinity
  return widened<4>((b & 0x7fu) << 20, (b & 0x80u) << 24, 0x7fu << 20);
}

inline float scale_at(const Slots& from, int64_t index) {
  if (from.scale_type == Number::f32) return reinterpret_cast<const float*>(from.scale)[index];
  uint16_t half = reinterpret_cast<const uint16_t*>(from.scale)[index];
  return from.scale_type == Number::bf16 ? as_float(uint32_t(half) << 16) : from_f16(half);
}

// Whether scores and weights in 16 bits are exact enough, and scales are as `scales` reads them.
inline bool in_bf16(const Part& part) {
  return part.query_type == Number::bf16 &&
         (!part.key.scale || part.key.scale_type == Number::bf16) &&
         (!part.value.scale || part.value.scale_type == Number::bf16);
}

constexpr float NEVER = -__builtin_inff();  // the score of a slot that is not there

// The largest magnitude among numbers; NaN if any is NaN or infinite.
struct Magnitude {
  Vector most = all(0), odd = all(0);
  void add(Vector x) { most = larger(most, larger(x, all(0) - x)), odd = multiply_add(x, all(0), odd); }
  float largest() const { return ::largest(most) + sum(odd); }
};

// e^x for x <= 20: 2^n e^r with |r| <= ln 2 / 2, and Taylor's series of e^r to r^7 (off by 5e-9).
inline Vector exponential(Vector x) {
  constexpr float TO_INTEGER = 12582912;  // 1.5 · 2^23: adding it leaves an integer in the low bits
  Vector bounded = larger(all(-87), x);   // in this order NaN stays NaN
  Vector biased = multiply_add(bounded, all(1.44269504f), all(TO_INTEGER));
  Vector n = biased - all(TO_INTEGER);
  Vector r = multiply_add(n, all(-0.693145752f), bounded);  // ln 2 in two parts
  r = multiply_add(n, all(-1.42860677e-6f), r);
  const float series[] = {1 / 720.f, 1 / 120.f, 1 / 24.f, 1 / 6.f, 0.5f, 1, 1};
  Vector y = all(1 / 5040.f);
  for (float coefficient : series) y = multiply_add(y, r, all(coefficient));
  return zero_below(x, -87, y * power_of_two(biased));
}

// cap · tanh(x / cap)
inline Vector bounded(Vector x, float cap) {
  const Vector fall = exponential(all(0) - larger(all(-20), x * all(2 / cap)));  // NaN stays NaN
  return all(cap) * (all(1) - fall) / (all(1) + fall);
}
