#include <immintrin.h>

#include "plain/plain.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_avx512vnni.h"

#include "plain/loop.h"
}  // namespace

PlainVariant plain_avx512vnni() { return {prepare, multiply}; }
