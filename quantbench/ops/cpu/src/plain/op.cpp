// quantbench::cpu_plain: x times a weight as torch has it, transposed. For a few rows of x, and with AMX,
// here; for more of them linear/many/choose.cpp does it. The weight is read once, each of its rows by one
// thread, in an order that does not depend on how many there are.

#include "plain/plain.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstring>

#include "common/isa.h"
#include "common/limits.h"
#include "common/products.h"
#include "common/scratch.h"
#include "linear/many/many.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BLOCK = 32, SIDE = 16;  // rows and tokens: AMX

// From two rows of x on tiles are faster.
bool in_tiles(const Plain& problem) {
  return has(Isa::amx) && problem.type == Number::bf16 && problem.tokens > 1 &&
         problem.columns % 32 == 0;
}

void multiply_in_tiles(Plain& problem, Scratch& scratch) {
  const int64_t tiles = (problem.tokens + SIDE - 1) / SIDE, row_bytes = problem.columns * 2;
  const int64_t rest = problem.rows % BLOCK;
  scratch.reserve((tiles * SIDE + BLOCK) * row_bytes);
  problem.tiles = scratch.take<char>(tiles * SIDE * row_bytes);
  if (rest) {
    char* copy = scratch.take<char>(BLOCK * row_bytes);
    std::memcpy(copy, problem.weight + (problem.rows - rest) * row_bytes, rest * row_bytes);
    std::memset(copy + rest * row_bytes, 0, (BLOCK - rest) * row_bytes);
    problem.rest = copy;
  }
  const PlainVariant run = plain_amx();
  torch::stable::parallel_for(0, tiles, 4, [&](int64_t first, int64_t last) {
    run.prepare(problem, first, last);
  });
  const int64_t blocks = (problem.rows + BLOCK - 1) / BLOCK;
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    run.multiply(problem, first, last);
  });
}

struct PlainProduct : Product {
  Plain problem{};
  PlainVariant run;

  PlainProduct(const void* weight, int64_t outputs, int64_t inputs, Number type)
      : Product(outputs, inputs), run(BEST_VARIANT(plain)(type)) {
    problem.type = type;
    problem.tokens = 1, problem.rows = rows, problem.columns = columns;
    problem.padded = (columns + 31) / 32 * 32;
    problem.x_step = 1;
    problem.weight = static_cast<const char*>(weight);
    memory = problem.weight, units = rows, unit_bytes = columns * size_of(type);
  }

  PlainProduct(const Tensor& weight, Number type)
      : PlainProduct(weight.const_data_ptr(), weight.size(0), weight.size(1), type) {}

  PreparedRow prepared(const void* x, Scratch& scratch) const override {
    Plain mine = problem;
    mine.x = static_cast<const char*>(x);
    scratch.reserve(mine.padded * int64_t(sizeof(float)));
    PreparedRow row;
    row.floats = mine.floats = scratch.take<float>(mine.padded);
    run.prepare(mine, 0, 1);
    return row;
  }

  bool prepares_like(const Product& other) const override {
    const auto* plain = dynamic_cast<const PlainProduct*>(&other);
    return plain && plain->columns == columns && plain->problem.type == problem.type;
  }

  void multiply(const PreparedRow& x, void* y, int64_t first, int64_t last) const override {
    Plain mine = problem;
    mine.floats = x.floats, mine.y = y;
    run.multiply(mine, first, last);
  }
};

}  // namespace

Tensor plain(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "the weight has to be contiguous");
  const int64_t columns = weight.size(1), rows = weight.size(0);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == columns, "x has to be (M, ", columns, ")");
  STD_TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "x and the weight differ in dtype");
  Plain problem{};
  problem.type = number_of(x.scalar_type());
  problem.tokens = x.size(0), problem.rows = rows, problem.columns = columns;
  problem.padded = (columns + 31) / 32 * 32;
  problem.x = static_cast<const char*>(x.const_data_ptr());
  problem.x_row = x.stride(0), problem.x_step = x.stride(1);
  problem.weight = static_cast<const char*>(weight.const_data_ptr());
  Tensor y = torch::stable::new_empty(x, {problem.tokens, rows});
  problem.y = y.mutable_data_ptr();
  if (!problem.tokens || !rows) return y;
  thread_local Scratch scratch;
  if (in_tiles(problem)) {
    multiply_in_tiles(problem, scratch);
    return y;
  }
  Problem many{};
  many.type = problem.type, many.outputs = problem.tokens;
  many.x = problem.x, many.x_row = problem.x_row, many.x_step = problem.x_step, many.y = problem.y;
  if (plain_of_many(many, problem.weight, rows, columns)) return y;
  const bool alone = int64_t(weight.numel() * weight.element_size()) <= limits.alone_bytes;
  if (problem.tokens == 1 && problem.x_step == 1 && !alone) {
    PlainProduct(weight, problem.type).by_all_threads(problem.x, problem.y);
    return y;
  }
  scratch.reserve(problem.tokens * problem.padded * sizeof(float));
  problem.floats = scratch.take<float>(problem.tokens * problem.padded);
  const PlainVariant run = BEST_VARIANT(plain)(problem.type);
  run.prepare(problem, 0, problem.tokens);
  torch::stable::parallel_for(0, rows, alone ? rows : 1, [&](int64_t first, int64_t last) {
    run.multiply(problem, first, last);
  });
  return y;
}

std::unique_ptr<Product> plain_product(const void* weight, int64_t rows, int64_t columns, Number type) {
  return std::unique_ptr<Product>(new PlainProduct(weight, rows, columns, type));
}

std::unique_ptr<Product> plain_product(const Tensor& weight, Number x) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "the weight has to be contiguous");
  STD_TORCH_CHECK(number_of(weight.scalar_type()) == x, "x and the weight differ in dtype");
  return std::unique_ptr<Product>(new PlainProduct(weight, x));
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) { library.impl("cpu_plain", TORCH_BOX(&plain)); }
