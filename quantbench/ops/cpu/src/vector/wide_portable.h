// What other instruction sets have instructions for, in plain C++. Included at the end of vector/wide.h.

#include "vector/wide_words.h"

// table[index], by the index's low 4 or 6 bits. The table has 16 or 64 bytes.
__attribute__((noinline, unused)) Bytes lookup16(const uint8_t* table, Bytes index) {
  Bytes found;
  for (int i = 0; i < 64; ++i) found[i] = table[index[i] & 15];
  return found;
}
__attribute__((noinline, unused)) Bytes lookup64(const uint8_t* table, Bytes index) {
  Bytes found;
  for (int i = 0; i < 64; ++i) found[i] = table[index[i] & 63];
  return found;
}

__attribute__((noinline, unused)) bool any_zero(Bytes v) {
  for (int i = 0; i < 64; ++i)
    if (!v[i]) return true;
  return false;
}

__attribute__((noinline)) Floats from_f16(HalfWords h) {
  Bits bits = __builtin_convertvector(h, Bits), magnitude = (bits & 0x7fffu) << 13;
  Bits denormal = (Bits)(magnitude < (1u << 23));
  Bits number = magnitude + (112u << 23) + (denormal & (1u << 23));
  Bits not_finite = (Bits)(magnitude >= (0x7c00u << 13));
  number = (not_finite & (magnitude | 0x7f800000u)) | (~not_finite & number);
  Floats less = (Floats)(denormal & (113u << 23));
  return (Floats)((Bits)((Floats)number - less) | (bits & 0x8000u) << 16);
}

__attribute__((noinline)) HalfWords as_f16(Floats v) {
  Bits bits = (Bits)v, sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  // Denormals: adding 2^-1 leaves their multiples of 2^-24 in the low bits.
  Bits small = (Bits)((Floats)magnitude + 0.5f) - 0x3f000000u;
  Bits normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  Bits is_small = (Bits)(magnitude < (113u << 23)), large = (Bits)(magnitude >= 0x477ff000u);
  Bits nan = (Bits)(magnitude > 0x7f800000u);
  Bits found = (is_small & small) | (~is_small & normal);
  found = (large & 0x7c00u) | (~large & found);
  return __builtin_convertvector(sign | (nan & 0x7e00u) | (~nan & found), HalfWords);
}

// A quad of weights, 4 unsigned codes for each of 16 rows, times x: four 16-bit integers, the first
// and third, then the second and fourth. The sum is spread over both accumulators.
__attribute__((noinline, unused)) void dot(Ints& a, Ints& b, Bytes codes, const int32_t* x) {
  Bits quads = (Bits)codes;
  const int16_t* w = reinterpret_cast<const int16_t*>(x);
  a += (Ints)(quads & 255u) * w[0] + (Ints)(quads >> 16 & 255u) * w[1];
  b += (Ints)(quads >> 8 & 255u) * w[2] + (Ints)(quads >> 24) * w[3];
}
