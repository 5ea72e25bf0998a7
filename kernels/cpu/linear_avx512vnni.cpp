#include <immintrin.h>

#include "linear.h"

namespace {
#include "wide.h"
#include "wide_avx512vnni.h"

#include "linear_codes.h"
#include "linear_part.h"
#include "linear_sparse_vnni.h"
#include "linear_x.h"
#include "linear_run.h"
}  // namespace

void prepare_avx512vnni(const Problem& problem) { prepare(problem); }
void multiply_avx512vnni(const Problem& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
