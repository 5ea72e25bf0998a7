// What a decoding step's ops share: reading tensors, what happens to rows between two products, and a
// step of all layers as it is called. For op.cpp alone, which has the overview.
#pragma once

#include "step/caches.h"
#include "step/rows.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
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

// What every layer is called with, and where its caches' new slots are.
struct Step {
  const std::vector<Tensor>& parts;
  const Tensor &hows, &x, &rotations;
  double epsilon;
  int64_t heads, kv_heads, width;
  LocalRanks* ranks;
  const Ending& ending;
  int64_t count, B, E;
  int64_t chunk;                   // tokens of each sequence: rows of x, one behind the other
  std::vector<int64_t> positions;  // (B,)
  std::vector<float> cos, sin;     // (B, tables, E / 2); (1, …) where all rows have one position
  Caches caches;
  Tensor first, filled;  // (B,) as decode attention wants them

  Step(const std::vector<Tensor>& parts, const Tensor& hows, std::vector<Tensor>& caches,
       const std::string& format, const Tensor& x, const Tensor& rotations, const Tensor& given,
       int64_t sequences, double epsilon, int64_t heads, int64_t kv_heads, int64_t width,
       LocalRanks* ranks, const Ending& ending)
      : parts(parts), hows(hows), x(x), rotations(rotations), epsilon(epsilon), heads(heads), kv_heads(kv_heads),
        width(width), ranks(ranks), ending(ending), count(parts.size() / PARTS), B(x.size(0)),
        E(2 * rotations.size(2)), chunk(B / sequences),
        caches(caches, format, count, x, sequences, kv_heads, E),
        first(torch::stable::new_empty(x, {B}, ScalarType::Long)),
        filled(torch::stable::new_empty(x, {B}, ScalarType::Long)) {
    STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x has to be (B, D), contiguous");
    STD_TORCH_CHECK(given.dim() == 1 && (given.numel() == 1 || given.numel() == B) &&
                        given.scalar_type() == ScalarType::Long && given.is_contiguous(),
                    "positions have to be (B,) or (1,) int64, contiguous");
    const auto* at = static_cast<const int64_t*>(given.const_data_ptr());
    for (int64_t b = 0; b < B; ++b) {
      positions.push_back(at[given.numel() == B ? b : 0]);
      STD_TORCH_CHECK(b % chunk == 0 || positions[b] == positions[b - 1] + 1, "row ", b,
                      " is at position ", positions[b], ", but follows its sequence's position ",
                      positions[b - 1]);
    }
    STD_TORCH_CHECK(int64_t(parts.size()) == count * PARTS && hows.is_contiguous() &&
                        hows.scalar_type() == ScalarType::Double && hows.numel() == count * NUMBERS,
                    "there are ", parts.size(), " tensors and ", hows.numel(), " numbers for ", count,
                    " layers");
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slots = this->caches.slots(i);
      for (int64_t position : positions) {
        STD_TORCH_CHECK(position >= 0 && (how(i).wraps || position < slots), "position ", position,
                        " is not in a cache of ", slots);
        STD_TORCH_CHECK(chunk == 1 || position < slots, "of several tokens of a sequence, position ",
                        position, " would overwrite what others see in a window of ", slots);
      }
      STD_TORCH_CHECK(how(i).rotation >= 0 && how(i).rotation < rotations.size(1) &&
                          how(i).gate >= 0 && how(i).gate < int(GATES), "there is no such rotation or gate");
    }
    const auto* frequencies = static_cast<const float*>(rotations.const_data_ptr());
    const int64_t angles = rotations.size(1) * rotations.size(2);
    for (int64_t row = 0; row < given.numel(); ++row)
      for (int64_t i = 0; i < angles; ++i) {
        const float angle = float(positions[row]) * frequencies[i], factor = frequencies[angles + i];
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

  // Whether each row gets the bits that it gets alone: of a chunk, whose tokens may be guesses.
  bool as_one() const { return chunk > 1; }

  bool has_experts(int64_t layer) const { return part(layer, W2).scalar_type() == ScalarType::Long; }

  // The weight of the norm of queries or keys, null without one, and how many numbers are normed together:
  // a head's, or those of all heads.
  const float* heads_norm(int64_t layer, Part part, int64_t heads, int64_t& together) const {
    const Tensor& t = this->part(layer, part);
    if (!t.numel()) return nullptr;
    return floats(t, together = t.numel() == heads * E ? heads * E : E);
  }

  // What happens to what a row's product with wqkv gives, in place: its bias is added, queries and keys are
  // normed, if this layer does that, and rotated; keys and values are stored.
  void turn_heads(const Rows& rows, int64_t layer, int64_t b, char* qkv) {
    const int64_t size = size_of(rows.type), n = (heads + 2 * kv_heads) * E;
    if (const char* added = bias(layer, WQKV_BIAS, n)) rows.add(qkv, added, 1, n, qkv);
    auto norm = [&](Part part, char* of_heads, int64_t count) {
      int64_t together;
      if (const float* weight = heads_norm(layer, part, count, together))
        for (int64_t i = 0; i < count * E; i += together)
          rows.norm(of_heads + i * size, weight, float(epsilon), together, of_heads + i * size);
    };
    norm(QUERY_NORM, qkv, heads);
    norm(KEY_NORM, qkv + heads * E * size, kv_heads);
    const int64_t each = rotations.size(1) * E / 2;  // numbers of a row of `cos`
    const int64_t table = b % (cos.size() / each) * each + int64_t(how(layer).rotation) * E / 2;
    for (int64_t h = 0; h < heads + kv_heads; ++h)
      rows.rotate(qkv + h * E * size, cos.data() + table, sin.data() + table, E / 2);
    caches.store(rows, qkv, heads, layer, b / chunk, positions[b] % caches.slots(layer));
  }

  // Attention of a layer's queries, once they are turned and read.
  std::unique_ptr<Attending> attending(int64_t layer, Tensor& qkv) {
    const int64_t slots = caches.slots(layer);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t end = positions[b] + 1, seen = std::min(end, slots);
      static_cast<int64_t*>(first.mutable_data_ptr())[b] = (end - seen) % slots;
      static_cast<int64_t*>(filled.mutable_data_ptr())[b] = seen;
    }
    Tensor of_heads = torch::stable::view(qkv, {B, heads + 2 * kv_heads, E});
    return Attending::make({torch::stable::narrow(of_heads, 1, 0, heads), caches.keys(layer),
                            caches.key_scales(layer), caches.values(layer),
                            caches.value_scales(layer), first, filled, caches.format,
                            how(layer).scale, how(layer).softcap});
  }
};

}  // namespace
