#include <immintrin.h>

#include "linear_many.h"

namespace {
#include "wide_halves.h"
#include "wide.h"
#include "wide_avx2.h"

#include "linear_codes.h"
#include "linear_part.h"
#include "linear_sparse.h"
#include "linear_x.h"
#include "linear_many_y.h"

typedef float Native __attribute__((vector_size(32)));
constexpr int MANY = 6, BESIDE = 1;
#include "linear_many_part.h"
}  // namespace

ManyVersion many_avx2() { return {MANY, 4, BESIDE, prepare_floats, multiply_floats}; }
