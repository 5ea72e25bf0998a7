#include "plain/plain.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_portable.h"

#include "plain/loop.h"
}  // namespace

void plain_prepare_portable(const Plain& problem, int64_t first, int64_t last) {
  prepare(problem, first, last);
}
void plain_multiply_portable(const Plain& problem, int64_t first, int64_t last) {
  multiply(problem, first, last);
}
