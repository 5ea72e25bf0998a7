#include <immintrin.h>

#include "attention.h"

namespace {
#include "vector_avx512.h"

#include "attention_numbers.h"

#include "attention_part.h"
}  // namespace

void attend_avx512(const Part& part) { attend(part); }
