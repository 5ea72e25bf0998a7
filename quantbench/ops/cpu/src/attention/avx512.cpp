// Decode attention's inner loop in AVX-512: dense bfloat16 caches from their lines, in blocks that are
// read ahead; others widened to float32 in L1.

#include <immintrin.h>

#include "attention/attention.h"

namespace {
#include "vector/lanes_avx512.h"

#include "attention/numbers.h"

#include "attention/loop.h"

#include "attention/blocks.h"

#include "attention/lines.h"

constexpr int LONG_SLOT = 256;  // bytes: 64 such keys and values leave the next ones no room in L1

template <int SLOTS>
void attend_dense(const Part& part) {
  Lines<KvFormat::bf16, SLOTS> lines(part);
  lines.all_slots();
  lines.finish();
}

}  // namespace

void attend_avx512(const Part& part) {
  if (part.format != KvFormat::bf16 || !in_bf16(part) || part.head_dim % LINE) return attend(part);
  // With more heads computing takes longer than reading, and longer in short blocks.
  if (part.key.slot_bytes >= LONG_SLOT && part.heads <= QUAD) return attend_dense<BLOCK / 2>(part);
  attend_dense<BLOCK>(part);
}
