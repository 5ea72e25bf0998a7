#include <immintrin.h>

#include "attention/attention.h"

namespace {
#include "vector/lanes_avx2.h"

#include "attention/numbers.h"

#include "attention/loop.h"
}  // namespace

void attend_avx2(const Part& part) { attend(part); }
