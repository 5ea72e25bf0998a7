// What other instruction sets have instructions for, in plain C++. Included at the end of vector/wide.h.

// table[index], by the index's low 4 bits. The table has 16 bytes.
__attribute__((noinline, unused)) Bytes lookup16(const uint8_t* table, Bytes index) {
  Bytes found;
  for (int i = 0; i < 64; ++i) found[i] = table[index[i] & 15];
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

__attribute__((noinline, unused)) void multiply_bytes(Bytes a, Bytes b, Bytes& even, Bytes& odd) {
  even = (Bytes)((SignedWords)((Words)a & 255) * ((SignedWords)((Words)b << 8) >> 8));
  odd = (Bytes)((SignedWords)((Words)a >> 8) * ((SignedWords)b >> 8));
}

// A quad of words times x: four 16-bit integers, the first and third, then the second and fourth.
__attribute__((noinline, unused)) void dot_words(Ints& a, Ints& b, Bytes even, Bytes odd, const int32_t* x) {
  const int16_t* w = reinterpret_cast<const int16_t*>(x);
  a += ((Ints)((Bits)even << 16) >> 16) * w[0] + ((Ints)even >> 16) * w[1];
  b += ((Ints)((Bits)odd << 16) >> 16) * w[2] + ((Ints)odd >> 16) * w[3];
}

#include "vector/wide_words.h"
