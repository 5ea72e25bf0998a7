#include "attention/attention.h"

namespace {
#include "vector/lanes_portable.h"

#include "attention/numbers.h"

#include "attention/loop.h"
}  // namespace

void attend_portable(const Part& part) { attend(part); }
