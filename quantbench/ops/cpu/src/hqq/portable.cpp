#include "hqq/hqq.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_portable.h"

#include "hqq/loop.h"
}  // namespace

FitGroups hqq_portable() { return fit_blocks; }
