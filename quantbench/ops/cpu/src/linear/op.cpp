// quantbench::cpu_linear: x times a packed weight, transposed. For a few rows of x, here, the weight is
// read once, each of its rows by one thread, in an order that does not depend on how many there are;
// for more of them linear/many/choose.cpp does it.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>

#include "common/isa.h"
#include "common/limits.h"
#include "linear/layout.h"
#include "linear/many/choose.h"
#include "common/products.h"
#include "common/scratch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

FewVariant best_few() {
  return (isa() == Isa::avxvnni ? few_avxvnni : isa() == Isa::neon_i8mm ? few_neon_i8mm : BEST_VARIANT(few))();
}

Header header_at(const void* packed, int64_t bytes) {
  STD_TORCH_CHECK(bytes >= int64_t(sizeof(Header)), "this is no weight packed by cpu_pack_linear");
  Header header;
  std::memcpy(&header, packed, sizeof header);
  const char* reason = wrong(header, bytes - int64_t(sizeof header));
  STD_TORCH_CHECK(!reason, reason);
  return header;
}

struct PackedProduct : Product {
  const Header header;
  Problem problem{};  // but for x and y
  const std::optional<ManyVariant> many;  // none: the loop over few tokens
  const FewVariant few = best_few();

  PackedProduct(const Header& given, const Geometry& g, const void* blocks, Number x, int64_t tokens,
                std::optional<ManyVariant> many)
      : Product(given.rows, given.columns, tokens), header(given), many(many) {
    const bool two_words = x == Number::f32 && !as_floats(header.coding) && header.rounding == Rounding::none;
    problem.header = &header, problem.geometry = g, problem.type = x;
    problem.blocks = static_cast<const uint8_t*>(blocks);
    problem.outputs = tokens, problem.tokens = two_words ? 2 * tokens : tokens;
    const int64_t beside = many ? many->side_by_side : 1;
    memory = static_cast<const char*>(blocks);
    units = (g.blocks + beside - 1) / beside, unit_bytes = beside * g.block_bytes;
    alone = many ? tokens * g.padded_columns * rows <= limits.alone_products
                 : g.blocks * g.block_bytes <= limits.alone_bytes;
    // The loop over few tokens puts TILE of them into the same lines.
    tile = many ? many->tokens : two_words ? TILE / 2 : TILE;
    x_bytes = place(problem, nullptr);
  }

  // Where in memory x lies once it is prepared; returns how many bytes that takes.
  int64_t place(Problem& to, char* memory) const {
    Room room(memory);
    const Geometry& g = to.geometry;
    const int64_t all = tiles() * tile, padded = g.padded_columns, words = many ? 0 : to.tokens;
    if (many) room.take<char>(all * padded * many->x_bytes);  // first: where the loop expects it
    const bool floats = as_floats(header.coding);
    to.token_scales = room.take<float>(all);
    to.floats = room.take<float>(floats ? words * padded : 0);
    to.quads = room.take<int32_t>(floats ? 0 : words * padded / 2);
    to.sums = room.take<int32_t>(floats ? 0 : words * sums_of(g));
    to.scales = room.take<float>(floats ? 0 : words * g.x_chunks);
    return room.next - Room(memory).next;
  }

  void prepare(const X& x, char* to, int64_t first, int64_t last) const override {
    Problem mine = problem;
    place(mine, to);
    mine.x = x.data, mine.x_row = x.row, mine.x_step = x.column;
    thread_local Scratch row;
    mine.row = reinterpret_cast<float*>(row.reserve(mine.geometry.padded_columns * sizeof(float)));
    if (many) many->prepare(mine, to, first, last);
    else few.prepare(mine, first * tile, std::min(tokens, last * tile));
  }

  bool prepares_like(const Product& other) const override {
    const auto* packed = dynamic_cast<const PackedProduct*>(&other);
    auto layout = [](const PackedProduct& product) {
      const Header& h = product.header;
      const Geometry& g = product.problem.geometry;
      return std::tuple(product.problem.type, product.tokens, product.many ? product.many->prepare : nullptr,
                        h.columns, x_layout(h), g.x_units, g.sum_columns, h.rounding);
    };
    return packed && layout(*packed) == layout(*this);
  }

  void multiply(char* x, void* y, int64_t first, int64_t last) const override {
    Problem mine = problem;
    place(mine, x);
    mine.y = y;
    if (many) many->multiply(mine, x, first, last);
    else few.multiply(mine, first, last);
  }
};

std::unique_ptr<Product> product_of(const Header& header, const void* packed, Number x, int64_t tokens,
                                    bool as_one) {
  const Geometry g = geometry(header);
  return std::make_unique<PackedProduct>(header, g, static_cast<const char*>(packed) + sizeof header, x,
                                         tokens, as_one ? std::nullopt : many_for(header, g, x, tokens));
}

}  // namespace

std::unique_ptr<Product> packed_product(const void* packed, int64_t bytes, Number x, int64_t tokens,
                                        bool as_one) {
  return product_of(header_at(packed, bytes), packed, x, tokens, as_one);
}

std::unique_ptr<Product> packed_product(const Tensor& packed, Number x, int64_t tokens, bool as_one) {
  STD_TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte,
                  "this is no weight packed by cpu_pack_linear");
  return packed_product(packed.const_data_ptr(), packed.numel(), x, tokens, as_one);
}

std::unique_ptr<Product> plain_product_by(const ManyVariant& many, const void* weight, int64_t rows,
                                          int64_t columns, Number type, int64_t tokens) {
  Header header{};
  header.rows = rows, header.columns = columns, header.factor = 1;
  header.scales = Scales::f32, header.scale_columns = LARGEST_CHUNK;
  Geometry g = geometry(header);
  g.block_bytes = ROWS * columns * size_of(type);
  auto product = std::make_unique<PackedProduct>(header, g, weight, type, tokens, many);
  product->problem.plain = true;
  return product;
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t rows) {
  STD_TORCH_CHECK(x.dim() == 2, "x has to be (M, K)");
  const auto product = packed_product(packed, number_of(x.scalar_type()), x.size(0), false);
  STD_TORCH_CHECK(product->rows == rows, "the weight has ", product->rows, " rows, not ", rows);
  STD_TORCH_CHECK(x.size(1) == product->columns, "x has to be (M, ", product->columns, ")");
  Tensor y = torch::stable::new_empty(x, {x.size(0), rows});
  if (y.numel())
    product->by_all_threads({x.const_data_ptr(), x.stride(0), x.stride(1)}, y.mutable_data_ptr());
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_linear", TORCH_BOX(&linear));
}
