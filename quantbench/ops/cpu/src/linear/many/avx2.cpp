#include <immintrin.h>

#include "linear/many/many.h"

namespace {
#include "vector/wide_halves.h"
#include "vector/wide.h"
#include "vector/wide_avx2.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#include "linear/few/sparse.h"
#include "linear/activations.h"
#include "linear/results.h"

typedef float Native __attribute__((vector_size(32)));
constexpr int MANY = 6, BESIDE = 1;
#include "linear/many/floats_loop.h"
}  // namespace

ManyVariant many_avx2() { return {MANY, 4, BESIDE, prepare_floats, multiply_floats}; }
