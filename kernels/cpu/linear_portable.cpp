#include "linear.h"

namespace {
#include "wide.h"
#include "wide_portable.h"

#include "linear_codes.h"
#include "linear_part.h"
#include "linear_sparse.h"
#include "linear_x.h"
#include "linear_run.h"
}  // namespace

void prepare_portable(const Problem& problem) { prepare(problem); }
void multiply_portable(const Problem& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
