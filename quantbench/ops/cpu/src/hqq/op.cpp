// quantbench::cpu_hqq: the scale and zero of every group of a weight that fit it best. Groups do not
// know of each other, so the result does not depend on how many threads there are.

#include "hqq/hqq.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>

#include "common/isa.h"

namespace {

using torch::stable::Tensor;

constexpr double NORM = 0.7, BETA = 10.0, KAPPA = 1.01;
constexpr int64_t GRAIN = 16;  // blocks that are worth another thread

// groups (blocks, columns + 2, AT_ONCE) float32: weights, then scale and zero. Returns (blocks, 2, AT_ONCE).
Tensor fit(const Tensor& groups, int64_t bits, bool half) {
  STD_TORCH_CHECK(groups.dim() == 3 && groups.size(2) == AT_ONCE && groups.is_contiguous() &&
                      groups.scalar_type() == torch::headeronly::ScalarType::Float,
                  "groups have to be (blocks, columns + 2, ", AT_ONCE, ") float32, contiguous");
  STD_TORCH_CHECK(1 <= bits && bits <= 8, "bits are 1 to 8, not ", bits);
  Fitting fitting{groups.size(1) - 2, int(bits), half, NORM - 1, {}, {}};
  STD_TORCH_CHECK(fitting.columns % 4 == 0 && 0 < fitting.columns && fitting.columns <= MOST_COLUMNS,
                  "groups have 4 to ", MOST_COLUMNS, " columns, in multiples of 4");
  for (int i = 0; i < ITERATIONS; ++i) {
    const double beta = BETA * std::pow(KAPPA, i);
    fitting.least[i] = float(std::pow(beta, -1 / (2 - NORM)));
    fitting.inverses[i] = float(1 / beta);
  }
  Tensor best = torch::stable::new_empty(groups, {groups.size(0), 2, AT_ONCE});
  const auto* from = static_cast<const float*>(groups.const_data_ptr());
  auto* to = static_cast<float*>(best.mutable_data_ptr());
  const FitGroups run = BEST_VARIANT(hqq)();
  torch::stable::parallel_for(0, groups.size(0), GRAIN, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block)
      run(fitting, from + block * groups.size(1) * AT_ONCE, to + block * 2 * AT_ONCE);
  });
  return best;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) { library.impl("cpu_hqq", TORCH_BOX(&fit)); }
