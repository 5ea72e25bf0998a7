// A layer's mixture of experts in a decoding step. For op.cpp alone.
//
// A mixture is passed in the tensors of a feed-forward network, so that a step's tensors are as many as for any
// other network:
//
//     W13       the router's weight (X, D)
//     W13_BIAS  the shared expert's gate (D,); empty without a shared expert, which all tokens go through
//     W2        a table, int64: Head, then for each of the X experts, and then for the shared one, its Addresses
//
// Experts may be kept in two tiers of memory (experts/fused.py). Then an address is null while its expert is in
// the slow tier, and the step asks Python to bring it: a turn.
#pragma once

#include "step/step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <vector>

namespace {

// A turn is one layer's experts in one step. This is what the step and experts/fused.py both read and write; it
// serves all layers, one after another. Behind it in memory are two lists of X numbers each: the experts that the
// turn wants, and how many tokens want each of them (Experts::wanted, tokens_each).
struct Turn {
  // Begins to bring the wanted experts of a layer into memory. Returns how many experts, from the start of the
  // list, are in memory or on their way; less than 1 after a failure. The layer's table has the addresses of
  // those in memory then. The next call may evict what this one has brought.
  int64_t (*ask)(int64_t layer);
  // Waits for the experts on their way and writes their addresses into the table. Returns 0 after a failure.
  int64_t (*wait)(int64_t layer);
  int64_t clock;        // experts used so far, counted once for each turn
  int64_t assignments;  // pairs of a token and an expert so far
  int64_t hits;         // of these pairs, those whose expert was in memory at the start of its turn
  int64_t nanoseconds;  // of all turns so far
  int64_t wanted;       // numbers in each list
};

// The experts of one row of x, ascending, and the weights of their results.
struct Choice {
  std::vector<int64_t> experts;
  std::vector<float> weights;
};

// An expert and the `count` rows that chose it, from index `first` on in a list of all experts' rows.
struct Chosen {
  int64_t expert, first, count;
};

// Several products that threads share as if their weights were one weight. Units are counted through all of them,
// so no thread waits between two products.
class Bundle {
 public:
  void clear() {
    products.clear();
    starts.assign(1, 0);
  }

  void add(std::unique_ptr<Product> product) {
    starts.push_back(starts.back() + product->units);
    products.push_back(std::move(product));
  }

  // A member's share of all products, which can be shared once. x_of(j) returns product j's x; it is called when
  // the member first needs that. y_of(j) returns the address of its y. stays: whether one address has the same x
  // in every product, so that it need not be prepared again.
  template <typename F, typename G>
  void share(Sharing& handed_out, int64_t member, int64_t members, bool stays, F x_of, G y_of) const {
    thread_local Scratch scratch;
    char* prepared = nullptr;
    const char* x = nullptr;
    int64_t before = -1;  // the product that x was last prepared for
    handed_out.share(starts.back(), products[0]->unit_bytes, member, members,
                     [&](int64_t first, int64_t last) {
      for (int64_t j = 0; j < int64_t(products.size()); ++j) {
        const Sharing::Range range = part(j, first, last);
        if (range.first >= range.last) continue;
        if (j != before) {
          const Product& product = *products[j];
          const char* own = x_of(j);
          if (!stays || product.tokens > 1 || own != x || !product.prepares_like(*products[before])) {
            prepared = scratch.reserve(product.x_bytes);
            product.prepare({own, product.columns, 1}, prepared, 0, product.tiles());
          }
          x = own, before = j;
        }
        products[j]->multiply(prepared, y_of(j), range.first, range.last);
      }
    });
  }

  // One of the streams that a member reads first: see Product::stream.
  const char* stream(int index, int64_t member, int64_t members, int64_t& bytes) const {
    const Sharing::Range own = Sharing::own(starts.back(), member, members);
    for (int64_t j = 0; j < int64_t(products.size()); ++j) {
      const Sharing::Range range = part(j, own.first, own.last);
      if (range.first < range.last) return products[j]->stream(index, range, bytes);
    }
    bytes = 0;
    return nullptr;
  }

 private:
  std::vector<std::unique_ptr<Product>> products;
  std::vector<int64_t> starts{0};  // of each product's units, and their end

  // Which of product j's units are among those of all from first to last.
  Sharing::Range part(int64_t j, int64_t first, int64_t last) const {
    return {std::max(first, starts[j]) - starts[j], std::min(last, starts[j + 1]) - starts[j]};
  }
};

struct Experts {
  struct Networks {
    int64_t width;                // of a network's hidden layer
    int64_t w13_bytes, w2_bytes;  // of a packed weight; 0: plain, in x's dtype
  };
  struct Head {
    int64_t chosen;             // experts of a token
    int64_t normalized;         // 1: their weights add up to 1
    Networks networks, shared;  // of the X experts, and of the shared one; width 0: there is none
    // With two tiers of memory; else null, null and 0.
    Turn* turn;
    int64_t* used;  // (X,): when each expert was last used, by the turn's clock
    int64_t layer;  // number of the layer, for the turn's functions
  };
  struct Addresses {
    const char *w13, *w2;
  };

  Experts(const Step& step, int64_t layer)
      : count(step.part(layer, W13).size(0)), D(step.x.size(1)), router(data(step.part(layer, W13))),
        gate(step.bias(layer, W13_BIAS, D)), row_size(D * step.x.element_size()),
        number(number_of(step.x.scalar_type())),
        head(reinterpret_cast<const Head*>(data(step.part(layer, W2)))),
        addresses(reinterpret_cast<const Addresses*>(head + 1)) {
    const Tensor &router = step.part(layer, W13), &table = step.part(layer, W2);
    STD_TORCH_CHECK(router.dim() == 2 && router.is_contiguous() && router.size(1) == D &&
                        router.scalar_type() == step.x.scalar_type(),
                    "a router has to be (X, ", D, ") of x's dtype");
    STD_TORCH_CHECK(table.is_contiguous() && table.numel() * 8 >= int64_t(sizeof(Head)) &&
                        table.numel() * 8 == int64_t(sizeof(Head) + all() * sizeof(Addresses)) &&
                        head->chosen > 0 && head->chosen <= count && head->networks.width > 0,
                    "the table of ", count, " experts has ", table.numel(), " numbers");
    STD_TORCH_CHECK((head->shared.width > 0) == (gate != nullptr), "a shared expert and its gate go together");
  }

  const int64_t count;  // experts that the router chooses from, X; the shared expert has this index
  const int64_t D;
  // How threads share the products with w13, and with w2: [0] of experts in memory, [1] of those that arrive while
  // the others are computed.
  Sharing first_units[2], second_units[2];

  // Experts that a token chooses.
  int64_t chosen() const { return head->chosen; }
  // The same, and behind them the shared expert, if there is one.
  int64_t taken() const { return head->chosen + (gate ? 1 : 0); }
  const Networks& of(int64_t expert) const { return expert < count ? head->networks : head->shared; }
  // The sum of the widths of a token's experts.
  int64_t widths() const { return head->chosen * head->networks.width + head->shared.width; }
  const char* row(int64_t expert) const { return router + expert * row_size; }

  // Chooses the experts of a token, x. scores (X,): the router's.
  void choose(const Rows& rows, const char* x, const float* scores, Choice& choice) const {
    auto& [experts, weights] = choice;
    const int64_t k = head->chosen;
    weights.resize(taken());
    best_first(scores, experts);
    const double most = scores[experts[0]];
    double sum = 0;
    for (int64_t i = 0; i < (head->normalized ? k : count); ++i)
      sum += std::exp(scores[experts[i]] - most);
    std::sort(experts.begin(), experts.begin() + k);
    for (int64_t i = 0; i < k; ++i) weights[i] = float(std::exp(scores[experts[i]] - most) / sum);
    experts.resize(k);
    if (!gate) return;
    experts.push_back(count);
    weights[k] = float(1 / (1 + std::exp(-double(rows.dot(x, gate, D)))));
  }

  // Whether experts are in two tiers of memory. Then one thread carries out a turn: begin(); want() for each
  // expert; bring(), and wait() for what is on its way, until all were in memory; end().
  bool moves() const { return head->turn; }

  void begin() {
    head->turn->wanted = 0;
    started = Clock::now();
  }

  // Adds an expert that this number of tokens want. The experts have to be ascending.
  void want(int64_t expert, int64_t tokens) {
    Turn& turn = *head->turn;
    wanted()[turn.wanted] = expert, tokens_each()[turn.wanted++] = tokens;
    head->used[expert] = ++turn.clock;
    turn.assignments += tokens;
    if (is_here(expert)) turn.hits += tokens;
  }

  // Removes the first wanted experts from the list and returns how many they are: those in memory (`is_here`), and
  // those that arrive while these are computed. Once all of them are computed, the next may be brought.
  int64_t bring() {
    Turn& turn = *head->turn;
    const bool all_here = std::all_of(wanted(), wanted() + turn.wanted,
                                      [&](int64_t expert) { return is_here(expert); });
    int64_t there = turn.wanted;
    if (!all_here) {
      there = turn.ask(head->layer);
      STD_TORCH_CHECK(there > 0 && there <= turn.wanted, "experts of layer ", head->layer,
                      " could not be brought into memory");
    }
    turn.wanted -= there;
    for (int64_t* list : {wanted(), tokens_each()}) std::copy(list + there, list + there + turn.wanted, list);
    return there;
  }

  void wait() {
    STD_TORCH_CHECK(head->turn->wait(head->layer) > 0, "experts of layer ", head->layer,
                    " did not arrive in memory");
  }

  bool is_here(int64_t expert) const { return addresses[expert].w13; }

  void end() {
    head->turn->nanoseconds += std::chrono::nanoseconds(Clock::now() - started).count();
  }

  // A weight of an expert: `first` is w13 (2 · width, D), `second` is w2 (D, width). bytes: as in Head.
  struct Matrix {
    const char* at;
    int64_t bytes, outputs, columns;
  };
  Matrix first(int64_t expert) const {
    return {addresses[expert].w13, of(expert).w13_bytes, 2 * of(expert).width, D};
  }
  Matrix second(int64_t expert) const {
    return {addresses[expert].w2, of(expert).w2_bytes, D, of(expert).width};
  }
  // Makes the products with a weight of the experts at some places of a list.
  void bundle(Matrix (Experts::*matrix)(int64_t) const, const std::vector<Chosen>& list,
              const std::vector<int64_t>& places, bool as_one, Bundle& products) const {
    for (int64_t place : places) __builtin_prefetch((this->*matrix)(list[place].expert).at);
    products.clear();
    for (int64_t place : places)
      products.add(product((this->*matrix)(list[place].expert), list[place].count, as_one));
  }

 private:
  using Clock = std::chrono::steady_clock;

  const char *const router, *const gate;
  const int64_t row_size;
  const Number number;
  const Head* const head;
  const Addresses* const addresses;
  Clock::time_point started;  // start of the turn

  int64_t* wanted() const { return reinterpret_cast<int64_t*>(head->turn + 1); }
  int64_t* tokens_each() const { return wanted() + count; }

  // All experts, those that a token chooses first: the ones of the highest scores.
  void best_first(const float* scores, std::vector<int64_t>& experts) const {
    experts.resize(count);
    std::iota(experts.begin(), experts.end(), 0);
    std::partial_sort(experts.begin(), experts.begin() + head->chosen, experts.end(),
                      [&](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
  }

  int64_t all() const { return count + (head->shared.width ? 1 : 0); }

  std::unique_ptr<Product> product(const Matrix& m, int64_t tokens, bool as_one) const {
    auto made = m.bytes ? packed_product(m.at, m.bytes, number, tokens, as_one)
                        : plain_product(m.at, m.outputs, m.columns, number, tokens, as_one);
    STD_TORCH_CHECK(made->rows == m.outputs && made->columns == m.columns, "an expert's weight is (",
                    made->rows, ", ", made->columns, "), not (", m.outputs, ", ", m.columns, ")");
    return made;
  }
};

}  // namespace
