// Which instructions the kernels use: chosen once for the process, the best that the CPU has and the
// compiler knew.
#pragma once

enum class Isa { portable, avx2, avx512, avx512vnni, amx };

Isa isa();
