#include "linear/layout.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_portable.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#include "linear/few/sparse.h"
#include "linear/activations.h"
#include "linear/results.h"
#include "linear/few/drive.h"
}  // namespace

FewVariant few_portable() { return {prepare, multiply}; }
