// Linear layers of many tokens in AMX.
//
// Variants: amx

#include "linear/many/many.h"

namespace {
#include "linear/inner.h"

#include "common/tiles.h"

#include "linear/many/weights_to_tiles.h"
#include "linear/many/bf16_tiles.h"
#include "linear/many/byte_tiles.h"
}  // namespace

ManyVariant many_amx() { return {TOKENS, 2, 2, prepare_tiles, multiply_tiles}; }
ManyVariant many_bytes_amx() {
  return {TOKENS, ByteTiles::BYTES, 1, prepare_bytes, multiply_bytes};
}
