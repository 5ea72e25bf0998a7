#include "plain/plain.h"

namespace {
#include "vector/wide.h"
#include "vector/wide_portable.h"

#include "plain/loop.h"
}  // namespace

PlainVariant plain_portable() { return {prepare, multiply}; }
