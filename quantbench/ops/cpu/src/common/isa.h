// Which instructions the kernels use: chosen once for the process, the best that the CPU has and the
// compiler knew.
#pragma once

enum class Isa { portable, avx2, avx512, avx512vnni, amx };

Isa isa();

// The best of the VARIANTS of a function (common/variant.h).
#define BEST_VARIANT(name)                                  \
  (isa() >= Isa::avx512vnni ? name##_avx512vnni             \
   : isa() >= Isa::avx2     ? name##_avx2 : name##_portable)
