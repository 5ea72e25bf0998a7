#include <immintrin.h>

#include "hqq/hqq.h"

namespace {
#include "vector/wide_halves.h"
#include "vector/wide.h"
#include "vector/wide_avx2.h"

#include "hqq/loop.h"
}  // namespace

FitGroups hqq_avx2() { return fit_blocks; }
