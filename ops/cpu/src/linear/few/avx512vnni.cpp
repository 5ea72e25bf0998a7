#include <immintrin.h>

#include "linear/layout.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_avx512vnni.h"

#include "linear/codes.h"
#include "linear/few/loop.h"
#include "linear/few/sparse_vnni.h"
#include "linear/activations.h"
#include "linear/few/drive.h"
}  // namespace

void prepare_avx512vnni(const Problem& problem) { prepare(problem); }
void multiply_avx512vnni(const Problem& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
