#include "isa.h"

#include <atomic>
#include <cstring>

namespace {

const char* const NAMES[] = {"portable", "avx2", "avx512"};

bool runs(Isa isa) {
  if (isa == Isa::portable) return true;
#if defined(__x86_64__)
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

Isa best() {
  return runs(Isa::avx512) ? Isa::avx512 : runs(Isa::avx2) ? Isa::avx2 : Isa::portable;
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
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512})
    if (!std::strcmp(name, NAMES[static_cast<int>(isa)]) && runs(isa)) {
      chosen() = isa;
      return 1;
    }
  return 0;
}
