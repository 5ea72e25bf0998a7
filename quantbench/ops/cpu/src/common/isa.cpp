#include "common/isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifndef QUANTBENCH_BUILT  // the instruction sets that the compiler knows: ops/cpu/compiler.py
#define QUANTBENCH_BUILT " portable avx2 avx512 avx512vnni amx "
#endif

namespace {

constexpr const char* NAMES[] = {"portable", "avx2", "avx512", "avx512vnni", "amx"};
constexpr Isa BEST_FIRST[] = {Isa::amx, Isa::avx512vnni, Isa::avx512, Isa::avx2,
                              Isa::portable};

#if defined(__x86_64__)
bool has_f16c() {  // clang 14 has no name for it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_vnni() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512vbmi");
}

// Linux gives a process the tiles' 8 KB of state when it asks for them.
bool has_amx() {
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
  constexpr unsigned TILES = BF16 | TILE | INT8;
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  unsigned a, b, c, d;
  if (!has_vnni() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & TILES) != TILES) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

bool runs(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2: return has_avx2();
    case Isa::avx512: return has_avx512();
    case Isa::avx512vnni: return has_vnni();
    case Isa::amx: return has_amx();
#endif
    default: return isa == Isa::portable;
  }
}

bool built(Isa isa) {
  const char* name = NAMES[static_cast<int>(isa)];
  const size_t length = std::strlen(name);
  for (const char* at = QUANTBENCH_BUILT; (at = std::strstr(at, name)); at += length)
    if (at[-1] == ' ' && at[length] == ' ') return true;
  return false;
}

Isa best() {
  for (Isa isa : BEST_FIRST)
    if (built(isa) && runs(isa)) return isa;
  return Isa::portable;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

}  // namespace

Isa isa() { return chosen().load(std::memory_order_relaxed); }

extern "C" __attribute__((visibility("default"))) const char* quantbench_isa() {
  return NAMES[static_cast<int>(isa())];
}

extern "C" __attribute__((visibility("default"))) int quantbench_use_isa(const char* name) {
  for (Isa isa : BEST_FIRST)
    if (!std::strcmp(name, NAMES[static_cast<int>(isa)]) && built(isa) && runs(isa)) {
      chosen() = isa;
      return 1;
    }
  return 0;
}
