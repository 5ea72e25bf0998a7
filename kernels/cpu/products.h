// The ops that multiply and attend, for other ops that need what they make: whole, or as shares of
// threads that do several of them one after another.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "number.h"

// x (M, K) by a weight that cpu_pack_linear has packed, `rows` of them; by a plain weight (N, K).
torch::stable::Tensor linear(const torch::stable::Tensor& x, const torch::stable::Tensor& packed,
                             int64_t rows);
torch::stable::Tensor plain(const torch::stable::Tensor& x, const torch::stable::Tensor& weight);

// One row of x (K,) by a weight (N, K). Several threads do a share each, whoever they are; what they
// are given must not change meanwhile.
class Product {
 public:
  const int64_t rows, columns;
  virtual ~Product() = default;
  virtual void share(const void* x, void* y, int64_t member, int64_t members) const = 0;

  // A place that this share begins to read at; null from the last on. `bytes` are read there.
  const char* place(int64_t index, int64_t member, int64_t members, int64_t& bytes) const;

 protected:
  Product(int64_t rows, int64_t columns) : rows(rows), columns(columns) {}
  // Memory in units of which shares are cut, and how many of them there are.
  const char* memory = nullptr;
  int64_t unit_bytes = 0, units = 0;
};

std::unique_ptr<Product> packed_product(const torch::stable::Tensor& packed, Number x);
std::unique_ptr<Product> plain_product(const torch::stable::Tensor& weight, Number x);

constexpr int PLACES = 4;  // in memory, from which a share is read in turn

// The first of `count` units of the place `index` of a share; of PLACES, its end.
inline int64_t place_of(int64_t count, int64_t index) {
  return (count * index + PLACES - 1) / PLACES;
}

inline const char* Product::place(int64_t index, int64_t member, int64_t members,
                                  int64_t& bytes) const {
  if (index >= PLACES) return nullptr;
  const int64_t first = units * member / members, count = units * (member + 1) / members - first;
  const int64_t begin = place_of(count, index);
  bytes = (place_of(count, index + 1) - begin) * unit_bytes;
  return memory + (first + begin) * unit_bytes;
}

// See cpu_decode_attention in attention.py.
torch::stable::Tensor decode_attention(const torch::stable::Tensor& query,
                                       const torch::stable::Tensor& key_codes,
                                       const std::optional<torch::stable::Tensor>& key_scale,
                                       const torch::stable::Tensor& value_codes,
                                       const std::optional<torch::stable::Tensor>& value_scale,
                                       const torch::stable::Tensor& first,
                                       const torch::stable::Tensor& count,
                                       const std::string& format_name);

// The same, to be done by several threads that call `work`, or by one that is `alone`.
class Attending {
 public:
  Attending(const torch::stable::Tensor& query, const torch::stable::Tensor& key_codes,
            const std::optional<torch::stable::Tensor>& key_scale,
            const torch::stable::Tensor& value_codes,
            const std::optional<torch::stable::Tensor>& value_scale,
            const torch::stable::Tensor& first, const torch::stable::Tensor& count,
            const std::string& format_name);
  ~Attending();
  void work();
  bool alone() const;  // one thread is faster than others wake up
  const torch::stable::Tensor& out() const;

 private:
  struct State;
  std::unique_ptr<State> state;
};
