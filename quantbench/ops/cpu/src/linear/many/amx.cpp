// Linear layers of many tokens in AMX.
//
// Variants: amx

#include "linear/layout.h"

namespace {
#include "linear/inner.h"

#include "common/tiles.h"

#include "linear/many/weights_to_tiles.h"
#include "linear/many/bf16_tiles.h"
#include "linear/many/byte_tiles.h"
}  // namespace

LinearLoop many_amx() { return {prepare_tiles, multiply_tiles, TOKENS, 2, 2}; }
LinearLoop many_bytes_amx() { return {prepare_bytes, multiply_bytes, TOKENS, ByteTiles::BYTES}; }
