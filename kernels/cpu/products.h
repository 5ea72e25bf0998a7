// The ops that multiply, for other ops that need their products.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

// x (M, K) by a weight that cpu_pack_linear has packed, `rows` of them; by a plain weight (N, K).
torch::stable::Tensor linear(const torch::stable::Tensor& x, const torch::stable::Tensor& packed,
                             int64_t rows);
torch::stable::Tensor plain(const torch::stable::Tensor& x, const torch::stable::Tensor& weight);
