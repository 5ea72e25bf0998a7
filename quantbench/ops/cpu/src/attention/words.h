// int8 and int4 caches in products of 16-bit integers, in heads of whole groups of 32 numbers. Included in
// the namespace of attention/loop.cpp.
//
// A query is 16 bits for each number, at a scale of its head; so are a block's weights times the values'
// scales. That keeps 15 bits of the largest, and sums are exact. Codes are widened in registers: of values
// those of two slots, PAIRS apart, whose products are added up in one lane.

constexpr int PAIRS = LOOP_BLOCK / 2;
constexpr float STEPS = 32767;

inline Integers add_words(Integers sum, __m256i a, __m256i b) {
#if LEVEL == LEVEL_avxvnni
  return (Integers)_mm256_dpwssd_avx_epi32((__m256i)sum, a, b);
#else
  return sum + (Integers)_mm256_madd_epi16(a, b);
#endif
}
inline __m256i words(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m128i sixteen(const char* p) { return _mm_loadu_si128((const __m128i*)p); }
inline Vector floats(Integers v) { return _mm256_cvtepi32_ps((__m256i)v); }

inline Integers rounded(Vector x, float step) {
  return (Integers)_mm256_cvtps_epi32(x * all(step > 0 ? 1 / step : 0));
}

template <KvFormat F>
struct InWords {
  static constexpr bool GROUPED = F == KvFormat::int4;
  static constexpr int GROUPS = GROUPED ? MAX_HEAD_DIM / INT4_GROUP : 1;  // at most
  static constexpr int SLOTS = LOOP_BLOCK;
  static constexpr int KEY_TILE = 2, VALUE_TILE = GROUPED ? 2 : 4;  // heads: their sums fit the registers
  static constexpr int CHUNK = 16, HALVES = GROUPED ? 2 : 1;        // bytes, and numbers in a byte
  static constexpr const float* value_scale = nullptr;              // weights have it already

  const Part& part;
  const int bytes;  // of a slot
  const char *keys, *values;
  alignas(32) int16_t query[MAX_GROUP][MAX_HEAD_DIM];
  alignas(32) float scales[2][GROUPS][LOOP_BLOCK], key_scale[LOOP_BLOCK];  // 1: scores have it already
  alignas(32) int32_t pairs[VALUE_TILE][GROUPS][PAIRS];
  float query_step[MAX_GROUP], step[VALUE_TILE][GROUPS];

  explicit InWords(const Part& part) : part(part), bytes(int(part.key.slot_bytes)) {
    for (float& one : key_scale) one = 1;
    for (int h = 0; h < part.heads; ++h) {
      const float* x = part.query + h * part.padded;
      Magnitude magnitude;
      for (int d = 0; d < part.head_dim; d += LANES) magnitude.add(load(x + d));
      query_step[h] = magnitude.largest() / STEPS;
      for (int d = 0; d < part.head_dim; d += LANES)
        for (int i = 0; i < LANES; ++i) query[h][d + i] = int16_t(rounded(load(x + d), query_step[h])[i]);
    }
  }

  int groups() const { return GROUPED ? part.head_dim / INT4_GROUP : 1; }
  float scale(int head) const { return query_step[head] * part.softmax_scale; }

  void read_keys(int64_t first, int slots) {
    keys = codes(part.key, first, slots);
    for (int side = 0; side < 2; ++side) {
      const uint16_t* scale = (const uint16_t*)(side ? part.value : part.key).scale + first * groups();
      for (int g = 0; g < groups(); ++g) {
        for (int s = 0; s < slots; ++s) scales[side][g][s] = as_float(uint32_t(scale[s * groups() + g]) << 16);
        for (int s = slots; s < LOOP_BLOCK; ++s) scales[side][g][s] = 0;
      }
    }
  }
  void read_values(int64_t first, int slots) { values = codes(part.value, first, slots); }

  const char* codes(const Slots& side, int64_t first, int slots) const {
    prefetch(side.codes + first * bytes, slots * bytes);
    return side.codes + first * bytes;
  }

  // 16 bytes as numbers: of int4 the low halves, then the high ones.
  static INLINE void widen(__m128i some, __m256i to[HALVES]) {
    to[0] = GROUPED ? _mm256_cvtepu8_epi16(some) : _mm256_cvtepi8_epi16(some);
    if (!GROUPED) return;
    const __m256i zero = _mm256_set1_epi16(8);  // the code of 0
    to[HALVES - 1] = _mm256_sub_epi16(_mm256_srli_epi16(to[0], 4), zero);
    to[0] = _mm256_sub_epi16(_mm256_and_si256(to[0], _mm256_set1_epi16(15)), zero);
  }

  template <int HEADS>
  void dot(int head, int slots, float* scores) const {
    int s = 0;
    for (; s + 4 <= slots; s += 4) dot_four<HEADS>(head, s, bytes, scores + s);
    if (slots >= 4 && s < slots) dot_four<HEADS>(head, slots - 4, bytes, scores + slots - 4);
    else for (; s < slots; ++s) dot_four<HEADS>(head, s, 0, scores + s);
  }

  // Scores of four slots from s on, `apart` bytes from each other.
  template <int HEADS>
  INLINE void dot_four(int head, int s, int apart, float* scores) const {
    Vector total[HEADS][4] = {};
    for (int g = 0; g < groups(); ++g) {
      Integers sum[HEADS][4] = {};
      for (int at = g * CHUNK, end = GROUPED ? at + CHUNK : bytes; at < end; at += CHUNK)
        for (int i = 0; i < 4; ++i) {
          __m256i key[HALVES];
          widen(sixteen(keys + s * bytes + i * apart + at), key);
          for (int h = 0; h < HEADS; ++h)
            for (int half = 0; half < HALVES; ++half)
              sum[h][i] = add_words(sum[h][i], words(query[head + h] + at * HALVES + half * CHUNK), key[half]);
        }
      for (int i = 0; i < 4; ++i) {
        const Vector scale = all(scales[0][g][s + (apart ? i : 0)]);
        for (int h = 0; h < HEADS; ++h) total[h][i] = multiply_add(floats(sum[h][i]), scale, total[h][i]);
      }
    }
    for (int h = 0; h < HEADS; ++h)
      store_sums(scores + h * LOOP_BLOCK, total[h][0], total[h][1], total[h][2], total[h][3]);
  }

  // A head's weights times a group's scales, two slots' in a number.
  void pair(const float* weights, int slots, int h, int g) {
    constexpr int HALF = PAIRS / LANES;
    Vector x[2 * HALF];
    Magnitude magnitude;
    for (int v = 0, s = 0; v < 2 * HALF; ++v, s += LANES)
      magnitude.add(x[v] = s < slots ? load(weights + s) * load(scales[1][g] + s) : all(0));
    const float by = step[h][g] = magnitude.largest() / STEPS;
    for (int v = 0; v < HALF; ++v) {
      const Integers both = (rounded(x[v], by) & 0xffff) | (rounded(x[v + HALF], by) << 16);
      store((float*)pairs[h][g] + v * LANES, (Vector)both);
    }
  }

  template <int HEADS>
  void add_weighted(int head, int slots, const float* weights, const float* shrink) {
    for (int h = 0; h < HEADS; ++h)
      for (int g = 0; g < groups(); ++g) pair(weights + h * LOOP_BLOCK, slots, h, g);
    for (int at = 0; at < bytes; at += CHUNK) {
      const int g = GROUPED ? at / CHUNK : 0;
      Integers sum[HEADS][HALVES][2] = {};
      for (int s = 0; s < PAIRS && s < slots; ++s) {
        const char* from = values + s * bytes + at;
        const __m128i a = sixteen(from), b = s + PAIRS < slots ? sixteen(from + PAIRS * bytes) : a;
        for (int i = 0; i < 2; ++i) {
          __m256i value[HALVES];
          widen(i ? _mm_unpackhi_epi8(a, b) : _mm_unpacklo_epi8(a, b), value);
          for (int h = 0; h < HEADS; ++h)
            for (int half = 0; half < HALVES; ++half)
              sum[h][half][i] = add_words(sum[h][half][i], value[half], _mm256_set1_epi32(pairs[h][g][s]));
        }
      }
      for (int h = 0; h < HEADS; ++h)
        for (int half = 0; half < HALVES; ++half)
          for (int i = 0; i < 2; ++i) {
            float* to = part.weighted + (head + h) * part.padded + (at * HALVES + half * CHUNK) + i * LANES;
            store(to, multiply_add(floats(sum[h][half][i]), all(step[h][g]), load(to) * all(shrink[h])));
          }
    }
  }
};
