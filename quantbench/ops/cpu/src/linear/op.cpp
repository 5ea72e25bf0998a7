// quantbench::cpu_linear: x times a packed weight, transposed. For a few rows of x, here, the weight is
// read once, each of its rows by one thread, in an order that does not depend on how many there are;
// for more of them linear/many/choose.cpp does it.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstring>
#include <tuple>

#include "common/isa.h"
#include "common/limits.h"
#include "linear/layout.h"
#include "linear/many/many.h"
#include "common/products.h"
#include "common/scratch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

FewVariant best_few() { return (isa() == Isa::avxvnni ? few_avxvnni : BEST_VARIANT(few))(); }

Header header_at(const void* packed, int64_t bytes) {
  STD_TORCH_CHECK(bytes >= int64_t(sizeof(Header)), "this is no weight packed by cpu_pack_linear");
  Header header;
  std::memcpy(&header, packed, sizeof header);
  const char* reason = wrong(header, bytes - int64_t(sizeof header));
  STD_TORCH_CHECK(!reason, reason);
  return header;
}

Header header_of(const Tensor& packed) {
  STD_TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte,
                  "this is no weight packed by cpu_pack_linear");
  return header_at(packed.const_data_ptr(), packed.numel());
}

// What a product of M rows is, but for x and y. It points to the header.
Problem problem_of(const Header& header, const void* packed, Number x, int64_t M) {
  const bool whole = as_floats(header.coding) || header.rounding != Rounding::none;
  Problem problem{};
  problem.header = &header;
  problem.geometry = geometry(header);
  problem.blocks = static_cast<const uint8_t*>(packed) + sizeof header;
  problem.outputs = M;
  problem.tokens = x == Number::f32 && !whole ? 2 * M : M;
  problem.type = x;
  return problem;
}

void take_scratch(Problem& problem, Scratch& scratch) {
  const Geometry& g = problem.geometry;
  const bool floats = as_floats(problem.header->coding);
  const int64_t tokens = problem.tokens, padded = g.padded_columns;
  scratch.reserve(4 * (padded + problem.outputs + tokens * (padded + sums_of(g) + g.x_chunks) + 6 * 16));
  problem.row = scratch.take<float>(padded);
  problem.token_scales = scratch.take<float>(problem.outputs);
  problem.floats = scratch.take<float>(floats ? tokens * padded : 0);
  problem.quads = scratch.take<int32_t>(floats ? 0 : tokens * padded / 2);
  problem.sums = scratch.take<int32_t>(floats ? 0 : tokens * sums_of(g));
  problem.scales = scratch.take<float>(floats ? 0 : tokens * g.x_chunks);
}

struct PackedProduct : Product {
  Header header;
  Problem problem;
  FewVariant run = best_few();

  PackedProduct(const Header& given, const void* packed, Number x)
      : Product(given.rows, given.columns), header(given),
        problem(problem_of(header, packed, x, 1)) {
    problem.x_step = 1;
    memory = reinterpret_cast<const char*>(problem.blocks);
    units = problem.geometry.blocks, unit_bytes = problem.geometry.block_bytes;
  }

  PreparedRow prepared(const void* x, Scratch& scratch) const override {
    Problem mine = problem;
    mine.x = x;
    take_scratch(mine, scratch);
    run.prepare(mine);
    return {mine.floats, mine.scales, mine.token_scales, mine.quads, mine.sums};
  }

  bool prepares_like(const Product& other) const override {
    const auto* packed = dynamic_cast<const PackedProduct*>(&other);
    auto layout = [](const PackedProduct& product) {
      const Header& h = product.header;
      const Geometry& g = product.problem.geometry;
      return std::tuple(product.problem.type, h.columns, x_layout(h), g.x_units, g.sum_columns, h.rounding);
    };
    return packed && layout(*packed) == layout(*this);
  }

  void multiply(const PreparedRow& x, void* y, int64_t first, int64_t last) const override {
    Problem mine = problem;
    mine.floats = x.floats, mine.scales = x.scales, mine.token_scales = x.token_scales;
    mine.quads = x.quads, mine.sums = x.sums, mine.y = y;
    run.multiply(mine, first, last);
  }
};

}  // namespace

std::unique_ptr<Product> packed_product(const void* packed, int64_t bytes, Number x) {
  return std::unique_ptr<Product>(new PackedProduct(header_at(packed, bytes), packed, x));
}

std::unique_ptr<Product> packed_product(const Tensor& packed, Number x) {
  const Header header = header_of(packed);
  return std::unique_ptr<Product>(new PackedProduct(header, packed.const_data_ptr(), x));
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t rows) {
  const Header header = header_of(packed);
  const Geometry g = geometry(header);
  STD_TORCH_CHECK(header.rows == rows, "the weight has ", header.rows, " rows, not ", rows);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == header.columns,
                  "x has to be (M, ", header.columns, ")");
  const ScalarType type = x.scalar_type();
  const int64_t M = x.size(0);
  const Number x_type = number_of(type);
  Tensor y = torch::stable::new_empty(x, {M, rows});
  if (!M || !rows) return y;

  Problem problem = problem_of(header, packed.const_data_ptr(), x_type, M);
  problem.x = x.const_data_ptr();
  problem.x_row = x.stride(0);
  problem.x_step = x.stride(1);
  problem.y = y.mutable_data_ptr();
  if (linear_of_many(problem)) return y;
  const bool alone = g.blocks * g.block_bytes <= limits.alone_bytes;
  if (M == 1 && x.stride(1) == 1 && !alone) {
    PackedProduct(header, packed.const_data_ptr(), x_type)
        .by_all_threads(x.const_data_ptr(), y.mutable_data_ptr());
    return y;
  }
  thread_local Scratch scratch;
  take_scratch(problem, scratch);
  const FewVariant run = best_few();
  run.prepare(problem);
  torch::stable::parallel_for(0, g.blocks, alone ? g.blocks : 1, [&](int64_t begin, int64_t end) {
    run.multiply(problem, begin, end);
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_linear", TORCH_BOX(&linear));
}
