// Sizes of packed weights, and which headers there may be: see linear/layout.h.

#include "linear/layout.h"

#include <algorithm>

Geometry geometry(const Header& h) {
  Geometry g;
  g.blocks = (h.rows + ROWS - 1) / ROWS;
  const int64_t units = (h.columns + UNIT - 1) / UNIT;
  const bool by_row = h.scales == Scales::row, few = h.scale_columns < UNIT;
  g.units = by_row ? 4 : few ? 1 : h.scale_columns / UNIT;
  g.chunks = std::max<int64_t>(1, (units + g.units - 1) / g.units);
  g.last_units = int(units - (g.chunks - 1) * g.units);
  g.fine = !by_row && h.scale_columns <= UNIT && h.coding != Coding::sparse && !as_floats(h.coding);
  g.x_units = g.fine ? OUTER / UNIT : g.units;
  g.x_chunks = std::max<int64_t>(1, (units + g.x_units - 1) / g.x_units);
  g.sum_columns = g.fine ? h.scale_columns : g.units * UNIT;
  const bool codes = h.scales == Scales::codes;
  const int pieces = ROWS * (h.zeros ? 2 : 1);
  g.outer_bytes = codes ? 2 * pieces : 0;
  g.head_bytes = (h.columns + OUTER - 1) / OUTER * g.outer_bytes;
  g.scale_bytes = bytes_of(h.scales) * pieces * (few ? fine_scales(h) : 1);
  g.unit_bytes = UNIT * ROWS * h.bits / 8;
  const int64_t bytes = g.head_bytes + g.chunks * g.scale_bytes + units * g.unit_bytes + by_row * ROWS * 4;
  g.block_bytes = (bytes + 63) / 64 * 64;
  g.padded_columns = ((g.chunks - 1) * g.units + g.last_units) * UNIT;
  return g;
}

namespace {

bool bits_fit(Coding coding, int bits) {
  switch (coding) {
    case Coding::integer: return bits >= 1 && bits <= 8;
    case Coding::fp6: return bits == 6;
    case Coding::bytes:
    case Coding::table: return bits == 4;
    case Coding::sparse: return bits == 3;  // on average: half of 4, and 2 for every second place
    case Coding::fp8: return bits == 8;
  }
  return false;
}

bool scales_fit(const Header& h) {
  const bool of_columns = h.scales > Scales::row && h.scales <= Scales::codes;
  if ((h.from_zero && (h.coding != Coding::integer || !h.zeros)) || h.from_zero < 0 || h.from_zero > 1) return false;
  if (h.scales == Scales::codes && (h.columns % OUTER || h.scale_columns > OUTER || as_floats(h.coding) ||
                                    h.coding == Coding::sparse || h.zeros == 2))
    return false;
  if (h.scales == Scales::row) return h.zeros == 0 && !h.from_zero && h.scale_columns == UNIT;
  if (!of_columns || h.zeros < 0 || h.zeros > 2) return false;
  if (h.scale_columns == 8 || h.scale_columns == 16)
    return h.coding != Coding::sparse && !as_floats(h.coding);
  return h.scale_columns >= UNIT && h.scale_columns <= LARGEST_CHUNK && h.scale_columns % UNIT == 0;
}

}  // namespace

const char* wrong(const Header& h, int64_t bytes) {
  if (h.magic != MAGIC) return "this is no weight packed by ops/cpu/linear.py";
  if (!bits_fit(h.coding, h.bits)) return "a packed weight has no such format";
  if (!scales_fit(h)) return "a packed weight has no such scales";
  // A table's numbers are multiplied by 16-bit x alone.
  if (h.rounding < Rounding::none || h.rounding > Rounding::int8_asymmetric ||
      (h.coding == Coding::table && h.rounding != Rounding::none))
    return "a packed weight has no such rounding of activations";
  // So many that all sizes fit 64 bits; then exactly those that fit.
  if (h.rows < 0 || h.rows > bytes || h.columns < 0 || h.columns > 8 * bytes + UNIT)
    return "a packed weight has not the size that its header says";
  const Geometry g = geometry(h);
  const bool right = g.blocks ? bytes % g.blocks == 0 && bytes / g.blocks == g.block_bytes : !bytes;
  return right ? nullptr : "a packed weight has not the size that its header says";
}

// For a test that compares them with ops/cpu/linear.py, in the order in which that names them.
extern "C" __attribute__((visibility("default"))) const int64_t* quantbench_layout() {
  static constexpr int64_t numbers[] = {ROWS, UNIT, LARGEST_CHUNK, sizeof(Header),
                                        int64_t(Rounding::none), int64_t(Rounding::int8),
                                        int64_t(Rounding::int8_asymmetric)};
  return numbers;
}
