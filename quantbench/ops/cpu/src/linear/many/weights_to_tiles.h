// Weights as tiles of bfloat16: 16 pairs of columns, each of 16 rows. A unit is a tile. Included in
// the namespace of linear/many/amx.cpp.
//
// Scales of rows are applied to the sums. Scales of columns are multiplied in, and the product is
// rounded once. The two columns of a pair are those whose codes lie 16 bits apart, so that a quad's
// columns come in the order 0, 2, 1, 3.

typedef uint16_t Bf16;
constexpr int TILE_NUMBERS = ROWS * UNIT;

// Rounded to the nearest; ties away from zero, which are too rare to matter.
inline Bits rounded_pairs(Floats low, Floats high) {
  __m512i a = (__m512i)((Bits)low + 0x8000u), b = (__m512i)((Bits)high + 0x8000u);
  return (Bits)_mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b,
                                         _mm512_set1_epi32(int(0xffff0000)), 0xf8);  // a | b & c
}

// Low and high bytes of bfloat16, to pairs: those at even places of a quad, those at odd ones.
inline void put_pairs(Bytes low, Bytes high, Bits& even, Bits& odd) {
  const __m512i low_bytes = _mm512_set1_epi16(0xff);
  even = (Bits)_mm512_ternarylogic_epi32(low_bytes, raw(low), _mm512_slli_epi16(raw(high), 8), 0xca);
  odd = (Bits)_mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(raw(low), 8), raw(high), 0xca);
}

// Values of codes of up to 7 bits as bfloat16, in two bytes.
struct Values {
  alignas(64) uint8_t low[128], high[128];
  alignas(64) float whole[TABLE];  // of the first codes
  float factor;                    // of sums of these

  explicit Values(const Header& header) {
    // A table's integers have 24 bits: times a large x they could overflow a float32.
    factor = header.coding == Coding::table ? 1 : header.factor;
    for (int code = 0; code < 128; ++code) {
      const float value = of(header, code);
      const uint32_t bits = __builtin_bit_cast(uint32_t, value) + 0x8000;
      low[code] = uint8_t(bits >> 16), high[code] = uint8_t(bits >> 24);
      if (code < TABLE) whole[code] = value;
    }
  }

  static float of(const Header& header, int code) {
    switch (header.coding) {
      case Coding::integer: {
        const int middle = header.from_zero ? 0 : 1 << (header.bits - 1);
        return float((code & ((1 << header.bits) - 1)) - middle);
      }
      case Coding::sparse: return float((code & 15) - 8);
      case Coding::bytes: return float(header.table[code & 15]);
      case Coding::fp6: return small_float(code, 3, 2) * 16;
      case Coding::fp8: return small_float(code, 4, 3);
      default: return header.table[code & 15] * header.factor;
    }
  }
};

// Each reads a unit and calls `next` with 16 pairs, one after the other.
// Codes by tables: of 64 values, where higher bits are ignored, or of 128, of 7 bits and perhaps a sign.
template <class Read, int SIZE = 64, bool SIGNED = false>
struct ByTable {
  static constexpr bool WHOLE = false;
  static Bytes looked_up(const uint8_t* table, Bytes codes) {
    if constexpr (SIZE == 64) return (Bytes)_mm512_permutexvar_epi8(raw(codes), _mm512_load_si512(table));
    else
      return (Bytes)_mm512_permutex2var_epi8(_mm512_load_si512(table), raw(codes),
                                             _mm512_load_si512(table + 64));
  }
  template <class F>
  static INLINE void read(const Values& values, const uint8_t* p, F next) {
    Bytes codes[HALF];
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; ++q) {
      if (q % HALF == 0) Read::read(p, q / HALF, codes);
      const Bytes code = codes[q % HALF];
      Bytes high = looked_up(values.high, code);
      if (SIGNED) high |= code & 0x80;
      Bits even, odd;
      put_pairs(looked_up(values.low, code), high, even, odd);
      next(2 * q, even);
      next(2 * q + 1, odd);
    }
  }
};

// Integers of 8 bits. All of them are bfloat16, so the low halves of floats are zeros.
struct SignedBytes {
  static constexpr bool WHOLE = false;
  static Bits pair(Ints low, Ints high) {
    return (Bits)floats(low) >> 16 | (Bits)floats(high);
  }
  template <class F>
  static INLINE void read(const Values&, const uint8_t* p, F next) {
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; ++q) {
      Ints codes = load<Ints>(p + 64 * q) ^ int32_t(0x80808080);
      next(2 * q, pair(codes << 24 >> 24, codes << 8 >> 24));
      next(2 * q + 1, pair(codes << 16 >> 24, codes >> 24));
    }
  }
};

// A table of 16 floats that bfloat16 cannot hold; `next` gets pairs of floats.
struct FloatTable {
  static constexpr bool WHOLE = true;
  template <class F>
  static INLINE void read(const Values& values, const uint8_t* p, F next) {
    Bytes codes[HALF];
    const __m512 table = _mm512_load_ps(values.whole);
    auto value = [&](Bits index) { return (Floats)_mm512_permutexvar_ps((__m512i)index, table); };
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; ++q) {
      if (q % HALF == 0) Codes<4>::read(p, q / HALF, codes);
      Bits quad = (Bits)codes[q % HALF];
      next(2 * q, value(quad), value(quad >> 16));
      next(2 * q + 1, value(quad >> 8), value(quad >> 24));
    }
  }
};

struct SparseCodes {
  static void read(const uint8_t* p, int half, Bytes* quads) {
    Sparse(Header{}).read(p, half, reinterpret_cast<Bytes(*)[HALF]>(quads));
  }
};

// Where arithmetic is short for the bytes, memory has to be asked farther ahead, into the second-level
// cache: into the first a core has too few lines on their way, and waits (docs/LOG.md).
constexpr int FAR = 4096;

// Some chunks of a block, which ends at `end`, as tiles. Returns where the next chunk is. Blocks come in
// pairs: after this one comes the next but one.
typedef const uint8_t* (*ToTiles)(const Problem&, const Values&, const uint8_t* p, const uint8_t* end,
                                  int64_t first, int64_t last, Bf16* to);

template <class C, bool SCALED>
const uint8_t* to_tiles(const Problem& problem, const Values& values, const uint8_t* p,
                        const uint8_t* end, int64_t first, int64_t last, Bf16* to) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const bool fine = header.scale_columns < UNIT;
  const int pairs_of_a_scale = header.scale_columns / 2;
  const bool far = g.unit_bytes < 8 * 64;
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const ScaleAndZero outer = read_outer(header, outer_at(g, end - g.block_bytes, chunk * g.units));
    const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
    const uint8_t* scales = p;
    ScaleAndZero by = read_scale(header, scales, outer);
    p += g.scale_bytes;
    for (int unit = 0; unit < units; ++unit, p += g.unit_bytes, to += TILE_NUMBERS) {
      const uint8_t* ahead = p + (far ? FAR : PREFETCHED);
      if (ahead >= end) ahead += g.block_bytes;
      for (int line = 0; line < g.unit_bytes; line += 64)
        if (far) read_ahead(ahead + line);
        else __builtin_prefetch(ahead + line);
      auto put = [&](int i, Floats low, Floats high) {
        if (SCALED && fine && i && i % pairs_of_a_scale == 0) by = read_scale(header, scales, outer);
        if (SCALED) low = low * by.scale + by.zero, high = high * by.scale + by.zero;
        store(to + i * UNIT, rounded_pairs(low, high));
      };
      if constexpr (C::WHOLE)
        C::read(values, p, put);
      else
        C::read(values, p, [&](int i, Bits pairs) {
          if (SCALED) put(i, low_half(pairs), high_half(pairs));
          else store(to + i * UNIT, pairs);
        });
    }
  }
  return p;
}

// What reads each format.
template <int BITS>
inline ByTable<Codes<BITS>> reader(Format<Integer<BITS>>) { return {}; }
inline ByTable<Loose6> reader(Format<Integer<6>>) { return {}; }
inline ByTable<Codes<7>, 128> reader(Format<Integer<7>>) { return {}; }
inline SignedBytes reader(Format<Integer<8>>) { return {}; }
inline ByTable<Loose6> reader(Format<Float6>) { return {}; }
inline ByTable<Codes<4>> reader(Format<Bytes4>) { return {}; }
inline ByTable<SparseCodes> reader(Format<Sparse>) { return {}; }
inline FloatTable reader(Format<Table4<3>>) { return {}; }
inline ByTable<Codes<8>, 128, true> reader(Format<Float8>) { return {}; }

inline ToTiles tile_maker(const Header& header) {
  return with_format(header, [&]<class C>(Format<C> format) -> ToTiles {
    using Read = decltype(reader(format));
    return header.scales == Scales::row ? to_tiles<Read, false> : to_tiles<Read, true>;
  });
}
