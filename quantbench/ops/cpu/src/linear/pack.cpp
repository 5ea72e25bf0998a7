// quantbench::cpu_pack_codes: the codes of a packed weight, into blocks that ops/cpu/linear.py makes, in the order in
// which linear/codes.h reads them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/layout.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A word's fields of WIDTH bits, numbered from the lowest: those whose numbers' bit LOW is set and HIGH is not change
// places with those the other way round.
template <int WIDTH, int HIGH, int LOW>
uint32_t exchanged(uint32_t word) {
  constexpr int distance = WIDTH * ((1 << HIGH) - (1 << LOW));
  constexpr uint32_t mask = [] {
    uint32_t fields = 0;
    for (int i = 0; i < 32 / WIDTH; ++i)
      if (i >> LOW & 1 && !(i >> HIGH & 1)) fields |= ((1u << WIDTH) - 1) << i * WIDTH;
    return fields;
  }();
  const uint32_t moved = (word ^ word >> distance) & mask;
  return word ^ moved ^ moved << distance;
}

// 32 bits of a plane have the codes of 8 / width quads, each quad's 4 columns one after another: the lowest two bits
// of a code's number are its column. Each byte of the result has one column's codes: the quad's bits are the lowest.
uint32_t by_column(uint32_t word, int64_t width) {
  switch (width) {
    case 4: return exchanged<4, 2, 1>(exchanged<4, 2, 0>(word));
    case 2: return exchanged<2, 3, 1>(exchanged<2, 2, 0>(word));
    case 1: return exchanged<1, 4, 3>(exchanged<1, 4, 2>(exchanged<1, 3, 1>(exchanged<1, 2, 0>(word))));
    default: return word;
  }
}

typedef uint32_t Vector[ROWS];

// A unit's planes of 4 and 2 bits, 4 vectors and 2, as one of 6 bits.
void join_six_bits(Vector* unit) {
  constexpr uint32_t LOW = 0x0f0f0f0f, HIGH = 0x03030303;  // a code's bits in each byte
  for (int r = 0; r < ROWS; ++r) {
    uint32_t quads[QUADS];
    for (int q = 0; q < QUADS; ++q)
      quads[q] = (unit[q / 2][r] >> q % 2 * 4 & LOW) | (unit[4 + q / HALF][r] >> q % HALF * 2 & HIGH) << 4;
    for (int i = 0; i < 6; ++i) {
      const uint32_t* half = quads + i / 3 * HALF;
      unit[i][r] = half[i % 3] | (half[3] >> i % 3 * 2 & HIGH) << 6;
    }
  }
}

struct Plane {
  const uint8_t* data;
  int64_t row_bytes, width, vectors;
};

// blocks (N / ROWS, bytes) uint8. planes: ops/packing.py's, (N, bytes) each. widths: bits of a code in each. vectors: how
// many of them a unit takes. A block's first unit is at byte `at`. `units` of them follow one another, then `gap` bytes,
// and so on. flip: whether codes of 8 bits are signed.
void pack_codes(Tensor blocks, std::vector<Tensor> planes, std::vector<int64_t> widths, std::vector<int64_t> vectors,
                int64_t at, int64_t units, int64_t gap, bool flip) {
  const int64_t rows = planes.at(0).size(0), block_bytes = blocks.size(1);
  std::vector<Plane> from;
  int64_t total = 0, count = 0;  // vectors of a unit; units of a block
  for (size_t i = 0; i < planes.size(); ++i) {
    STD_TORCH_CHECK(planes[i].is_contiguous() && planes[i].element_size() == 1 && planes[i].size(0) == rows,
                    "planes have to be (", rows, ", bytes), contiguous");
    from.push_back({static_cast<const uint8_t*>(planes[i].const_data_ptr()), planes[i].size(1), widths.at(i),
                    vectors.at(i)});
    total += vectors[i];
    count = std::max(count, (from[i].row_bytes + 4 * vectors[i] - 1) / (4 * vectors[i]));
  }
  const int64_t unit_bytes = total * int64_t(sizeof(Vector));
  STD_TORCH_CHECK(blocks.is_contiguous() && blocks.size(0) * ROWS >= rows && total <= QUADS && units > 0 &&
                      at + count * unit_bytes + (count - 1) / units * gap <= block_bytes,
                  "the blocks are too small for ", rows, " rows of ", count, " units");
  const bool six = from.size() > 1 && vectors[0] == 4 && vectors[1] == 2;
  auto* to = static_cast<uint8_t*>(blocks.mutable_data_ptr());
  auto read = [&](const Plane& plane, int64_t row, int64_t unit, Vector* quads, int r) {
    const int64_t done = unit * 4 * plane.vectors, left = plane.row_bytes - done;
    const uint8_t* words = plane.data + row * plane.row_bytes + done;
    uint8_t last[QUADS * 4] = {};
    if (left < 4 * plane.vectors) words = static_cast<uint8_t*>(std::memcpy(last, words, std::max<int64_t>(0, left)));
    for (int64_t i = 0; i < plane.vectors; ++i) {
      uint32_t word;
      std::memcpy(&word, words + 4 * i, 4);
      quads[i][r] = flip ? word ^ 0x80808080 : by_column(word, plane.width);
    }
  };
  torch::stable::parallel_for(0, blocks.size(0), 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block)
      for (int64_t unit = 0; unit < count; ++unit) {
        Vector quads[QUADS] = {}, *next = quads;
        for (const Plane& plane : from) {
          for (int r = 0; r < ROWS && block * ROWS + r < rows; ++r) read(plane, block * ROWS + r, unit, next, r);
          next += plane.vectors;
        }
        if (six) join_six_bits(quads);
        std::memcpy(to + block * block_bytes + at + unit * unit_bytes + unit / units * gap, quads, unit_bytes);
      }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_pack_codes", TORCH_BOX(&pack_codes));
}
