#include <immintrin.h>

#include "plain.h"

namespace {
#include "wide_halves.h"
#include "wide.h"
#include "wide_avx2.h"

#include "plain_part.h"
}  // namespace

void plain_prepare_avx2(const Plain& problem, int64_t first, int64_t last) {
  prepare(problem, first, last);
}
void plain_multiply_avx2(const Plain& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
