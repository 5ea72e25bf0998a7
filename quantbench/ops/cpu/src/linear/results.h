// What both kinds of inner loop of many tokens share: where weights lie, and how results are stored.
// Included in a variant's namespace, after linear/activations.h.

// Units of columns that are multiplied at a time. Two threads of a core share its first cache, and
// there with 16 units a tenth to a third was lost.
constexpr int STRETCH = 8;
static_assert(STRETCH * UNIT >= LARGEST_CHUNK);

// Chunks that make a stretch.
inline int64_t chunks_at_once(const Geometry& g) { return g.units < STRETCH ? STRETCH / g.units : 1; }

inline int units_of(const Geometry& g, int64_t first, int64_t last) {
  return int(last - first) * g.units - (last == g.chunks ? g.units - g.last_units : 0);
}

// Scales of a block's rows, if it has such.
inline Floats row_scales(const Problem& problem, int64_t block) {
  const Geometry& g = problem.geometry;
  const uint8_t* p = problem.blocks + block * g.block_bytes;
  if (problem.header->scales != Scales::row) return all(1.0f);
  return load<Floats>(p + g.padded_columns / UNIT * g.unit_bytes);
}

// Where a block's results for one token lie.
inline char* results_of(const Problem& problem, int64_t token, int64_t block) {
  const int size = size_of(problem.type);
  return static_cast<char*>(problem.y) + (token * problem.header->rows + block * ROWS) * size;
}

// Prefetches the lines that results will be written to while there is something to compute. Each is in
// another page, and writing to lines that are not there would wait for one after the other. Lines that
// are a multiple of a page apart would displace each other before they are written.
inline void ask_for_results(const Problem& problem, int64_t token, int64_t end, int64_t block) {
  if ((results_of(problem, 1, 0) - results_of(problem, 0, 0)) % 4096 == 0) return;
  for (; token < end; ++token) __builtin_prefetch(results_of(problem, token, block), 1);
}

// A block's results for one token.
inline void put_rows(const Problem& problem, Floats v, int64_t token, int64_t block) {
  const int64_t rows = problem.header->rows, row = block * ROWS;
  const int count = rows - row < ROWS ? int(rows - row) : ROWS;
  char* to = results_of(problem, token, block);
  if (problem.header->rounding != Rounding::none) v *= problem.token_scales[token];
  write_floats(problem.type, to, v, count);
}
