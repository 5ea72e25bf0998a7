#include "common/isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr const char* NAMES[] = {"portable", "avx2", "avx512", "avx512vnni", "amx"};
constexpr Isa BEST_FIRST[] = {Isa::amx, Isa::avx512vnni, Isa::avx512, Isa::avx2,
                              Isa::portable};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
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

Isa best() {
  for (Isa isa : BEST_FIRST)
    if (runs(isa)) return isa;
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
    if (!std::strcmp(name, NAMES[static_cast<int>(isa)]) && runs(isa)) {
      chosen() = isa;
      return 1;
    }
  return 0;
}
