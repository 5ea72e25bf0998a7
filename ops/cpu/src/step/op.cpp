// quantbench::cpu_decode: a whole Llama, from the newest token of each row to logits, over caches in
// its dtype. cpu_layers: its layers alone. cpu_before_attention and cpu_after_attention: one layer,
// for other caches. Between two products lie some microseconds of work; a compiled graph makes several
// calls and allocations for it, each of which takes as long as the work itself.

#include "step/rows.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "common/isa.h"
#include "common/products.h"
#include "common/team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

Rows rows_of(const Tensor& x) {
  const Number number = number_of(x.scalar_type());
  if (isa() >= Isa::avx512vnni) return rows_avx512vnni(number);
  return isa() >= Isa::avx2 ? rows_avx2(number) : rows_portable(number);
}

const char* data(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }
char* data(Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); }
int64_t row_bytes(const Tensor& t) { return t.size(1) * t.element_size(); }

// A norm's weight or a bias, which applies to every row of x.
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

// Norms of heads, where there are any, and rotation, of queries and keys in place.
void turn_heads(const Rows& rows, Tensor& y, const char* query_norm, const char* key_norm,
                double epsilon, const Tensor& cos, const Tensor& sin, int64_t heads,
                int64_t kv_heads) {
  const int64_t half = cos.numel(), head_bytes = 2 * half * y.element_size();
  const auto* c = static_cast<const float*>(cos.const_data_ptr());
  const auto* s = static_cast<const float*>(sin.const_data_ptr());
  for (int64_t b = 0; b < y.size(0); ++b)
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      char* head = data(y) + b * row_bytes(y) + h * head_bytes;
      if (const char* w = h < heads ? query_norm : key_norm)
        rows.norm(head, w, float(epsilon), 2 * half, head);
      rows.rotate(head, c, s, half);
    }
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
  turn_heads(rows, y, query_norm ? vector(*query_norm, x, head_dim) : nullptr,
             key_norm ? vector(*key_norm, x, head_dim) : nullptr, epsilon, cos, sin, heads, kv_heads);
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

void check_cache(const Tensor& cache, const Tensor& x, int64_t kv_heads, int64_t E) {
  STD_TORCH_CHECK(cache.dim() == 4 && cache.size(0) >= x.size(0) && cache.size(1) == kv_heads &&
                      cache.size(3) == E && cache.stride(3) == 1 &&
                      cache.scalar_type() == x.scalar_type(),
                  "a cache has to be (B, ", kv_heads, ", T, ", E, ") of x's dtype");
}

// What follows the layers where logits are wanted.
struct Ending {
  const Tensor &norm, &weight;
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
  std::vector<Tensor>& caches;
  const Tensor &x, &cos, &sin;
  double epsilon;
  int64_t heads, kv_heads, width;
  const Ending* ending;
  int64_t count, B, E, end;
  Tensor first, filled;  // (B,) as decode attention wants them

  Step(const std::vector<Tensor>& parts, std::vector<Tensor>& caches, const Tensor& x,
       const Tensor& cos, const Tensor& sin, const Tensor& position, bool wraps, double epsilon,
       int64_t heads, int64_t kv_heads, int64_t width, const Ending* ending = nullptr)
      : parts(parts), caches(caches), x(x), cos(cos), sin(sin), epsilon(epsilon), heads(heads),
        kv_heads(kv_heads), width(width), ending(ending), count(caches.size() / 2), B(x.size(0)),
        E(2 * cos.numel()), first(torch::stable::new_empty(x, {B}, ScalarType::Long)),
        filled(torch::stable::new_empty(x, {B}, ScalarType::Long)) {
    check_rows(x);
    STD_TORCH_CHECK(int64_t(parts.size()) == count * PARTS, "there are ", parts.size(),
                    " tensors for ", count, " layers");
    end = one_position(position) + 1;
    const int64_t slots = count ? caches[0].size(2) : 1;
    for (const Tensor& cache : caches) {
      check_cache(cache, x, kv_heads, E);
      STD_TORCH_CHECK(end > 0 && cache.size(2) == slots && (wraps || end <= slots), "position ",
                      end - 1, " is not in a cache of ", cache.size(2));
    }
    const int64_t seen = end < slots ? end : slots;
    for (int64_t b = 0; b < B; ++b) {
      static_cast<int64_t*>(first.mutable_data_ptr())[b] = (end - seen) % slots;
      static_cast<int64_t*>(filled.mutable_data_ptr())[b] = seen;
    }
  }

  const Tensor& part(int64_t layer, Part part) const { return parts[layer * PARTS + part]; }

  // Stores a layer's new keys and values; attention over all of them.
  std::unique_ptr<Attending> attending(int64_t layer, Tensor& qkv) {
    Tensor &keys = caches[2 * layer], &values = caches[2 * layer + 1];
    const int64_t slot = (end - 1) % keys.size(2);
    store(qkv, heads, keys, slot);
    store(qkv, heads + kv_heads, values, slot);
    Tensor of_heads = torch::stable::view(qkv, {B, heads + 2 * kv_heads, E});
    return std::unique_ptr<Attending>(new Attending(
        torch::stable::narrow(of_heads, 1, 0, heads), torch::stable::narrow(keys, 0, 0, B),
        std::nullopt, torch::stable::narrow(values, 0, 0, B), std::nullopt, first, filled, "dense"));
  }
};

Tensor one_op_after_another(Step& step) {
  Tensor x = step.x;
  for (int64_t i = 0; i < step.count; ++i) {
    auto part = [&](Part p) -> const Tensor& { return step.part(i, p); };
    Tensor qkv = before_attention(x, part(NORM), step.epsilon, part(WQKV), maybe(part(WQKV_BIAS)),
                                  maybe(part(QUERY_NORM)), maybe(part(KEY_NORM)), step.cos,
                                  step.sin, step.heads, step.kv_heads);
    auto attending = step.attending(i, qkv);
    if (attending->alone()) attending->work();
    else
      torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1,
                                  [&](int64_t, int64_t) { attending->work(); });
    Tensor y = attending->out();
    x = after_attention(torch::stable::view(y, {step.B, step.heads * step.E}), x, part(WO),
                        maybe(part(WO_BIAS)), part(FFN_NORM), step.epsilon, part(W13),
                        maybe(part(W13_BIAS)), part(W2), maybe(part(W2_BIAS)), step.width);
  }
  if (!step.ending) return x;
  const Rows rows = rows_of(x);
  return product(rows, normed(rows, x, step.ending->norm, step.epsilon), step.ending->weight,
                 std::nullopt, step.ending->outputs);
}

// For tests: where an allocation fails, once.
struct TestFailure {
  std::atomic<int64_t> member{-1}, layer{0};
  void check(int64_t this_member, int64_t this_layer) {
    if (member.load(std::memory_order_relaxed) != this_member || layer != this_layer) return;
    member = -1;
    throw std::bad_alloc();
  }
} test_failure;

// For one row. Products are shared among the members of a team; what lies between two products
// takes less time than it would to share it, and each member does it for itself.
class ByTeam {
 public:
  explicit ByTeam(Step& step)
      : step(step), rows(rows_of(step.x)), size(step.x.element_size()), D(step.x.size(1)),
        qkv(torch::stable::new_empty(step.x, {1, (step.heads + 2 * step.kv_heads) * step.E})),
        result(torch::stable::new_empty(step.x, {1, step.ending ? step.ending->outputs : D})),
        of_wo(D * size), of_w2(D * size),
        of_w13(2 * step.width * size) {
    for (int64_t i = 0; i < step.count; ++i) {
      const std::pair<Part, int64_t> weights[] = {
          {WQKV, D}, {WO, step.heads * step.E}, {W13, D}, {W2, step.width}};
      const int64_t outputs[] = {qkv.size(1), D, 2 * step.width, D};
      for (int k = 0; k < 4; ++k) {
        const auto [part, columns] = weights[k];
        add(step.part(i, part), columns, outputs[k]);
        optional(i, Part(part + 1), outputs[k]);  // its bias
      }
      for (Part norm : {NORM, FFN_NORM}) vector(step.part(i, norm), step.x, D);
      for (Part norm : {QUERY_NORM, KEY_NORM}) optional(i, norm, step.E);
    }
    if (const Ending* ending = step.ending) {
      vector(ending->norm, step.x, D);
      add(ending->weight, D, ending->outputs);
    }
  }

  Tensor run() {
    Team team;
    try {
      team.run([&](const Team::Member& member) { all_layers(member); });
    } catch (const std::bad_alloc&) {
      STD_TORCH_CHECK(false, "a thread of the decoding step could not allocate memory");
    }
    return result;
  }

 private:
  Step& step;
  const Rows rows;
  const int64_t size, D;
  Tensor qkv, result;
  std::vector<char> of_wo, of_w2, of_w13;  // products, written by all, read by all
  std::vector<std::unique_ptr<Product>> products;
  std::unique_ptr<Attending> attending;

  void add(const Tensor& weight, int64_t columns, int64_t outputs) {
    const bool packed = weight.scalar_type() == ScalarType::Byte;
    products.push_back(packed ? packed_product(weight, rows.type) : plain_product(weight, rows.type));
    const Product& product = *products.back();
    STD_TORCH_CHECK(product.rows == outputs && product.columns == columns, "a weight is (",
                    product.rows, ", ", product.columns, "), not (", outputs, ", ", columns, ")");
  }

  // Null for what the model lacks.
  const char* optional(int64_t layer, Part part, int64_t n) const {
    const Tensor& t = step.part(layer, part);
    return t.numel() ? vector(t, step.x, n) : nullptr;
  }

  void all_layers(const Team::Member& member) {
    std::vector<char> memory((3 * D + step.width) * size);  // this member's own
    char *x = memory.data(), *middle = x + D * size, *normed = middle + D * size;
    char* gated = normed + D * size;
    std::memcpy(x, data(step.x), D * size);
    for (int64_t i = 0; i < step.count; ++i) {
      test_failure.check(member.index, i);
      norm(i, NORM, x, normed);
      multiply(member, 4 * i, normed, data(qkv));
      if (member.index == 0) begin_attention(i);
      wait(member, 4 * i + 1);
      if (!attending->alone()) {
        attending->work();
        wait(member, 4 * i + 1);
      }
      multiply(member, 4 * i + 1, data(attending->out()), of_wo.data());
      sum(i, WO_BIAS, of_wo.data(), x, middle);
      norm(i, FFN_NORM, middle, normed);
      multiply(member, 4 * i + 2, normed, of_w13.data());
      gate(i, gated);
      multiply(member, 4 * i + 3, gated, of_w2.data());
      sum(i, W2_BIAS, of_w2.data(), middle, x);
    }
    if (step.ending) {
      rows.norm(x, data(step.ending->norm), float(step.epsilon), D, normed);
      multiply(member, 4 * step.count, normed, data(result));
    } else if (member.index == 0) {
      std::memcpy(data(result), x, D * size);
    }
  }

  void norm(int64_t layer, Part part, const char* from, char* to) const {
    rows.norm(from, data(step.part(layer, part)), float(step.epsilon), D, to);
  }

  // to = product + bias + other
  void sum(int64_t layer, Part bias, const char* product, const char* other, char* to) const {
    const char* from = product;
    if (const char* b = optional(layer, bias, D)) {
      rows.add(product, b, D, to);  // rounded, as a linear layer's result is
      from = to;
    }
    rows.add(from, other, D, to);
  }

  void gate(int64_t layer, char* to) const {
    const char *both = of_w13.data(), *up = both + step.width * size;
    std::vector<char> biased;
    if (const char* bias = optional(layer, W13_BIAS, 2 * step.width)) {
      biased.resize(of_w13.size());
      rows.add(both, bias, 2 * step.width, biased.data());
      both = biased.data(), up = both + step.width * size;
    }
    rows.gate(both, up, step.width, to);
  }

  // What one member does for all: it is too little to share.
  void begin_attention(int64_t layer) {
    if (const char* bias = optional(layer, WQKV_BIAS, qkv.size(1)))
      rows.add(data(qkv), bias, qkv.size(1), data(qkv));
    turn_heads(rows, qkv, optional(layer, QUERY_NORM, step.E), optional(layer, KEY_NORM, step.E),
               step.epsilon, step.cos, step.sin, step.heads, step.kv_heads);
    attending = step.attending(layer, qkv);
    if (attending->alone()) attending->work();
  }

  void multiply(const Team::Member& member, int64_t index, const char* x, char* to) {
    products[index]->share(x, to, member.index, member.count);
    wait(member, index + 1);
  }

  // Until all are here; meanwhile what this member will read first of product `next` comes nearer.
  void wait(const Team::Member& member, int64_t next) const {
    constexpr int64_t NEAR = 32 << 10;  // bytes of each stream: a fraction of a second-level cache
    int64_t at = 0, bytes[Streams::COUNT];
    const char* streams[Streams::COUNT];
    if (next < int64_t(products.size()))
      for (int i = 0; i < Streams::COUNT; ++i)
        streams[i] = products[next]->stream(i, member.index, member.count, bytes[i]);
    member.meet([&] {
      if (next >= int64_t(products.size())) return false;
      for (int i = 0; i < Streams::COUNT; ++i)
        if (at < bytes[i]) __builtin_prefetch(streams[i] + at, 0, 2);
      return (at += 64) < NEAR;
    });
  }
};

Tensor run(Step& step) {
  if (step.B == 1 && step.count) return ByTeam(step).run();
  return one_op_after_another(step);
}

Tensor layers(const Tensor& x, std::vector<Tensor> parts, std::vector<Tensor> caches,
              const Tensor& cos, const Tensor& sin, const Tensor& position, bool wraps,
              double epsilon, int64_t heads, int64_t kv_heads, int64_t width) {
  Step step(parts, caches, x, cos, sin, position, wraps, epsilon, heads, kv_heads, width);
  return run(step);
}

// The rows of a table that tokens (B, 1) name.
Tensor embedded(const Tensor& tokens, const Tensor& table) {
  STD_TORCH_CHECK(tokens.scalar_type() == ScalarType::Long && tokens.dim() == 2 && tokens.size(1) == 1,
                  "tokens have to be (B, 1), int64");
  STD_TORCH_CHECK(table.dim() == 2 && table.is_contiguous(), "the table has to be (V, D), contiguous");
  Tensor x = torch::stable::new_empty(table, {tokens.size(0), table.size(1)});
  for (int64_t b = 0; b < tokens.size(0); ++b) {
    const int64_t token = static_cast<const int64_t*>(tokens.const_data_ptr())[b * tokens.stride(0)];
    STD_TORCH_CHECK(token >= 0 && token < table.size(0), "token ", token, " is not in a table of ",
                    table.size(0));
    std::memcpy(data(x) + b * row_bytes(x), data(table) + token * row_bytes(x), row_bytes(x));
  }
  return x;
}

Tensor decode(const Tensor& tokens, const Tensor& table, std::vector<Tensor> parts,
              std::vector<Tensor> caches, const Tensor& frequencies, const Tensor& position,
              bool wraps, double epsilon, int64_t heads, int64_t kv_heads, int64_t width,
              const Tensor& norm, const Tensor& output) {
  STD_TORCH_CHECK(frequencies.is_contiguous() && frequencies.scalar_type() == ScalarType::Float,
                  "frequencies have to be float32, contiguous");
  Tensor x = embedded(tokens, table);
  Tensor cos = torch::stable::new_empty(frequencies, {frequencies.numel()});
  Tensor sin = torch::stable::new_empty(frequencies, {frequencies.numel()});
  const auto* of = static_cast<const float*>(frequencies.const_data_ptr());
  auto *c = static_cast<float*>(cos.mutable_data_ptr()), *s = static_cast<float*>(sin.mutable_data_ptr());
  for (int64_t at = one_position(position), i = 0; i < frequencies.numel(); ++i)
    c[i] = std::cos(float(at) * of[i]), s[i] = std::sin(float(at) * of[i]);
  const Ending ending{norm, output, table.size(0)};
  Step step(parts, caches, x, cos, sin, position, wraps, epsilon, heads, kv_heads, width, &ending);
  return run(step);
}

}  // namespace

// For tests: in the next step a member of the team fails at a layer as if memory had run out. Member
// -1: none does.
extern "C" __attribute__((visibility("default"))) void quantbench_fail_allocation(int64_t member,
                                                                                  int64_t layer) {
  test_failure.layer = layer;
  test_failure.member = member;
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_decode", TORCH_BOX(&decode));
  library.impl("cpu_layers", TORCH_BOX(&layers));
  library.impl("cpu_before_attention", TORCH_BOX(&before_attention));
  library.impl("cpu_after_attention", TORCH_BOX(&after_attention));
}
