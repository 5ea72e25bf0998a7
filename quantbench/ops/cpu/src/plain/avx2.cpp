#include <immintrin.h>

#include "plain/plain.h"

namespace {
#include "vector/wide_halves.h"
#include "vector/wide.h"
#include "vector/wide_avx2.h"

#include "plain/loop.h"
}  // namespace

PlainVariant plain_avx2() { return {prepare, multiply}; }
