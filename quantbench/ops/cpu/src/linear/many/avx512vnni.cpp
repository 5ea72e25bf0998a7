#include <immintrin.h>

#include "linear/many/many.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_avx512vnni.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#include "linear/few/sparse_vnni.h"
#include "linear/activations.h"
#include "linear/results.h"

typedef float Native __attribute__((vector_size(64)));
constexpr int MANY = 12, BESIDE = 2;
#include "linear/many/floats_loop.h"
}  // namespace

ManyVariant many_avx512vnni() { return {MANY, 4, BESIDE, prepare_floats, multiply_floats}; }
