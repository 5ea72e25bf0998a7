// Which instructions the kernels use: chosen once for the process, the best that the CPU has and the
// library was built for.
#pragma once

enum class Isa { portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx, neon_dotprod, neon_i8mm };

Isa isa();
bool has(Isa);  // whether the chosen instruction set includes this one

// The best of the VARIANTS of a function (common/variant.h).
#define BEST_VARIANT(name)                                \
  (has(Isa::avx512vnni)     ? name##_avx512vnni           \
   : has(Isa::avx2)         ? name##_avx2                 \
   : has(Isa::neon_dotprod) ? name##_neon_dotprod : name##_portable)
