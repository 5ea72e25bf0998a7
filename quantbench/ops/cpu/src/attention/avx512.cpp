// Decode attention's inner loop in AVX-512: bfloat16 and fp8 caches from their lines; int8 and int4 ones, where there is
// VNNI, in byte products. Other formats, and queries that these would not be exact enough for, go to AVX2.
//
// Variants: avx512 avx512vnni avx512bf16

#include "attention/attention.h"

namespace {
#include "attention/numbers.h"
#include "attention/blocks.h"
#include "attention/fp8.h"
#include "attention/lines.h"

constexpr int LONG_SLOT = 256;  // bytes: 64 such keys and values leave the next ones no room in L1

#if LEVEL >= LEVEL_avx512vnni
#include "attention/bytes.h"
#include "attention/vnni_bytes.h"
#endif

}  // namespace

void NAMED(attend)(const Part& part) {
  const bool in_lines = part.head_dim % LINE == 0;
  if (in_bf16(part)) switch (part.format) {
      case KvFormat::bf16:
        if (!in_lines) break;
        // With more heads computing takes longer than reading, and longer in short blocks.
        if (part.key.slot_bytes >= LONG_SLOT && part.heads <= QUAD)
          return Lines<KvFormat::bf16, BLOCK / 2>(part).all_slots();
        return Lines<KvFormat::bf16, BLOCK>(part).all_slots();
      case KvFormat::fp8:
        if (in_lines) return Lines<KvFormat::fp8, BLOCK>(part).all_slots();
        break;
#if LEVEL >= LEVEL_avx512vnni
      case KvFormat::int8: return Codes<KvFormat::int8>(part).all_slots();
      case KvFormat::int4: return Codes<KvFormat::int4>(part).all_slots();
#endif
      default: break;
    }
  attend_avx2(part);
}
