// Linear layers of many tokens: which inner loop runs, and its share of threads and memory.

#include "linear_many.h"

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <vector>

#include "isa.h"

namespace {

constexpr int64_t NEVER = INT64_MAX;

bool by_row(const Header& header) { return header.scales == Scales::row; }
bool rounded(const Header& header) { return header.rounding != Rounding::none; }

// Tiles are of bfloat16: float32 and float16 have more bits, and rounded activations are promised
// exact products, which weights with scales of their own are not.
bool fits_tiles(const Header& header, Number x) {
  return rounded(header) ? by_row(header) : x == Number::bf16;
}

// One integer for each weight, one of 16 bits for each number of x.
bool is_integers(const Header& header, Number x) {
  const Coding coding = header.coding;
  return (x != Number::f32 || rounded(header)) &&
         (coding == Coding::integer || coding == Coding::fp4 || coding == Coding::sparse);
}

struct Choice {
  ManyVersion (*version)();
  int64_t from;  // rows of x
};

// Where the few rows' loop is as fast as this, weights of 2048 x 2048 to 11264 x 2048.
Choice choice(const Header& header, Number x) {
#if defined(__x86_64__)
  if (isa() >= Isa::amx && fits_tiles(header, x)) {
    if (header.coding == Coding::sparse) return {many_amx, 17};
    if (header.coding != Coding::integer) return {many_amx, 5};
    return {many_amx, header.bits == 8 && by_row(header) ? 9 : 12};
  }
  if (isa() >= Isa::avx512vnni) return {many_avx512vnni, is_integers(header, x) ? NEVER : 17};
  if (isa() >= Isa::avx2) return {many_avx2, 5};
#endif
  return {many_portable, 5};
}

// Memory that a thread keeps from call to call: fresh pages cost more than what is written to them.
template <int USE>
char* kept(int64_t size) {
  thread_local std::vector<char> bytes;
  if (int64_t(bytes.size()) < size + 64) bytes.resize(size + 64);
  return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
}

}  // namespace

int64_t many_from(const Header& header, Number x) { return choice(header, x).from; }

void linear_of_many(const Problem& given) {
  Problem problem = given;
  const Geometry& g = problem.geometry;
  const ManyVersion run = choice(*problem.header, problem.type).version();
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
