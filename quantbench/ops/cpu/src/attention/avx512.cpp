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

template <KvFormat F, int SLOTS>
void attend_lines(const Part& part) {
  Lines<F, SLOTS> lines(part);
  lines.all_slots();
  lines.finish();
}

#if LEVEL >= LEVEL_avx512vnni
#include "attention/bytes.h"
#include "attention/vnni_bytes.h"

template <KvFormat F>
void attend_bytes(const Part& part) {
  Codes<F> codes(part);
  codes.all_slots();
}
#endif

}  // namespace

void NAMED(attend)(const Part& part) {
  const bool in_lines = part.head_dim % LINE == 0;
  if (in_bf16(part)) switch (part.format) {
      case KvFormat::bf16:
        if (!in_lines) break;
        // With more heads computing takes longer than reading, and longer in short blocks.
        if (part.key.slot_bytes >= LONG_SLOT && part.heads <= QUAD)
          return attend_lines<KvFormat::bf16, BLOCK / 2>(part);
        return attend_lines<KvFormat::bf16, BLOCK>(part);
      case KvFormat::fp8:
        if (in_lines) return attend_lines<KvFormat::fp8, BLOCK>(part);
        break;
#if LEVEL >= LEVEL_avx512vnni
      case KvFormat::int8: return attend_bytes<KvFormat::int8>(part);
      case KvFormat::int4: return attend_bytes<KvFormat::int4>(part);
#endif
      default: break;
    }
  attend_avx2(part);
}
