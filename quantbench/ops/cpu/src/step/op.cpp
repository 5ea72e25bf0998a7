// quantbench::cpu_decode: a decoding step of a whole Llama, from each row's newest embedding to logits, over
// caches of any format. Between two products lie some microseconds of work; a compiled graph makes several
// calls and allocations for it, each of which takes as long as the work itself.
//
// Ranks that share memory (common/ranks.h) each have a part of the heads, of the feed-forward network and
// of the vocabulary, so they sum what wo and w2 give, and gather the logits. `handle`: 0 if this process
// has the whole model.

#include "step/by_team.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

Tensor product(const Rows& rows, const Tensor& x, const Tensor& weight, const char* bias,
               int64_t outputs, bool as_one) {
  const bool packed = weight.scalar_type() == ScalarType::Byte;
  Tensor y = packed ? linear(x, weight, outputs, as_one) : plain(x, weight, as_one);
  STD_TORCH_CHECK(y.size(1) == outputs, "the weight has ", y.size(1), " rows, not ", outputs);
  for (int64_t i = 0; bias && i < y.size(0); ++i) {
    char* row = data(y) + i * row_bytes(y);
    rows.add(row, bias, 1, outputs, row);
  }
  return y;
}

// x itself where the model has no such norm.
Tensor normed(const Rows& rows, const Tensor& x, const Tensor& weight, double epsilon) {
  if (!weight.numel()) return x;
  Tensor y = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  const float* w = floats(weight, x.size(1));
  for (int64_t i = 0; i < x.size(0); ++i)
    rows.norm(data(x) + i * row_bytes(x), w, float(epsilon), x.size(1), data(y) + i * row_bytes(y));
  return y;
}

// A feed-forward network's output, this rank's part of it.
Tensor fed_forward(const Rows& rows, const Tensor& x, const Tensor& w13, const char* w13_bias,
                   const Tensor& w2, const char* w2_bias, int64_t width, Gate kind, int64_t up,
                   bool as_one) {
  const int64_t B = x.size(0);
  Tensor both = product(rows, x, w13, w13_bias, width + up, as_one);
  Tensor gated = torch::stable::new_empty(x, {B, width});
  for (int64_t b = 0; b < B; ++b) {
    const char* gate = data(both) + b * row_bytes(both);
    rows.gates[kind](gate, gate + up * x.element_size(), width, data(gated) + b * row_bytes(gated));
  }
  return product(rows, gated, w2, w2_bias, x.size(1), as_one);
}

// Scores (B, X) that a layer's router gives the rows of x (B, D).
std::vector<float> scores_of(const Rows& rows, const Experts& layer, const Tensor& x) {
  const int64_t B = x.size(0), bytes = row_bytes(x);
  std::vector<float> scores(B * layer.count);
  torch::stable::parallel_for(0, layer.count, 1, [&](int64_t first, int64_t last) {
    for (int64_t e = first; e < last; ++e)
      for (int64_t b = 0; b < B; ++b)
        scores[b * layer.count + e] = rows.dot(data(x) + b * bytes, layer.row(e), x.size(1));
  });
  return scores;
}

// What the experts chosen for each row of x (B, D) return, weighed and summed, this rank's part of it.
// Each expert computes all of its rows at once.
Tensor mixed(const Rows& rows, Experts& layer, const Tensor& x, bool as_one) {
  struct Share {
    int64_t row;
    float weight;
  };
  const int64_t B = x.size(0), D = x.size(1), bytes = row_bytes(x);
  const std::vector<float> scores = scores_of(rows, layer, x);
  std::vector<float> total(B * D), weights;
  std::vector<std::vector<Share>> shares(layer.count + 1);  // of each expert
  std::vector<int64_t> experts;
  for (int64_t b = 0; b < B; ++b) {
    layer.choose(rows, data(x) + b * bytes, scores.data() + b * layer.count, experts, weights);
    for (size_t j = 0; j < experts.size(); ++j) shares[experts[j]].push_back({b, weights[j]});
  }
  if (layer.moves()) {
    layer.begin();
    for (int64_t e = 0; e < layer.count; ++e)
      if (!shares[e].empty()) layer.want(e, shares[e].size());
  }
  std::vector<std::optional<Tensor>> results(layer.count + 1);  // (rows of its share, D), of each expert
  auto compute = [&](int64_t e) {
    const int64_t count = shares[e].size();
    if (!count) return;
    Tensor some = torch::stable::new_empty(x, {count, D});
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(data(some) + i * bytes, data(x) + shares[e][i].row * bytes, bytes);
    results[e] = fed_forward(rows, some, layer.tensor(layer.first(e)), nullptr,
                             layer.tensor(layer.second(e)), nullptr, layer.width_of(e), SILU,
                             layer.width_of(e), as_one);
  };
  std::vector<int64_t> left, arriving;  // experts that are still to be computed; of them, those to wait for
  for (int64_t e = 0; e < layer.count; ++e)
    if (!shares[e].empty()) left.push_back(e);
  for (auto next = left.begin(); next != left.end();) {
    const auto end = layer.moves() ? next + layer.bring() : left.end();
    arriving.clear();
    for (; next != end; ++next)
      if (layer.is_here(*next)) compute(*next);
      else arriving.push_back(*next);
    if (arriving.empty()) continue;
    if (!results[layer.count]) compute(layer.count);  // the shared expert is always there
    layer.wait();
    for (int64_t e : arriving) compute(e);
  }
  if (!results[layer.count]) compute(layer.count);
  for (int64_t e = 0; e <= layer.count; ++e)  // in this order, whenever they arrived
    for (size_t i = 0; i < shares[e].size(); ++i)
      rows.add_weighed(data(*results[e]) + i * bytes, shares[e][i].weight, D,
                       total.data() + shares[e][i].row * D);
  if (layer.moves()) layer.end();
  Tensor y = torch::stable::new_empty(x, {B, D});
  rows.narrow(total.data(), B * D, data(y));
  return y;
}

Tensor one_op_after_another(Step& step) {
  const Rows rows = rows_of(step.x);
  const bool as_one = step.chunk > 1;  // tokens of a chunk may be guesses, which change nothing else
  Tensor x = step.x;
  for (int64_t i = 0; i < step.count; ++i) {
    const int64_t D = x.size(1), qkv_width = (step.heads + 2 * step.kv_heads) * step.E;
    auto part = [&](Part p) -> const Tensor& { return step.part(i, p); };
    // x + residual · norm(y), where y is this rank's part of what a part of the layer returns.
    auto sum = [&](const Tensor& x, Tensor y, Part norm) {
      STD_TORCH_CHECK(y.scalar_type() == x.scalar_type() && y.numel() == x.numel(),
                      "a product and x differ in dtype or size");
      sum_over(step.ranks, rows, data(y), y.numel(), [] { return false; });
      y = normed(rows, y, part(norm), step.epsilon);
      rows.add(data(x), data(y), float(step.how(i).residual), y.numel(), data(y));
      return y;
    };
    Tensor qkv = product(rows, normed(rows, x, part(NORM), step.epsilon), part(WQKV),
                         step.bias(i, WQKV_BIAS, qkv_width), qkv_width, as_one);
    auto attending = step.attending(rows, i, qkv);
    if (attending->alone()) attending->work();
    else
      torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1,
                                  [&](int64_t, int64_t) { attending->work(); });
    Tensor y = attending->result();
    y = torch::stable::view(y, {step.B, step.heads * step.E});
    y = product(rows, y, part(WO), step.bias(i, WO_BIAS, D), D, as_one);
    const Tensor middle = sum(x, y, POST_NORM);
    const Tensor own = normed(rows, middle, part(FFN_NORM), step.epsilon);
    if (step.has_experts(i)) {
      Experts layer(step, i);
      y = mixed(rows, layer, own, as_one);
    } else {
      const int64_t up = step.up(i);
      y = fed_forward(rows, own, part(W13), step.bias(i, W13_BIAS, step.width + up), part(W2),
                      step.bias(i, W2_BIAS, D), step.width, Gate(step.how(i).gate), up, as_one);
    }
    x = sum(middle, y, FFN_POST_NORM);
  }
  const Ending& ending = step.ending;
  return product(rows, normed(rows, x, ending.norm, step.epsilon), ending.weight, ending.bias,
                 ending.outputs, as_one);
}

Tensor run(Step& step) {
  try {
    if (step.B == 1 && step.count) return ByTeam(step).run();
    return one_op_after_another(step);
  } catch (...) {
    if (step.ranks) step.ranks->abandon();  // or the others would wait for this one
    throw;
  }
}

// x: the tokens' embeddings (B, D), as many of each sequence, one behind the other. positions: (B,), or (1,)
// for all. vocabularies: how many tokens each rank has in its output.
Tensor decode(const Tensor& x, std::vector<Tensor> parts, const Tensor& hows, std::vector<Tensor> caches,
              const std::string& format, const Tensor& rotations, const Tensor& positions,
              int64_t sequences, double epsilon, int64_t heads, int64_t kv_heads, int64_t width,
              const Tensor& norm, const Tensor& output, const Maybe& output_bias, int64_t handle,
              std::vector<int64_t> vocabularies) {
  STD_TORCH_CHECK(rotations.is_contiguous() && rotations.scalar_type() == ScalarType::Float &&
                      rotations.dim() == 3 && rotations.size(0) == 2,
                  "rotations have to be (2, tables, E / 2), float32, contiguous");
  STD_TORCH_CHECK(sequences > 0 && x.size(0) % sequences == 0, "there are ", x.size(0), " rows for ",
                  sequences, " sequences");
  LocalRanks* ranks = LocalRanks::of(handle);
  STD_TORCH_CHECK(int64_t(vocabularies.size()) == (ranks ? ranks->size : 1), "there are ",
                  vocabularies.size(), " vocabularies");
  const int64_t outputs = vocabularies[ranks ? ranks->rank : 0];
  const Ending ending{norm, output, output_bias ? vector(*output_bias, x, outputs) : nullptr, outputs};
  Step step(parts, hows, caches, format, x, rotations, positions, sequences, epsilon, heads, kv_heads,
            width, ranks, ending);
  Tensor logits = run(step);
  return ranks ? gather_rows(logits, *ranks, vocabularies) : logits;
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
}
