// A layer's mixture of experts, as a decoding step sees it. For op.cpp alone.
//
// Its tensors come in the places of a feed-forward network's: the router's weight (X, D) in that of W13,
// that of the gate of the expert that all tokens share, (D,), if there is one, in that of W13_BIAS, and
// in that of W2 int64 numbers: a head (below), then for each expert the addresses of its two weights, the
// shared one's last. So a step is called with a handful of tensors, however many experts there are.
//
// Experts may come and go between two tiers of memory. Then an address is null while its expert is not in
// memory, and a turn (below) asks Python for it.
#pragma once

#include "step/step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <vector>

namespace {

// What a step and experts/fused.py tell each other about a turn: one layer's experts in one step. The same
// numbers serve all layers; they are followed by two lists (Experts::wanted and tokens_each).
struct Turn {
  // Begins to bring the wanted experts of a layer. Returns how many of them, the first ones of the list, are
  // in memory or on their way; less than 1 if it failed. Those that are in memory have their addresses in the
  // layer's table then. The next call may take away what this one has brought.
  int64_t (*ask)(int64_t layer);
  // Waits for those that are on their way, and writes their addresses into the table. 0 if it failed.
  int64_t (*wait)(int64_t layer);
  int64_t clock;        // how many uses of an expert were noted
  int64_t assignments;  // tokens times experts of each
  int64_t hits;         // of these, how many experts' addresses were known when their turn began
  int64_t nanoseconds;  // of all turns
  int64_t wanted;       // how many numbers each list has
};

// A row's experts, ascending, and the weights of their results.
struct Choice {
  std::vector<int64_t> experts;
  std::vector<float> weights;
};

// An expert that some rows have chosen: `count` of them, from `first` on in a list of all experts' rows.
struct Chosen {
  int64_t expert, first, count;
};

// Several products that are shared among threads as if their weights were one weight, each product's
// units behind those of the one before: no thread waits between two of them.
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

  // What one of so many members does of all products, which is done once. x_of(j) is product j's x:
  // it is asked for when this member first needs it. y_of(j) is where its y begins. `stays`: whether memory
  // that had a token of x has it still.
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

  // A stream of what a member reads first, as Product::stream gives it.
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
  struct Head {
    int64_t chosen, normalized, width;  // experts of a token; whether their weights add up to 1
    int64_t w13_bytes, w2_bytes;        // of a packed weight; 0: plain, in x's dtype
    // Of the expert that all tokens share, the same; its width is 0 where there is none.
    int64_t shared_width, shared_w13_bytes, shared_w2_bytes;
    // Where experts come and go: what is told, when each was last used (X numbers, by the turn's clock),
    // and the layer's number. Null where all of them stay.
    Turn* turn;
    int64_t* used;
    int64_t layer;
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
                        head->chosen > 0 && head->chosen <= count && head->width > 0,
                    "the table of ", count, " experts has ", table.numel(), " numbers");
    STD_TORCH_CHECK((head->shared_width > 0) == (gate != nullptr),
                    "a shared expert and its gate go together");
  }

  const int64_t count;  // of experts that the router chooses from; the shared one has this number
  const int64_t D;
  // How this step's products with w13, and with w2, are shared among threads: first for experts that are there
  // at once, then for those that arrive meanwhile.
  Sharing first_units[2], second_units[2];

  // Experts that a token chooses.
  int64_t chosen() const { return head->chosen; }
  // Experts that a token goes through, the shared one included; it comes last.
  int64_t taken() const { return head->chosen + (gate ? 1 : 0); }
  int64_t width_of(int64_t expert) const {
    return expert < count ? head->width : head->shared_width;
  }
  // What all experts of a token together have of that.
  int64_t widths() const { return head->chosen * head->width + head->shared_width; }
  const char* row(int64_t expert) const { return router + expert * row_size; }

  // The numbers of a token's experts, ascending, and what each one's result weighs. scores: of all
  // that there are to choose from. x: the token.
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

  // A turn of experts that come and go, by one thread: begin; want; bring and wait until all are there; end. A
  // layer has one turn in a step, and none where its experts stay.
  bool moves() const { return head->turn; }

  void begin() {
    head->turn->wanted = 0;
    started = Clock::now();
  }

  // So many tokens want this expert. Experts are wanted in ascending order.
  void want(int64_t expert, int64_t tokens) {
    Turn& turn = *head->turn;
    wanted()[turn.wanted] = expert, tokens_each()[turn.wanted++] = tokens;
    head->used[expert] = ++turn.clock;
    turn.assignments += tokens;
    if (is_here(expert)) turn.hits += tokens;
  }

  // Returns how many of the wanted experts, the first ones, are in memory (`is_here`) or arrive while those are
  // computed: then `wait`. They leave the list; when they have been computed, the others may be brought.
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

  // A matrix of an expert: `first`, (2 · width, D), or `second`, (D, width).
  struct Matrix {
    const char* at;
    int64_t bytes, outputs, columns;
  };
  Matrix first(int64_t expert) const {
    const bool own = expert < count;
    return {addresses[expert].w13, own ? head->w13_bytes : head->shared_w13_bytes,
            2 * width_of(expert), D};
  }
  Matrix second(int64_t expert) const {
    const bool own = expert < count;
    return {addresses[expert].w2, own ? head->w2_bytes : head->shared_w2_bytes, D, width_of(expert)};
  }
  // The products with the matrices of the experts at these places of a list.
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
  Clock::time_point started;  // this turn

  // The turn's lists: X wanted experts, and the tokens of each.
  int64_t* wanted() const { return reinterpret_cast<int64_t*>(head->turn + 1); }
  int64_t* tokens_each() const { return wanted() + count; }

  // All experts' numbers, as many as a token has with the highest scores first.
  void best_first(const float* scores, std::vector<int64_t>& experts) const {
    experts.resize(count);
    std::iota(experts.begin(), experts.end(), 0);
    std::partial_sort(experts.begin(), experts.begin() + head->chosen, experts.end(),
                      [&](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
  }

  int64_t all() const { return count + (head->shared_width ? 1 : 0); }

  std::unique_ptr<Product> product(const Matrix& m, int64_t tokens, bool as_one) const {
    auto made = m.bytes ? packed_product(m.at, m.bytes, number, tokens, as_one)
                        : plain_product(m.at, m.outputs, m.columns, number, tokens, as_one);
    STD_TORCH_CHECK(made->rows == m.outputs && made->columns == m.columns, "an expert's weight is (",
                    made->rows, ", ", made->columns, "), not (", m.outputs, ", ", m.columns, ")");
    return made;
  }
};

}  // namespace
