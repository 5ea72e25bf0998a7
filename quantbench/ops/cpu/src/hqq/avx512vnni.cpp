#include <immintrin.h>

#include "hqq/hqq.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_avx512vnni.h"

#include "hqq/loop.h"
}  // namespace

FitGroups hqq_avx512vnni() { return fit_blocks; }
