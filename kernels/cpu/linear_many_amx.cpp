// Linear layers of many tokens in AMX.

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
#include "linear_many_tiles.h"
#include "linear_many_amx.h"
#include "linear_bytes_amx.h"
}  // namespace

ManyVersion many_amx() { return {TOKENS, 2, 2, prepare_tiles, multiply_tiles}; }
ManyVersion many_bytes_amx() {
  return {TOKENS, ByteTiles::BYTES, 1, prepare_bytes, multiply_bytes};
}
