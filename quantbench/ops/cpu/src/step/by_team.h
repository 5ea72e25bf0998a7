// All layers of a step, by a team of threads. For op.cpp alone.
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

// For tests: the member and the layer at which the next step fails as if memory had run out.
struct TestFailure {
  std::atomic<int64_t> member{-1}, layer{0};
  void check(int64_t this_member, int64_t this_layer) {
    if (member.load(std::memory_order_relaxed) != this_member || layer != this_layer) return;
    member = -1;
    throw std::bad_alloc();
  }
} test_failure;

// The members of a team share products, and with several rows of x also the work between two products. The work
// between products for one row takes less time than sharing it: each member does all of it for itself.
class ByTeam {
 public:
  explicit ByTeam(Step& step)
      : step(step), rows(rows_of(step.x)), B(step.B), size(step.x.element_size()), D(step.x.size(1)),
        row(D * size), heads((step.heads + 2 * step.kv_heads) * step.E),
        qkv(torch::stable::new_empty(step.x, {B, heads})),
        result(torch::stable::new_empty(step.x, {B, step.ending.outputs})) {
    for (int64_t i = 0; i < step.count; ++i) {
      first_product.push_back(products.size());
      experts.push_back(nullptr);
      if (step.has_experts(i)) {
        experts.back().reset(new Experts(step, i));
        mixture.make_room(*experts.back(), B, size);
      }
      const std::pair<Part, int64_t> weights[] = {
          {WQKV, D}, {WO, step.heads * step.E}, {W13, D}, {W2, step.width}};
      const int64_t outputs[] = {heads, D, step.width + step.up(i), D};
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
    if (B > 1) shared = between();
    try {
      team.run([&](const Team::Member& member) { all_layers(member); });
    } catch (const std::bad_alloc&) {
      STD_TORCH_CHECK(false, "a thread of the decoding step could not allocate memory");
    }
    if (step.ending.bias) add_bias(step.ending.bias, step.ending.outputs, data(result));
    return result;
  }

 private:
  // Memory for rows between products, and for x prepared for the next product.
  struct Between {
    char *x, *middle, *own, *gated, *prepared;
  };

  Step& step;
  const Rows rows;
  const int64_t B, size, D, row, heads;  // size: bytes of a number; row: of D numbers; heads: wqkv's outputs
  Tensor qkv, result;
  const std::unique_ptr<char[]> of_wo{new char[B * row]}, of_w2{new char[B * row]},
      of_w13{new char[B * 2 * step.width * size]};  // products, written by all, read by all
  Between shared;                                   // of all members, with several rows
  std::vector<std::unique_ptr<Product>> products;
  std::vector<int64_t> first_product;             // of each layer, and of the ending
  int64_t group = 1;                              // rows that one member prepares together: a tile's, but for AMX
  std::vector<std::unique_ptr<Experts>> experts;  // of each layer; null where it has none
  std::unique_ptr<Attending> attending;

  // What members share of a layer's experts: written by all, read by all.
  struct Mixture {
    std::vector<float> scores;    // (B, X), of a layer's router
    std::vector<Choice> choices;  // of several rows
    std::vector<char> of_first, of_second;  // products, of one expert behind the other
    // With two tiers of memory, places in the list of experts: of those in memory, of those that arrive while these
    // are computed, and the first that is not brought yet.
    std::vector<int64_t> here, arriving;
    int64_t next;

    void make_room(const Experts& experts, int64_t B, int64_t size) {
      auto at_least = [](auto& numbers, size_t n) {
        if (numbers.size() < n) numbers.resize(n);
      };
      at_least(scores, B * experts.count);
      at_least(choices, B);
      at_least(of_first, B * 2 * experts.widths() * size);
      at_least(of_second, B * experts.taken() * experts.D * size);
    }
  } mixture;

  // What a member has for itself.
  struct Mixing {
    std::vector<Choice> choices{1};  // of one row
    std::vector<Chosen> list;
    std::vector<int64_t> rows;   // rows of x that the list's first expert gets, then those of the next
    std::vector<int64_t> place;  // (B, taken): where in `rows` a row is, for each of its experts
    std::vector<int64_t> next;   // for each expert where in `rows` its next row comes, while these are made
    std::vector<float> total;
    std::vector<char> x;  // an expert's
    Bundle first, second;
  };

  void add(const Tensor& weight, int64_t columns, int64_t outputs) {
    const bool packed = weight.scalar_type() == ScalarType::Byte;
    products.push_back(packed ? packed_product(weight, rows.type, B, step.as_one())
                              : plain_product(weight, rows.type, B, step.as_one()));
    const Product& product = *products.back();
    STD_TORCH_CHECK(product.rows == outputs && product.columns == columns, "a weight is (",
                    product.rows, ", ", product.columns, "), not (", outputs, ", ", columns, ")");
    if (product.tile <= 4) group = std::max(group, product.tile);
  }

  // Memory of the thread that calls, until it calls again.
  Between between() const {
    int64_t prepared = 0;
    for (const auto& product : products) prepared = std::max(prepared, product->x_bytes);
    auto placed = [&](Room room) {
      Between to;
      for (char** rows : {&to.x, &to.middle, &to.own}) *rows = room.take<char>(B * row);
      to.gated = room.take<char>(B * step.width * size);
      to.prepared = room.take<char>(prepared);
      return std::pair(to, room.next);
    };
    thread_local Scratch scratch;
    return placed(Room(scratch.reserve(placed(Room()).second))).first;
  }

  void all_layers(const Team::Member& member) {
    const Between at = B > 1 ? shared : between();
    Mixing mixing;
    each_row(member, [&](int64_t b) { std::memcpy(at.x + b * row, data(step.x) + b * row, row); });
    for (int64_t i = 0; i < step.count; ++i) {
      const int64_t first = first_product[i], next = first_product[i + 1];
      test_failure.check(member.index, i);
      if (member.index == 0) attending = step.attending(i, qkv);
      multiply(member, first, at, normed(member, i, NORM, at.x, at.own), data(qkv));
      attend(member, i, first + 1);
      multiply(member, first + 1, at, data(attending->result()), of_wo.get(), experts[i].get());
      sum_ranks(member, first + 2, i, WO_BIAS, of_wo.get());
      sum(member, i, WO_BIAS, of_wo.get(), at.x, at.middle);
      const char* x = normed(member, i, FFN_NORM, at.middle, at.own);
      if (experts[i]) {
        mix(member, i, mixing, next, x, at.own);
        sum(member, i, W2_BIAS, step.ranks ? of_w2.get() : at.own, at.middle, at.x);
        continue;
      }
      multiply(member, first + 2, at, x, of_w13.get());
      each_row(member, [&](int64_t b) { gate(i, b, at.gated); });
      multiply(member, first + 3, at, at.gated, of_w2.get());
      sum_ranks(member, next, i, W2_BIAS, of_w2.get());
      sum(member, i, W2_BIAS, of_w2.get(), at.middle, at.x);
    }
    each_row(member, [&](int64_t b) {
      rows.norm(at.x + b * row, floats(step.ending.norm, D), float(step.epsilon), D, at.own + b * row);
    });
    multiply(member, first_product[step.count], at, at.own, data(result));
  }

  // A member's part of n things.
  static Sharing::Range part(int64_t n, const Team::Member& member) {
    return {n * member.index / member.count, n * (member.index + 1) / member.count};
  }

  // Groups of rows that a member prepares for a product. The member also does the work before it for these rows,
  // so that no member waits in between.
  Sharing::Range groups(const Team::Member& member) const {
    return B == 1 ? Sharing::Range{0, 1} : part((B + group - 1) / group, member);
  }

  template <typename F>
  void each_row(const Team::Member& member, F some) const {
    const auto [first, last] = groups(member);
    for (int64_t b = group * first; b < std::min(B, group * last); ++b) some(b);
  }

  // y = x times product `index`, by all members. The next product, or a router, is prefetched meanwhile.
  void multiply(const Team::Member& member, int64_t index, const Between& at, const char* x, char* y,
                const Experts* router = nullptr) {
    Product& product = *products[index];
    Sharing::Range tiles = groups(member);
    if (group % product.tile == 0) {
      const int64_t each = group / product.tile;
      tiles = {each * tiles.first, std::min(product.tiles(), each * tiles.last)};
    } else if (B > 1) {  // a tile has rows of several members
      wait(member, index);
      tiles = part(product.tiles(), member);
    }
    if (tiles.first < tiles.last)
      product.prepare({x, product.columns, 1}, at.prepared, tiles.first, tiles.last);
    if (B > 1) wait(member, index);
    product.share(at.prepared, y, member.index, member.count);
    if (router) member.meet(prefetching(member, *router));
    else wait(member, index + 1);
  }

  // Attention, by all members; product `next` is prefetched meanwhile.
  void attend(const Team::Member& member, int64_t layer, int64_t next) {
    const auto [first, last] = part(B, member);
    const bool at_once = B == 1 && attending->alone();
    for (int64_t b = first; b < last; ++b) {
      step.turn_heads(rows, layer, b, data(qkv) + b * heads * size);
      attending->read(b * step.heads, (b + 1) * step.heads);
      if (at_once) attending->work();
    }
    wait(member, next);
    if (at_once) return;
    if (!attending->alone() || member.index == 0) attending->work();
    wait(member, next);
  }

  // own = the weighted sum of what each row's experts return; with several ranks of_w2 instead. `own` may be x. Product
  // `next` is prefetched meanwhile.
  void mix(const Team::Member& member, int64_t i, Mixing& mine, int64_t next, const char* x, char* own) {
    Experts& layer = *experts[i];
    if (B > 1) member.meet(prefetching(member, layer));
    score(member, layer, x);
    member.meet([] { return false; });
    const std::vector<Choice>& choices = choose(member, layer, x, mine);
    const int64_t to_bring = mine.list.size() - (layer.taken() - layer.chosen());
    if (!layer.moves()) {
      std::vector<int64_t> all(mine.list.size());
      std::iota(all.begin(), all.end(), 0);
      compute(member, layer, mine, all, 0, x);
    }
    for (bool first = true, more = layer.moves(); more; first = false) {
      if (member.index == 0) bring(layer, mine.list, first);
      member.meet([] { return false; });
      compute(member, layer, mine, mixture.here, 0, x);
      if (!mixture.arriving.empty()) {
        if (member.index == 0) layer.wait();
        member.meet([] { return false; });
        compute(member, layer, mine, mixture.arriving, 1, x);
      }
      if ((more = mixture.next < to_bring)) member.meet([] { return false; });
    }
    wait(member, next);
    if (layer.moves() && member.index == 0) layer.end();
    auto total = [&](int64_t b, char* to) {
      mine.total.assign(D, 0);
      for (int64_t j = 0; j < layer.taken(); ++j)  // in a row's order, whenever they arrived
        rows.add_weighed(mixture.of_second.data() + mine.place[b * layer.taken() + j] * row,
                         choices[b].weights[j], D, mine.total.data());
      rows.narrow(mine.total.data(), D, to);
    };
    if (!step.ranks) return each_row(member, [&](int64_t b) { total(b, own + b * row); });
    const auto [first, last] = part(B, member);
    for (int64_t b = first; b < last; ++b) total(b, of_w2.get() + b * row);
    wait(member, next);
    sum_ranks(member, next, i, W2_BIAS, of_w2.get());
  }

  // A member's part of a router's scores of x.
  void score(const Team::Member& member, const Experts& layer, const char* x) {
    const auto [first, last] = part(layer.count, member);
    for (int64_t e = first; e < last; ++e)
      for (int64_t b = 0; b < B; ++b)
        mixture.scores[b * layer.count + e] = rows.dot(x + b * row, layer.row(e), D);
  }

  // Each row's experts, and in `mine` the list of all experts that are chosen, ascending. For one row each member
  // chooses: that takes less time than waiting for another's choice.
  const std::vector<Choice>& choose(const Team::Member& member, const Experts& layer, const char* x,
                                    Mixing& mine) {
    std::vector<Choice>& choices = B == 1 ? mine.choices : mixture.choices;
    each_row(member, [&](int64_t b) {
      layer.choose(rows, x + b * row, mixture.scores.data() + b * layer.count, choices[b]);
    });
    if (B > 1) member.meet([] { return false; });
    mine.next.assign(layer.count + 1, 0);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t expert : choices[b].experts) ++mine.next[expert];
    mine.list.clear();
    int64_t first = 0;
    for (int64_t e = 0; e <= layer.count; ++e) {
      const int64_t count = std::exchange(mine.next[e], first);
      if (count) mine.list.push_back({e, first, count});
      first += count;
    }
    mine.rows.resize(first), mine.place.resize(first);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t j = 0; j < layer.taken(); ++j) {
        const int64_t place = mine.next[choices[b].experts[j]]++;
        mine.rows[place] = b, mine.place[b * layer.taken() + j] = place;
      }
    return choices;
  }

  // A member's part of what the experts at some places of the list return. phase: the index of Experts::first_units.
  void compute(const Team::Member& member, Experts& layer, Mixing& mine,
               const std::vector<int64_t>& places, int phase, const char* x) {
    if (places.empty()) return;
    const int64_t width = layer.of(0).width * size;  // of all but the shared one, which is last
    mine.x.resize(B * std::max({row, width, layer.of(layer.count).width * size}));
    char *both = mixture.of_first.data(), *results = mixture.of_second.data(), *own = mine.x.data();
    auto at = [&](int64_t j) { return mine.list[places[j]]; };
    auto rows_of = [&](int64_t j) -> const char* {
      const Chosen chosen = at(j);
      if (chosen.count == 1) return x + mine.rows[chosen.first] * row;
      for (int64_t k = 0; k < chosen.count; ++k)
        std::memcpy(own + k * row, x + mine.rows[chosen.first + k] * row, row);
      return own;
    };
    layer.bundle(&Experts::first, mine.list, places, step.as_one(), mine.first);
    mine.first.share(layer.first_units[phase], member.index, member.count, true, rows_of,
                     [&](int64_t j) { return both + 2 * at(j).first * width; });
    layer.bundle(&Experts::second, mine.list, places, step.as_one(), mine.second);
    member.meet(prefetching(member, mine.second));
    auto gated = [&](int64_t j) -> const char* {
      const Chosen chosen = at(j);
      const int64_t n = layer.of(chosen.expert).width;
      const char* gate = both + 2 * chosen.first * width;
      for (int64_t k = 0; k < chosen.count; ++k, gate += 2 * n * size)
        rows.gates[SILU](gate, gate + n * size, n, own + k * n * size);
      return own;
    };
    mine.second.share(layer.second_units[phase], member.index, member.count, false, gated,
                      [&](int64_t j) { return results + at(j).first * row; });
  }

  // Begins to bring the next experts of the list into memory, for all members.
  void bring(Experts& layer, const std::vector<Chosen>& list, bool first) {
    mixture.here.clear(), mixture.arriving.clear();
    if (first) {
      layer.begin();
      mixture.next = 0;
      for (const Chosen& chosen : list)
        if (chosen.expert < layer.count) layer.want(chosen.expert, chosen.count);
        else mixture.here.push_back(list.size() - 1);  // the shared expert, which is always there
    }
    for (Sharing* units : {layer.first_units, layer.second_units})
      for (int phase : {0, 1}) units[phase].restart();
    for (const int64_t end = mixture.next + layer.bring(); mixture.next < end; ++mixture.next)
      (layer.is_here(list[mixture.next].expert) ? mixture.here : mixture.arriving).push_back(mixture.next);
  }

  // x's rows normed, which are in `to` then; x itself where the model has no such norm.
  const char* normed(const Team::Member& member, int64_t layer, Part part, const char* x, char* to) const {
    if (!step.part(layer, part).numel()) return x;
    each_row(member, [&](int64_t b) { normed_row(layer, part, x + b * row, to + b * row); });
    return to;
  }

  const char* normed_row(int64_t layer, Part part, const char* x, char* to) const {
    const Tensor& weight = step.part(layer, part);
    if (!weight.numel()) return x;
    rows.norm(x, floats(weight, D), float(step.epsilon), D, to);
    return to;
  }

  void add_bias(const char* bias, int64_t n, char* y) const {
    for (int64_t b = 0; b < B; ++b, y += n * size) rows.add(y, bias, 1, n, y);
  }

  // One member adds the bias and sums over ranks, for all; product `next` is prefetched meanwhile.
  void sum_ranks(const Team::Member& member, int64_t next, int64_t layer, Part bias, char* product) const {
    if (!step.ranks) return;
    if (member.index == 0) {
      if (const char* added = step.bias(layer, bias, D)) add_bias(added, D, product);
      sum_over(step.ranks, rows, product, B * D, prefetching(member, next));
    }
    wait(member, next);
  }

  // to = other + residual · norm(product + bias). A sum over ranks has the bias already.
  void sum(const Team::Member& member, int64_t layer, Part bias, const char* product, const char* other,
           char* to) const {
    each_row(member, [&](int64_t b) {
      const char* y = product + b * row;
      char* sum = to + b * row;
      if (const char* added = step.ranks ? nullptr : step.bias(layer, bias, D)) {
        rows.add(y, added, 1, D, sum);  // rounded, as a linear layer's result is
        y = sum;
      }
      y = normed_row(layer, Part(bias + 1), y, sum);
      rows.add(other + b * row, y, float(step.how(layer).residual), D, sum);
    });
  }

  void gate(int64_t layer, int64_t b, char* to) const {
    const int64_t up = step.up(layer), n = step.width + up;
    const char* both = of_w13.get() + b * n * size;
    std::vector<char> biased;
    if (const char* bias = step.bias(layer, W13_BIAS, n)) {
      biased.resize(n * size);
      rows.add(both, bias, 1, n, biased.data());
      both = biased.data();
    }
    rows.gates[int(step.how(layer).gate)](both, both + up * size, step.width, to + b * step.width * size);
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
        if (at < bytes[i]) read_ahead(streams[i] + at);
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
    const auto [begin, end] = part(layer.count, member);
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
