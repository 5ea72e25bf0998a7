// 2:4 sparse products of bytes: no zeros are multiplied. A row stores 4 codes of 8 columns, in its lane; a
// shuffle picks the 4 numbers of x that they belong to out of the 8. Included in a variant's namespace,
// after linear/few/loop.h.

template <class C, int T, bool FINE>
struct SparseChunk {
  static constexpr bool TOGETHER = false;
  static constexpr int UNITS = 2;  // whose products fit 16 bits, and whose codes' sums fit 8
  explicit SparseChunk(const Header&) {}

  // x: for each 8 columns, and token, 8 high bytes of numbers plus 2^15, unsigned; after those of all tokens the
  // low bytes. So the codes' sum is subtracted 2^15 times. With NEON both are signed.
  INLINE void multiply(const Header& header, const Geometry&, const uint8_t*& p, const ScaleAndZero& outer,
                       int units, Tile x, Floats* totals) const {
    const int32_t* eights = x.quads;
    const ScaleAndZero by = read_scale(header, p, outer);
    Ints highs[T] = {}, lows[T] = {}, offsets{};
    for (int unit = 0; unit < units;) {
      ByteSums high[T] = {}, low[T] = {};
      Bytes all_codes{};
      for (int end = units - unit < UNITS ? units : unit + UNITS; unit < end; ++unit, p += C::BYTES) {
        fetch_ahead<T, C::BYTES>(p);
        const Bytes places = load<Bytes>(p + 128);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, eights += 4 * T) {
          const Bytes codes = (shifted(load<Bytes>(p + 64 * (i / 2)), -4 * (i % 2)) & 15) - 8;
          const Bytes from = (shifted(places, -2 * i) & 3) | (Bytes)all(0x04040000);
          all_codes += codes;
          for (int t = 0; t < T; ++t) {
            int64_t eight[2];
            __builtin_memcpy(&eight[0], eights + 2 * t, 8);
            __builtin_memcpy(&eight[1], eights + 2 * T + 2 * t, 8);
            high[t] = add_bytes(high[t], picked(eight[0], from), codes);
            low[t] = add_bytes(low[t], picked(eight[1], from), codes);
          }
        }
      }
      if (LEVEL > LEVEL_portable) offsets = total(offsets, add_bytes(ByteSums{}, Bytes{} + 128, all_codes));
      for (int t = 0; t < T; ++t) highs[t] = total(highs[t], high[t]), lows[t] = total(lows[t], low[t]);
    }
    for (int t = 0; t < T; ++t)
      totals[t] += floats(((highs[t] - offsets) << 8) + lows[t]) * (by.scale * x.scales[t]);
  }
};
