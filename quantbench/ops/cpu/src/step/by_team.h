// All layers for one row, by a team of threads. For op.cpp alone.
#pragma once

#include "step/experts.h"
#include "step/step.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "common/team.h"

namespace {

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
        result(torch::stable::new_empty(step.x, {1, step.ending.outputs})),
        of_wo(D * size), of_w2(D * size),
        of_w13(2 * step.width * size) {
    for (int64_t i = 0; i < step.count; ++i) {
      first_product.push_back(products.size());
      experts.push_back(nullptr);
      if (step.has_experts(i)) {
        experts.back().reset(new Experts(step, i));
        mixture.make_room(*experts.back(), D, size);
      }
      const std::pair<Part, int64_t> weights[] = {
          {WQKV, D}, {WO, step.heads * step.E}, {W13, D}, {W2, step.width}};
      const int64_t outputs[] = {qkv.size(1), D, step.width + step.up(i), D};
      for (int k = 0; k < (experts.back() ? 2 : 4); ++k) {
        const auto [part, columns] = weights[k];
        add(step.part(i, part), columns, outputs[k]);
        step.bias(i, Part(part + 1), outputs[k]);
      }
      int64_t together;
      step.heads_norm(i, QUERY_NORM, step.heads, together);  // raises what is wrong
      step.heads_norm(i, KEY_NORM, step.kv_heads, together);
      for (Part norm : {NORM, POST_NORM, FFN_NORM, FFN_POST_NORM})
        if (const Tensor& weight = step.part(i, norm); weight.numel()) floats(weight, D);
    }
    first_product.push_back(products.size());
    floats(step.ending.norm, D);
    add(step.ending.weight, D, step.ending.outputs);
  }

  Tensor run() {
    Team team;
    try {
      team.run([&](const Team::Member& member) { all_layers(member); });
    } catch (const std::bad_alloc&) {
      STD_TORCH_CHECK(false, "a thread of the decoding step could not allocate memory");
    }
    if (step.ending.bias)
      rows.add(data(result), step.ending.bias, 1, step.ending.outputs, data(result));
    return result;
  }

 private:
  Step& step;
  const Rows rows;
  const int64_t size, D;
  Tensor qkv, result;
  std::vector<char> of_wo, of_w2, of_w13;  // products, written by all, read by all
  std::vector<std::unique_ptr<Product>> products;
  std::vector<int64_t> first_product;               // of each layer; the last one is the ending's
  std::vector<std::unique_ptr<Experts>> experts;  // of each layer; null where it has none
  std::unique_ptr<Attending> attending;

  // What the members share of a layer's experts: written by all, read by all.
  struct Mixture {
    std::vector<float> scores;  // of a layer's router
    std::vector<char> of_first, of_second;   // products, of one expert behind the other
    // Where experts come and go: the places, in a token's list, of those that are in memory, and of those
    // that arrive while these are computed.
    std::vector<int64_t> here, arriving;

    void make_room(const Experts& experts, int64_t D, int64_t size) {
      auto at_least = [](auto& numbers, int64_t n) {
        if (int64_t(numbers.size()) < n) numbers.resize(n);
      };
      at_least(scores, experts.count);
      at_least(of_first, 2 * experts.widths() * size);
      at_least(of_second, experts.taken() * D * size);
    }
  } mixture;

  // What each member has for itself while it mixes experts: those of the token, the places of all of them,
  // what each one's result weighs, the products with their matrices, and the sum of their results.
  struct Mixing {
    std::vector<int64_t> experts, places;
    std::vector<float> weights, total;
    Bundle first, second;
  };

  void add(const Tensor& weight, int64_t columns, int64_t outputs) {
    const bool packed = weight.scalar_type() == ScalarType::Byte;
    products.push_back(packed ? packed_product(weight, rows.type) : plain_product(weight, rows.type));
    const Product& product = *products.back();
    STD_TORCH_CHECK(product.rows == outputs && product.columns == columns, "a weight is (",
                    product.rows, ", ", product.columns, "), not (", outputs, ", ", columns, ")");
  }

  void all_layers(const Team::Member& member) {
    int64_t width = step.width;  // of what is gated at once
    for (const auto& layer : experts)
      if (layer) width = std::max(width, layer->widths());
    std::vector<char> memory((3 * D + width) * size);  // this member's own
    char *x = memory.data(), *middle = x + D * size, *own = middle + D * size, *gated = own + D * size;
    Mixing mixing;
    std::memcpy(x, data(step.x), D * size);
    for (int64_t i = 0; i < step.count; ++i) {
      const int64_t first = first_product[i], next = first_product[i + 1];
      test_failure.check(member.index, i);
      multiply(member, first, normed(i, NORM, x, own), data(qkv));
      if (member.index == 0) begin_attention(i);
      wait(member, first + 1);
      if (!attending->alone()) {
        attending->work();
        wait(member, first + 1);
      }
      products[first + 1]->share(data(attending->result()), of_wo.data(), member.index, member.count);
      if (experts[i]) member.meet(prefetching(member, *experts[i]));
      else wait(member, first + 2);
      sum_ranks(member, first + 2, i, WO_BIAS, of_wo);
      sum(i, WO_BIAS, of_wo.data(), x, middle);
      const char* input = normed(i, FFN_NORM, middle, own);
      if (experts[i]) {
        mix(member, i, mixing, next, input, own, gated);
        sum(i, W2_BIAS, step.ranks ? of_w2.data() : own, middle, x);
        continue;
      }
      multiply(member, first + 2, input, of_w13.data());
      gate(i, gated);
      multiply(member, first + 3, gated, of_w2.data());
      sum_ranks(member, next, i, W2_BIAS, of_w2);
      sum(i, W2_BIAS, of_w2.data(), middle, x);
    }
    rows.norm(x, floats(step.ending.norm, D), float(step.epsilon), D, own);
    multiply(member, first_product[step.count], own, data(result));
  }

  // What the experts chosen for x return, weighed and summed, goes to `own`, which may be x; with several
  // ranks to of_w2. What is read next is product `next`.
  void mix(const Team::Member& member, int64_t i, Mixing& mine, int64_t next, const char* x, char* own,
           char* gated) {
    Experts& layer = *experts[i];
    score(member, layer, x, mixture.scores);
    member.meet([] { return false; });
    // Each member chooses for itself: that takes less time than to wait for another's choice.
    layer.choose(rows, x, mixture.scores.data(), mine.experts, mine.weights);
    if (layer.moves()) {
      if (member.index == 0) bring(layer, mine);
      member.meet([] { return false; });
    }
    mine.places.resize(layer.taken());
    std::iota(mine.places.begin(), mine.places.end(), 0);
    compute(member, layer, mine, layer.moves() ? mixture.here : mine.places, 0, x, gated);
    if (layer.moves() && !mixture.arriving.empty()) {
      if (member.index == 0) layer.wait();
      member.meet([] { return false; });
      compute(member, layer, mine, mixture.arriving, 1, x, gated);
    }
    wait(member, next);
    if (layer.moves() && member.index == 0) layer.end();
    if (step.ranks && member.index != 0) return wait(member, next);
    mine.total.assign(D, 0);
    for (int64_t j = 0; j < layer.taken(); ++j)  // in the list's order, whenever they arrived
      rows.add_weighed(mixture.of_second.data() + j * D * size, mine.weights[j], D, mine.total.data());
    char* to = step.ranks ? of_w2.data() : own;
    rows.narrow(mine.total.data(), D, to);
    if (!step.ranks) return;
    sum_over(step.ranks, rows, to, D, prefetching(member, next));
    wait(member, next);
  }

  // A member's part of what the experts at these places of a token's list return, each in its place of
  // `of_second`. phase: 0 for those that are there at once, 1 for those that arrive meanwhile.
  void compute(const Team::Member& member, Experts& layer, Mixing& mine,
               const std::vector<int64_t>& places, int phase, const char* x, char* gated) {
    if (places.empty()) return;
    layer.bundle(&Experts::first, mine.experts, places, mine.first);
    const int64_t width = layer.width_of(0) * size;  // of all but the shared one, which is last
    char *both = mixture.of_first.data(), *results = mixture.of_second.data();
    mine.first.share(layer.first_units[phase], member.index, member.count,
                     [&](int64_t) { return x; },
                     [&](int64_t j) { return both + 2 * places[j] * width; });
    layer.bundle(&Experts::second, mine.experts, places, mine.second);
    member.meet(prefetching(member, mine.second));
    auto gated_of = [&](int64_t j) {
      const int64_t place = places[j], own = layer.width_of(mine.experts[place]);
      const char* gate = both + 2 * place * width;
      rows.gates[SILU](gate, gate + own * size, own, gated + place * width);
      return gated + place * width;
    };
    mine.second.share(layer.second_units[phase], member.index, member.count, gated_of,
                      [&](int64_t j) { return results + places[j] * D * size; });
  }

  // A member's part of a router's scores of x.
  void score(const Team::Member& member, const Experts& layer, const char* x,
             std::vector<float>& scores) const {
    const auto [begin, end] = router_rows(member, layer);
    for (int64_t e = begin; e < end; ++e) scores[e] = rows.dot(x, layer.row(e), D);
  }

  // Begins to bring a token's experts into memory, for all members.
  void bring(Experts& layer, const Mixing& mine) {
    layer.begin();
    for (int64_t expert : mine.experts)
      if (expert < layer.count) layer.want(expert, 1);
    STD_TORCH_CHECK(layer.bring() == layer.chosen(), "a token's experts are not in memory together");
    mixture.here.clear(), mixture.arriving.clear();
    for (int64_t place = 0; place < layer.taken(); ++place)
      (layer.is_here(mine.experts[place]) ? mixture.here : mixture.arriving).push_back(place);
  }

  // The router's rows that a member multiplies by.
  static Sharing::Range router_rows(const Team::Member& member, const Experts& layer) {
    return {layer.count * member.index / member.count,
            layer.count * (member.index + 1) / member.count};
  }

  // x normed, which is in `to` then; x itself where the model has no such norm.
  const char* normed(int64_t layer, Part part, const char* x, char* to) const {
    const Tensor& weight = step.part(layer, part);
    if (!weight.numel()) return x;
    rows.norm(x, floats(weight, D), float(step.epsilon), D, to);
    return to;
  }

  // One member adds the bias and sums over ranks, for all; what it reads next is product `next`.
  void sum_ranks(const Team::Member& member, int64_t next, int64_t layer, Part bias,
                 std::vector<char>& product) const {
    if (!step.ranks) return;
    if (member.index == 0) {
      if (const char* b = step.bias(layer, bias, D)) rows.add(product.data(), b, 1, D, product.data());
      sum_over(step.ranks, rows, product.data(), D, prefetching(member, next));
    }
    wait(member, next);
  }

  // to = other + residual · norm(product + bias). A sum over ranks has the bias already.
  void sum(int64_t layer, Part bias, const char* product, const char* other, char* to) const {
    if (const char* b = step.ranks ? nullptr : step.bias(layer, bias, D)) {
      rows.add(product, b, 1, D, to);  // rounded, as a linear layer's result is
      product = to;
    }
    product = normed(layer, Part(bias + 1), product, to);
    rows.add(other, product, float(step.how(layer).residual), D, to);
  }

  void gate(int64_t layer, char* to) const {
    const int64_t up = step.up(layer);
    const char* both = of_w13.data();
    std::vector<char> biased;
    if (const char* bias = step.bias(layer, W13_BIAS, step.width + up)) {
      biased.resize(of_w13.size());
      rows.add(both, bias, 1, step.width + up, biased.data());
      both = biased.data();
    }
    rows.gates[int(step.how(layer).gate)](both, both + up * size, step.width, to);
  }

  // What one member does for all: it is too little to share.
  void begin_attention(int64_t layer) {
    if (const char* bias = step.bias(layer, WQKV_BIAS, qkv.size(1)))
      rows.add(data(qkv), bias, 1, qkv.size(1), data(qkv));
    attending = step.attending(rows, layer, qkv);
    if (attending->alone()) attending->work();
  }

  void multiply(const Team::Member& member, int64_t index, const char* x, char* to) {
    products[index]->share(x, to, member.index, member.count);
    wait(member, index + 1);
  }

  // Until all are here; meanwhile what this member will read first of product `next` comes nearer.
  void wait(const Team::Member& member, int64_t next) const {
    member.meet(prefetching(member, next));
  }

  // Fetches a line of each stream that a member reads first of a product; false once that is enough.
  struct Prefetching {
    static constexpr int64_t NEAR = 32 << 10;  // bytes of each stream: a fraction of a second-level cache
    int64_t at = NEAR, bytes[Streams::COUNT];
    const char* streams[Streams::COUNT];

    bool operator()() {
      if (at >= NEAR) return false;
      for (int i = 0; i < Streams::COUNT; ++i)
        if (at < bytes[i]) __builtin_prefetch(streams[i] + at, 0, 2);
      return (at += 64) < NEAR;
    }
  };

  Prefetching prefetching(const Team::Member& member, int64_t index) const {
    if (index >= int64_t(products.size())) return {};
    const Product& product = *products[index];
    const Sharing::Range own = Sharing::own(product.units, member.index, member.count);
    return prefetching([&](int i, int64_t& bytes) { return product.stream(i, own, bytes); });
  }

  Prefetching prefetching(const Team::Member& member, const Bundle& bundle) const {
    return prefetching([&](int i, int64_t& bytes) {
      return bundle.stream(i, member.index, member.count, bytes);
    });
  }

  // The first of a member's rows of a router, which it reads one behind the other.
  Prefetching prefetching(const Team::Member& member, const Experts& layer) const {
    const auto [begin, end] = router_rows(member, layer);
    const char* from = layer.row(begin);
    const int64_t all = layer.row(end) - from;
    return prefetching([&](int i, int64_t& bytes) {
      bytes = std::max<int64_t>(0, std::min(Prefetching::NEAR, all - i * Prefetching::NEAR));
      return from + i * Prefetching::NEAR;
    });
  }

  template <typename F>
  static Prefetching prefetching(F stream) {
    Prefetching made;
    made.at = 0;
    for (int i = 0; i < Streams::COUNT; ++i) made.streams[i] = stream(i, made.bytes[i]);
    return made;
  }
};

}  // namespace
