// quantbench::cpu_plain: x times a weight as torch has it, transposed. For a few rows of x, and with AMX,
// here; for more of them linear/many/choose.cpp does it. The weight is read once, each of its rows by one
// thread, in an order that does not depend on how many there are.

#include "plain/plain.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstring>
#include <memory>
#include <tuple>

#include "common/isa.h"
#include "common/limits.h"
#include "common/products.h"
#include "common/scratch.h"
#include "linear/many/choose.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BLOCK = 32, SIDE = 16;  // rows and tokens: AMX

struct PlainProduct : Product {
  Plain problem{};  // but for x and y
  const bool in_tiles;
  const PlainVariant run;

  PlainProduct(const void* weight, int64_t rows, int64_t columns, Number type, int64_t tokens, bool in_tiles)
      : Product(rows, columns, tokens), in_tiles(in_tiles),
        run(in_tiles               ? plain_amx()
            : has(Isa::avx512bf16) ? plain_avx512bf16(type) : BEST_VARIANT(plain)(type)) {
    problem.type = type;
    problem.tokens = tokens, problem.rows = rows, problem.columns = columns;
    problem.padded = (columns + 31) / 32 * 32;
    problem.weight = memory = static_cast<const char*>(weight);
    const int64_t together = in_tiles ? BLOCK : 1, row_bytes = columns * size_of(type);
    units = (rows + together - 1) / together, unit_bytes = together * row_bytes;
    alone = !in_tiles && rows * row_bytes <= limits.alone_bytes;
    if (in_tiles) tile = SIDE;
    x_bytes = place(problem, nullptr);
  }

  // Where in memory x lies once it is prepared; returns how many bytes that takes.
  int64_t place(Plain& to, char* memory) const {
    Room room(memory);
    const int64_t rest = in_tiles && rows % BLOCK ? BLOCK * columns * 2 : 0;
    to.floats = room.take<float>(in_tiles ? 0 : tokens * to.padded);
    to.tiles = room.take<char>(in_tiles ? tiles() * SIDE * columns * 2 : 0);
    to.rest = room.take<char>(rest);
    return room.next - Room(memory).next;
  }

  void prepare(const X& x, char* to, int64_t first, int64_t last) const override {
    Plain mine = problem;
    place(mine, to);
    mine.x = static_cast<const char*>(x.data), mine.x_row = x.row, mine.x_step = x.column;
    run.prepare(mine, first, last);
    const int64_t rest = rows % BLOCK, row_bytes = columns * 2;
    if (!in_tiles || !rest || first > 0) return;
    std::memcpy(mine.rest, mine.weight + (rows - rest) * row_bytes, rest * row_bytes);
    std::memset(mine.rest + rest * row_bytes, 0, (BLOCK - rest) * row_bytes);
  }

  bool prepares_like(const Product& other) const override {
    const auto* plain = dynamic_cast<const PlainProduct*>(&other);
    auto layout = [](const PlainProduct& product) {
      return std::tuple(product.columns, product.tokens, product.problem.type, product.in_tiles);
    };
    // The last rows of the weight may lie behind x in tiles.
    return plain && !in_tiles && layout(*plain) == layout(*this);
  }

  void multiply(char* x, void* y, int64_t first, int64_t last) const override {
    Plain mine = problem;
    place(mine, x);
    mine.y = y;
    run.multiply(mine, first, last);
  }
};

}  // namespace

std::unique_ptr<Product> plain_product(const void* weight, int64_t rows, int64_t columns, Number type,
                                       int64_t tokens, bool as_one) {
  // From two tokens on tiles are faster.
  const bool in_tiles = isa() == Isa::amx && type == Number::bf16 && tokens > 1 && columns % 32 == 0;
  if (!as_one && !in_tiles)
    if (const auto many = many_for_plain(tokens))
      return plain_product_by(*many, weight, rows, columns, type, tokens);
  return std::make_unique<PlainProduct>(weight, rows, columns, type, tokens, in_tiles && !as_one);
}

std::unique_ptr<Product> plain_product(const Tensor& weight, Number x, int64_t tokens, bool as_one) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "the weight has to be contiguous");
  STD_TORCH_CHECK(number_of(weight.scalar_type()) == x, "x and the weight differ in dtype");
  return plain_product(weight.const_data_ptr(), weight.size(0), weight.size(1), x, tokens, as_one);
}

namespace {

Tensor plain(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() == 2, "x has to be (M, K)");
  const auto product = plain_product(weight, number_of(x.scalar_type()), x.size(0), false);
  STD_TORCH_CHECK(x.size(1) == product->columns, "x has to be (M, ", product->columns, ")");
  Tensor y = torch::stable::new_empty(x, {x.size(0), product->rows});
  if (y.numel())
    product->by_all_threads({x.const_data_ptr(), x.stride(0), x.stride(1)}, y.mutable_data_ptr());
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) { library.impl("cpu_plain", TORCH_BOX(&plain)); }
