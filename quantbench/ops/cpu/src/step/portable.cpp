#include "step/rows.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_portable.h"

#include "step/rows_loop.h"
}  // namespace

Rows rows_portable(Number type) { return rows(type); }
