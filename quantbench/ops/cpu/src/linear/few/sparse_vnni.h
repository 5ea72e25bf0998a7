// 2:4 sparse products with VNNI: no zeros are multiplied. A row stores 4 codes of 8 columns, in its
// lane; a shuffle picks the 4 numbers of x that they belong to out of the 8. Included in a variant's
// namespace, after linear/few/loop.h.

template <class C, int T, bool FINE>
struct SparseChunk {
  static constexpr bool TOGETHER = false;
  explicit SparseChunk(const Header&) {}

  // x: for each 8 columns, and token, 8 high bytes less -128, unsigned; after those of all tokens
  // the low bytes. Codes are signed here, and 16 times what they mean.
  void multiply(const Header& header, const Geometry&, const uint8_t*& p, const ScaleAndZero& outer,
                int units, Tile x, Floats* totals) const {
    const int32_t* eights = x.quads;
    ScaleAndZero by = read_scale(header, p, outer);
    __m512i high[T] = {}, low[T] = {}, offset[2] = {};
    const __m512i second = _mm512_set1_epi32(0x04040000), nibble = _mm512_set1_epi8(char(0xf0));
    const __m512i place = _mm512_set1_epi8(3), half = _mm512_set1_epi8(char(0x80));
    for (int unit = 0; unit < units; ++unit, p += C::BYTES) {
      fetch_ahead<T, C::BYTES>(p);
      __m512i places = _mm512_loadu_si512(p + 128);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i, eights += 4 * T) {
        __m512i codes = _mm512_loadu_si512(p + 64 * (i / 2));
        codes = _mm512_xor_si512(
            _mm512_and_si512(i % 2 ? codes : _mm512_slli_epi16(codes, 4), nibble), half);
        // (places & 3) | second
        __m512i from = _mm512_ternarylogic_epi32(_mm512_srli_epi16(places, 2 * i), place, second, 0xea);
        offset[i % 2] = _mm512_dpbusd_epi32(offset[i % 2], half, codes);
        for (int t = 0; t < T; ++t) {
          int64_t eight[2];
          __builtin_memcpy(&eight[0], eights + 2 * t, 8);
          __builtin_memcpy(&eight[1], eights + 2 * T + 2 * t, 8);
          __m512i x_high = _mm512_shuffle_epi8(_mm512_set1_epi64(eight[0]), from);
          __m512i x_low = _mm512_shuffle_epi8(_mm512_set1_epi64(eight[1]), from);
          high[t] = _mm512_dpbusd_epi32(high[t], x_high, codes);
          low[t] = _mm512_dpbusd_epi32(low[t], x_low, codes);
        }
      }
    }
    __m512i offsets = _mm512_add_epi32(offset[0], offset[1]);
    for (int t = 0; t < T; ++t) {
      Ints sum = dotted((Ints)_mm512_sub_epi32(high[t], offsets), (Ints)low[t]);
      totals[t] += floats(sum) * (by.scale * (x.scales[t] * 0.0625f));
    }
  }
};

inline void arrange_eight(const int16_t* x, int32_t* to, int32_t* low_to) {
  uint8_t high[8], low[8];
  for (int i = 0; i < 8; ++i) {
    high[i] = uint8_t((x[i] >> 8) + 128);
    low[i] = uint8_t(x[i]);
  }
  __builtin_memcpy(to, high, 8);
  __builtin_memcpy(low_to, low, 8);
}

// The high bytes of 4 numbers, then their low ones, of 16 numbers: signed both.
inline void arrange_quads(const int16_t* x, int tile, int32_t* to) {
  __m128i highs, lows;
  split_bytes(x, highs, lows);
  __m128i quads[2] = {_mm_unpacklo_epi32(highs, lows), _mm_unpackhi_epi32(highs, lows)};
  for (int i = 0; i < 2; ++i) {
    _mm_storel_epi64((__m128i*)(to + 4 * i * tile), quads[i]);
    _mm_storel_epi64((__m128i*)(to + (4 * i + 2) * tile), _mm_unpackhi_epi64(quads[i], quads[i]));
  }
}

// Some units of x, for one token of a tile.
inline void arrange(const Header& header, const int16_t* x, int units, int tile, int32_t* to) {
  if (header.coding == Coding::sparse)
    for (int q = 0; q < units * QUADS; q += 2)
      arrange_eight(x + 4 * q, to + 2 * q * tile, to + 2 * (q + 1) * tile);
  else
    for (int q = 0; q < units * QUADS; q += 4) arrange_quads(x + 4 * q, tile, to + 2 * q * tile);
}
