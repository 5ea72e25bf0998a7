// quantbench::cpu_hqq: the scale and zero of every group of a weight that fit it best. Groups do not
// know of each other, so the result does not depend on how many threads there are.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <tuple>

#include "common/isa.h"
#include "common/products.h"
#include "hqq/hqq.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr double NORM = 0.7, BETA = 10.0, KAPPA = 1.01;
constexpr int64_t GRAIN = 16;  // blocks that are worth another thread

std::tuple<Tensor, Tensor> fit(const Tensor& w, const Tensor& scale, const Tensor& zero,
                               int64_t bits) {
  STD_TORCH_CHECK(w.dim() == 2 && w.is_contiguous(), "the weight has to be contiguous, (N, K)");
  STD_TORCH_CHECK(scale.is_contiguous() && zero.is_contiguous() && scale.numel() == zero.numel() &&
                      scale.dim() == 2 && scale.size(0) == w.size(0),
                  "scale and zero have to be contiguous, (N, groups of a row)");
  STD_TORCH_CHECK(1 <= bits && bits <= 8, "bits are 1 to 8, not ", bits);
  Groups groups{};
  groups.type = number_of(w.scalar_type());
  const ScalarType type =
      groups.type == Number::f16 ? ScalarType::Half : ScalarType::BFloat16;
  STD_TORCH_CHECK(scale.scalar_type() == type && zero.scalar_type() == type,
                  "scale and zero are float16 with float16 weights, else bfloat16");
  Tensor best_scale = torch::stable::clone(scale), best_zero = torch::stable::clone(zero);
  groups.count = scale.numel();
  if (!groups.count) return {best_scale, best_zero};
  groups.columns = w.numel() / groups.count;
  STD_TORCH_CHECK(groups.columns * scale.size(1) == w.size(1) && groups.columns % 4 == 0 &&
                      0 < groups.columns && groups.columns <= MOST_COLUMNS,
                  "groups have 4 to ", MOST_COLUMNS, " columns, in multiples of 4");
  groups.bits = int(bits);
  groups.weights = static_cast<const char*>(w.const_data_ptr());
  groups.scale = static_cast<uint16_t*>(best_scale.mutable_data_ptr());
  groups.zero = static_cast<uint16_t*>(best_zero.mutable_data_ptr());
  groups.power = NORM - 1;
  for (int i = 0; i < ITERATIONS; ++i) {
    const double beta = BETA * std::pow(KAPPA, i);
    groups.least[i] = float(std::pow(beta, -1 / (2 - NORM)));
    groups.inverses[i] = float(1 / beta);
  }
  const int64_t blocks = (groups.count + AT_ONCE - 1) / AT_ONCE;
  const FitGroups run = BEST_VARIANT(hqq)();
  torch::stable::parallel_for(0, blocks, GRAIN, [&](int64_t first, int64_t last) {
    run(groups, first, last);
  });
  return {best_scale, best_zero};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) { library.impl("cpu_hqq", TORCH_BOX(&fit)); }
