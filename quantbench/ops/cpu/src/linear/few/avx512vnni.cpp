#include <immintrin.h>

#include "linear/layout.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_avx512vnni.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#include "linear/few/sparse_vnni.h"
#include "linear/activations.h"
#include "linear/results.h"
#include "linear/few/drive.h"
}  // namespace

FewVariant few_avx512vnni() { return {prepare, multiply}; }
