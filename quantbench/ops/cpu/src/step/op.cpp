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
#include <utility>
#include <vector>

namespace {

Tensor run(Step& step) {
  try {
    return ByTeam(step).run();
  } catch (...) {
    if (step.ranks) step.ranks->abandon();  // or the others would wait for this one
    throw;
  }
}

// The tensors of all layers, which are the same in every step: handing over 450 takes 60 µs.
struct Kept {
  std::vector<Tensor> parts, caches;
};

int64_t keep(std::vector<Tensor> parts, std::vector<Tensor> caches) {
  return reinterpret_cast<int64_t>(new Kept{std::move(parts), std::move(caches)});
}

// x: the tokens' embeddings (B, D), a sequence's one behind the other. positions: (B,), or (1,) for all. vocabularies: how many tokens each rank has in its output.
Tensor decode(const Tensor& x, int64_t kept, const Tensor& hows, const std::string& format,
              const Tensor& rotations, const Tensor& positions,
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
  auto& [parts, caches] = *reinterpret_cast<Kept*>(kept);
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

extern "C" __attribute__((visibility("default"))) void quantbench_forget(int64_t kept) {
  delete reinterpret_cast<Kept*>(kept);
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_keep", TORCH_BOX(&keep));
  library.impl("cpu_decode", TORCH_BOX(&decode));
}
