// What every variant of an inner loop needs. A variant is a loop compiled for one instruction set.
#pragma once

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__)
#error "remove -Ofast, -ffast-math and their parts from CXXFLAGS: the kernels round by adding and \
subtracting a constant, and test for NaN"
#endif

// Declares a variant that is not there on other architectures, and where the compiler does not know
// the instructions (ops/cpu/compiler.py): its address is null then. isa() never names such a one.
#define OPTIONAL_VARIANT __attribute__((weak))

// A function compiled for one instruction set must not be merged by the linker with its namesake
// compiled for another: what headers of variants define is inlined or has internal linkage.
#define INLINE __attribute__((always_inline)) inline
