// A block's slots as floats; of int8 and fp8 the codes, whose one scale comes later. Included in the
// namespace of attention/loop.cpp.

#ifdef REGISTER
inline void widen_f16(const char* from, float* to) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)));
}
// 8 codes of fp8 as floats, 256 times too small: bits of a float16, whose exponent has one bit more.
inline void widen_fp8(const char* codes, float* to) {
  const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)codes));
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7f));
  const __m128i bits = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16(int16_t(0xbf80)));
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_or_si128(bits, nan)));
}
constexpr float FP8_UNIT = 256;
#else
inline void widen_f16(const char* from, float* to) {
  for (int d = 0; d < 8; ++d) to[d] = from_f16(((const uint16_t*)from)[d]);
}
inline void widen_fp8(const char* codes, float* to) {
  for (int d = 0; d < 8; ++d) to[d] = from_fp8(uint8_t(codes[d]));
}
constexpr float FP8_UNIT = 1;
#endif

template <KvFormat F>
struct InFloats {
  static constexpr bool ONE_SCALE = F == KvFormat::int8 || F == KvFormat::fp8;
  static constexpr int SLOTS = 32;  // in L1 they take 32 KB, of 256 numbers
  static constexpr int KEY_TILE = 3, VALUE_TILE = 3;  // heads: their sums fit the registers
  static constexpr float UNIT = F == KvFormat::fp8 ? FP8_UNIT : 1;

  const Part& part;
  const int padded;
  alignas(64) float rows[SLOTS * MAX_HEAD_DIM];
  alignas(64) float key_scale[SLOTS], value_scales[SLOTS];
  const float* value_scale = ONE_SCALE ? value_scales : nullptr;

  explicit InFloats(const Part& part) : part(part), padded(part.padded) {
    __builtin_memset(rows, 0, SLOTS * padded * sizeof(float));  // what pads a row stays zero
    for (int s = 0; s < SLOTS; ++s) key_scale[s] = 1, value_scales[s] = 0;
  }

  float scale(int) const { return part.softmax_scale; }

  void read_keys(int64_t first, int slots) {
    read(part.key, first, slots);
    for (int s = 0; ONE_SCALE && s < slots; ++s) {
      key_scale[s] = scale_at(part.key, first + s) * UNIT;
      value_scales[s] = scale_at(part.value, first + s) * UNIT;
    }
  }
  void read_values(int64_t first, int slots) { read(part.value, first, slots); }
  void read(const Slots& side, int64_t first, int slots) {
    for (int s = 0; s < slots; ++s) widen(side, first + s, rows + s * padded);
  }

  void widen(const Slots& from, int64_t slot, float* __restrict to) const {
    const char* codes = from.codes + slot * from.slot_bytes;
    prefetch(codes, from.slot_bytes);
    auto each = [&](auto* x, auto number) {
      for (int d = 0; d < part.head_dim; ++d) to[d] = number(x[d]);
    };
    if constexpr (F == KvFormat::f32) {
      __builtin_memcpy(to, codes, part.head_dim * sizeof(float));
    } else if constexpr (F == KvFormat::bf16) {
      each((const uint16_t*)codes, [](uint16_t x) { return as_float(uint32_t(x) << 16); });
    } else if constexpr (F == KvFormat::f16) {
      for (int d = 0; d < part.head_dim; d += 8) widen_f16(codes + 2 * d, to + d);
    } else if constexpr (F == KvFormat::int8) {
      each((const int8_t*)codes, [](int8_t x) { return float(x); });
    } else if constexpr (F == KvFormat::fp8) {
      for (int d = 0; d < part.head_dim; d += 8) widen_fp8(codes + d, to + d);
    } else {
      const uint8_t* x = reinterpret_cast<const uint8_t*>(codes);
      constexpr int HALF = INT4_GROUP / 2;
      for (int group = 0; group < part.head_dim / INT4_GROUP; ++group) {
        float scale = scale_at(from, slot * from.slot_scales + group);
        for (int i = 0; i < HALF; ++i) {
          int code = x[group * HALF + i];
          to[group * INT4_GROUP + i] = float((code & 15) - 8) * scale;
          to[group * INT4_GROUP + HALF + i] = float((code >> 4) - 8) * scale;
        }
      }
    }
  }

  // scores[h][s] = query[h] · rows[s] for HEADS heads from `head` on and all slots, padded to a multiple of 4.
  template <int HEADS>
  void dot(int head, int slots, float* scores) const {
    const float* query = part.query + head * padded;
    for (int s = 0; s < slots; s += 4) {
      Vector total[HEADS][4];
      for (int h = 0; h < HEADS; ++h)
        for (int i = 0; i < 4; ++i) total[h][i] = all(0);
      for (int d = 0; d < padded; d += LANES) {
        Vector key[4];
        for (int i = 0; i < 4; ++i) key[i] = load(rows + (s + i) * padded + d);
        for (int h = 0; h < HEADS; ++h) {
          Vector q = load(query + h * padded + d);
          for (int i = 0; i < 4; ++i) total[h][i] = multiply_add(q, key[i], total[h][i]);
        }
      }
      for (int h = 0; h < HEADS; ++h)
        store_sums(scores + h * LOOP_BLOCK + s, total[h][0], total[h][1], total[h][2], total[h][3]);
    }
  }

  // weighted[h] = weighted[h] · shrink[h] + Σ weights[h][s] · rows[s], in columns of 4 vectors.
  template <int HEADS>
  void add_weighted(int head, int slots, const float* weights, const float* shrink) {
    int d = 0;
    for (; d + 4 * LANES <= padded; d += 4 * LANES) add<HEADS, 4>(head, d, slots, weights, shrink);
    for (; d < padded; d += LANES) add<HEADS, 1>(head, d, slots, weights, shrink);
  }

  template <int HEADS, int COLUMNS>
  void add(int head, int d, int slots, const float* weights, const float* shrink) {
    float* weighted = part.weighted + head * padded + d;
    Vector total[HEADS][COLUMNS];
    for (int h = 0; h < HEADS; ++h)
      for (int c = 0; c < COLUMNS; ++c)
        total[h][c] = load(weighted + h * padded + c * LANES) * all(shrink[h]);
    for (int s = 0; s < slots; ++s) {
      Vector value[COLUMNS];
      for (int c = 0; c < COLUMNS; ++c) value[c] = load(rows + s * padded + d + c * LANES);
      for (int h = 0; h < HEADS; ++h) {
        Vector weight = all(weights[h * LOOP_BLOCK + s]);
        for (int c = 0; c < COLUMNS; ++c)
          total[h][c] = multiply_add(weight, value[c], total[h][c]);
      }
    }
    for (int h = 0; h < HEADS; ++h)
      for (int c = 0; c < COLUMNS; ++c) store(weighted + h * padded + c * LANES, total[h][c]);
  }
};
