// What ops multiply and attend with: whole, or as shares of threads that do several things one after
// another.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "common/number.h"
#include "common/scratch.h"
#include "common/streams.h"

// From which sizes on work is shared among threads.
inline struct Limits {
  int64_t alone_bytes = 64 << 10;    // up to this, one thread reads faster than others wake up
  int64_t alone_products = 1 << 20;  // up to this, one thread multiplies faster than others wake up
  int64_t piece_bytes = 64 << 10;    // the least that a thread takes of what is not cut evenly
} limits;

// What x is made of; an error for other types.
inline Number number_of(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half, "the dtype has to be float32, bfloat16 or float16");
  return type == ScalarType::Float      ? Number::f32
         : type == ScalarType::BFloat16 ? Number::bf16
                                        : Number::f16;
}

// What a format of KV caches stores of a head (ops/kv.py).
struct KvStorage {
  const char* name;
  KvFormat format;                                       // f32 for all dense caches
  std::optional<torch::headeronly::ScalarType> codes;  // their type; none: that of the numbers
  int64_t numbers;                                       // in an element of the codes
  int64_t group;                                         // numbers that share a scale; 0: there are no scales

  int64_t scales(int64_t head_dim) const { return group ? (head_dim + group - 1) / group : 0; }
};

inline const KvStorage& kv_storage(const std::string& name) {
  using torch::headeronly::ScalarType;
  constexpr int64_t WHOLE_HEAD = 1 << 20;  // more numbers than a head has
  static constexpr KvStorage STORAGES[] = {
      {"dense", KvFormat::f32, std::nullopt, 1, 0},
      {"int8", KvFormat::int8, ScalarType::Char, 1, WHOLE_HEAD},
      {"fp8", KvFormat::fp8, ScalarType::Float8_e4m3fn, 1, WHOLE_HEAD},
      {"int4", KvFormat::int4, ScalarType::Byte, 2, INT4_GROUP},
  };
  for (const KvStorage& storage : STORAGES)
    if (name == storage.name) return storage;
  STD_TORCH_CHECK(false, "the C++ code stores no keys and values as ", name);
}

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

  // For the next units, once all members have had their parts of the last ones.
  void restart() { taken.store(0, std::memory_order_relaxed); }

  // Calls `some` with ranges of `units`, each of `unit_bytes`.
  template <typename F>
  void share(int64_t units, int64_t unit_bytes, int64_t member, int64_t members, F some) {
    const Range mine = own(units, member, members);
    some(mine.first, mine.last);
    const int64_t half = evenly(units, members);
    // A small weight's pieces are smaller, or there would be none for some members.
    const int64_t piece = std::min(limits.piece_bytes, units * unit_bytes / (4 * members));
    const int64_t least = std::max<int64_t>(1, (piece + unit_bytes - 1) / unit_bytes);
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

struct X {
  const void* data;
  int64_t row, column;  // numbers from a row to the next, and from a column
};

// x (tokens, columns) by a weight (rows, columns), which is read once: by one thread, or shared by several.
// as_one: each token gets the bits that it gets alone, even if another loop is faster for all of them.
class Product {
 public:
  const int64_t rows, columns, tokens;
  virtual ~Product() = default;

  // What x is before it is multiplied: tiles of `tile` tokens, x_bytes in all, from a line on.
  int64_t tile = 1, x_bytes = 0;
  int64_t tiles() const { return (tokens + tile - 1) / tile; }
  // Makes some tiles; several threads may, each others.
  virtual void prepare(const X& x, char* to, int64_t first, int64_t last) const = 0;
  // Whether what was prepared for `other` is the same for this product.
  virtual bool prepares_like(const Product& other) const = 0;
  // What some of the weight's units give: some columns of y (tokens, rows).
  virtual void multiply(char* x, void* y, int64_t first, int64_t last) const = 0;

  // A member's share of the whole product, which can be shared once. x is prepared.
  void share(char* x, void* y, int64_t member, int64_t members) {
    handed_out.share(units, unit_bytes, member, members, [&](int64_t first, int64_t last) {
      multiply(x, y, first, last);
    });
  }

  void by_all_threads(const X& x, void* y) {
    using torch::stable::parallel_for;
    thread_local Scratch scratch;
    char* prepared = scratch.reserve(x_bytes);
    const int64_t numbers = std::max<int64_t>(1, columns * tile);
    parallel_for(0, tiles(), std::max<int64_t>(1, limits.alone_bytes / 4 / numbers),
                 [&](int64_t first, int64_t last) { prepare(x, prepared, first, last); });
    // Loops of many tokens go through all of x for each piece of the weight: a piece for each thread.
    if (tokens > 1 || alone)
      return parallel_for(0, units, alone ? units : 1, [&](int64_t first, int64_t last) {
        multiply(prepared, y, first, last);
      });
    const int64_t members = torch::stable::get_num_threads();
    parallel_for(0, members, 1, [&](int64_t first, int64_t last) {
      for (int64_t member = first; member < last; ++member) share(prepared, y, member, members);
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
  bool alone = false;  // one thread is faster than others wake up

 protected:
  Product(int64_t rows, int64_t columns, int64_t tokens) : rows(rows), columns(columns), tokens(tokens) {}

 private:
  Sharing handed_out;
};

std::unique_ptr<Product> packed_product(const torch::stable::Tensor& packed, Number x, int64_t tokens,
                                        bool as_one);
std::unique_ptr<Product> plain_product(const torch::stable::Tensor& weight, Number x, int64_t tokens,
                                       bool as_one);
// The same from a pointer: to `bytes` of a packed weight, or to a plain weight's contiguous rows.
std::unique_ptr<Product> packed_product(const void* packed, int64_t bytes, Number x, int64_t tokens,
                                        bool as_one);
std::unique_ptr<Product> plain_product(const void* weight, int64_t rows, int64_t columns, Number type,
                                       int64_t tokens, bool as_one);

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

// It, to be done by several threads that call `work`, or by one that is `alone`, once all query heads, (B · H),
// have been read.
class Attending {
 public:
  static std::unique_ptr<Attending> make(const AttentionInputs&);
  virtual ~Attending() = default;
  virtual void read(int64_t first, int64_t last) = 0;
  virtual void work() = 0;
  virtual bool alone() const = 0;  // one thread is faster than others wake up
  virtual const torch::stable::Tensor& result() const = 0;
};
