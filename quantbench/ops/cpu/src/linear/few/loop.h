// The inner loop of linear layers, in whatever instructions the including file has chosen: products
// of chunks, 16 rows of the weight times up to TILE tokens. Included in a variant's namespace, after
// vector/wide.h, one of wide_*.h, and linear/codes.h. Nothing here calls the standard library: a function
// compiled for two instruction sets must not be merged into one by the linker.

constexpr int STREAMS = Streams::COUNT;
constexpr int PREFETCHED = 1024;  // bytes ahead in each of them

// Most tokens in a tile. Portable code, which is there to be right, has smaller ones, and one block at a time
// (IntegerChunk::TOGETHER): GCC 12 compiles it in 30 s, and took 116 s with those of the others (docs/LOG.md).
constexpr int MOST = LEVEL == LEVEL_portable ? 2 : TILE;

// The same for T tokens and a format whose units have BYTES. For several tokens a chunk of each stream is
// read interleaved, so the next round's chunk, of up to 4 KB, has to be fetched. For one token a unit is: 2048
// bytes ahead instead of 1024 where its arithmetic is longer, or no difference (docs/LOG.md).
template <int T, int BYTES>
constexpr int AHEAD = T > 1 ? 4096 : BYTES < 8 * 64 ? 2048 : PREFETCHED;

// Codes of fewer than 8 bits take longer to unpack than to bring near, and would wait for the second cache.
template <int T, int BYTES>
INLINE void fetch_ahead(const uint8_t* p) {
  for (int line = 0; line < BYTES; line += 64) {
    if (BYTES < 8 * 64) __builtin_prefetch(p + AHEAD<T, BYTES> + line);
    else read_ahead(p + AHEAD<T, BYTES> + line);
  }
}

struct ScaleAndZero {
  Floats scale, zero;
};

// 16 scales or zero points, as floats; `size` bytes each.
inline Floats stored(Scales kind, int size, const uint8_t* p) {
  if (kind == Scales::f16) return from_f16(load<HalfWords>(p));
  if (size == 2) return (Floats)(converted<Bits>(load<HalfWords>(p)) << 16);
  if (size == 4) return load<Floats>(p);
  typedef uint8_t Codes __attribute__((vector_size(16)));  // signed, and `converted` knows no sign
  return floats(converted<Ints>(converted<HalfWords>(load<Codes>(p) ^ 128))) - 128.0f;
}

// What multiplies the scales of a unit, where they are codes; `p` is where outer_at says.
inline ScaleAndZero read_outer(const Header& header, const uint8_t* p) {
  if (header.scales != Scales::codes) return {Floats{}, Floats{}};
  return {from_f16(load<HalfWords>(p)), header.zeros ? from_f16(load<HalfWords>(p + 32)) : Floats{}};
}

// Moves p behind the scales of some columns.
inline ScaleAndZero read_scale(const Header& header, const uint8_t*& p, const ScaleAndZero& outer) {
  const int size = bytes_of(header.scales);
  if (!size) return {all(1.0f), Floats{}};
  ScaleAndZero by{stored(header.scales, size, p), Floats{}};
  p += ROWS * size;
  const bool in_codes = header.scales == Scales::codes;
  if (in_codes) by.scale *= outer.scale;
  if (!header.zeros) return by;
  by.zero = stored(header.scales, size, p);
  p += ROWS * size;
  if (in_codes) by.zero *= outer.zero;
  if (header.zeros == 2) by.zero *= -by.scale;
  return by;
}

// A table's integers have 24 bits: times a large x their sums would overflow a float32.
constexpr float TABLE_DOWN = 0x1p-16f;
inline float down(const Header& header) { return header.coding == Coding::table ? TABLE_DOWN : 1.0f; }

// Where a tile's x is, for one chunk.
struct Tile {
  const int32_t* quads;
  const int32_t* sums;
  const float* scales;
  const float* floats;
};

#if LEVEL < LEVEL_portable
// What is taken off codes of 8 bits before they are multiplied, where products are of signed bytes.
template <class C>
constexpr uint8_t LESS = SIGNED_CODES && !requires { requires C::MOST < 128; } ? 128 : 0;
#else
template <class C>
constexpr uint8_t LESS = 0;
inline void begin(Ints& a, Ints& b, int32_t number) { a = all(0), b = all(number); }
#endif

// Adds the products of x and COUNT quads, from q on, to the two sums of each part. x: one quad each `stride` integers.
template <class C, int COUNT>
INLINE void add_products(Ints (*sums)[2], const Bytes (*codes)[HALF], int q, const int32_t* x, int stride) {
#if LEVEL < LEVEL_portable
  for (int i = 0; i < COUNT; i += 2, x += 2 * stride)
    for (int part = 0; part < C::PARTS; ++part) {
      const Bytes* two = codes[part] + q + i;
      dot_two(sums[part][0], sums[part][1], two[0] ^ LESS<C>, two[1] ^ LESS<C>, x, stride);
    }
#else
#ifdef PAIRS
  if constexpr (requires { requires C::MOST < 128; })
    return dot_pairs<C::MOST, COUNT>(sums[0][0], codes[0] + q, x, stride);
  if constexpr (LONG<C>)
    return dot_long<COUNT>(sums[0][0], sums[0][1], codes[0] + q, codes[1] + q, x, stride);
#endif
#pragma GCC unroll 4
  for (int i = 0; i < COUNT; ++i, x += stride)
    if constexpr (WORDS<C>) dot_words(sums[0][0], sums[0][1], codes[0][q + i], codes[1][q + i], x);
    else
      for (int part = 0; part < C::PARTS; ++part) dot(sums[part][0], sums[part][1], codes[part][q + i], x);
#endif
}

// The sum of both sums of a part.
template <class C>
INLINE Floats whole_of(Ints a, Ints b) {
#ifdef PAIRS
  if constexpr (LONG<C>) return floats(in_order(a, b));
#endif
  return WORDS<C> ? floats(a) + floats(b) : floats(dotted(a, b));
}

template <class C, int T, bool FINE>
struct IntegerChunk {
  static constexpr int PARTS = WORDS<C> ? 1 : C::PARTS;
  static constexpr bool TOGETHER = T == 1 && PARTS <= 2 && LEVEL != LEVEL_portable;
  static constexpr int EACH = FINE ? 2 : HALF;  // quads at a time: scales may belong to 8 columns
  C codes;
  int32_t centre[PARTS];
  explicit IntegerChunk(const Header& header) : codes(header) {
    for (int part = 0; part < PARTS; ++part) centre[part] = centre_of<C>(header, part) - LESS<C>;
  }

  struct Sums {
    Ints at[T][PARTS][2];
  };

  INLINE void clear(Sums& sums, const int32_t* x_sums) const {
    for (int t = 0; t < T; ++t)
      for (int part = 0; part < PARTS; ++part)
        begin(sums.at[t][part][0], sums.at[t][part][1], -centre[part] * x_sums[t]);
  }

  // Adds sums of columns that share a scale to `scaled`, which x's scales do not yet multiply.
  static INLINE void add(const Header& header, const Sums& sums, ScaleAndZero by, const int32_t* x_sums,
                         Floats* scaled) {
    if constexpr (requires { C::UP; }) by.scale *= C::UP * TABLE_DOWN;
    for (int t = 0; t < T; ++t) {
      Floats sum{};
      for (int part = 0; part < PARTS; ++part) {
        const Ints* at = sums.at[t][part];
        const Floats whole = whole_of<C>(at[0], at[1]);
        sum = part ? sum + whole * float(C::WEIGHT[part]) : whole * float(C::WEIGHT[0]);
      }
      scaled[t] += sum * by.scale;
      if (header.zeros) scaled[t] += floats(all(x_sums[t])) * by.zero;
    }
  }

  // Chunks of COUNT blocks that x's integers have one scale for: units interleaved, so that memory is
  // read in all of their places all the time, and halves of units, so that they share x in registers.
  template <int COUNT>
  INLINE void multiply(const Header& header, const Geometry& g, const uint8_t** at, const ScaleAndZero* outer,
                       int units, Tile x, Floats (*totals)[TILE]) const {
    const int last = FINE ? header.scale_columns / 4 - 1 : 0;  // of the quads of a scale
    Floats scaled[COUNT][T] = {};
    Sums sums[COUNT];
    ScaleAndZero by[COUNT];
    const uint8_t *scales[COUNT], *p[COUNT];
    for (int s = 0; s < COUNT && !FINE; ++s) {
      clear(sums[s], x.sums);
      by[s] = read_scale(header, at[s], outer[s]);  // before the units: its line may be in memory yet
    }
    const int32_t *quads = x.quads, *x_sums = x.sums;
    for (int unit = 0; unit < units; ++unit) {
      for (int s = 0; s < COUNT; ++s) {
        if (FINE) scales[s] = at[s];
        p[s] = FINE ? at[s] + g.scale_bytes : at[s];
        fetch_ahead<T, C::BYTES + FINE * 64>(p[s]);
        at[s] = p[s] + C::BYTES;
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half, quads += 2 * HALF * T) {
        const int32_t* sums_here = x_sums;
#pragma GCC unroll 4
        for (int s = 0; s < COUNT; ++s) {
          const int32_t* here = quads;
#if LEVEL < LEVEL_avx512
          asm volatile("" : "+r"(here));  // reads x again for each block: 16 registers would spill it
#endif
          Bytes read[C::PARTS][HALF];
          codes.read(p[s], half, read);
          sums_here = x_sums;
#pragma GCC unroll 4
          for (int q = 0; q < HALF; q += EACH) {
            const int quad = HALF * half + q;
            if (FINE && (quad & last) == 0) clear(sums[s], sums_here);
            for (int t = 0; t < T; ++t)
              add_products<C, EACH>(sums[s].at[t], read, q, here + 2 * (q * T + t), 2 * T);
            if (FINE && ((quad + EACH - 1) & last) == last) {
              add(header, sums[s], read_scale(header, scales[s], outer[s]), sums_here, scaled[s]);
              sums_here += T;
            }
          }
        }
        x_sums = sums_here;
      }
    }
    for (int s = 0; s < COUNT; ++s) {
      if (!FINE) add(header, sums[s], by[s], x.sums, scaled[s]);
      for (int t = 0; t < T; ++t) totals[s][t] += scaled[s][t] * x.scales[t];
    }
  }
  INLINE void multiply(const Header& header, const Geometry& g, const uint8_t*& at, const ScaleAndZero& outer,
                       int units, Tile x, Floats* totals) const {
    multiply<1>(header, g, &at, &outer, units, x, (Floats(*)[TILE])totals);
  }
};

template <class C, int T, bool>
struct FloatChunk {
  static constexpr bool TOGETHER = false;
  explicit FloatChunk(const Header&) {}

  INLINE void multiply(const Header& header, const Geometry&, const uint8_t*& p, const ScaleAndZero& outer,
                       int units, Tile x, Floats* totals) const {
    const float* floats = x.floats;
    const ScaleAndZero by = read_scale(header, p, outer);
    Floats sums[T][2] = {};
    for (int unit = 0; unit < units; ++unit, p += C::BYTES, floats += UNIT * T) {
      fetch_ahead<T, C::BYTES>(p);
      C::read(p, [&](int column, Floats value) {
        for (int t = 0; t < T; ++t) sums[t][column % 2] += value * floats[column * T + t];
      });
    }
    for (int t = 0; t < T; ++t) totals[t] += (sums[t][0] + sums[t][1]) * by.scale;
  }
};

// `count` blocks side by side, each at its own place in memory, times a tile. Totals are
// (STREAMS, TILE) vectors.
template <class Chunk, int T>
void blocks_by_tile(const Problem& problem, const uint8_t* const* blocks, int count, Tile x,
                    Floats (*totals)[TILE]) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const Chunk chunk(header);
  const uint8_t* at[STREAMS];
  for (int s = 0; s < count; ++s) {
    at[s] = blocks[s] + g.head_bytes;
    for (int t = 0; t < T; ++t) totals[s][t] = Floats{};
  }
  for (int64_t i = 0; i < g.x_chunks; ++i) {
    const int units = x_units(g, i);
    ScaleAndZero outer[STREAMS];
    for (int s = 0; s < count; ++s) outer[s] = read_outer(header, outer_at(g, blocks[s], i * g.x_units));
    bool done = false;
    if constexpr (Chunk::TOGETHER)
      if ((done = count == STREAMS)) chunk.template multiply<STREAMS>(header, g, at, outer, units, x, totals);
    for (int s = 0; s < count && !done; ++s) chunk.multiply(header, g, at[s], outer[s], units, x, totals[s]);
    x.quads += units * QUADS * T * 2;
    x.sums += (units * UNIT + g.sum_columns - 1) / g.sum_columns * T;
    x.scales += T;
    x.floats += units * UNIT * T;
  }
  if (header.scales == Scales::row)
    for (int s = 0; s < count; ++s) {
      Floats scale = load<Floats>(at[s]);
      for (int t = 0; t < T; ++t) totals[s][t] *= scale;
    }
}
