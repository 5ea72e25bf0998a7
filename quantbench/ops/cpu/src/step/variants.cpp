// Variants: portable avx2 avx512vnni

#include "step/rows.h"

namespace {
#include "vector/wide.h"

#include "step/rows_loop.h"
}  // namespace

Rows NAMED(rows)(Number type) { return rows(type); }
