#include "common/isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#ifndef QUANTBENCH_BUILT  // the instruction sets in the library: ops/cpu/compiling.py
#define QUANTBENCH_BUILT " portable avx2 avx512 avx512vnni avx512bf16 amx avxvnni neon-dotprod neon-i8mm "
#endif

namespace {

enum Feature : unsigned {
  AVX2 = 1, AVXVNNI = 2, AVX512 = 4, VNNI = 8, VBMI = 16, BF16 = 32, AMX = 64, DOTPROD = 128, I8MM = 256
};

struct Set {
  Isa isa;
  const char* name;
  unsigned needs;
};
constexpr Set BEST_FIRST[] = {
    {Isa::amx, "amx", AVX2 | AVX512 | VNNI | VBMI | BF16 | AMX},
    {Isa::avx512bf16, "avx512bf16", AVX2 | AVX512 | VNNI | BF16},
    {Isa::avx512vnni, "avx512vnni", AVX2 | AVX512 | VNNI},
    {Isa::avx512, "avx512", AVX2 | AVX512},
    {Isa::avxvnni, "avxvnni", AVX2 | AVXVNNI},
    {Isa::avx2, "avx2", AVX2},
    {Isa::neon_i8mm, "neon-i8mm", DOTPROD | I8MM},
    {Isa::neon_dotprod, "neon-dotprod", DOTPROD},
    {Isa::portable, "portable", 0},
};

const Set& set_of(Isa isa) {
  for (const Set& set : BEST_FIRST)
    if (set.isa == isa) return set;
  __builtin_unreachable();
}

#if defined(__x86_64__)
#define CPU_HAS(name) (__builtin_cpu_supports(name) != 0)

// Those for which compilers have no name.
unsigned cpuid(unsigned leaf, unsigned subleaf, int output) {
  unsigned all[4] = {};
  __get_cpuid_count(leaf, subleaf, &all[0], &all[1], &all[2], &all[3]);
  return all[output];
}

// Linux gives a process the tiles' 8 KB of state when it asks for them.
bool has_amx() {
#ifdef EMULATED_AMX  // tests/ops/amx_tiles.h
  return true;
#endif
  constexpr unsigned BFLOAT16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, TILES = BFLOAT16 | TILE | INT8;
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return (cpuid(7, 0, 3) & TILES) == TILES && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

unsigned features() {
  constexpr unsigned F16C = 1u << 29, AVX_VNNI = 1u << 4;
  unsigned found = 0;
  if (CPU_HAS("avx2") && CPU_HAS("fma") && cpuid(1, 0, 2) & F16C) found |= AVX2;
  if (cpuid(7, 1, 0) & AVX_VNNI) found |= AVXVNNI;
  if (CPU_HAS("avx512f") && CPU_HAS("avx512bw") && CPU_HAS("avx512dq") && CPU_HAS("avx512vl")) found |= AVX512;
  if (CPU_HAS("avx512vnni")) found |= VNNI;
  if (CPU_HAS("avx512vbmi")) found |= VBMI;
  if (CPU_HAS("avx512bf16")) found |= BF16;
  if (found & VBMI && has_amx()) found |= AMX;
  return found;
}
#elif defined(__aarch64__) && defined(__linux__)
unsigned features() {
  constexpr unsigned long DOT_PRODUCTS = 1 << 20, MATRIX_PRODUCTS = 1 << 13;
  unsigned found = 0;
  if (getauxval(AT_HWCAP) & DOT_PRODUCTS) found |= DOTPROD;
  if (getauxval(AT_HWCAP2) & MATRIX_PRODUCTS) found |= I8MM;
  return found;
}
#else
unsigned features() { return 0; }
#endif

bool runs(const Set& set) {
  static const unsigned found = features();
  return (found & set.needs) == set.needs;
}

bool built(const Set& set) {
  const size_t length = std::strlen(set.name);
  for (const char* at = QUANTBENCH_BUILT; (at = std::strstr(at, set.name)); at += length)
    if (at[-1] == ' ' && at[length] == ' ') return true;
  return false;
}

Isa best() {
  for (const Set& set : BEST_FIRST)
    if (built(set) && runs(set)) return set.isa;
  return Isa::portable;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

}  // namespace

Isa isa() { return chosen().load(std::memory_order_relaxed); }

bool has(Isa other) { return !(set_of(other).needs & ~set_of(isa()).needs); }

extern "C" __attribute__((visibility("default"))) const char* quantbench_isa() {
  return set_of(isa()).name;
}

extern "C" __attribute__((visibility("default"))) int quantbench_use_isa(const char* name) {
  for (const Set& set : BEST_FIRST)
    if (!std::strcmp(name, set.name) && built(set) && runs(set)) {
      chosen() = set.isa;
      return 1;
    }
  return 0;
}
