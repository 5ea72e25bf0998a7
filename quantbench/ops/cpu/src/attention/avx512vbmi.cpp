// Decode attention's inner loop in AVX-512 with VNNI and VBMI: int8 and int4 caches in byte products, fp8 ones from
// their lines. Other formats, and queries that bytes would not be exact enough for, go to AVX-512.
//
// Variants: avx512vbmi

#include "attention/attention.h"

namespace {
#include "attention/numbers.h"
#include "attention/blocks.h"
#include "attention/bytes.h"
#include "attention/vnni_bytes.h"
#include "attention/fp8.h"
#include "attention/lines.h"

template <>
struct Line<KvFormat::fp8> {
  static constexpr int BYTES = 32;
  static constexpr bool SCALED = true;
  static __m512i read(const char* from) { return fp8_as_bf16(from); }
};

void attend_fp8(const Part& part) {
  Lines<KvFormat::fp8, BLOCK> lines(part);
  lines.all_slots();
  lines.finish();
}

template <KvFormat F>
void attend(const Part& part) {
  Codes<F> codes(part);
  codes.all_slots();
}

}  // namespace

void attend_avx512vbmi(const Part& part) {
  if (in_bf16(part)) switch (part.format) {
      case KvFormat::int8: return attend<KvFormat::int8>(part);
      case KvFormat::int4: return attend<KvFormat::int4>(part);
      case KvFormat::fp8:
        if (part.head_dim % LINE == 0) return attend_fp8(part);
        break;
      default: break;
    }
  attend_avx512(part);
}
