#include <immintrin.h>

#include "linear_many.h"

namespace {
#include "wide.h"
#include "wide_avx512vnni.h"

#include "linear_codes.h"
#include "linear_part.h"
#include "linear_sparse_vnni.h"
#include "linear_x.h"
#include "linear_many_y.h"

typedef float Native __attribute__((vector_size(64)));
constexpr int MANY = 12, BESIDE = 2;
#include "linear_many_part.h"
}  // namespace

ManyVersion many_avx512vnni() { return {MANY, 4, BESIDE, prepare_floats, multiply_floats}; }
