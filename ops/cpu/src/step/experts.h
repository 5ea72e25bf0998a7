// A layer's mixture of experts, as a decoding step of one row sees it. For op.cpp alone.
//
// Its tensors come in the places of a feed-forward network's: the router's weight (X, D) in that of W13,
// and in that of W2 int64 numbers: a head (below), then for each expert the addresses of its two weights.
// So a step is called with a handful of tensors, however many experts there are.
#pragma once

#include "step/step.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace {

struct Experts {
  struct Head {
    int64_t chosen, normalized, width;  // experts of a token; whether their weights add up to 1
    int64_t w13_bytes, w2_bytes;        // of a packed weight; 0: plain, in x's dtype
  };
  struct Addresses {
    int64_t w13, w2;
  };

  Experts(const Tensor& router, const Tensor& table, const Tensor& x)
      : router(router), x(x), head(reinterpret_cast<const Head*>(data(table))),
        addresses(reinterpret_cast<const Addresses*>(head + 1)), count(router.size(0)) {
    STD_TORCH_CHECK(router.dim() == 2 && router.is_contiguous() && router.size(1) == x.size(1) &&
                        router.scalar_type() == x.scalar_type(),
                    "a router has to be (X, ", x.size(1), ") of x's dtype");
    STD_TORCH_CHECK(table.is_contiguous() &&
                        table.numel() * 8 == int64_t(sizeof(Head) + count * sizeof(Addresses)) &&
                        head->chosen > 0 && head->chosen <= count && head->width > 0,
                    "the table of ", count, " experts has ", table.numel(), " numbers");
  }

  int64_t chosen() const { return head->chosen; }
  int64_t width() const { return head->width; }
  const char* row(int64_t expert) const { return data(router) + expert * row_bytes(router); }

  // The numbers of the experts with the largest scores, ascending, and what each one's result weighs.
  void choose(const float* scores, int64_t* experts, float* weights) const {
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + chosen(), order.end(), [&](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    const float most = scores[order[0]];
    std::sort(order.begin(), order.begin() + chosen());
    double all = 0, taken = 0;
    for (int64_t i = 0; i < count; ++i) all += std::exp(double(scores[i]) - most);
    for (int64_t i = 0; i < chosen(); ++i) taken += std::exp(double(scores[order[i]]) - most);
    for (int64_t i = 0; i < chosen(); ++i) {
      experts[i] = order[i];
      weights[i] = float(std::exp(double(scores[order[i]]) - most) / (head->normalized ? taken : all));
    }
  }

  // Products with an expert's first matrix (2 · width, D) and with its second (D, width).
  std::unique_ptr<Product> first(int64_t expert) const {
    return product(addresses[expert].w13, head->w13_bytes, 2 * width(), x.size(1));
  }
  std::unique_ptr<Product> second(int64_t expert) const {
    return product(addresses[expert].w2, head->w2_bytes, x.size(1), width());
  }

 private:
  const Tensor &router, &x;
  const Head* head;
  const Addresses* addresses;

  std::unique_ptr<Product> product(int64_t address, int64_t bytes, int64_t outputs,
                                   int64_t columns) const {
    auto* at = reinterpret_cast<void*>(address);
    const Number number = number_of(x.scalar_type());
    const auto device = x.device();
    auto made = bytes ? packed_product(torch::stable::from_blob(at, {bytes}, {1}, device,
                                                                ScalarType::Byte), number)
                      : plain_product(torch::stable::from_blob(at, {outputs, columns}, {columns, 1},
                                                               device, x.scalar_type()), number);
    STD_TORCH_CHECK(made->rows == outputs && made->columns == columns, "an expert's weight is (",
                    made->rows, ", ", made->columns, "), not (", outputs, ", ", columns, ")");
    return made;
  }

 public:
  const int64_t count;
};

}  // namespace
