// The ops that multiply and attend, for other ops that need what they make.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

// x (M, K) by a weight that cpu_pack_linear has packed, `rows` of them; by a plain weight (N, K).
torch::stable::Tensor linear(const torch::stable::Tensor& x, const torch::stable::Tensor& packed,
                             int64_t rows);
torch::stable::Tensor plain(const torch::stable::Tensor& x, const torch::stable::Tensor& weight);

// See cpu_decode_attention in attention.py.
torch::stable::Tensor decode_attention(const torch::stable::Tensor& query,
                                       const torch::stable::Tensor& key_codes,
                                       const std::optional<torch::stable::Tensor>& key_scale,
                                       const torch::stable::Tensor& value_codes,
                                       const std::optional<torch::stable::Tensor>& value_scale,
                                       const torch::stable::Tensor& first,
                                       const torch::stable::Tensor& count,
                                       const std::string& format_name);
