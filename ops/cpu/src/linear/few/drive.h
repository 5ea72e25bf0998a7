// A thread's share of a linear layer: which inner loop (linear/few/loop.h) its blocks go through, and
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

inline void store_rows(const Problem& problem, Floats v, int64_t output, int64_t row) {
  const int64_t rows = problem.header->rows, at = output * rows + row;
  const int count = rows - row < ROWS ? int(rows - row) : ROWS;
  v *= problem.header->factor;
  if (problem.header->rounding != Rounding::none) v *= problem.token_scales[output];
  char* to = static_cast<char*>(problem.y) + at * (problem.type == Number::f32 ? 4 : 2);
  if (problem.type == Number::f32) {
    __builtin_memcpy(to, &v, count * 4);
  } else {
    HalfWords halves = problem.type == Number::bf16 ? as_bf16(v) : as_f16(v);
    __builtin_memcpy(to, &halves, count * 2);
  }
}

// Blocks first to last. The share is cut in STREAMS, each read from its first block to its last.
inline void multiply(const Problem& problem, int64_t first, int64_t last) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const int64_t columns = g.padded_columns();
  const int64_t sums_per_token = header.scale_columns < UNIT ? columns / 8 : g.chunks;
  const Part parts[] = {part(header, 1), part(header, 2), part(header, 4)};
  const bool doubled = problem.tokens != problem.outputs;
  const Streams cut(first, last);
  const int64_t* begin = cut.begin;
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
