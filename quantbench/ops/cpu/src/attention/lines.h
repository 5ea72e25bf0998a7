// Dense bfloat16 caches, and fp8 ones, in float32, for queries that are bfloat16, too, and heads of whole
// lines. Included in a variant's namespace, after attention/blocks.h and attention/fp8.h.
//
// A line of a slot, 32 numbers as bfloat16, becomes two vectors in registers: the numbers at even places,
// moved to the upper half of a lane, and those at odd places, of which the lower half is cut off. So a
// query has its even numbers before its odd ones, too, and the weighted values have until `finish`.

constexpr int AT_ONCE = 4;       // slots whose scores are summed together

inline __attribute__((always_inline)) void split(__m512i line, Vector& even, Vector& odd) {
  even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(int(0xffff0000))));
}

// A line as the cache stores it, and its numbers as bfloat16.
template <KvFormat>
struct Line;

template <>
struct Line<KvFormat::bf16> {
  static constexpr int BYTES = 64;
  static constexpr bool SCALED = false;
  static __m512i read(const char* from) { return _mm512_loadu_si512(from); }
};

template <>
struct Line<KvFormat::fp8> {
  static constexpr int BYTES = 32;
  static constexpr bool SCALED = true;
  static __m512i read(const char* from) { return fp8_as_bf16(from); }
};

// Slots: how many a block has. The functions that hold sums are always inlined: alone, GCC 12 would
// keep the sums in memory before and after their loops.
template <KvFormat F, int SLOTS>
struct Lines : Blocks<Lines<F, SLOTS>, 1, SLOTS> {
  using Base = Blocks<Lines<F, SLOTS>, 1, SLOTS>;
  using Base::part, Base::slot_bytes, Base::ahead;
  using Kept = Line<F>;
  static constexpr bool COPIES_TAIL = false;  // nothing is read behind a run's last slot

  const int lines;  // of a slot

  alignas(64) float query[MAX_GROUP][MAX_HEAD_DIM];
  alignas(64) float weights[QUAD][SLOTS];  // scores, then weights
  alignas(16) float rise[QUAD], shrink[QUAD];

  explicit Lines(const Part& part) : Base(part, Kept::SCALED), lines(part.head_dim / LINE) {
    for (int h = 0; h < part.heads; ++h) {
      rearrange(part.query + h * part.padded, lines, PLACES.even, PLACES.odd, query[h]);
#if LEVEL >= LEVEL_avx512bf16
      for (float* line = query[h]; line < query[h] + lines * LINE; line += LINE)  // as bfloat16 again
        store(line, (Vector)(((Integers)load(line) >> 16 & 0xffff) | (Integers)load(line + LANES)));
#endif
    }
    const int quads = (part.heads + QUAD - 1) / QUAD;
    this->pace(quads * SLOTS / AT_ONCE * (1 + (lines + 1) / 2));
  }

  void finish() { this->put_in_order(); }

  void block(const Slots& key, const Slots& value, int slots) {
    int h = 0;
    for (; h + QUAD <= part.heads; h += QUAD) attend_heads<QUAD>(h, key, value, slots);
    switch (part.heads - h) {
      case 1: return attend_heads<1>(h, key, value, slots);
      case 2: return attend_heads<2>(h, key, value, slots);
      case 3: return attend_heads<3>(h, key, value, slots);
    }
  }

  template <int HEADS>
  void attend_heads(int head, const Slots& key, const Slots& value, int slots) {
    for (int s = 0; s + AT_ONCE <= slots; s += AT_ONCE)
      multiply_keys<HEADS>(head, key.codes + s * slot_bytes, slot_bytes, s);
    if (slots % AT_ONCE) multiply_last<HEADS>(head, key.codes, slots);
    const int vectors = (slots + LANES - 1) / LANES;
    const char *key_scale = key.scale, *value_scale = value.scale;
    if (vectors == SLOTS / LANES)  // in loops of known length
      weigh<HEADS>(head, key_scale, value_scale, slots, SLOTS / LANES);
    else
      weigh<HEADS>(head, key_scale, value_scale, slots, vectors);
    int line = 0;
    for (; line + 2 <= lines; line += 2) add_values<HEADS, 2>(head, line, value.codes, slots);
    if (line < lines) add_values<HEADS, 1>(head, line, value.codes, slots);
  }

  // Scores of a block's last slots, some of them again; of fewer than AT_ONCE, one by one.
  template <int HEADS>
  __attribute__((noinline)) void multiply_last(int head, const char* keys, int slots) {
    const int first = slots - AT_ONCE;
    if (first >= 0) return multiply_keys<HEADS>(head, keys + first * slot_bytes, slot_bytes, first);
    for (int s = 0; s < slots; ++s) multiply_keys<HEADS>(head, keys + s * slot_bytes, 0, s);
  }

  // Scores of AT_ONCE slots from the block's slot s on, `apart` bytes from each other.
  template <int HEADS>
  inline __attribute__((always_inline)) void multiply_keys(int head, const char* keys, int64_t apart,
                                                           int s) {
    ahead();
    Vector total[HEADS][AT_ONCE];
    for (int i = 0; i < HEADS; ++i)
      for (int j = 0; j < AT_ONCE; ++j) total[i][j] = all(0);
    for (int l = 0; l < lines; ++l) {
#if LEVEL >= LEVEL_avx512bf16
      __m512i key[AT_ONCE];
      for (int j = 0; j < AT_ONCE; ++j) key[j] = Kept::read(keys + j * apart + l * Kept::BYTES);
      for (int i = 0; i < HEADS; ++i) {
        const __m512bh both = (__m512bh)_mm512_load_si512(query[head + i] + l * LINE);
        for (int j = 0; j < AT_ONCE; ++j)
          total[i][j] = _mm512_dpbf16_ps(total[i][j], both, (__m512bh)key[j]);
      }
#else
      Vector even[AT_ONCE], odd[AT_ONCE];
      for (int j = 0; j < AT_ONCE; ++j)
        split(Kept::read(keys + j * apart + l * Kept::BYTES), even[j], odd[j]);
      for (int i = 0; i < HEADS; ++i) {
        const Vector first = load(query[head + i] + l * LINE);
        const Vector second = load(query[head + i] + l * LINE + LANES);
        for (int j = 0; j < AT_ONCE; ++j) total[i][j] = multiply_add(first, even[j], total[i][j]);
        for (int j = 0; j < AT_ONCE; ++j) total[i][j] = multiply_add(second, odd[j], total[i][j]);
      }
#endif
    }
    for (int i = 0; i < HEADS; ++i)
      store_sums(weights[i] + s, total[i][0], total[i][1], total[i][2], total[i][3]);
  }

  template <int HEADS>
  inline __attribute__((always_inline)) void weigh(int head, const char* key_scale,
                                                   const char* value_scale, int slots, int vectors) {
    Vector scores[SLOTS / LANES][QUAD], most[QUAD], total[QUAD];
    for (int i = 0; i < QUAD; ++i) most[i] = all(NEVER), total[i] = all(0);
    for (int v = 0; v < vectors; ++v) {
      Vector scale = all(part.softmax_scale);
      if (Kept::SCALED) scale = scale * first_scales(key_scale + v * LANES * 2, slots - v * LANES);
      for (int i = 0; i < HEADS; ++i) scores[v][i] = load(weights[i] + v * LANES) * scale;
      this->template keep<HEADS>(v * LANES, slots, scores[v], most);
    }
    float base[QUAD];
    this->begin(head, most, base, rise, shrink);
    for (int i = 0; i < HEADS; ++i)
      for (int v = 0; v < vectors; ++v) {
        Vector weight = exponential(scores[v][i] - all(base[i]));
        total[i] = total[i] + weight;
        if (Kept::SCALED)
          weight = weight * first_scales(value_scale + v * LANES * 2, slots - v * LANES);
        store(weights[i] + v * LANES, weight);
      }
    this->end(head, total, rise, shrink);
  }

  // Adds lines `line` to `line + LINES - 1` of a block's slots to the weighted values.
  template <int HEADS, int LINES>
  inline __attribute__((always_inline)) void add_values(int head, int line, const char* values,
                                                        int slots) {
    Vector total[HEADS][2 * LINES];
    for (int i = 0; i < HEADS; ++i)
      for (int j = 0; j < 2 * LINES; ++j) total[i][j] = all(0);
    const char* from = values + line * Kept::BYTES;
    for (int s = 0; s < slots; ++s, from += slot_bytes) {
      if (s % AT_ONCE == 0) ahead();
      Vector value[2 * LINES];
      for (int l = 0; l < LINES; ++l)
        split(Kept::read(from + l * Kept::BYTES), value[2 * l], value[2 * l + 1]);
      for (int i = 0; i < HEADS; ++i) {
        const Vector weight = all(weights[i][s]);
        for (int j = 0; j < 2 * LINES; ++j)
          total[i][j] = multiply_add(weight, value[j], total[i][j]);
      }
    }
    for (int i = 0; i < HEADS; ++i) {
      float* to = part.weighted + (head + i) * part.padded + line * LINE;
      const Vector more = all(rise[i]), before = all(shrink[i]);
      for (int j = 0; j < 2 * LINES; ++j, to += LANES)
        store(to, multiply_add(total[i][j], more, load(to) * before));
    }
  }
};
