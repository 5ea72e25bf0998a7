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
#include "common/scratch.h"
#include "common/streams.h"

// What x is made of; an error for other types.
inline Number number_of(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half, "the dtype has to be float32, bfloat16 or float16");
  return type == ScalarType::Float      ? Number::f32
         : type == ScalarType::BFloat16 ? Number::bf16
                                        : Number::f16;
}

// x (M, K) by a weight that cpu_pack_linear has packed, `rows` of them; by a plain weight (N, K). as_one:
// each row of x gets the bits that it gets alone, whichever loop is faster for M rows.
torch::stable::Tensor linear(const torch::stable::Tensor& x, const torch::stable::Tensor& packed,
                             int64_t rows, bool as_one);
torch::stable::Tensor plain(const torch::stable::Tensor& x, const torch::stable::Tensor& weight,
                            bool as_one);

// How several threads share units of work. Half of them is cut evenly: a member knows its part before
// and can prefetch it. The other half is handed out in pieces as members ask for them, because a core
// that something else interrupts would otherwise keep all the others waiting.
class Sharing {
 public:
  struct Range {
    int64_t first, last;
  };

  // A member's part of the half that is cut evenly.
  static Range own(int64_t units, int64_t member, int64_t members) {
    const int64_t half = evenly(units, members);
    return {half * member / members, half * (member + 1) / members};
  }

  // Calls `some` with ranges of `units`, each of `unit_bytes`.
  template <typename F>
  void share(int64_t units, int64_t unit_bytes, int64_t member, int64_t members, F some) {
    const Range mine = own(units, member, members);
    some(mine.first, mine.last);
    const int64_t half = evenly(units, members);
    const int64_t least = (limits.piece_bytes + unit_bytes - 1) / unit_bytes;
    for (int64_t first = half + taken.load(std::memory_order_relaxed); first < units;
         first = half + taken.load(std::memory_order_relaxed)) {
      const int64_t left = units - first, fair = left / (2 * members);
      const int64_t count = left < least ? left : fair < least ? least : fair;
      int64_t expected = first - half;
      if (taken.compare_exchange_strong(expected, expected + count)) some(first, first + count);
    }
  }

 private:
  // Units of the second half. Written by all members, so on lines (which come in pairs) that hold nothing else.
  alignas(128) std::atomic<int64_t> taken{0};

  static int64_t evenly(int64_t units, int64_t members) { return members > 1 ? units / 2 : units; }
};

// A row of x as an inner loop reads it; the weight's format decides which of these there are.
struct PreparedRow {
  float *floats = nullptr, *scales = nullptr, *token_scales = nullptr;
  int32_t *quads = nullptr, *sums = nullptr;
};

// One row of x (K,) by a weight (N, K), which is read once: by one thread, or shared by several.
class Product {
 public:
  const int64_t rows, columns;
  virtual ~Product() = default;

  // x in `scratch`, until that is used again.
  virtual PreparedRow prepared(const void* x, Scratch& scratch) const = 0;
  // Whether a row that was prepared for `other` is the same for this product.
  virtual bool prepares_like(const Product& other) const = 0;
  // What some of the weight's units give: some elements of y (N,).
  virtual void multiply(const PreparedRow& x, void* y, int64_t first, int64_t last) const = 0;

  // A member's share of the whole product, which can be shared once.
  void share(const void* x, void* y, int64_t member, int64_t members) {
    thread_local Scratch scratch;
    const PreparedRow row = prepared(x, scratch);
    handed_out.share(units, unit_bytes, member, members, [&](int64_t first, int64_t last) {
      multiply(row, y, first, last);
    });
  }

  void by_all_threads(const void* x, void* y) {
    const int64_t members = torch::stable::get_num_threads();
    torch::stable::parallel_for(0, members, 1, [&](int64_t first, int64_t last) {
      for (int64_t member = first; member < last; ++member) share(x, y, member, members);
    });
  }

  // `multiply` reads a range of units as Streams::COUNT streams: where the stream of this index starts,
  // and its bytes.
  const char* stream(int index, Sharing::Range range, int64_t& bytes) const {
    const Streams streams(range.first, range.last);
    bytes = (streams.begin[index + 1] - streams.begin[index]) * unit_bytes;
    return memory + streams.begin[index] * unit_bytes;
  }

  // The weight's memory, in units that are multiplied whole.
  const char* memory = nullptr;
  int64_t unit_bytes = 1, units = 0;

 protected:
  Product(int64_t rows, int64_t columns) : rows(rows), columns(columns) {}

 private:
  Sharing handed_out;
};

std::unique_ptr<Product> packed_product(const torch::stable::Tensor& packed, Number x);
std::unique_ptr<Product> plain_product(const torch::stable::Tensor& weight, Number x);
// The same from a pointer: to `bytes` of a packed weight, or to a plain weight's contiguous rows.
std::unique_ptr<Product> packed_product(const void* packed, int64_t bytes, Number x);
std::unique_ptr<Product> plain_product(const void* weight, int64_t rows, int64_t columns, Number type);

// What cpu_decode_attention takes: see attention.py.
struct AttentionInputs {
  const torch::stable::Tensor &query, &key_codes;
  const std::optional<torch::stable::Tensor>& key_scale;
  const torch::stable::Tensor& value_codes;
  const std::optional<torch::stable::Tensor>& value_scale;
  const torch::stable::Tensor &first, &count;
  const std::string& format;
  double scale, softcap;
};

// It, to be done by several threads that call `work`, or by one that is `alone`.
class Attending {
 public:
  static std::unique_ptr<Attending> make(const AttentionInputs&);
  virtual ~Attending() = default;
  virtual void work() = 0;
  virtual bool alone() const = 0;  // one thread is faster than others wake up
  virtual const torch::stable::Tensor& result() const = 0;
};
