// int8 and int4 caches in tiles of bytes. Included in the namespace of attention/amx.cpp.
//
// int4 codes become 16 · (code - 8), which one operation makes of a nibble.

constexpr int PAIR = 64;                        // numbers in a tile's row: two groups of int4
constexpr int MAX_PAIRS = MAX_HEAD_DIM / PAIR;  // of a head

typedef int8_t Bytes[PAIR];

// From four times 16 bytes, one after another, to 16 times four bytes, one of each.
struct InTurn {
  alignas(64) uint8_t from[64];
  constexpr InTurn() : from() {
    for (int i = 0; i < 64; ++i) from[i] = uint8_t(i % 4 * 16 + i / 4);
  }
};
constexpr InTurn IN_TURN;

inline __m512i in_turn(const char* a, const char* b, const char* c, const char* d) {
  auto sixteen = [](const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  __m512i x = _mm512_castsi128_si512(sixteen(a));
  x = _mm512_inserti32x4(x, sixteen(b), 1);
  x = _mm512_inserti32x4(x, sixteen(c), 2);
  x = _mm512_inserti32x4(x, sixteen(d), 3);
  return _mm512_permutexvar_epi8(_mm512_load_si512(IN_TURN.from), x);
}

// 16 · (code - 8) of bytes' upper four bits.
inline __m512i upper_codes(__m512i bytes) {
  return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(char(0xf0)),
                                   _mm512_set1_epi8(char(0x80)), 0x6a);  // (a & b) ^ c
}

template <KvFormat F>
struct Codes : ByteBlocks<Codes<F>, F> {
  using Base = ByteBlocks<Codes<F>, F>;
  using Base::GROUPED, Base::MAX_GROUPS, Base::part, Base::groups, Base::slot_bytes, Base::ahead;
  using Base::key_scale, Base::step;
  static constexpr int CODE = GROUPED ? 16 : 1;  // what a code is multiplied by

  const int pairs;
  const int heads;  // at a time
  // A product's columns: for each head the upper parts, and, `half` further on, the lower ones. For
  // int4, four heads in a pair's first group, then in its second, where the query is zero in the
  // other; each group has its scale.
  const int half;

  alignas(64) int8_t query[MAX_GROUP / QUAD][MAX_PAIRS][ROWS * MAX_COLUMNS * 4];
  float query_scale[(MAX_GROUP + MAX_HEADS)];
  alignas(64) Bytes keys[MAX_PAIRS][BLOCK];             // of int4
  alignas(64) Bytes values[MAX_HEAD_DIM / ROWS][ROWS];  // a tile for each 16 numbers
  alignas(64) int32_t products[GROUPED ? MAX_PAIRS : 1][BLOCK * MAX_COLUMNS];
  // A head's high bytes are a row, its low ones another, `heads` below.
  alignas(64) Bytes weights[MAX_GROUPS][2 * MAX_HEADS];
  alignas(64) int32_t sums[2][2 * MAX_HEADS][ROWS];
  alignas(16) float rise[MAX_HEADS], shrink[MAX_HEADS];

  explicit Codes(const Part& part)
      : Base(part), pairs(part.head_dim / PAIR),
        heads(part.heads > QUAD && !GROUPED ? MAX_HEADS : QUAD), half(GROUPED ? 2 * QUAD : heads) {
    configure(2 * half, heads);
    for (int first = 0, chunk = 0; first < part.heads; first += heads, ++chunk)
      put_query(first, chunk);
    __builtin_memset(weights, 0, sizeof weights);
    this->pace((GROUPED ? BLOCK / 4 : 0) + BLOCK / 16 + BLOCK / 32 * pairs +
               BLOCK / ROWS + heads + part.head_dim / 32);
  }

  // Which number of the head lies at a byte of a pair's row of keys.
  static int number_at(int pair, int byte) {
    if (!GROUPED) return pair * PAIR + byte;
    return pair * PAIR + byte % 32 / 16 * INT4_GROUP + byte / 32 * 16 + byte % 16;
  }

  void put_query(int first, int chunk) {
    __builtin_memset(query[chunk], 0, sizeof query[chunk]);
    for (int h = 0; h < heads; ++h) {
      query_scale[first + h] = 0;
      if (first + h >= part.heads) continue;
      int8_t high[MAX_HEAD_DIM], low[MAX_HEAD_DIM];
      const float* x = part.query + (first + h) * part.padded;
      query_scale[first + h] = query_bytes(x, part.padded, high, low) / CODE * part.softmax_scale;
      // Four bytes that follow one another in a row of keys are a lane of the query's tile.
      for (int pair = 0; pair < pairs; ++pair)
        for (int row = 0; row < ROWS; ++row) {
          const int number = number_at(pair, 4 * row), group = number % PAIR / INT4_GROUP;
          int8_t* to = query[chunk][pair] + (row * 2 * half + (GROUPED ? group * QUAD + h : h)) * 4;
          __builtin_memcpy(to, high + number, 4);
          __builtin_memcpy(to + half * 4, low + number, 4);
        }
    }
  }

  void block(const Slots& key, const Slots& value, int slots) {
    if (GROUPED) read_keys(key);  // int8's tiles are loaded from the cache itself
    read_values(value);
    for (int g = 0; g < groups; ++g) this->read_scales(key, value, g);
    for (int first = 0, chunk = 0; first < part.heads; first += heads, ++chunk) {
      const int left = part.heads - first;
      multiply_keys(key, chunk);
      weigh(first, slots);
      multiply_values(first, left < heads ? left : heads);
    }
  }

  void read_keys(const Slots& key) {
    const __m512i shifts = _mm512_zextsi256_si512(_mm256_set1_epi16(4));
    for (int pair = 0; pair < pairs; ++pair) {
      const char* from = key.codes + pair * PAIR / 2;
      for (int s = 0; s < BLOCK; s += 4) {
        if (pair == 0) ahead();
        for (int i = s; i < s + 4; ++i, from += slot_bytes) {
          __m512i twice = _mm512_broadcast_i64x4(
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
          _mm512_store_si512(keys[pair][i], upper_codes(_mm512_sllv_epi16(twice, shifts)));
        }
      }
    }
  }

  // Row r of a tile interleaves slots r, 32 + r, 16 + r and 48 + r, as `weigh` puts its weights.
  void read_values(const Slots& value) {
    for (int i = 0; i < slot_bytes / 16; ++i) {
      const char* a = value.codes + i * 16;
      const char *b = a + 32 * slot_bytes, *c = a + 16 * slot_bytes, *d = a + 48 * slot_bytes;
      for (int r = 0; r < ROWS; ++r) {
        if (i == 0 && r % 4 == 0) ahead();
        const int64_t at = r * slot_bytes;
        __m512i x = in_turn(a + at, b + at, c + at, d + at);
        if (GROUPED) {
          _mm512_store_si512(values[2 * i][r], upper_codes(_mm512_slli_epi16(x, 4)));
          _mm512_store_si512(values[2 * i + 1][r], upper_codes(x));
        } else {
          _mm512_store_si512(values[i][r], x);
        }
      }
    }
    compiler_barrier();
  }

  void multiply_keys(const Slots& key, int chunk) {
    const int row_bytes = 2 * half * 4;
    for (int s = 0; s < BLOCK; s += 2 * ROWS)
      for (int pair = 0; pair < pairs; ++pair) {
        ahead();
        if (GROUPED || pair == 0) {
          _tile_zero(SCORES_A);
          _tile_zero(SCORES_B);
        }
        const char* from = GROUPED ? reinterpret_cast<const char*>(keys[pair][s])
                                   : key.codes + s * slot_bytes + pair * PAIR;
        const int64_t stride = GROUPED ? PAIR : slot_bytes;
        _tile_loadd(QUERY, query[chunk][pair], row_bytes);
        _tile_loadd(CACHE, from, stride);
        _tile_dpbssd(SCORES_A, CACHE, QUERY);
        _tile_loadd(CACHE, from + ROWS * stride, stride);
        _tile_dpbssd(SCORES_B, CACHE, QUERY);
        if (GROUPED || pair == pairs - 1) {
          int32_t* to = products[GROUPED ? pair : 0] + s * 2 * half;
          _tile_stored(SCORES_A, to, row_bytes);
          _tile_stored(SCORES_B, to + ROWS * 2 * half, row_bytes);
        }
      }
    compiler_barrier();
  }

  // 16 slots' products, upper and lower parts put together: of each quad of columns that there is.
  void join(const int32_t* rows, Vector out[2][QUAD]) const {
    Vector four[2][4];
    for (int j = 0; j < 4; ++j, rows += 4 * 2 * half) {
      if (half == QUAD) {
        four[0][j] = joined(quads(rows, 2 * half), quads(rows + half, 2 * half));
        continue;
      }
      const __m512i a = _mm512_castps_si512(joined(halves(rows), halves(rows + half)));
      const __m512i b = _mm512_castps_si512(joined(halves(rows + 32), halves(rows + 32 + half)));
      four[0][j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(a, b, 0x88));
      four[1][j] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(a, b, 0xdd));
    }
    for (int q = 0; q < half / QUAD; ++q) transpose(four[q], out[q]);
  }

  // Eight columns of two rows of 16; four columns of four rows.
  static __m512i halves(const int32_t* row) {
    auto eight = [](const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    return _mm512_inserti64x4(_mm512_castsi256_si512(eight(row)), eight(row + 16), 1);
  }
  static __m512i quads(const int32_t* row, int step) {
    auto four = [](const int32_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    __m512i x = _mm512_castsi128_si512(four(row));
    x = _mm512_inserti32x4(x, four(row + step), 1);
    x = _mm512_inserti32x4(x, four(row + 2 * step), 2);
    return _mm512_inserti32x4(x, four(row + 3 * step), 3);
  }

  void weigh(int first, int slots) {
    Vector scores[2][BLOCK / ROWS][QUAD], most[2][QUAD];
    const int count = heads / QUAD;
    for (int q = 0; q < count; ++q)
      for (int i = 0; i < QUAD; ++i) most[q][i] = all(NEVER);
    for (int v = 0; v < BLOCK / ROWS; ++v) {
      ahead();
      Vector product[2][QUAD];
      if (!GROUPED) join(products[0] + v * ROWS * 2 * half, product);
      for (int q = 0; q < count; ++q) {
        Vector* score = scores[q][v];
        const Vector scale = load(key_scale[0] + v * ROWS);
        for (int i = 0; i < QUAD; ++i) score[i] = GROUPED ? all(0) : product[q][i] * scale;
        for (int pair = 0; pair < (GROUPED ? pairs : 0); ++pair) {
          join(products[pair] + v * ROWS * 2 * half, product);
          const Vector scale_a = load(key_scale[2 * pair] + v * ROWS);
          const Vector scale_b = load(key_scale[2 * pair + 1] + v * ROWS);
          for (int i = 0; i < QUAD; ++i)
            score[i] += product[0][i] * scale_a + product[1][i] * scale_b;
        }
        for (int i = 0; i < QUAD; ++i)
          score[i] = score[i] * all(query_scale[first + q * QUAD + i]);
        this->keep(v * ROWS, slots, score, most[q]);
      }
    }
    for (int h = 0; h < heads && first + h < part.heads; h += QUAD)
      this->template weigh_quad<QUAD>(
          first + h, scores[h / QUAD], most[h / QUAD], rise + h, shrink + h,
          [&](int g, int i, __m512i high, __m512i low) {
            if (g == 0) ahead();
            _mm512_store_si512(weights[g][h + i], high);
            _mm512_store_si512(weights[g][heads + h + i], low);
          });
  }

  void multiply_values(int first, int count) {
    compiler_barrier();
    for (int d = 0; d < part.head_dim; d += 2 * ROWS) {
      ahead();
      const int g = GROUPED ? d / INT4_GROUP : 0;
      _tile_zero(OUT_EVEN);
      _tile_zero(OUT_ODD);
      _tile_loadd(WEIGHTS, weights[g], 64);
      _tile_loadd(CACHE, values[d / ROWS], 64);
      _tile_dpbssd(OUT_EVEN, WEIGHTS, CACHE);
      _tile_loadd(CACHE, values[d / ROWS + 1], 64);
      _tile_dpbssd(OUT_ODD, WEIGHTS, CACHE);
      _tile_stored(OUT_EVEN, sums[0], 64);
      _tile_stored(OUT_ODD, sums[1], 64);
      compiler_barrier();
      for (int h = 0; h < count; ++h)
        for (int i = 0; i < 2; ++i) {
          float* to = part.weighted + (first + h) * part.padded + d + i * ROWS;
          __m512i high = _mm512_load_si512(sums[i][h]), low = _mm512_load_si512(sums[i][heads + h]);
          store(to, multiply_add(joined(high, low), all(step[g] * rise[h]), load(to) * all(shrink[h])));
        }
    }
  }
};
