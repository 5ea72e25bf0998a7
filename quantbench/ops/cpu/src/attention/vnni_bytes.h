// int8 and int4 caches in byte products of AVX-512 VNNI (`vpdpbusd`: four unsigned bytes times four
// signed ones, added to 32 bits). Included in the namespace of attention/avx512.cpp.
//
// A block's codes are rearranged once for all heads, as unsigned bytes: code + ZERO. A sum over them
// starts at minus what ZERO adds to it. A vector has 16 lanes of four bytes:
//
//     keys    a lane is a slot, its bytes are four numbers; the query's same four are broadcast
//     values  a lane is a number, its bytes are four slots; the weights of these four are broadcast
//
// So each lane of a product is a separate result, and no lanes have to be added up.

constexpr int SPAN = 32;  // bytes of a slot that are rearranged at a time

// Loads a span: all of it, or its first bytes and zeros for the others.
template <bool WHOLE>
struct Span {
  __mmask32 there;
  explicit Span(int64_t bytes) : there(WHOLE ? ~0u : (1u << bytes) - 1) {}
  __m256i operator()(const char* from) const {
    if (WHOLE) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_maskz_loadu_epi8(there, from);
  }
};

template <typename Span>
inline __m512i two_spans(const char* a, const char* b, Span span) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(span(a)), span(b), 1);
}

// A span of each of 16 slots, as 8 vectors whose lanes are the slots: bytes 4 i to 4 i + 3 in out[i].
template <typename Span>
inline void columns(const char* from, int64_t slot_bytes, Span span, __m512i out[8]) {
  // 16 bytes each: column i of four slots, column 4 + i of the same, then both of four more slots.
  __m512i half[2][4];
  for (int h = 0; h < 2; ++h, from += 8 * slot_bytes) {
    __m512i row[4];
    for (int i = 0; i < 4; ++i)
      row[i] = two_spans(from + i * slot_bytes, from + (4 + i) * slot_bytes, span);
    for (int i = 0; i < 2; ++i) {
      auto pairs = [i](__m512i a, __m512i b) {
        return i ? _mm512_unpackhi_epi32(a, b) : _mm512_unpacklo_epi32(a, b);
      };
      const __m512i first = pairs(row[0], row[1]), last = pairs(row[2], row[3]);
      half[h][2 * i] = _mm512_unpacklo_epi64(first, last);
      half[h][2 * i + 1] = _mm512_unpackhi_epi64(first, last);
    }
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_shuffle_i32x4(half[0][i], half[1][i], 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(half[0][i], half[1][i], 0xdd);
  }
}

// Which 16-bit words of two vectors, each of whose halves interleaves two slots' bytes, become 16 lanes of
// one byte from each slot: a lane's words are 32 bytes apart.
struct WordsInTurn {
  alignas(64) uint16_t from[32];
  constexpr WordsInTurn() : from() {
    for (int i = 0; i < 32; ++i) from[i] = uint16_t(i / 16 * 32 + i % 16 / 2 + i % 2 * 16);
  }
};
constexpr WordsInTurn WORDS_IN_TURN;

inline int32_t four_bytes(const int8_t* from) {
  int32_t lane;
  __builtin_memcpy(&lane, from, 4);
  return lane;
}

template <KvFormat F>
struct Codes : ByteBlocks<Codes<F>, F> {
  using Base = ByteBlocks<Codes<F>, F>;
  using Base::GROUPED, Base::MAX_GROUPS, Base::part, Base::groups, Base::slot_bytes;
  using Base::key_scale, Base::step, Base::next_key, Base::next_value;
  static constexpr int CODE = 1;                  // what a code is multiplied by
  static constexpr int ZERO = GROUPED ? 8 : 128;  // the unsigned code of 0
  static constexpr int GROUP_COLUMNS = INT4_GROUP / 4;

  // Lines are prefetched between products, where loads wait for nothing: N in a step of a loop over
  // columns, or over rows of values, as make a block. In int4 the loop over columns asks for both: one over
  // rows that asked made GCC 12 keep more of its sums in memory. The next block is too near: its first
  // lines would be asked for just before they are read.
  static constexpr int BLOCKS_AHEAD = 2;
  static constexpr int KEY_LINES = GROUPED ? 1 : 2;

  const int key_columns;    // of four numbers each, in whole spans
  const int group_columns;  // that share a scale

  // Four numbers in a lane: a column's high bytes and its low ones, of one head after another.
  alignas(64) int32_t query[MAX_GROUP / QUAD][MAX_HEAD_DIM / 4][QUAD][2];
  float query_scale[MAX_GROUP];
  int32_t query_start[MAX_GROUP][MAX_GROUPS];
  alignas(64) uint8_t keys[MAX_HEAD_DIM / 4][BLOCK * 4];
  alignas(64) uint8_t values[MAX_HEAD_DIM / ROWS][ROWS][64];
  alignas(64) int8_t weights[MAX_GROUPS][QUAD][2][64];  // high bytes, low ones
  int32_t value_start[MAX_GROUPS][QUAD];
  alignas(16) float rise[QUAD], shrink[QUAD];

  explicit Codes(const Part& part)
      : Base(part), key_columns((int(slot_bytes) + SPAN - 1) / SPAN * (GROUPED ? 16 : 8)),
        group_columns(GROUPED ? GROUP_COLUMNS : key_columns) {
    for (int h = 0; h < part.heads; ++h) put_query(h);
  }

  void put_query(int h) {
    int8_t high[MAX_HEAD_DIM] = {}, low[MAX_HEAD_DIM] = {};
    const float* x = part.query + h * part.padded;
    query_scale[h] = query_bytes(x, part.padded, high, low) * part.softmax_scale;
    for (int c = 0; c < key_columns; ++c) {
      __builtin_memcpy(&query[h / QUAD][c][h % QUAD][0], high + 4 * c, 4);
      __builtin_memcpy(&query[h / QUAD][c][h % QUAD][1], low + 4 * c, 4);
    }
    for (int g = 0; g < groups; ++g) {
      int total = 0;
      for (int d = g * group_columns * 4; d < (g + 1) * group_columns * 4; ++d)
        total += high[d] * 128 + low[d];
      query_start[h][g] = -ZERO * total;
    }
  }

  void block(const Slots& key, const Slots& value, int slots) {
    int at = 0;
    for (; at + SPAN <= slot_bytes; at += SPAN) read<true>(key.codes, value.codes, at);
    if (at < slot_bytes) read<false>(key.codes, value.codes, at);
    for (int g = 0; g < groups; ++g) this->read_scales(key, value, g);
    int h = 0;
    for (; h + QUAD <= part.heads; h += QUAD) attend_heads<QUAD>(h, slots);
    switch (part.heads - h) {
      case 1: return attend_heads<1>(h, slots);
      case 2: return attend_heads<2>(h, slots);
      case 3: return attend_heads<3>(h, slots);
    }
  }

  static __m512i low_codes(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
  static __m512i high_codes(__m512i bytes) { return low_codes(_mm512_srli_epi16(bytes, 4)); }
  static __m512i from_zero(__m512i bytes) {
    return _mm512_xor_si512(bytes, _mm512_set1_epi8(char(ZERO)));
  }

  // Rearranges the span from a slot's byte `at` on.
  template <bool WHOLE>
  void read(const char* key, const char* value, int at) {
    const Span<WHOLE> span(slot_bytes - at);
    read_keys(key + at, slot_bytes, span, keys + at / SPAN * (GROUPED ? 16 : 8));
    read_values(value + at, slot_bytes, span, values + at / SPAN * (GROUPED ? 4 : 2));
  }

  template <typename Span>
  void read_keys(const char* from, int64_t slot_bytes, Span span, uint8_t (*to)[BLOCK * 4]) {
    for (int s = 0; s < BLOCK; s += ROWS) {
      __m512i four[8];
      columns(from + s * slot_bytes, slot_bytes, span, four);
      for (int i = 0; i < 8; ++i) {
        if (!GROUPED) {
          _mm512_store_si512(to[i] + s * 4, from_zero(four[i]));
          continue;
        }
        auto low = to + i / 4 * GROUP_COLUMNS + i % 4, high = low + GROUP_COLUMNS / 2;
        _mm512_store_si512(low[0] + s * 4, low_codes(four[i]));
        _mm512_store_si512(high[0] + s * 4, high_codes(four[i]));
      }
    }
  }

  // Row r has slots r, 32 + r, 16 + r and 48 + r in each lane, as lane r of the weights has them.
  template <typename Span>
  void read_values(const char* from, int64_t slot_bytes, Span span, uint8_t (*to)[ROWS][64]) {
    const __m512i first = _mm512_load_si512(WORDS_IN_TURN.from);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(8));
    for (int r = 0; r < ROWS; ++r, from += slot_bytes) {
      const __m512i a = two_spans(from, from + 16 * slot_bytes, span);
      const __m512i b = two_spans(from + 32 * slot_bytes, from + 48 * slot_bytes, span);
      const __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
      const __m512i four[2] = {_mm512_permutex2var_epi16(low, first, high),
                               _mm512_permutex2var_epi16(low, second, high)};
      for (int i = 0; i < 2; ++i) {
        if (!GROUPED) {
          _mm512_store_si512(to[i][r], from_zero(four[i]));
          continue;
        }
        _mm512_store_si512(to[2 * i][r], low_codes(four[i]));
        _mm512_store_si512(to[2 * i + 1][r], high_codes(four[i]));
      }
    }
  }

  template <int HEADS>
  void attend_heads(int head, int slots) {
    Vector scores[BLOCK / ROWS][QUAD], most[QUAD];
    for (int i = 0; i < QUAD; ++i) most[i] = all(NEVER);
    for (int v = 0; v < BLOCK / ROWS; v += 2) {
      if (head == 0) multiply_keys<HEADS, true>(head, v, scores + v);
      else multiply_keys<HEADS, false>(head, v, scores + v);
      for (int i = 0; i < 2; ++i) {
        this->template keep<HEADS>((v + i) * ROWS, slots, scores[v + i], most);
      }
    }
    this->template weigh_quad<HEADS>(
        head, scores, most, rise, shrink, [&](int g, int i, __m512i high, __m512i low) {
          _mm512_store_si512(weights[g][i][0], high);
          _mm512_store_si512(weights[g][i][1], low);
          const __m512i zeros = _mm512_set1_epi8(char(ZERO));
          high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), zeros, high);
          low = _mm512_dpbusd_epi32(_mm512_setzero_si512(), zeros, low);
          value_start[g][i] =
              -_mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low));
        });
    for (int d = 0; d < part.padded; d += 2 * ROWS) {
      if (d + ROWS >= part.padded) multiply_values<HEADS, 1, false>(head, d);
      else if (head == 0) multiply_values<HEADS, 2, true>(head, d);
      else multiply_values<HEADS, 2, false>(head, d);
    }
  }

  // Scores of 32 slots, from the 16 · v-th on.
  template <int HEADS, bool ASKS>
  void multiply_keys(int head, int v, Vector scores[2][QUAD]) {
    for (int g = 0; g < groups; ++g) {
      __m512i high[HEADS][2], low[HEADS][2];
      for (int i = 0; i < HEADS; ++i)
        for (int j = 0; j < 2; ++j) {
          high[i][j] = _mm512_setzero_si512();
          low[i][j] = _mm512_set1_epi32(query_start[head + i][g]);
        }
#pragma GCC unroll 4
      for (int c = g * group_columns; c < (g + 1) * group_columns; ++c) {
        if (ASKS) ask<KEY_LINES>(next_key);
        if (ASKS && GROUPED) ask<KEY_LINES>(next_value);
        __m512i key[2];
        for (int j = 0; j < 2; ++j) key[j] = _mm512_load_si512(keys[c] + (v + j) * 64);
        for (int i = 0; i < HEADS; ++i) {
          const __m512i upper = _mm512_set1_epi32(query[head / QUAD][c][i][0]);
          const __m512i lower = _mm512_set1_epi32(query[head / QUAD][c][i][1]);
          for (int j = 0; j < 2; ++j) {
            high[i][j] = _mm512_dpbusd_epi32(high[i][j], key[j], upper);
            low[i][j] = _mm512_dpbusd_epi32(low[i][j], key[j], lower);
          }
        }
      }
      for (int j = 0; j < 2; ++j) {
        const Vector scale = load(key_scale[g] + (v + j) * ROWS);
        for (int i = 0; i < HEADS; ++i) {
          const Vector product = joined(high[i][j], low[i][j]);
          scores[j][i] = g ? multiply_add(product, scale, scores[j][i]) : product * scale;
        }
      }
    }
    for (int j = 0; j < 2; ++j)
      for (int i = 0; i < HEADS; ++i) scores[j][i] = scores[j][i] * all(query_scale[head + i]);
  }

  // Adds the block to numbers d to d + 16 · VECTORS - 1 of the weighted values.
  template <int HEADS, int VECTORS, bool ASKS>
  void multiply_values(int head, int d) {
    const int g = GROUPED ? d / INT4_GROUP : 0;
    __m512i high[HEADS][VECTORS], low[HEADS][VECTORS];
    for (int i = 0; i < HEADS; ++i)
      for (int j = 0; j < VECTORS; ++j) {
        high[i][j] = _mm512_setzero_si512();
        low[i][j] = _mm512_set1_epi32(value_start[g][i]);
      }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      if (ASKS && !GROUPED) ask<VECTORS>(next_value);
      __m512i value[VECTORS];
      for (int j = 0; j < VECTORS; ++j) value[j] = _mm512_load_si512(values[d / ROWS + j][r]);
      for (int i = 0; i < HEADS; ++i) {
        const __m512i upper = _mm512_set1_epi32(four_bytes(weights[g][i][0] + 4 * r));
        const __m512i lower = _mm512_set1_epi32(four_bytes(weights[g][i][1] + 4 * r));
        for (int j = 0; j < VECTORS; ++j) {
          high[i][j] = _mm512_dpbusd_epi32(high[i][j], value[j], upper);
          low[i][j] = _mm512_dpbusd_epi32(low[i][j], value[j], lower);
        }
      }
    }
    for (int i = 0; i < HEADS; ++i) {
      const Vector more = all(step[g] * rise[i]), before = all(shrink[i]);
      for (int j = 0; j < VECTORS; ++j) {
        float* to = part.weighted + (head + i) * part.padded + d + j * ROWS;
        store(to, multiply_add(joined(high[i][j], low[i][j]), more, load(to) * before));
      }
    }
  }
};
