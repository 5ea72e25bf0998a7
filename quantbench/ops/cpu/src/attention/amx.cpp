// Decode attention's inner loop in AMX. What does not fill tiles, or would not be exact enough in
// them, goes to AVX-512.
//
// Variants: amx

#include "attention/attention.h"

namespace {
#include "attention/numbers.h"
#include "common/tiles.h"
#include "attention/blocks.h"
#include "attention/bytes.h"
#include "attention/amx.h"
#include "attention/fp8.h"
#include "attention/amx_bf16.h"
#include "attention/amx_bytes.h"

#undef SCORES_A
#undef SCORES_B
#undef QUERY
#undef CACHE
#undef WEIGHTS
#undef OUT_EVEN
#undef OUT_ODD

template <typename Work>
void attend(const Part& part) {
  Work(part).all_slots();
  _tile_release();
}

bool fits(const Part& part) { return in_bf16(part) && part.head_dim % PAIR == 0; }

}  // namespace

void attend_amx(const Part& part) {
  if (fits(part)) switch (part.format) {
      case KvFormat::bf16: return attend<Widened<KvFormat::bf16>>(part);
      case KvFormat::fp8: return attend<Widened<KvFormat::fp8>>(part);
      case KvFormat::int8: return attend<Codes<KvFormat::int8>>(part);
      case KvFormat::int4: return attend<Codes<KvFormat::int4>>(part);
      default: break;
    }
  attend_avx512bf16(part);
}
