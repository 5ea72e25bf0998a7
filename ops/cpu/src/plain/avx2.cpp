#include <immintrin.h>

#include "plain/plain.h"

namespace {
#include "vector/wide_halves.h"
#include "vector/wide.h"
#include "vector/wide_avx2.h"

#include "plain/loop.h"
}  // namespace

void plain_prepare_avx2(const Plain& problem, int64_t first, int64_t last) {
  prepare(problem, first, last);
}
void plain_multiply_avx2(const Plain& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
