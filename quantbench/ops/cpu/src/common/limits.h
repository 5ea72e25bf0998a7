// From which sizes on work is shared among threads. Tests lower these, to share small weights.
#pragma once

#include <cstdint>

struct Limits {
  int64_t alone_bytes = 64 << 10;  // up to this, one thread reads faster than others wake up
  int64_t alone_products = 1 << 20;  // up to this, one thread multiplies faster than others wake up
  int64_t piece_bytes = 64 << 10;  // the least that a thread takes of what is not cut evenly
};

extern Limits limits;
