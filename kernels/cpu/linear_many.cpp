// Linear layers of many tokens: which inner loop runs, and its share of threads and memory.

#include "linear_many.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "isa.h"

namespace {

ManyVersion version(const Header& header, Number x) {
#if defined(__x86_64__)
  // float32 and float16 have more bits than tiles take; rounded activations have 9.
  const bool fits = x == Number::bf16 || (header.rounding != Rounding::none &&
                                          header.scales == Scales::row);
  const bool exact = header.rounding == Rounding::none || header.scales == Scales::row;
  if (isa() >= Isa::amx && fits && exact) return many_amx();
  if (isa() >= Isa::avx512vnni) return many_avx512vnni();
  if (isa() >= Isa::avx2) return many_avx2();
#endif
  return many_portable();
}

// Memory that a thread keeps from call to call: fresh pages cost more than what is written to them.
template <int USE>
char* kept(int64_t size) {
  thread_local std::vector<char> bytes;
  if (int64_t(bytes.size()) < size + 64) bytes.resize(size + 64);
  return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
}

}  // namespace

int64_t many_from(const Header& header, Number x) { return 17; }

void linear_of_many(const Problem& given) {
  Problem problem = given;
  const Geometry& g = problem.geometry;
  const ManyVersion run = version(*problem.header, problem.type);
  const int64_t tiles = (problem.outputs + run.tokens - 1) / run.tokens;
  const int64_t tokens = tiles * run.tokens, padded = g.padded_columns();
  char* x = kept<0>(tokens * (padded * run.x_bytes + sizeof(float)));
  problem.token_scales = reinterpret_cast<float*>(x + tokens * padded * run.x_bytes);
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t first, int64_t last) {
    Problem mine = problem;
    mine.row = reinterpret_cast<float*>(kept<1>(padded * sizeof(float)));
    run.prepare(mine, x, first, last);
  });
  const int64_t groups = (g.blocks + run.side_by_side - 1) / run.side_by_side;
  torch::stable::parallel_for(0, groups, 1, [&](int64_t first, int64_t last) {
    run.multiply(problem, x, first, last);
  });
}
