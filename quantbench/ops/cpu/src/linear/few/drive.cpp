// A thread's blocks of a linear layer of few tokens: each goes through the loop of its format
// (linear/few/loop.h).
//
// Variants: portable avx2 avxvnni avx512vnni neon-dotprod neon-i8mm

#include "linear/layout.h"

namespace {
#include "linear/inner.h"

typedef void (*Loop)(const Problem&, const uint8_t* const*, int, Tile, Floats (*)[TILE]);

template <template <class, int, bool> class Chunk, class C, bool FINE>
Loop by_tile(int tile) {
  switch (tile) {
    case 1: return blocks_by_tile<Chunk<C, 1, FINE>, 1>;
    case 2: return blocks_by_tile<Chunk<C, 2, FINE>, 2>;
    default: return blocks_by_tile<Chunk<C, MOST, FINE>, MOST>;
  }
}

// A table's numbers have 24 bits for float32; 16 are as exact as 16-bit x is in integers.
inline Loop loop_of(const Header& header, bool fine, int tile, bool exact) {
  auto of_integers = [&]<class C>(Format<C>) {
    return fine ? by_tile<IntegerChunk, C, true>(tile) : by_tile<IntegerChunk, C, false>(tile);
  };
  return with_format(header, [&]<class C>(Format<C>) -> Loop {
    if constexpr (std::is_same_v<C, Float8>) return by_tile<FloatChunk, C, false>(tile);
    else if constexpr (std::is_same_v<C, Sparse>) return by_tile<SparseChunk, C, false>(tile);
    else if (std::is_same_v<C, Table4<3>> && !exact) return of_integers(Format<Table4<2>>());
    else return of_integers(Format<C>());
  });
}

// Blocks first to last. The share is cut in STREAMS, each read from its first block to its last.
inline void multiply(const Problem& problem, int64_t first, int64_t last) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const int64_t columns = g.padded_columns;
  const bool doubled = problem.tokens != problem.outputs;
  const Loop loops[] = {loop_of(header, g.fine, 1, doubled), loop_of(header, g.fine, 2, doubled),
                        loop_of(header, g.fine, 4, doubled)};
  const Streams cut(first, last);
  int64_t index[STREAMS];
  for (int64_t round = 0; const int streams = cut.next(round, index); ++round) {
    const uint8_t* blocks[STREAMS];
    for (int s = 0; s < streams; ++s) blocks[s] = problem.blocks + index[s] * g.block_bytes;
    for (int64_t token = 0; token < problem.tokens;) {
      const int tile = tile_of(problem.tokens - token, MOST);
      Tile x{problem.quads + token * columns / 2, problem.sums + token * sums_of(g),
             problem.scales + token * g.x_chunks, problem.floats + token * columns};
      Floats totals[STREAMS][TILE];
      loops[tile / 2](problem, blocks, streams, x, totals);
      for (int s = 0; s < streams; ++s)
        for (int t = 0; t < tile; t += doubled ? 2 : 1) {
          Floats v = doubled ? totals[s][t] + totals[s][t + 1] : totals[s][t];
          put_rows(problem, v * (header.factor / down(header)), (token + t) / (doubled ? 2 : 1), index[s]);
        }
      token += tile;
    }
  }
}

}  // namespace

LinearLoop NAMED(few)() { return {prepare, multiply}; }
