// Decode attention: what the op (attention/op.cpp) hands to a variant of its inner loop.
#pragma once

#include <cstdint>

#include "common/number.h"

constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_GROUP = 128;    // query heads of one key head
constexpr int HEAD_DIM_UNIT = 16;  // head_dim is padded to a multiple of it: a vector of AVX-512
// A part has a multiple of these slots: whole blocks of every inner loop, but at a cache's end.
constexpr int SLOTS_UNIT = 128;

// Keys, or values, of one row and head.
struct Slots {
  const char* codes;
  const char* scale;
  int64_t slot_bytes;    // from a slot's codes to the next slot's
  int64_t slot_scales;   // scales of a slot
  Number scale_type;
};

// Some slots of one row and key head, for all of its query heads.
struct Part {
  KvFormat format;
  Slots key, value;
  int heads, head_dim, padded;  // padded: head_dim as the buffers below have it
  int64_t first, count, slots;  // (first + i) % slots for i < count
  const float* query;           // (heads, padded), zeros behind
  Number query_type;            // what it was: to choose what is exact enough
  float softmax_scale;          // scores are multiplied by it,
  float softcap;                // then bounded by it, smoothly; 0: they are not
  // Out: the largest score, the sum of exp(score - largest), and the values weighted by that. For
  // int4, query and weighted have each 32 numbers in the order 0, 2, … 30, 1, 3, … 31: the codes'
  // low halves, then their high ones.
  float* largest;   // (heads,)
  float* sum;       // (heads,)
  float* weighted;  // (heads, padded)
};

void attend_portable(const Part&);
OPTIONAL_VARIANT void attend_avx2(const Part&);
OPTIONAL_VARIANT void attend_avxvnni(const Part&);
OPTIONAL_VARIANT void attend_avx512(const Part&);
OPTIONAL_VARIANT void attend_avx512vnni(const Part&);
OPTIONAL_VARIANT void attend_avx512bf16(const Part&);
OPTIONAL_VARIANT void attend_amx(const Part&);
