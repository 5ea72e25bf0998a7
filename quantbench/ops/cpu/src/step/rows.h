// What a layer does to rows of activations between its products: what the ops (step/op.cpp) hand to a
// variant of the loops over a row (step/rows_loop.cpp).
#pragma once

#include <cstdint>

#include "common/number.h"

// A head's n numbers to what a KV cache of some format stores of them: codes, and scales of the numbers' type.
typedef void (*Encode)(const char* x, int64_t n, char* codes, char* scales);

// What the gate of a feed-forward network goes through; SQUARED_RELU: there is only relu(x)², and no gate.
enum Gate { SILU, GELU, SQUARED_RELU, GATES };

// Pointers to rows of n numbers of one type; biases have the same, norms' weights are float32. A result may
// overwrite an operand.
struct Rows {
  Number type;
  // to = x / √(mean(x²) + epsilon) · weight
  void (*norm)(const char* x, const float* weight, float epsilon, int64_t n, char* to);
  // to = a + factor · b
  void (*add)(const char* a, const char* b, float factor, int64_t n, char* to);
  // x's pairs (i, i + half) turned by angles whose cosines and sines are float32, in place
  void (*rotate)(char* x, const float* cos, const float* sin, int64_t half);
  // to = gate(x) · up; relu(x)² without a gate
  void (*gates[GATES])(const char* x, const char* up, int64_t n, char* to);
  // to = x, as float32; as this type
  void (*widen)(const char* x, int64_t n, float* to);
  void (*narrow)(const float* x, int64_t n, char* to);
  // a · b, summed in float32
  float (*dot)(const char* a, const char* b, int64_t n);
  // to += weight · x, in float32
  void (*add_weighed)(const char* x, float weight, int64_t n, float* to);
  // by KvFormat: step/encode.h
  Encode encode[6];
};

VARIANTS(Rows, rows, Number);
