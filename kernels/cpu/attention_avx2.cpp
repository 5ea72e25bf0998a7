#include <immintrin.h>

#include "attention.h"

namespace {
#include "vector_avx2.h"

#include "attention_numbers.h"

#include "attention_part.h"
}  // namespace

void attend_avx2(const Part& part) { attend(part); }
