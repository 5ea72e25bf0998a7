// The inner loop of linear layers, in whatever instructions the including file has chosen: products
// of chunks, 16 rows of the weight times up to TILE tokens. Included in a variant's namespace, after
// vector/wide.h, one of wide_*.h, and linear/codes.h. Nothing here calls the standard library: a function
// compiled for two instruction sets must not be merged into one by the linker.

constexpr int STREAMS = Streams::COUNT;
constexpr int PREFETCHED = 1024;  // bytes ahead in each of them

// The same for T tokens and a format whose units have BYTES. For several tokens a chunk of each stream is
// read interleaved, so the next round's chunk, of up to 4 KB, has to be fetched. For one token a unit is: 2048
// bytes ahead instead of 1024 where its arithmetic is longer, or no difference (docs/LOG.md).
template <int T, int BYTES>
constexpr int AHEAD = T > 1 ? 4096 : BYTES < 8 * 64 ? 2048 : PREFETCHED;

template <int T, int BYTES>
INLINE void fetch_ahead(const uint8_t* p) {
  for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(p + AHEAD<T, BYTES> + line);
}

struct ScaleAndZero {
  Floats scale, zero;
};

typedef int8_t ScaleCodes __attribute__((vector_size(16)));

inline Floats from_codes(const uint8_t* p) {
  HalfWords up = __builtin_convertvector(load<ScaleCodes>(p), HalfWords) + 128;  // `converted` knows no sign
  return floats(converted<Ints>(up) - 128);
}

inline ScaleAndZero stored_scale(const Header& header, const uint8_t*& p) {
  const bool zeros = header.zeros;
  const uint8_t* at = p;
  switch (header.scales) {
    case Scales::bf16:
      if (zeros) {
        p += 64;
        Bits both = load<Bits>(at);
        return {low_half(both), high_half(both)};
      }
      p += 32;
      return {(Floats)(converted<Bits>(load<HalfWords>(at)) << 16), Floats{}};
    case Scales::f16:
      p += zeros ? 64 : 32;
      return {from_f16(load<HalfWords>(at)), zeros ? from_f16(load<HalfWords>(at + 32)) : Floats{}};
    case Scales::f32:
      p += zeros ? 128 : 64;
      return {load<Floats>(at), zeros ? load<Floats>(at + 64) : Floats{}};
    case Scales::codes:
      p += zeros ? 32 : 16;
      return {from_codes(at), zeros ? from_codes(at + 16) : Floats{}};
    case Scales::row: break;
  }
  return {all(1.0f), Floats{}};
}

// Moves p behind the scales of some columns. outer: what multiplies them, where they are codes.
inline ScaleAndZero read_scale(const Header& header, const uint8_t*& p, const uint8_t* outer) {
  ScaleAndZero by = stored_scale(header, p);
  if (!in_codes(header)) return by;
  if (header.scales == Scales::codes) {
    by.scale *= from_f16(load<HalfWords>(outer));
    if (header.zeros) by.zero *= from_f16(load<HalfWords>(outer + 32));
  }
  if (header.zeros == 2) by.zero *= -by.scale;
  if (header.from_zero) by.zero += by.scale * float(1 << (header.bits - 1));
  return by;
}

// A table's integers have 24 bits: times a large x their sums would overflow a float32.
inline float down(const Header& header) { return header.coding == Coding::table ? 0x1p-16f : 1.0f; }

// Where a tile's x is, for one chunk.
struct Tile {
  const int32_t* quads;
  const int32_t* sums;
  const float* scales;
  const float* floats;
};

template <class C, int T, bool FINE>
struct IntegerChunk {
  static constexpr int SPREAD = T == 1 ? 2 : 1;  // more sums at a time, so that none waits long
  C codes;
  explicit IntegerChunk(const Header& header) : codes(header) {}

  struct Sums {
    Ints at[T][C::PARTS][SPREAD][2];
  };

  static void clear(Sums& sums, const int32_t* x_sums) {
    for (int t = 0; t < T; ++t)
      for (int part = 0; part < C::PARTS; ++part)
        for (int i = 0; i < SPREAD; ++i) {
          sums.at[t][part][i][0] = all(0);
          sums.at[t][part][i][1] = all(i ? 0 : -C::CENTRE[part] * x_sums[t]);
        }
  }

  static void add(const Header& header, const Sums& sums, const ScaleAndZero& by,
                  const int32_t* x_sums, const float* x_scales, Floats* totals) {
    for (int t = 0; t < T; ++t) {
      Floats sum{};
      for (int part = 0; part < C::PARTS; ++part) {
        Ints whole = dotted(sums.at[t][part][0][0], sums.at[t][part][0][1]);
        for (int i = 1; i < SPREAD; ++i)
          whole += dotted(sums.at[t][part][i][0], sums.at[t][part][i][1]);
        sum = part ? sum + floats(whole) * float(C::WEIGHT[part]) : floats(whole);
      }
      Floats total = totals[t] + sum * (by.scale * (x_scales[t] * down(header)));
      if (header.zeros) total += by.zero * (x_sums[t] * x_scales[t]);
      totals[t] = total;
    }
  }

  // One token's products with a unit, added to the sums.
  INLINE void add_unit(const uint8_t* p, const int32_t* quads, Sums& sums) const {
    fetch_ahead<1, C::BYTES>(p);
    Bytes read[C::PARTS][QUADS];
    codes.read(p, read);
#pragma GCC unroll 8
    for (int quad = 0; quad < QUADS; ++quad)
      for (int part = 0; part < C::PARTS; ++part) {
        Ints* sum = sums.at[0][part][quad % SPREAD];
        dot(sum[0], sum[1], read[part][quad], quads + 2 * quad);
      }
  }

  INLINE const uint8_t* operator()(const Header& header, const uint8_t* p, const uint8_t* outer,
                                   int units, Tile x, Floats* totals) const {
    const int32_t* quads = x.quads;
    const int32_t* x_sums = x.sums;
    const uint8_t* scales = p;
    ScaleAndZero by = read_scale(header, p, outer);
    if (FINE) p = scales + fine_scales(header) * (p - scales);
    Sums sums;
    clear(sums, x_sums);
    for (int unit = 0; unit < units; ++unit, p += C::BYTES) {
      fetch_ahead<T, C::BYTES>(p);
      Bytes read[C::PARTS][QUADS];
      codes.read(p, read);
#pragma GCC unroll 8
      for (int quad = 0; quad < QUADS; ++quad, quads += 2 * T) {
        for (int t = 0; t < T; ++t)
          for (int part = 0; part < C::PARTS; ++part) {
            Ints* sum = sums.at[t][part][quad % SPREAD];
            dot(sum[0], sum[1], read[part][quad], quads + 2 * t);
          }
        if (FINE && quad % 2) {  // 8 columns
          if (header.scale_columns == 8 || quad % 4 == 1) by = read_scale(header, scales, outer);
          add(header, sums, by, x_sums, x.scales, totals);
          x_sums += T;
          if (quad < QUADS - 1) clear(sums, x_sums);
        }
      }
    }
    if (!FINE) add(header, sums, by, x_sums, x.scales, totals);
    return p;
  }

  // A chunk of STREAMS blocks at once, for one token: units interleaved, so that memory is read in all
  // of their places all the time.
  INLINE void side_by_side(const Header& header, const uint8_t** at, const uint8_t* const* outer,
                           int units, Tile x, Floats (*totals)[TILE]) const {
    ScaleAndZero by[STREAMS];
    Sums sums[STREAMS];
    for (int s = 0; s < STREAMS; ++s) {
      by[s] = read_scale(header, at[s], outer[s]);
      clear(sums[s], x.sums);
    }
    const int32_t* quads = x.quads;
    for (int unit = 0; unit < units; ++unit, quads += 2 * QUADS)
#pragma GCC unroll 4
      for (int s = 0; s < STREAMS; ++s) {
        add_unit(at[s], quads, sums[s]);
        at[s] += C::BYTES;
      }
    for (int s = 0; s < STREAMS; ++s) add(header, sums[s], by[s], x.sums, x.scales, totals[s]);
  }
};

template <class C, int T, bool>
struct FloatChunk {
  explicit FloatChunk(const Header&) {}

  INLINE const uint8_t* operator()(const Header& header, const uint8_t* p, const uint8_t* outer,
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
    return p;
  }
};

template <class Chunk>
constexpr bool together = false;
template <class C>
constexpr bool together<IntegerChunk<C, 1, false>> = C::PARTS <= 2;

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
  const bool fine = header.scale_columns < UNIT;
  for (int64_t i = 0; i < g.chunks; ++i) {
    const int units = i + 1 < g.chunks ? g.units : g.last_units;
    const uint8_t* outer[STREAMS];
    for (int s = 0; s < count; ++s) outer[s] = outer_of(g, blocks[s], i);
    bool done = false;
    if constexpr (together<Chunk>)
      if ((done = count == STREAMS)) chunk.side_by_side(header, at, outer, units, x, totals);
    for (int s = 0; s < count && !done; ++s) at[s] = chunk(header, at[s], outer[s], units, x, totals[s]);
    x.quads += units * QUADS * T * 2;
    x.sums += fine ? T * UNIT / 8 : T;
    x.scales += T;
    x.floats += units * UNIT * T;
  }
  if (header.scales == Scales::row)
    for (int s = 0; s < count; ++s) {
      Floats scale = load<Floats>(at[s]);
      for (int t = 0; t < T; ++t) totals[s][t] *= scale;
    }
}
