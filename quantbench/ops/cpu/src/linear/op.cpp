// quantbench::cpu_linear and cpu_plain: x times a weight, packed or as torch has it, transposed. For a few rows
// of x the weight is read once, each of its rows by one thread, in an order that does not depend on how many
// there are. linear/choose.cpp chooses the loop.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <tuple>

#include "common/products.h"
#include "linear/layout.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Header header_at(const void* packed, int64_t bytes) {
  STD_TORCH_CHECK(bytes >= int64_t(sizeof(Header)), "this is no weight packed by ops/cpu/linear.py");
  Header header;
  std::memcpy(&header, packed, sizeof header);
  const char* reason = wrong(header, bytes - int64_t(sizeof header));
  STD_TORCH_CHECK(!reason, reason);
  return header;
}

struct LinearProduct : Product {
  const Header header;
  Problem problem{};  // but for x and y
  const LinearLoop loop;

  LinearProduct(const Header& given, const Geometry& g, const void* blocks, bool plain, Number x, int64_t tokens,
                const LinearLoop& loop)
      : Product(given.rows, given.columns, tokens), header(given), loop(loop) {
    const bool two_words =
        !plain && x == Number::f32 && !as_floats(header.coding) && header.rounding == Rounding::none;
    problem.header = &header, problem.geometry = g, problem.type = x, problem.plain = plain;
    problem.blocks = static_cast<const uint8_t*>(blocks);
    problem.outputs = tokens, problem.tokens = two_words ? 2 * tokens : tokens;
    memory = static_cast<const char*>(blocks);
    const bool by_rows = plain && !loop.tokens;
    units = by_rows ? rows : (g.blocks + loop.side_by_side - 1) / loop.side_by_side;
    unit_bytes = by_rows ? g.block_bytes / ROWS : loop.side_by_side * g.block_bytes;
    alone = units * unit_bytes <= limits.alone_bytes &&
            tokens * g.padded_columns * rows <= limits.alone_products;
    // A loop over few tokens puts up to TILE of them into the same lines, of a packed weight.
    tile = loop.tokens ? loop.tokens : plain ? 1 : two_words ? TILE / 2 : TILE;
    x_bytes = place(problem, nullptr);
  }

  // Where in memory x lies once it is prepared; returns how many bytes that takes.
  int64_t place(Problem& to, char* memory) const {
    Room room(memory);
    const Geometry& g = to.geometry;
    const int64_t all = tiles() * tile, padded = g.padded_columns, words = loop.tokens ? 0 : to.tokens;
    const bool floats = to.plain || as_floats(header.coding);
    to.tiles = room.take<char>(all * padded * loop.x_bytes);
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
    loop.prepare(mine, first * tile, last * tile);
  }

  bool prepares_like(const Product& other) const override {
    const auto* linear = dynamic_cast<const LinearProduct*>(&other);
    auto layout = [](const LinearProduct& product) {
      const Header& h = product.header;
      const Geometry& g = product.problem.geometry;
      return std::tuple(product.problem.type, product.tokens, product.loop.prepare, h.columns, x_layout(h),
                        g.x_units, g.sum_columns, h.rounding);
    };
    return linear && layout(*linear) == layout(*this);
  }

  void multiply(char* x, void* y, int64_t first, int64_t last) const override {
    Problem mine = problem;
    place(mine, x);
    mine.y = y;
    loop.multiply(mine, first, last);
  }
};

}  // namespace

std::unique_ptr<Product> packed_product(const void* packed, int64_t bytes, Number x, int64_t tokens,
                                        bool as_one) {
  const Header header = header_at(packed, bytes);
  const Geometry g = geometry(header);
  return std::make_unique<LinearProduct>(header, g, static_cast<const char*>(packed) + sizeof header, false, x,
                                         tokens, loop_for(header, g, x, tokens, as_one));
}

std::unique_ptr<Product> packed_product(const Tensor& packed, Number x, int64_t tokens, bool as_one) {
  STD_TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte,
                  "this is no weight packed by ops/cpu/linear.py");
  return packed_product(packed.const_data_ptr(), packed.numel(), x, tokens, as_one);
}

std::unique_ptr<Product> plain_product(const void* weight, int64_t rows, int64_t columns, Number type,
                                       int64_t tokens, bool as_one) {
  Header header{};
  header.rows = rows, header.columns = columns, header.factor = 1;
  header.scales = Scales::f32, header.scale_columns = LARGEST_CHUNK;
  Geometry g = geometry(header);
  g.block_bytes = ROWS * columns * size_of(type);
  return std::make_unique<LinearProduct>(header, g, weight, true, type, tokens,
                                         loop_for_plain(type, columns, tokens, as_one));
}

std::unique_ptr<Product> plain_product(const Tensor& weight, Number x, int64_t tokens, bool as_one) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "the weight has to be contiguous");
  STD_TORCH_CHECK(number_of(weight.scalar_type()) == x, "x and the weight differ in dtype");
  return plain_product(weight.const_data_ptr(), weight.size(0), weight.size(1), x, tokens, as_one);
}

namespace {

Tensor multiplied(const Tensor& x, Product& weight) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == weight.columns, "x has to be (M, ", weight.columns, ")");
  Tensor y = torch::stable::new_empty(x, {x.size(0), weight.rows});
  if (y.numel()) weight.by_all_threads({x.const_data_ptr(), x.stride(0), x.stride(1)}, y.mutable_data_ptr());
  return y;
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t rows) {
  const auto weight = packed_product(packed, number_of(x.scalar_type()), x.size(0), false);
  STD_TORCH_CHECK(weight->rows == rows, "the weight has ", weight->rows, " rows, not ", rows);
  return multiplied(x, *weight);
}

Tensor plain(const Tensor& x, const Tensor& weight) {
  return multiplied(x, *plain_product(weight, number_of(x.scalar_type()), x.size(0), false));
}

// How many products the loop that multiplies `tokens` rows of a type by a packed weight, or a plain one, makes in some
// rounds of its instructions, on all threads; 0 where it is not written.
int64_t spin(const Tensor& weight, ScalarType type, int64_t tokens, int64_t rounds) {
  const Number x = number_of(type);
  const bool packed = weight.scalar_type() == ScalarType::Byte;
  const auto product = packed ? packed_product(weight, x, tokens, false) : plain_product(weight, x, tokens, false);
  const auto& linear = static_cast<const LinearProduct&>(*product);
  if (!linear.loop.spin) return 0;
  std::atomic<int64_t> all{0};
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](int64_t first, int64_t last) {
    for (; first < last; ++first) all += linear.loop.spin(linear.header, rounds);
  });
  return all;
}

}  // namespace

// For tests, which share small weights, while no op runs. Negative numbers: as it was at first.
extern "C" __attribute__((visibility("default"))) void quantbench_set_limits(int64_t bytes,
                                                                             int64_t products,
                                                                             int64_t piece) {
  limits = bytes < 0 ? Limits{} : Limits{bytes, products, piece};
}

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_linear", TORCH_BOX(&linear));
  library.impl("cpu_plain", TORCH_BOX(&plain));
  library.impl("cpu_spin", TORCH_BOX(&spin));
}
