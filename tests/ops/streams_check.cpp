// Prints where the streams of ops/cpu/src/common/streams.h start, for the ranges of units that are
// named: FIRST LAST [FIRST LAST …]. test_cpu_team.py compiles and runs it.

#include "common/streams.h"

#include <cstdio>
#include <cstdlib>

int main(int count, char** arguments) {
  for (int i = 1; i + 1 < count; i += 2) {
    const Streams streams(std::atoll(arguments[i]), std::atoll(arguments[i + 1]));
    for (int64_t begin : streams.begin) std::printf("%lld ", static_cast<long long>(begin));
    std::printf("\n");
  }
}
