// quantbench::cpu_layers: all layers of a Llama, for the newest token of each row, over caches in x's
// dtype. cpu_before_attention and cpu_after_attention: one layer, for other caches. Between two
// products lie some microseconds of work, for which a compiled graph makes several calls and as many
// allocations, each as long as the work itself.

#include "block.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstring>
#include <optional>
#include <vector>

#include "isa.h"
#include "products.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

Rows rows_of(const Tensor& x) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half, "x has to be float32, bfloat16 or float16");
  const Number number = type == ScalarType::Float      ? Number::f32
                        : type == ScalarType::BFloat16 ? Number::bf16
                                                       : Number::f16;
#if defined(__x86_64__)
  if (isa() >= Isa::avx512vnni) return rows_avx512vnni(number);
  if (isa() >= Isa::avx2) return rows_avx2(number);
#endif
  return rows_portable(number);
}

const char* data(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }
char* data(Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); }
int64_t row_bytes(const Tensor& t) { return t.size(1) * t.element_size(); }

// A vector that every row meets: a norm's weight, or a bias.
const char* vector(const Tensor& t, const Tensor& x, int64_t n) {
  STD_TORCH_CHECK(t.scalar_type() == x.scalar_type() && t.is_contiguous() && t.numel() == n,
                  "a norm's weight or a bias has to be ", n, " numbers of x's dtype");
  return data(t);
}

void check_rows(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "x has to be (B, D), contiguous");
}

Tensor product(const Rows& rows, const Tensor& x, const Tensor& weight, const Maybe& bias,
               int64_t outputs) {
  Tensor y = weight.scalar_type() == ScalarType::Byte ? linear(x, weight, outputs) : plain(x, weight);
  STD_TORCH_CHECK(y.size(1) == outputs, "the weight has ", y.size(1), " rows, not ", outputs);
  if (!bias) return y;
  const char* b = vector(*bias, x, outputs);
  for (int64_t i = 0; i < y.size(0); ++i) {
    char* row = data(y) + i * row_bytes(y);
    rows.add(row, b, outputs, row);
  }
  return y;
}

Tensor normed(const Rows& rows, const Tensor& x, const Tensor& weight, double epsilon) {
  Tensor y = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  const char* w = vector(weight, x, x.size(1));
  for (int64_t i = 0; i < x.size(0); ++i)
    rows.norm(data(x) + i * row_bytes(x), w, float(epsilon), x.size(1), data(y) + i * row_bytes(y));
  return y;
}

Tensor before_attention(const Tensor& x, const Tensor& norm, double epsilon, const Tensor& weight,
                        const Maybe& bias, const Maybe& query_norm, const Maybe& key_norm,
                        const Tensor& cos, const Tensor& sin, int64_t heads, int64_t kv_heads) {
  check_rows(x);
  for (const Tensor* t : {&cos, &sin})
    STD_TORCH_CHECK(t->is_contiguous() && t->scalar_type() == ScalarType::Float,
                    "cosines and sines have to be float32, contiguous");
  const int64_t half = cos.numel(), head_dim = 2 * half, all = heads + 2 * kv_heads;
  STD_TORCH_CHECK(sin.numel() == half, "there are ", half, " cosines and ", sin.numel(), " sines");
  const Rows rows = rows_of(x);
  Tensor y = product(rows, normed(rows, x, norm, epsilon), weight, bias, all * head_dim);
  const char* of_query = query_norm ? vector(*query_norm, x, head_dim) : nullptr;
  const char* of_key = key_norm ? vector(*key_norm, x, head_dim) : nullptr;
  const auto* c = static_cast<const float*>(cos.const_data_ptr());
  const auto* s = static_cast<const float*>(sin.const_data_ptr());
  const int64_t head_bytes = head_dim * y.element_size();
  for (int64_t b = 0; b < y.size(0); ++b)
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      char* head = data(y) + (b * all + h) * head_bytes;
      if (const char* w = h < heads ? of_query : of_key)
        rows.norm(head, w, float(epsilon), head_dim, head);
      rows.rotate(head, c, s, half);
    }
  return y;
}

Tensor after_attention(const Tensor& y, const Tensor& x, const Tensor& wo, const Maybe& wo_bias,
                       const Tensor& norm, double epsilon, const Tensor& w13,
                       const Maybe& w13_bias, const Tensor& w2, const Maybe& w2_bias,
                       int64_t width) {
  check_rows(x);
  const Rows rows = rows_of(x);
  const int64_t D = x.size(1), B = x.size(0);
  auto add = [&](Tensor& to, const Tensor& other) {
    STD_TORCH_CHECK(other.scalar_type() == to.scalar_type() && other.numel() == B * D,
                    "a product and x differ in dtype or size");
    rows.add(data(to), data(other), B * D, data(to));
  };
  Tensor middle = product(rows, y, wo, wo_bias, D);
  add(middle, x);
  Tensor both = product(rows, normed(rows, middle, norm, epsilon), w13, w13_bias, 2 * width);
  Tensor gated = torch::stable::new_empty(x, {B, width});
  for (int64_t b = 0; b < B; ++b) {
    const char* gate = data(both) + b * row_bytes(both);
    rows.gate(gate, gate + row_bytes(gated), width, data(gated) + b * row_bytes(gated));
  }
  Tensor result = product(rows, gated, w2, w2_bias, D);
  add(result, middle);
  return result;
}

// What a layer's tensors are, in the order in which they come. Those that a model has not are empty.
enum Part { NORM, WQKV, WQKV_BIAS, QUERY_NORM, KEY_NORM, WO, WO_BIAS, FFN_NORM, W13, W13_BIAS, W2,
            W2_BIAS, PARTS };

Maybe maybe(const Tensor& t) { return t.numel() ? Maybe(t) : std::nullopt; }

// kv_heads heads of every row, from `first_head` on, of y (B, all · E), to slot `slot` of a cache (B, K, T, E).
void store(const Tensor& y, int64_t first_head, Tensor& cache, int64_t slot) {
  const int64_t bytes = cache.size(3) * cache.element_size(), size = cache.element_size();
  for (int64_t b = 0; b < y.size(0); ++b)
    for (int64_t k = 0; k < cache.size(1); ++k)
      std::memcpy(data(cache) + (b * cache.stride(0) + k * cache.stride(1) + slot * cache.stride(2)) * size,
                  data(y) + b * row_bytes(y) + (first_head + k) * bytes, bytes);
}

Tensor layers(const Tensor& x, std::vector<Tensor> parts, std::vector<Tensor> caches,
              const Tensor& cos, const Tensor& sin, const Tensor& position, bool wraps,
              double epsilon, int64_t heads, int64_t kv_heads, int64_t width) {
  const int64_t count = caches.size() / 2, B = x.size(0), E = 2 * cos.numel();
  STD_TORCH_CHECK(int64_t(parts.size()) == count * PARTS, "there are ", parts.size(),
                  " tensors for ", count, " layers");
  STD_TORCH_CHECK(position.numel() == 1 && position.scalar_type() == ScalarType::Long,
                  "the position has to be one int64");
  const int64_t end = *static_cast<const int64_t*>(position.const_data_ptr()) + 1;
  Tensor first = torch::stable::new_empty(x, {B}, ScalarType::Long);
  Tensor filled = torch::stable::new_empty(x, {B}, ScalarType::Long);
  Tensor result = x;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor* part = parts.data() + i * PARTS;
    Tensor &keys = caches[2 * i], &values = caches[2 * i + 1];
    for (const Tensor* cache : {&keys, &values})
      STD_TORCH_CHECK(cache->dim() == 4 && cache->size(0) >= B && cache->size(1) == kv_heads &&
                          cache->size(3) == E && cache->stride(3) == 1 &&
                          cache->scalar_type() == x.scalar_type(),
                      "a cache has to be (B, ", kv_heads, ", T, ", E, ") of x's dtype");
    const int64_t slots = keys.size(2), seen = end < slots ? end : slots;
    STD_TORCH_CHECK(end > 0 && values.size(2) == slots && (wraps || end <= slots),
                    "position ", end - 1, " is not in a cache of ", slots);
    for (int64_t b = 0; b < B; ++b) {
      static_cast<int64_t*>(first.mutable_data_ptr())[b] = (end - seen) % slots;
      static_cast<int64_t*>(filled.mutable_data_ptr())[b] = seen;
    }
    Tensor qkv = before_attention(result, part[NORM], epsilon, part[WQKV], maybe(part[WQKV_BIAS]),
                                  maybe(part[QUERY_NORM]), maybe(part[KEY_NORM]), cos, sin,
                                  heads, kv_heads);
    store(qkv, heads, keys, (end - 1) % slots);
    store(qkv, heads + kv_heads, values, (end - 1) % slots);
    Tensor of_heads = torch::stable::view(qkv, {B, heads + 2 * kv_heads, E});
    const Tensor y = decode_attention(torch::stable::narrow(of_heads, 1, 0, heads),
                                      torch::stable::narrow(keys, 0, 0, B), std::nullopt,
                                      torch::stable::narrow(values, 0, 0, B), std::nullopt, first,
                                      filled, "dense");
    result = after_attention(torch::stable::view(y, {B, heads * E}), result, part[WO],
                             maybe(part[WO_BIAS]), part[FFN_NORM], epsilon, part[W13],
                             maybe(part[W13_BIAS]), part[W2], maybe(part[W2_BIAS]), width);
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_layers", TORCH_BOX(&layers));
  library.impl("cpu_before_attention", TORCH_BOX(&before_attention));
  library.impl("cpu_after_attention", TORCH_BOX(&after_attention));
}
