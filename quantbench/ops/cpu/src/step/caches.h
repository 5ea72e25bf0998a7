// The KV caches of all layers: what each format stores (ops/kv.py), and how a new token comes there. For
// step.h alone.
#pragma once

#include "step/rows.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "common/products.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

const char* data(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }
char* data(Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); }

// Tensors of caches: for keys and then for values of each layer (B or more, kv_heads, T, …), codes, and
// scales if the format has any.
class Caches {
 public:
  const std::string format;

  Caches(std::vector<Tensor>& tensors, const std::string& format, int64_t layers, const Tensor& x,
         int64_t sequences, int64_t kv_heads, int64_t head_dim)
      : format(format), tensors(tensors), storage(kv_storage(format)), B(sequences),
        head_dim(head_dim), each(storage.group ? 2 : 1) {
    STD_TORCH_CHECK(int64_t(tensors.size()) == 2 * each * layers, "there are ", tensors.size(),
                    " tensors of caches for ", layers, " layers");
    const int64_t scales = storage.scales(head_dim);
    for (size_t i = 0; i < tensors.size(); i += each) {
      const int64_t layer = i / each / 2;
      check(tensors[i], kv_heads, slots(layer), head_dim / storage.numbers,
            storage.codes.value_or(x.scalar_type()), storage.codes ? "its format's" : "x's");
      if (scales) check(tensors[i + 1], kv_heads, slots(layer), scales, x.scalar_type(), "scales of x's");
    }
  }

  int64_t slots(int64_t layer) const { return tensors[2 * each * layer].size(2); }
  Tensor keys(int64_t layer) const { return of_rows(tensors[2 * each * layer]); }
  Maybe key_scales(int64_t layer) const { return scales(2 * layer); }
  Tensor values(int64_t layer) const { return of_rows(tensors[each * (2 * layer + 1)]); }
  Maybe value_scales(int64_t layer) const { return scales(2 * layer + 1); }

  // A token's keys, from head `first_key` of y (all · head_dim) on, and the values behind them.
  void store(const Rows& rows, const char* y, int64_t first_key, int64_t layer, int64_t row, int64_t slot) {
    const int64_t head_bytes = head_dim * size_of(rows.type);
    for (int64_t side = 0; side < 2; ++side) {
      Tensor* stored = &tensors[each * (2 * layer + side)];
      const int64_t kv_heads = stored->size(1);
      for (int64_t k = 0; k < kv_heads; ++k)
        rows.encode[int(storage.format)](y + (first_key + side * kv_heads + k) * head_bytes, head_dim,
                               at(stored[0], row, k, slot),
                               each == 2 ? at(stored[1], row, k, slot) : nullptr);
    }
  }

 private:
  std::vector<Tensor>& tensors;
  const KvStorage& storage;
  const int64_t B, head_dim, each;  // sequences; each: tensors of keys, or of values

  void check(const Tensor& t, int64_t kv_heads, int64_t slots, int64_t width, ScalarType type,
             const char* whose) const {
    STD_TORCH_CHECK(t.dim() == 4 && t.size(0) >= B && t.size(1) == kv_heads && t.size(2) == slots &&
                        t.size(3) == width && (width == 1 || t.stride(3) == 1) &&
                        t.scalar_type() == type,
                    "a cache as ", format, " has to be (B, ", kv_heads, ", ", slots, ", ", width,
                    ") of ", whose, " dtype");
  }

  Maybe scales(int64_t side) const {
    return each == 2 ? Maybe(of_rows(tensors[each * side + 1])) : std::nullopt;
  }

  Tensor of_rows(const Tensor& t) const {
    return t.size(0) == B ? t : torch::stable::narrow(const_cast<Tensor&>(t), 0, 0, B);
  }

  static char* at(Tensor& t, int64_t row, int64_t head, int64_t slot) {
    return data(t) + (row * t.stride(0) + head * t.stride(1) + slot * t.stride(2)) * t.element_size();
  }
};

}  // namespace
