// The ops that multiply and attend, for other ops that need what they make: whole, or as shares of
// threads that do several of them one after another.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "common/limits.h"
#include "common/number.h"
#include "common/streams.h"

// What x is made of; an error for other types.
inline Number number_of(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half, "x has to be float32, bfloat16 or float16");
  return type == ScalarType::Float      ? Number::f32
         : type == ScalarType::BFloat16 ? Number::bf16
                                        : Number::f16;
}

// x (M, K) by a weight that cpu_pack_linear has packed, `rows` of them; by a plain weight (N, K).
torch::stable::Tensor linear(const torch::stable::Tensor& x, const torch::stable::Tensor& packed,
                             int64_t rows);
torch::stable::Tensor plain(const torch::stable::Tensor& x, const torch::stable::Tensor& weight);

// One row of x (K,) by a weight (N, K), once, shared by several threads. Half of the weight is cut
// evenly: a member knows its part before and can prefetch it. The other half is handed out in pieces
// as members ask for them, because a core that something else interrupts would otherwise keep all
// the others waiting.
class Product {
 public:
  const int64_t rows, columns;
  virtual ~Product() = default;
  virtual void share(const void* x, void* y, int64_t member, int64_t members) = 0;

  void by_all_threads(const void* x, void* y) {
    const int64_t members = torch::stable::get_num_threads();
    torch::stable::parallel_for(0, members, 1, [&](int64_t first, int64_t last) {
      for (int64_t member = first; member < last; ++member) share(x, y, member, members);
    });
  }

  // A member's part of the first half is read as Streams::COUNT streams: where the one of this index
  // begins, and its bytes.
  const char* stream(int index, int64_t member, int64_t members, int64_t& bytes) const;

 protected:
  Product(int64_t rows, int64_t columns) : rows(rows), columns(columns) {}
  // The weight's memory, in units that are multiplied whole.
  const char* memory = nullptr;
  int64_t unit_bytes = 1, units = 0;

  // Calls `some` with ranges of units.
  template <typename F>
  void ranges(int64_t member, int64_t members, F some) {
    const int64_t half = members > 1 ? units / 2 : units;
    some(half * member / members, half * (member + 1) / members);
    const int64_t least = (limits.piece_bytes + unit_bytes - 1) / unit_bytes;
    for (int64_t first = half + taken.count.load(std::memory_order_relaxed); first < units;
         first = half + taken.count.load(std::memory_order_relaxed)) {
      const int64_t left = units - first, fair = left / (2 * members);
      const int64_t count = left < least ? left : fair < least ? least : fair;
      int64_t expected = first - half;
      if (taken.count.compare_exchange_strong(expected, expected + count)) some(first, first + count);
    }
  }

 private:
  // Written by all members, so on lines (which come in pairs) that hold nothing else.
  struct alignas(128) OwnLines {
    std::atomic<int64_t> count{0};
  } taken;  // units of the second half
};

inline const char* Product::stream(int index, int64_t member, int64_t members,
                                   int64_t& bytes) const {
  const int64_t half = members > 1 ? units / 2 : units;
  const Streams streams(half * member / members, half * (member + 1) / members);
  bytes = (streams.begin[index + 1] - streams.begin[index]) * unit_bytes;
  return memory + streams.begin[index] * unit_bytes;
}

std::unique_ptr<Product> packed_product(const torch::stable::Tensor& packed, Number x);
std::unique_ptr<Product> plain_product(const torch::stable::Tensor& weight, Number x);

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
