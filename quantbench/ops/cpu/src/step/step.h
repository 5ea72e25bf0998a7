// What a decoding step's ops share: reading tensors, what happens to rows between two products, and a
// step of all layers as it is called. For op.cpp alone, which has the overview.
#pragma once

#include "step/caches.h"
#include "step/rows.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/isa.h"
#include "common/products.h"
#include "common/ranks.h"

namespace {

Rows rows_of(const Tensor& x) {
  const Number number = number_of(x.scalar_type());
  return BEST_VARIANT(rows)(number);
}

// A norm's weight or a bias, which applies to every row of x.
const char* vector(const Tensor& t, const Tensor& x, int64_t n) {
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.numel() == n,
                  "a norm's weight or a bias has to be ", n, " numbers of x's dtype");
  return data(t);
}

void check_rows(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x has to be (B, D), contiguous");
}

// x = the sum of all ranks' x, n numbers, rounded once; x itself if there are no others.
template <typename F>
void sum_over(LocalRanks* ranks, const Rows& rows, char* x, int64_t n, F idle) {
  if (!ranks) return;
  if (rows.type == Number::f32) {
    auto* numbers = reinterpret_cast<float*>(x);
    return ranks->sum(numbers, numbers, n, idle);
  }
  std::vector<float> wide(n);
  rows.widen(x, n, wide.data());
  ranks->sum(wide.data(), wide.data(), n, idle);
  rows.narrow(wide.data(), n, x);
}

void sum_over(LocalRanks* ranks, const Rows& rows, Tensor& x) {
  sum_over(ranks, rows, data(x), x.numel(), [] { return false; });
}

// The weight of a norm of some heads, if there is one: E numbers for each head by itself, or as many for
// all heads together.
const char* heads_norm(const Tensor* t, const Tensor& x, int64_t heads, int64_t E) {
  if (!t || !t->numel()) return nullptr;
  return vector(*t, x, t->numel() == heads * E ? heads * E : E);
}

// Norms of queries and keys, where there are any, and rotation of both, in place.
void turn_heads(const Rows& rows, Tensor& y, const Tensor* query_norm, const Tensor* key_norm,
                double epsilon, const Tensor& cos, const Tensor& sin, int64_t heads,
                int64_t kv_heads) {
  const int64_t half = cos.numel(), E = 2 * half, size = y.element_size();
  const auto* c = static_cast<const float*>(cos.const_data_ptr());
  const auto* s = static_cast<const float*>(sin.const_data_ptr());
  auto norm = [&](const Tensor* t, char* first, int64_t count) {
    const char* weight = heads_norm(t, y, count, E);
    const int64_t together = weight ? t->numel() : 0, end = weight ? count * E : 0;
    for (int64_t i = 0; i < end; i += together)
      rows.norm(first + i * size, weight, float(epsilon), together, first + i * size);
  };
  for (int64_t b = 0; b < y.size(0); ++b) {
    char* row = data(y) + b * row_bytes(y);
    norm(query_norm, row, heads);
    norm(key_norm, row + heads * E * size, kv_heads);
    for (int64_t h = 0; h < heads + kv_heads; ++h) rows.rotate(row + h * E * size, c, s, half);
  }
}

// What a layer's tensors are, in the order in which they come. Those that a model has not are empty.
enum Part { NORM, WQKV, WQKV_BIAS, QUERY_NORM, KEY_NORM, WO, WO_BIAS, FFN_NORM, W13, W13_BIAS, W2,
            W2_BIAS, PARTS };

Maybe maybe(const Tensor& t) { return t.numel() ? Maybe(t) : std::nullopt; }

// What follows the layers.
struct Ending {
  const Tensor &norm, &weight;
  const Maybe& bias;
  int64_t outputs;
};

int64_t one_position(const Tensor& position) {
  STD_TORCH_CHECK(position.numel() == 1 && position.scalar_type() == ScalarType::Long,
                  "the position has to be one int64");
  return *static_cast<const int64_t*>(position.const_data_ptr());
}

// What every layer is called with, and where its caches' new slot is.
struct Step {
  const std::vector<Tensor>& parts;
  const Tensor &x, &cos, &sin;
  double epsilon;
  int64_t heads, kv_heads, width;
  LocalRanks* ranks;
  const Ending& ending;
  int64_t count, B, E, end;
  Caches caches;
  Tensor first, filled;  // (B,) as decode attention wants them

  Step(const std::vector<Tensor>& parts, std::vector<Tensor>& caches, const std::string& format,
       const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& position, bool wraps,
       double epsilon, int64_t heads, int64_t kv_heads, int64_t width, int64_t handle,
       const Ending& ending)
      : parts(parts), x(x), cos(cos), sin(sin), epsilon(epsilon), heads(heads), kv_heads(kv_heads),
        width(width), ranks(LocalRanks::of(handle)), ending(ending), count(parts.size() / PARTS),
        B(x.size(0)), E(2 * cos.numel()), end(one_position(position) + 1),
        caches(caches, format, count, x, kv_heads, E),
        first(torch::stable::new_empty(x, {B}, ScalarType::Long)),
        filled(torch::stable::new_empty(x, {B}, ScalarType::Long)) {
    check_rows(x);
    STD_TORCH_CHECK(int64_t(parts.size()) == count * PARTS, "there are ", parts.size(),
                    " tensors for ", count, " layers");
    const int64_t slots = this->caches.slots;
    STD_TORCH_CHECK(end > 0 && (wraps || end <= slots), "position ", end - 1,
                    " is not in a cache of ", slots);
    const int64_t seen = end < slots ? end : slots;
    for (int64_t b = 0; b < B; ++b) {
      static_cast<int64_t*>(first.mutable_data_ptr())[b] = (end - seen) % slots;
      static_cast<int64_t*>(filled.mutable_data_ptr())[b] = seen;
    }
  }

  const Tensor& part(int64_t layer, Part part) const { return parts[layer * PARTS + part]; }

  bool has_experts(int64_t layer) const { return part(layer, W2).scalar_type() == ScalarType::Long; }

  // Stores a layer's new keys and values; attention over all of them.
  std::unique_ptr<Attending> attending(const Rows& rows, int64_t layer, Tensor& qkv) {
    caches.store(rows, qkv, heads, layer, (end - 1) % caches.slots);
    Tensor of_heads = torch::stable::view(qkv, {B, heads + 2 * kv_heads, E});
    return Attending::make({torch::stable::narrow(of_heads, 1, 0, heads), caches.keys(layer),
                            caches.key_scales(layer), caches.values(layer),
                            caches.value_scales(layer), first, filled, caches.format});
  }
};

}  // namespace
