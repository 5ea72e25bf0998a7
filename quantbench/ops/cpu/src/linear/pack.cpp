// quantbench::cpu_pack_linear: a weight in the order in which the inner loop reads it (linear/layout.h).

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "linear/layout.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
typedef std::optional<Tensor> MaybeTensor;

const uint8_t* bytes_of(const MaybeTensor& tensor) {
  return tensor ? static_cast<const uint8_t*>(tensor->const_data_ptr()) : nullptr;
}

// 8 codes of `width` bits, the lowest first, to a byte each: halves move apart three times.
template <int width>
uint64_t spread(uint64_t codes) {
  constexpr uint64_t mask = (1 << width) - 1;
  constexpr uint64_t two = mask | mask << width, four = two | two << 2 * width;
  codes = (codes | codes << (32 - 4 * width)) & (four | four << 32);
  codes = (codes | codes << (16 - 2 * width)) & (two * 0x0001000100010001);
  return (codes | codes << (8 - width)) & (mask * 0x0101010101010101);
}

template <int width>
void unpack_plane(const uint8_t* from, int64_t codes, int shift, uint8_t* to) {
  int64_t k = 0;
  for (; k + 8 <= codes; k += 8, from += width) {
    uint64_t some = 0, all;
    for (int i = 0; i < width; ++i) some |= uint64_t(from[i]) << (8 * i);
    some = spread<width>(some) << shift;
    uint8_t bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = uint8_t(some >> (8 * i));
    std::memcpy(&all, to + k, 8), std::memcpy(&some, bytes, 8);
    all |= some;
    std::memcpy(to + k, &all, 8);
  }
  for (int i = 0; k < codes; ++k, ++i)
    to[k] |= (from[i * width / 8] >> (i * width % 8) & ((1 << width) - 1)) << shift;
}

// One row's codes, a byte each, from planes as ops/packing.py has them.
void unpack(const uint8_t* const* planes, const int* widths, int64_t row, int64_t codes,
            uint8_t* to) {
  std::memset(to, 0, codes);
  for (int plane = 0, shift = 0; plane < 3 && widths[plane]; shift += widths[plane++]) {
    const uint8_t* from = planes[plane] + row * (codes * widths[plane] / 8);
    if (widths[plane] == 4) unpack_plane<4>(from, codes, shift, to);
    if (widths[plane] == 2) unpack_plane<2>(from, codes, shift, to);
    if (widths[plane] == 1) unpack_plane<1>(from, codes, shift, to);
  }
}

typedef uint8_t Quad[64];

template <int width>
void join(const Quad* quads, int count, uint8_t* to) {
  constexpr int each = 8 / width, mask = (1 << width) - 1;
  for (int i = 0; i < count / each; ++i)
    for (int b = 0; b < 64; ++b) {
      int byte = 0;
      for (int j = 0; j < each; ++j) byte |= (quads[i * each + j][b] & mask) << (j * width);
      to[i * 64 + b] = uint8_t(byte);
    }
}

void high_bits(Quad* quads, int low) {
  for (int q = 0; q < QUADS; ++q)
    for (int b = 0; b < 64; ++b) quads[q][b] >>= low;
}

// See linear/codes.h, which reads it.
void write_unit(Quad* quads, int bits, uint8_t* to) {
  if (bits == 6 || bits == 7) {
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 3; ++j)
        for (int b = 0; b < 64; ++b)
          to[(3 * i + j) * 64 + b] =
              uint8_t((quads[4 * i + j][b] & 63) | (quads[4 * i + 3][b] >> (2 * j) & 3) << 6);
    high_bits(quads, 6);
    bits -= 6, to += 6 * 64;
  }
  if (bits & 8) std::memcpy(to, quads, QUADS * sizeof(Quad));
  if (bits & 4) join<4>(quads, QUADS, to), high_bits(quads, 4), to += 4 * 64;
  if (bits & 2) join<2>(quads, QUADS, to), high_bits(quads, 2), to += 2 * 64;
  if (bits & 1) join<1>(quads, QUADS, to);
}

struct Source {
  const Header& header;
  const uint8_t* planes[3];
  int widths[3];
  const uint8_t *scale, *zero, *outer;
  int64_t scales_per_row;
};

void write_scales(const Source& from, int64_t first, int64_t index, uint8_t* to) {
  const Header& h = from.header;
  const int size = h.scales == Scales::row ? 4 : bytes_of(h.scales);
  for (int r = 0; r < ROWS && first + r < h.rows; ++r) {
    const int64_t at = ((first + r) * from.scales_per_row + index) * size;
    std::memcpy(to + r * size, from.scale + at, size);
    if (h.zeros) std::memcpy(to + (ROWS + r) * size, from.zero + at, size);
  }
}

// What multiplies the codes of a block's scales; in memory (rows, columns / OUTER, scale and zero).
void write_outer(const Source& from, const Geometry& g, int64_t first, uint8_t* to) {
  const Header& h = from.header;
  const int64_t each = h.columns / OUTER;
  for (int64_t i = 0; i < each; ++i)
    for (int r = 0; r < ROWS && first + r < h.rows; ++r)
      for (int part = 0; part < (h.zeros ? 2 : 1); ++part)
        std::memcpy(to + i * g.outer_bytes + (part * ROWS + r) * 2,
                    from.outer + (((first + r) * each + i) * 2 + part) * 2, 2);
}

void write_chunk_scales(const Source& from, int64_t first, int64_t chunk, uint8_t* to, int bytes) {
  const bool fine = from.header.scale_columns < UNIT;
  const int count = fine ? fine_scales(from.header) : 1;
  for (int i = 0; i < count; ++i)
    if (chunk * count + i < from.scales_per_row)
      write_scales(from, first, chunk * count + i, to + i * (bytes / count));
}

// Codes, a byte each, of 16 rows: of what is stored, and of its places in sparse weights.
struct Codes {
  int64_t columns;
  std::vector<uint8_t> codes, places;
};

void read_codes(const Source& from, int64_t first, Codes& to) {
  const Header& h = from.header;
  const bool sparse = h.coding == Coding::sparse;
  const int64_t stored = sparse ? h.columns / 2 : h.columns;
  std::fill(to.codes.begin(), to.codes.end(), sparse ? 8 : 0);
  for (int r = 0; r < ROWS && first + r < h.rows; ++r) {
    uint8_t* row = &to.codes[r * to.columns];
    if (sparse) {
      const int codes[] = {4, 0, 0}, places[] = {2, 0, 0};
      unpack(from.planes, codes, first + r, stored, row);
      unpack(from.planes + 1, places, first + r, stored, &to.places[r * to.columns]);
    } else if (h.bits == 8) {
      const uint8_t flip = h.coding == Coding::integer ? 0x80 : 0;
      for (int64_t k = 0; k < stored; ++k) row[k] = from.planes[0][(first + r) * stored + k] ^ flip;
    } else {
      unpack(from.planes, from.widths, first + r, stored, row);
    }
  }
}

void write_codes(const Codes& from, const Header& h, int64_t unit, uint8_t* to) {
  Quad quads[QUADS], places[QUADS];
  const int count = h.coding == Coding::sparse ? QUADS / 2 : QUADS;
  auto gather = [&](const std::vector<uint8_t>& codes, Quad* quads) {
    for (int q = 0; q < count; ++q)
      for (int r = 0; r < ROWS; ++r)
        std::memcpy(&quads[q][4 * r], &codes[r * from.columns + (unit * count + q) * 4], 4);
  };
  gather(from.codes, quads);
  if (h.coding != Coding::sparse) return write_unit(quads, h.bits, to);
  gather(from.places, places);
  join<4>(quads, count, to);
  join<2>(places, count, to + 128);
}

void write_block(const Source& from, const Geometry& g, int64_t block, Codes& codes, uint8_t* to) {
  const Header& h = from.header;
  const int64_t first = block * ROWS;
  std::memset(to, 0, g.block_bytes);
  read_codes(from, first, codes);
  if (g.head_bytes) write_outer(from, g, first, to);
  to += g.head_bytes;
  for (int64_t chunk = 0, unit = 0; chunk < g.chunks; ++chunk) {
    if (g.scale_bytes) write_chunk_scales(from, first, chunk, to, g.scale_bytes);
    to += g.scale_bytes;
    const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
    for (int i = 0; i < units; ++i, ++unit, to += g.unit_bytes) write_codes(codes, h, unit, to);
  }
  if (h.scales == Scales::row) write_scales(from, first, 0, to);
}

Coding coding(const std::string& format) {
  if (format == "int" || format == "uint") return Coding::integer;
  if (format == "fp6") return Coding::fp6;
  if (format == "fp4" || format == "iq4nl") return Coding::bytes;
  if (format == "fp8") return Coding::fp8;
  if (format == "2:4") return Coding::sparse;
  STD_TORCH_CHECK(format == "nf4" || format == "bnb-fp4", "pack_linear knows no format ", format);
  return Coding::table;
}

int64_t byte_count(const Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

// The planes and scales have the sizes that unpack and write_scales read; see ops/formats.py.
void check_sizes(const Header& h, const MaybeTensor* planes, const int* widths, int64_t bits,
                 const Tensor& scale, const MaybeTensor& zero, const MaybeTensor& outer) {
  const bool sparse = h.coding == Coding::sparse;
  const int sparse_widths[] = {4, 2, 0}, whole[] = {8, 0, 0};
  const int64_t stored = sparse ? h.columns / 2 : h.columns;
  if (sparse) widths = sparse_widths;
  else if (bits == 8) widths = whole;
  for (int i = 0; i < 3; ++i) {
    STD_TORCH_CHECK(planes[i].has_value() == (widths[i] > 0), "pack_linear: plane ", i,
                    widths[i] ? " is missing" : " is one too many");
    if (widths[i])
      STD_TORCH_CHECK(byte_count(*planes[i]) == h.rows * (stored * widths[i] / 8),
                      "pack_linear: plane ", i, " has not the bytes of (", h.rows, ", ", stored,
                      ") codes of ", widths[i], " bits");
  }
  const int64_t groups = h.scales == Scales::row ? 1 : (h.columns + h.scale_columns - 1) / h.scale_columns;
  STD_TORCH_CHECK(scale.size(0) == h.rows && scale.size(1) == groups,
                  "pack_linear: scales have to be (", h.rows, ", ", groups, ")");
  if (zero)
    STD_TORCH_CHECK(byte_count(*zero) == byte_count(scale),
                    "pack_linear: zeros have not the size of the scales");
  STD_TORCH_CHECK(outer.has_value() == (h.scales == Scales::codes) &&
                      (!outer || byte_count(*outer) == h.rows * (h.columns / OUTER) * 4),
                  "pack_linear: what multiplies scales of 8 bits has to be (", h.rows, ", ",
                  h.columns / OUTER, ", 2) float16");
}

void advise_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 2 << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / PAGE * PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// scale: (N, K / scale_columns), or (N, 1) float32 where scale_columns is 0.
Tensor pack_linear(const Tensor& plane0, const MaybeTensor& plane1, const MaybeTensor& plane2,
                   const Tensor& scale, const MaybeTensor& zero, const MaybeTensor& outer,
                   const MaybeTensor& table,
                   const std::string& format, int64_t columns, int64_t bits, int64_t scale_columns,
                   double factor, int64_t rounding, bool zero_codes) {
  Header header{};
  header.magic = MAGIC;
  header.rows = plane0.size(0);
  header.columns = columns;
  header.coding = coding(format);
  const bool sparse = header.coding == Coding::sparse;
  header.bits = sparse ? 3 : int32_t(bits);
  const ScalarType type = scale.scalar_type();
  header.scales = !scale_columns                   ? Scales::row
                  : type == ScalarType::BFloat16 ? Scales::bf16
                  : type == ScalarType::Half     ? Scales::f16
                  : type == ScalarType::Char     ? Scales::codes
                                                 : Scales::f32;
  header.scale_columns = scale_columns ? int32_t(scale_columns) : UNIT;
  header.zeros = zero ? 1 + zero_codes : 0;
  header.from_zero = format == "uint";
  header.rounding = static_cast<Rounding>(rounding);
  header.factor = float(factor);
  STD_TORCH_CHECK(table.has_value() == (header.coding == Coding::table || header.coding == Coding::bytes) &&
                      (!table || byte_count(*table) == sizeof header.table),
                  "pack_linear: format ", format, " and its table do not fit");
  if (table) std::memcpy(header.table, table->const_data_ptr(), sizeof header.table);

  Source source{header, {bytes_of(plane0), bytes_of(plane1), bytes_of(plane2)}, {}, bytes_of(scale),
                bytes_of(zero), bytes_of(outer), scale.size(1)};
  int planes = 0;
  for (int width : {4, 2, 1})
    if (bits & width) source.widths[planes++] = width;
  const MaybeTensor given[] = {plane0, plane1, plane2};
  check_sizes(header, given, source.widths, bits, scale, zero, outer);
  const Geometry g = geometry(header);
  const int64_t size = sizeof(Header) + g.blocks * g.block_bytes;
  Tensor packed = torch::stable::new_empty(plane0, {size}, ScalarType::Byte);
  uint8_t* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  advise_huge_pages(to, size);
  std::memcpy(to, &header, sizeof header);
  torch::stable::parallel_for(0, g.blocks, 1, [&](int64_t begin, int64_t end) {
    Codes codes;
    codes.columns = g.padded_columns / (sparse ? 2 : 1);
    codes.codes.resize(ROWS * codes.columns);
    if (sparse) codes.places.resize(ROWS * codes.columns);
    for (int64_t block = begin; block < end; ++block)
      write_block(source, g, block, codes, to + sizeof(Header) + block * g.block_bytes);
  });
  return packed;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(quantbench, CPU, library) {
  library.impl("cpu_pack_linear", TORCH_BOX(&pack_linear));
}
