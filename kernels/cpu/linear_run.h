// A thread's share of a linear layer: which inner loop (linear_part.h) its blocks go through, and
// how results are stored. Included in a version's namespace.

typedef void (*Part)(const Problem&, const uint8_t* const*, int, Tile, Floats (*)[TILE]);

template <template <class, int, bool> class Chunk, class C, bool FINE>
Part by_tile(int tile) {
  switch (tile) {
    case 1: return blocks_by_tile<Chunk<C, 1, FINE>, 1>;
    case 2: return blocks_by_tile<Chunk<C, 2, FINE>, 2>;
    default: return blocks_by_tile<Chunk<C, 4, FINE>, 4>;
  }
}

template <class C>
Part integers(bool fine, int tile) {
  return fine ? by_tile<IntegerChunk, C, true>(tile) : by_tile<IntegerChunk, C, false>(tile);
}

inline Part part(const Header& header, int tile) {
  const bool fine = header.scale_columns < UNIT;
  switch (header.coding) {
    case Coding::fp6: return integers<Float6>(fine, tile);
    case Coding::fp4: return integers<Float4>(fine, tile);
    case Coding::table: return integers<Table4>(fine, tile);
    case Coding::fp8: return by_tile<FloatChunk, Float8, false>(tile);
    case Coding::bf16: return by_tile<FloatChunk, BFloat16, false>(tile);
    case Coding::f16: return by_tile<FloatChunk, Float16, false>(tile);
    case Coding::f32: return by_tile<FloatChunk, Float32, false>(tile);
    case Coding::sparse: return by_tile<SparseChunk, Sparse, false>(tile);
    case Coding::integer: break;
  }
  switch (header.bits) {
    case 1: return integers<Integer<1>>(fine, tile);
    case 2: return integers<Integer<2>>(fine, tile);
    case 3: return integers<Integer<3>>(fine, tile);
    case 4: return integers<Integer<4>>(fine, tile);
    case 5: return integers<Integer<5>>(fine, tile);
    case 6: return integers<Integer<6>>(fine, tile);
    case 7: return integers<Integer<7>>(fine, tile);
    default: return integers<Integer<8>>(fine, tile);
  }
}

// Rounded to the nearest, ties to even; NaN stays NaN.
inline HalfWords as_bf16(Floats v) {
  Bits bits = (Bits)v, nan = (Bits)(v != v);
  Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return __builtin_convertvector((~nan & rounded) | (nan & 0x7fc0u), HalfWords);
}

inline void store_rows(const Problem& problem, Floats v, int64_t output, int64_t row) {
  const int64_t rows = problem.header->rows, at = output * rows + row;
  const int count = rows - row < ROWS ? int(rows - row) : ROWS;
  v *= problem.header->factor;
  if (problem.token_scales) v *= problem.token_scales[output];
  char* to = static_cast<char*>(problem.y) + at * (problem.y_type ? 2 : 4);
  if (problem.y_type) {
    HalfWords halves = problem.y_type == 1 ? as_bf16(v) : as_f16(v);
    __builtin_memcpy(to, &halves, count * 2);
  } else {
    __builtin_memcpy(to, &v, count * 4);
  }
}

inline int tile_of(int64_t tokens) { return tokens >= 4 ? 4 : tokens >= 2 ? 2 : 1; }

// Blocks first to last. The share is cut in STREAMS, each read from its first block to its last.
inline void multiply(const Problem& problem, int64_t first, int64_t last) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const int64_t columns = g.padded_columns(), count = last - first;
  const int64_t sums_per_token = header.scale_columns < UNIT ? columns / 8 : g.chunks;
  const Part parts[] = {part(header, 1), part(header, 2), part(header, 4)};
  const bool doubled = problem.tokens != problem.outputs;
  int64_t begin[STREAMS + 1];
  for (int s = 0; s <= STREAMS; ++s) begin[s] = first + (count * s + STREAMS - 1) / STREAMS;
  for (int64_t round = 0; begin[0] + round < begin[1]; ++round) {
    const uint8_t* blocks[STREAMS];
    int64_t row[STREAMS];
    int streams = 0;
    for (int s = 0; s < STREAMS; ++s)
      if (int64_t block = begin[s] + round; block < begin[s + 1]) {
        blocks[streams] = problem.blocks + block * g.block_bytes;
        row[streams++] = block * ROWS;
      }
    for (int64_t token = 0; token < problem.tokens;) {
      const int tile = tile_of(problem.tokens - token);
      Tile x{problem.quads + token * columns / 2, problem.sums + token * sums_per_token,
             problem.scales + token * g.chunks, problem.floats + token * columns};
      Floats totals[STREAMS][TILE];
      parts[tile / 2](problem, blocks, streams, x, totals);
      for (int s = 0; s < streams; ++s)
        for (int t = 0; t < tile; t += doubled ? 2 : 1) {
          Floats v = doubled ? totals[s][t] + totals[s][t + 1] : totals[s][t];
          store_rows(problem, v, (token + t) / (doubled ? 2 : 1), row[s]);
        }
      token += tile;
    }
  }
}

// x, floats (outputs, padded columns), as the inner loop takes it. 16-bit integers times a power of
// two, one for each chunk: then a bfloat16 down to 2^-6 of a chunk's largest is exact, a float16
// down to 2^-3, and others are off by 2^-15 of the largest. Of float32 what is left over is another
// token, 2^15 times finer. Activations that have been rounded are integers already.
inline void prepare(const Problem& problem, const float* x) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const int64_t columns = g.padded_columns();
  const bool fine = header.scale_columns < UNIT;
  const int64_t sums_per_token = fine ? columns / 8 : g.chunks;
  const int words = problem.tokens == problem.outputs ? 1 : 2;
  for (int64_t token = 0; token < problem.tokens;) {
    const int tile = tile_of(problem.tokens - token);
    for (int t = 0; t < tile; t += words) {
      const float* row = x + (token + t) / words * columns;
      if (as_floats(header.coding)) {
        float* to = problem.floats + token * columns + t;
        for (int64_t k = 0; k < columns; ++k) to[k * tile] = row[k];
        continue;
      }
      int32_t* quads = problem.quads + token * columns / 2 + 2 * t;
      int32_t* sums = problem.sums + token * sums_per_token + t;
      float* scales = problem.scales + token * g.chunks + t;
      for (int64_t chunk = 0; chunk < g.chunks; ++chunk) {
        const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
        alignas(64) float left[LARGEST_CHUNK];
        alignas(64) int16_t integers[LARGEST_CHUNK];
        __builtin_memcpy(left, row, units * UNIT * sizeof(float));
        for (int word = 0; word < words; ++word) {
          const bool whole = header.rounding != Rounding::none;
          float scale = whole ? 1.0f : word ? finer(scales[0]) : power(largest(left, units));
          scales[word] = scale;
          to_integers(left, units, scale, integers);
          arrange(header, integers, units, tile, quads + 2 * word);
          const int each = fine ? 8 : units * UNIT;
          for (int i = 0; i < units * UNIT / each; ++i) {
            int32_t sum = 0;
            for (int k = 0; k < each; ++k) sum += integers[i * each + k];
            sums[i * tile + word] = sum;
          }
        }
        row += units * UNIT;
        quads += units * QUADS * 2 * tile;
        sums += (fine ? UNIT / 8 : 1) * tile;
        scales += tile;
      }
    }
    token += tile;
  }
}
