// What every variant of an inner loop needs. A variant is a loop compiled for one instruction set: a source
// with a line `// Variants: …` is compiled once for each that the line names (ops/cpu/compiler.py).
#pragma once

#ifdef VARIANT  // portable, avx2, …: the instruction set that this source is compiled for
#define LEVEL_neon_dotprod -2  // ARM's below 0, x86's above
#define LEVEL_neon_i8mm -1
#define LEVEL_portable 0
#define LEVEL_avx2 1
#define LEVEL_avxvnni 2
#define LEVEL_avx512 3
#define LEVEL_avx512vnni 4
#define LEVEL_avx512bf16 5
#define LEVEL_amx 6
#define JOIN(a, b) a##b
#define JOINED(a, b) JOIN(a, b)
#define LEVEL JOINED(LEVEL_, VARIANT)
#define NAMED(name) JOINED(name##_, VARIANT)  // the variant of a function: name_avx2
#if LEVEL > LEVEL_portable
#include <immintrin.h>
#elif LEVEL < LEVEL_portable
#include <arm_neon.h>
#endif
#endif

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__)
#error "remove -Ofast, -ffast-math and their parts from CXXFLAGS: the kernels round by adding and \
subtracting a constant, and test for NaN"
#endif

// Declares a variant that is not there on other architectures, and where the compiler does not know
// the instructions (ops/cpu/compiler.py): its address is null then. isa() never names such a one.
#define OPTIONAL_VARIANT __attribute__((weak))

// Declares the variants of a function that most loops have; isa.h chooses one of them.
#define VARIANTS(Result, name, ...)                     \
  Result name##_portable(__VA_ARGS__);                  \
  OPTIONAL_VARIANT Result name##_avx2(__VA_ARGS__);     \
  OPTIONAL_VARIANT Result name##_avx512vnni(__VA_ARGS__); \
  OPTIONAL_VARIANT Result name##_neon_dotprod(__VA_ARGS__)

// A function compiled for one instruction set must not be merged by the linker with its namesake
// compiled for another: what headers of variants define is inlined or has internal linkage.
#define INLINE __attribute__((always_inline)) inline
