#include <immintrin.h>

#include "plain/plain.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_avx512vnni.h"

#include "plain/loop.h"
}  // namespace

void plain_prepare_avx512vnni(const Plain& problem, int64_t first, int64_t last) {
  prepare(problem, first, last);
}
void plain_multiply_avx512vnni(const Plain& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
