#include <immintrin.h>

#include "step/rows.h"

namespace {
#include "vector/wide_halves.h"
#include "vector/wide.h"
#include "vector/wide_avx2.h"

#include "step/rows_loop.h"
}  // namespace

Rows rows_avx2(Number type) { return rows(type); }
