#include "common/limits.h"

Limits limits;

// For tests: `bytes` and `products` that one thread reads or multiplies alone, and the `piece` of
// bytes that a thread takes at least. Not while an op runs. Negative numbers: as it was at first.
extern "C" __attribute__((visibility("default"))) void quantbench_set_limits(int64_t bytes,
                                                                             int64_t products,
                                                                             int64_t piece) {
  limits = bytes < 0 ? Limits{} : Limits{bytes, products, piece};
}
