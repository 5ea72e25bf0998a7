#include "linear/many/many.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_portable.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#include "linear/few/sparse.h"
#include "linear/activations.h"
#include "linear/results.h"

typedef float Native __attribute__((vector_size(16)));
constexpr int MANY = 3, BESIDE = 1;
#include "linear/many/floats_loop.h"
}  // namespace

ManyVariant many_portable() { return {MANY, 4, BESIDE, prepare_floats, multiply_floats}; }
