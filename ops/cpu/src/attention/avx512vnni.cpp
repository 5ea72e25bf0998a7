// Decode attention's inner loop in AVX-512 VNNI: int8 and int4 caches in byte products. Other formats,
// and queries that bytes would not be exact enough for, go to AVX-512.

#include <immintrin.h>

#include "attention/attention.h"

namespace {
#include "vector/lanes_avx512.h"

#include "attention/numbers.h"

#include "attention/blocks.h"

#include "attention/bytes.h"

#include "attention/vnni_bytes.h"

template <KvFormat F>
void attend(const Part& part) {
  Codes<F> codes(part);
  codes.all_slots();
}

}  // namespace

void attend_avx512vnni(const Part& part) {
  if (in_bf16(part)) switch (part.format) {
      case KvFormat::int8: return attend<KvFormat::int8>(part);
      case KvFormat::int4: return attend<KvFormat::int4>(part);
      default: break;
    }
  attend_avx512(part);
}
