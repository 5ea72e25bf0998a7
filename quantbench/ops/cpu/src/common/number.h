// What activations, weights and caches are made of.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/variant.h"

enum class Number : int32_t { f32, bf16, f16 };
static constexpr int size_of(Number type) { return type == Number::f32 ? 4 : 2; }

enum class KvFormat { f32, bf16, f16, int8, fp8, int4 };  // of a KV cache: a dense cache has its numbers' type
constexpr int INT4_GROUP = 32;  // numbers of an int4 cache that share a scale: ops/kv.py

// A float of a few bits, as IEEE 754 has them for any number of bits, but without infinities and NaN.
static constexpr float small_float(int code, int exponent_bits, int mantissa_bits) {
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int power = (exponent ? exponent : 1) - bias - mantissa_bits;
  float value = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
  for (int i = 0; i < power; ++i) value *= 2;
  for (int i = 0; i < -power; ++i) value /= 2;
  return code >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}
