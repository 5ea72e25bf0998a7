// What a decoding step's ops share: reading tensors, what happens to rows between two products, and a
// step of all layers as it is called. For op.cpp alone, which has the overview.
#pragma once

#include "step/caches.h"
#include "step/rows.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
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

// A bias, which applies to every row of x.
const char* vector(const Tensor& t, const Tensor& x, int64_t n) {
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.numel() == n,
                  "a bias has to be ", n, " numbers of x's dtype");
  return data(t);
}

const float* floats(const Tensor& t, int64_t n) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == n,
                  "a norm's weight has to be ", n, " float32 numbers");
  return static_cast<const float*>(t.const_data_ptr());
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

// What a layer's tensors are, in the order in which they come. Those that a model has not are empty. A
// bias follows its weight, and the norm of what attention or feed-forward network return the last bias.
enum Part { NORM, WQKV, WQKV_BIAS, QUERY_NORM, KEY_NORM, WO, WO_BIAS, POST_NORM, FFN_NORM, W13, W13_BIAS,
            W2, W2_BIAS, FFN_POST_NORM, PARTS };

// What else differs between layers: a row of the tensor `hows`, a `How` of step.py.
struct How {
  double wraps;           // whether a full cache overwrites its oldest slot, for a sliding window
  double rotation;        // which table of cosines and sines
  double gate;            // which Gate
  double scale, softcap;  // of attention's scores, as Attending takes them
  double residual;        // what attention and feed-forward network return is multiplied by it
};
constexpr int64_t NUMBERS = sizeof(How) / sizeof(double);

// What follows the layers.
struct Ending {
  const Tensor &norm, &weight;
  const char* bias;
  int64_t outputs;
};

// What every layer is called with, and where its caches' new slot is.
struct Step {
  const std::vector<Tensor>& parts;
  const Tensor &hows, &x;
  double epsilon;
  int64_t heads, kv_heads, width;
  LocalRanks* ranks;
  const Ending& ending;
  int64_t count, B, E, end;
  std::vector<float> cos, sin;  // (tables, E / 2)
  Caches caches;
  Tensor first, filled;  // (B,) as decode attention wants them

  Step(const std::vector<Tensor>& parts, const Tensor& hows, std::vector<Tensor>& caches,
       const std::string& format, const Tensor& x, const Tensor& rotations, int64_t position,
       double epsilon, int64_t heads, int64_t kv_heads, int64_t width, LocalRanks* ranks,
       const Ending& ending)
      : parts(parts), hows(hows), x(x), epsilon(epsilon), heads(heads), kv_heads(kv_heads),
        width(width), ranks(ranks), ending(ending), count(parts.size() / PARTS), B(x.size(0)),
        E(2 * rotations.size(2)), end(position + 1), caches(caches, format, count, x, kv_heads, E),
        first(torch::stable::new_empty(x, {B}, ScalarType::Long)),
        filled(torch::stable::new_empty(x, {B}, ScalarType::Long)) {
    STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x has to be (B, D), contiguous");
    STD_TORCH_CHECK(int64_t(parts.size()) == count * PARTS && hows.is_contiguous() &&
                        hows.scalar_type() == ScalarType::Double && hows.numel() == count * NUMBERS,
                    "there are ", parts.size(), " tensors and ", hows.numel(), " numbers for ", count,
                    " layers");
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slots = this->caches.slots(i);
      STD_TORCH_CHECK(end > 0 && (how(i).wraps || end <= slots), "position ", end - 1,
                      " is not in a cache of ", slots);
      STD_TORCH_CHECK(how(i).rotation >= 0 && how(i).rotation < rotations.size(1) &&
                          how(i).gate >= 0 && how(i).gate < int(GATES), "there is no such rotation or gate");
    }
    const auto* frequencies = static_cast<const float*>(rotations.const_data_ptr());
    const int64_t angles = rotations.size(1) * rotations.size(2);
    for (int64_t i = 0; i < angles; ++i) {
      const float angle = float(position) * frequencies[i], factor = frequencies[angles + i];
      cos.push_back(std::cos(angle) * factor), sin.push_back(std::sin(angle) * factor);
    }
  }

  const How& how(int64_t layer) const {
    return static_cast<const How*>(hows.const_data_ptr())[layer];
  }

  // The up projection's first number in w13's output; 0 without a gate.
  int64_t up(int64_t layer) const { return Gate(how(layer).gate) == SQUARED_RELU ? 0 : width; }

  const Tensor& part(int64_t layer, Part part) const { return parts[layer * PARTS + part]; }

  // Null for what the model lacks.
  const char* bias(int64_t layer, Part part, int64_t n) const {
    const Tensor& t = this->part(layer, part);
    return t.numel() ? vector(t, x, n) : nullptr;
  }

  bool has_experts(int64_t layer) const { return part(layer, W2).scalar_type() == ScalarType::Long; }

  // The weight of the norm of queries or keys, null without one, and how many numbers are normed together:
  // a head's, or those of all heads.
  const float* heads_norm(int64_t layer, Part part, int64_t heads, int64_t& together) const {
    const Tensor& t = this->part(layer, part);
    if (!t.numel()) return nullptr;
    return floats(t, together = t.numel() == heads * E ? heads * E : E);
  }

  // Norms a layer's queries and keys, if it does, and rotates both, in place.
  void turn_heads(const Rows& rows, int64_t layer, Tensor& qkv) const {
    const int64_t size = qkv.element_size(), table = int64_t(how(layer).rotation) * E / 2;
    auto norm = [&](Part part, char* of_heads, int64_t count) {
      int64_t together;
      if (const float* weight = heads_norm(layer, part, count, together))
        for (int64_t i = 0; i < count * E; i += together)
          rows.norm(of_heads + i * size, weight, float(epsilon), together, of_heads + i * size);
    };
    for (int64_t b = 0; b < B; ++b) {
      char* row = data(qkv) + b * row_bytes(qkv);
      norm(QUERY_NORM, row, heads);
      norm(KEY_NORM, row + heads * E * size, kv_heads);
      for (int64_t h = 0; h < heads + kv_heads; ++h)
        rows.rotate(row + h * E * size, cos.data() + table, sin.data() + table, E / 2);
    }
  }

  // Norms and rotates a layer's new queries and keys, stores its keys and values; attention over all.
  std::unique_ptr<Attending> attending(const Rows& rows, int64_t layer, Tensor& qkv) {
    turn_heads(rows, layer, qkv);
    const int64_t slots = caches.slots(layer), seen = end < slots ? end : slots;
    for (int64_t b = 0; b < B; ++b) {
      static_cast<int64_t*>(first.mutable_data_ptr())[b] = (end - seen) % slots;
      static_cast<int64_t*>(filled.mutable_data_ptr())[b] = seen;
    }
    caches.store(rows, qkv, heads, layer, (end - 1) % slots);
    Tensor of_heads = torch::stable::view(qkv, {B, heads + 2 * kv_heads, E});
    return Attending::make({torch::stable::narrow(of_heads, 1, 0, heads), caches.keys(layer),
                            caches.key_scales(layer), caches.values(layer),
                            caches.value_scales(layer), first, filled, caches.format,
                            how(layer).scale, how(layer).softcap});
  }
};

}  // namespace
