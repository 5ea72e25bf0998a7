#include <immintrin.h>

#include "linear.h"

namespace {
#include "wide_halves.h"
#include "wide.h"
#include "wide_avx2.h"

#include "linear_codes.h"
#include "linear_part.h"
#include "linear_sparse.h"
#include "linear_x.h"
#include "linear_run.h"
}  // namespace

void prepare_avx2(const Problem& problem) { prepare(problem); }
void multiply_avx2(const Problem& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
