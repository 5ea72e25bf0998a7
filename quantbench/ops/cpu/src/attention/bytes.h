// What kernels share that multiply bytes, over int8 and int4 caches (AMX, VNNI). Included in a
// variant's namespace, after attention/blocks.h.
//
// A query is two signed bytes for each number, 128 · high + low, at a scale of its head; so are a
// block's weights times the values' scale. That keeps 15 bits of the largest, and sums are exact.

constexpr float QUERY_STEPS = 127 * 128, WEIGHT_STEPS = 127 * 128 + 127;

// a's bits where `mask` has them, else b's.
inline __m512i select(__m512i mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}

// 128 · high + low, as a float.
inline Vector joined(__m512i high, __m512i low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low));
}

// The bytes of a head's query (`padded` numbers); returns its scale. One that is NaN or infinite
// anywhere has scale NaN, as all of its scores will be.
inline float query_bytes(const float* query, int padded, int8_t* high, int8_t* low) {
  Magnitude magnitude;
  for (int d = 0; d < padded; d += LANES) magnitude.add(load(query + d));
  const float step = magnitude.largest() / QUERY_STEPS, steps = step > 0 ? 1 / step : 0;
  for (int d = 0; d < padded; d += LANES) {
    const __m512i code = _mm512_cvtps_epi32(load(query + d) * all(steps));
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(64)), 7);
    const __m512i lower = _mm512_sub_epi32(code, _mm512_slli_epi32(upper, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + d), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + d), _mm512_cvtepi32_epi8(lower));
  }
  return step;
}

// Scales and softmax. `Work` says in CODE by how much it multiplies each code.
template <typename Work, KvFormat F>
struct ByteBlocks : Blocks<Work, F == KvFormat::int4 ? MAX_HEAD_DIM / INT4_GROUP : 1> {
  static constexpr bool GROUPED = F == KvFormat::int4;
  static constexpr int MAX_GROUPS = GROUPED ? MAX_HEAD_DIM / INT4_GROUP : 1;
  using Base = Blocks<Work, MAX_GROUPS>;
  using Base::groups, Base::scale_bytes;

  alignas(64) float key_scale[MAX_GROUPS][BLOCK];
  alignas(64) float value_scale[MAX_GROUPS][BLOCK];  // in steps of the weights
  float step[MAX_GROUPS];                            // and what such a step is

  explicit ByteBlocks(const Part& part) : Base(part, GROUPED ? part.head_dim / INT4_GROUP : 1) {}

  void read_scales(const Slots& key, const Slots& value, int g) {
    Magnitude magnitude;
    for (int s = 0; s < BLOCK; s += LANES) {
      store(key_scale[g] + s, scales(key.scale + s * scale_bytes, groups, g));
      const Vector x = scales(value.scale + s * scale_bytes, groups, g);
      magnitude.add(x);
      store(value_scale[g] + s, x);
    }
    const float top = magnitude.largest(), steps = top > 0 ? WEIGHT_STEPS / top : 0;
    for (int s = 0; s < BLOCK; s += LANES)
      store(value_scale[g] + s, load(value_scale[g] + s) * all(steps));
    step[g] = top / (WEIGHT_STEPS * Work::CODE);
  }

  // Weights of HEADS heads from `head` on. `put` gets each head's bytes for each group: high and
  // low ones, whose lane r has those of slots r, 32 + r, 16 + r and 48 + r.
  template <int HEADS, typename Put>
  void weigh_quad(int head, const Vector scores[BLOCK / ROWS][QUAD], const Vector* most,
                  float* rise, float* shrink, Put put) {
    Vector total[QUAD];
    for (int i = 0; i < QUAD; ++i) total[i] = all(0);
    float base[QUAD];
    this->begin(head, most, base, rise, shrink);
#pragma GCC unroll 4  // so that four heads' exponentials overlap
    for (int i = 0; i < HEADS; ++i) {
      Vector weight[4];
      for (int v = 0; v < 4; ++v) {
        weight[v] = rough_exponential(scores[v][i] - all(base[i]));
        total[i] = total[i] + weight[v];
      }
      for (int g = 0; g < groups; ++g) {
        __m512i steps[4];
        for (int v = 0; v < 4; ++v)
          steps[v] = _mm512_cvtps_epi32(weight[v] * load(value_scale[g] + v * ROWS));
        // 16 bits of two slots in a lane, then bytes of four.
        const __m512i word = _mm512_set1_epi32(0xffff), byte = _mm512_set1_epi16(0xff);
        __m512i first_two = select(word, steps[0], _mm512_slli_epi32(steps[1], 16));
        __m512i last_two = select(word, steps[2], _mm512_slli_epi32(steps[3], 16));
        __m512i high = select(byte, _mm512_srli_epi16(first_two, 7), _mm512_slli_epi16(last_two, 1));
        __m512i low = select(byte, first_two, _mm512_slli_epi16(last_two, 8));
        put(g, i, high, _mm512_and_si512(low, _mm512_set1_epi8(127)));
      }
    }
    this->end(head, total, rise, shrink);
  }
};
