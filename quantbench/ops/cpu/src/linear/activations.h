// x as the inner loop of linear layers takes it. Included in a variant's namespace, after vector/wide.h.

// `columns` numbers, `step` apart, as floats, with zeros behind them: `padded` in all, a multiple of 16.
inline void read_numbers(Number type, const char* from, int64_t step, int64_t columns, int64_t padded,
                         float* to) {
  const int size = size_of(type);
  int64_t k = 0;
  if (step == 1)
    for (; k + 16 <= columns; k += 16) store(to + k, read_floats(type, from + k * size));
  for (; k < padded; k += 16) {
    char some[64] = {};
    for (int64_t i = k; i < k + 16 && i < columns; ++i)
      __builtin_memcpy(some + (i - k) * size, from + i * step * size, size);
    store(to + k, read_floats(type, some));
  }
}

// One row of x, with zeros up to the padded columns.
inline void read_row(const Problem& problem, int64_t output) {
  const int size = size_of(problem.type);
  const char* x = static_cast<const char*>(problem.x) + output * problem.x_row * size;
  read_numbers(problem.type, x, problem.x_step, problem.header->columns,
               problem.geometry.padded_columns, problem.row);
}

// The largest magnitude among units of 32 floats; NaN counts as the largest.
inline float largest(const float* x, int units) {
  Ints most{};
  for (int i = 0; i < 2 * units; ++i) {
    const Ints magnitude = load<Ints>(x + 16 * i) & 0x7fffffff;
    most = select(magnitude > most, magnitude, most);
  }
  return __builtin_bit_cast(float, largest(most));
}

// The smallest power of two in whose units a number's size rounds to less than 127.5 · 256 (so that
// its high byte is not over 127), but none below the normal numbers'. NaN for what is not finite.
inline float power(float largest) {
  uint32_t bits = __builtin_bit_cast(uint32_t, largest);
  if (bits >= 0x7f800000u) return __builtin_nanf("");
  constexpr uint32_t MOST = 0x7eff00;  // the mantissa of 32639.5
  int exponent = int(bits >> 23) - 14 + ((bits & 0x7fffffu) >= MOST);
  return __builtin_bit_cast(float, uint32_t(exponent > 1 ? exponent : 1) << 23);
}

inline float finer(float scale) {
  float wanted = scale * 0x1p-15f;
  return wanted < 0x1p-126f ? 0x1p-126f : wanted;  // NaN stays NaN
}

// x in units of `scale`, rounded; x becomes what rounding left over.
inline void to_integers(float* x, int units, float scale, int16_t* to) {
  constexpr float SHIFT = 12582912;  // 1.5 · 2^23: adding it leaves an integer in the low bits
  const float inverse = 1 / scale;
  for (int i = 0; i < 2 * units; ++i) {
    Floats v = load<Floats>(x + 16 * i), shifted = v * inverse + SHIFT;
    store(x + 16 * i, v - (shifted - SHIFT) * scale);
    Ints integers = (Ints)shifted - 0x4b400000;
    store(to + 16 * i, converted<HalfWords>(integers));
  }
}

// For `dot_words`: the first and third of four numbers, then the second and fourth.
inline void arrange_words(const int16_t* x, int32_t* to) {
  const int16_t words[4] = {x[0], x[2], x[1], x[3]};
  __builtin_memcpy(to, words, sizeof words);
}

#if LEVEL != LEVEL_portable
// For `dot`, `dot_pairs` and `dot_two`: of 16 numbers, the high bytes of four, then their low ones, signed both.
inline void arrange_bytes(const int16_t* x, int tile, int32_t* to) {
#if LEVEL < LEVEL_portable
  const int16x8_t a = vld1q_s16(x), b = vld1q_s16(x + 8);
  const int64x2x2_t quads = paired(vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8)),
                                   vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
#else
  const __m256i all = _mm256_loadu_si256((const __m256i*)x), half = _mm256_set1_epi16(128);
  const __m256i high = _mm256_srai_epi16(_mm256_add_epi16(all, half), 8);
  const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
  const __m256i quads = _mm256_shuffle_epi32(_mm256_packs_epi16(high, low), 0xd8);
#endif
  for (int q = 0; q < 4; ++q)
    __builtin_memcpy(to + 2 * q * tile, reinterpret_cast<const int64_t*>(&quads) + q, 8);
}

// For sparse weights: of 8 numbers, the high bytes less -128, unsigned; elsewhere the low ones. With NEON signed.
inline void arrange_eight(const int16_t* x, int32_t* to, int32_t* low_to) {
  uint8_t high[8], low[8];
  for (int i = 0; i < 8; ++i)
    high[i] = LEVEL > LEVEL_portable ? uint8_t((x[i] >> 8) + 128) : uint8_t((x[i] + 128) >> 8), low[i] = uint8_t(x[i]);
  __builtin_memcpy(to, high, 8);
  __builtin_memcpy(low_to, low, 8);
}
#endif

// Some units of x, for one token of a tile, whose numbers are of one word or of two.
inline void arrange(const Header& header, const int16_t* x, int units, int tile, int words, int32_t* to) {
#if LEVEL != LEVEL_portable
  const XLayout layout = x_layout(header);
  if (layout == XLayout::eights) {
    for (int q = 0; q < units * QUADS; q += 2)
      arrange_eight(x + 4 * q, to + 2 * q * tile, to + 2 * (q + 1) * tile);
    return;
  }
  if (layout == XLayout::pairs || (layout == XLayout::bytes && LEVEL != LEVEL_avx2) || LEVEL < LEVEL_portable) {
    for (int q = 0; q < units * QUADS; q += 4) arrange_bytes(x + 4 * q, tile, to + 2 * q * tile);
    return;
  }
#endif
  const bool in_order = LEVEL == LEVEL_avx2 && header.coding == Coding::table && words == 1;  // see `dot_long`
  for (int q = 0; q < units * QUADS; ++q)
    if (in_order) __builtin_memcpy(to + 2 * q * tile, x + 4 * q, 8);
    else arrange_words(x + 4 * q, to + 2 * q * tile);
}

inline float least(Floats v) {
  float found = v[0];
  for (int i = 1; i < 16; ++i) found = v[i] < found ? v[i] : found;
  return found;
}

// quantize/activation.py's roundings of activations, operation by operation: integers, in place.
// Returns their scale, NaN for a row that is not finite. offset: what was subtracted from integers of 8 bits.
inline float round_row(Rounding how, float* x, int64_t padded, int64_t* offset = nullptr) {
  constexpr float SHIFT = 12582912, SMALLEST = 0x1p-23f;
  if (!(largest(x, int(padded / UNIT)) <= __FLT_MAX__)) return __builtin_nanf("");
  Floats low{}, high{};  // negated, so that both are the least
  for (int64_t k = 0; k < padded; k += 16) {
    Floats v = load<Floats>(x + k);
    low = select(v < low, v, low);
    high = select(-v < high, -v, high);
  }
  const float lowest = least(low), highest = -least(high);
  const bool symmetric = how == Rounding::int8;
  float scale = symmetric ? (-lowest > highest ? -lowest : highest) / 127.5f
                          : (highest - lowest) / 255.0f;
  scale = scale > SMALLEST ? scale : SMALLEST;
  float zero = symmetric ? 0 : -128.0f - ((lowest / scale + SHIFT) - SHIFT);
  zero = zero < -128 ? -128 : zero > 127 ? 127 : zero;
  if (offset) *offset = int64_t(zero);
  for (int64_t k = 0; k < padded; k += 16) {
    const Floats code = ((load<Floats>(x + k) / scale + SHIFT) - SHIFT) + zero;
    store(x + k, clamped(code, -128, 127) - zero);
  }
  return scale;
}

// One row of x as 16-bit integers in units of a power of two, one for x_units of columns. Their
// numbers are off by at most 2^-15 of their largest; a bfloat16 of at least 2^-6 of the largest is exact,
// and a float16 of at least 2^-3. A float32 takes two tokens: the second has what the first rounded
// away, in units 2^15 times smaller.
inline void integers_of(const Problem& problem, int64_t token, int tile, int t) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const int words = problem.tokens == problem.outputs ? 1 : 2;
  const int64_t columns = g.padded_columns;
  int32_t* quads = problem.quads + token * columns / 2 + 2 * t;
  int32_t* sums = problem.sums + token * sums_of(g) + t;
  float* scales = problem.scales + token * g.x_chunks + t;
  float* row = problem.row;
  for (int64_t chunk = 0; chunk < g.x_chunks; ++chunk) {
    const int units = x_units(g, chunk), each = units * UNIT < g.sum_columns ? units * UNIT : g.sum_columns;
    alignas(64) int16_t integers[LARGEST_CHUNK];
    for (int word = 0; word < words; ++word) {
      const bool whole = header.rounding != Rounding::none;
      float scale = whole ? 1.0f : word ? finer(scales[0]) : power(largest(row, units));
      scales[word] = scale;
      to_integers(row, units, scale, integers);
      arrange(header, integers, units, tile, words, quads + 2 * word);
      for (int i = 0; i < units * UNIT / each; ++i) {
        int32_t sum = 0;
        for (int k = 0; k < each; ++k) sum += integers[i * each + k];
        sums[i * tile + word] = sum;
      }
    }
    row += units * UNIT;
    quads += units * QUADS * 2 * tile;
    sums += units * UNIT / each * tile;
    scales += tile;
  }
}

inline void prepare(const Problem& problem, int64_t first, int64_t last) {
  const Header& header = *problem.header;
  const int64_t columns = problem.geometry.padded_columns;
  const int words = problem.tokens == problem.outputs ? 1 : 2;
  for (int64_t token = 0; token < problem.tokens;) {
    const int tile = tile_of(problem.tokens - token, MOST);
    for (int t = 0; t < tile; t += words) {
      const int64_t output = (token + t) / words;
      if (output < first || output >= last) continue;
      read_row(problem, output);
      if (header.rounding != Rounding::none)
        problem.token_scales[output] = round_row(header.rounding, problem.row, columns);
      if (!as_floats(header.coding)) {
        integers_of(problem, token, tile, t);
        continue;
      }
      float* to = problem.floats + token * columns + t;
      for (int64_t k = 0; k < columns; ++k) to[k * tile] = problem.row[k];
    }
    token += tile;
  }
}
