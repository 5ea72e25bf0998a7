// Dense and fp8 caches in tiles of bfloat16. Included in the namespace of attention/amx.cpp.
//
// Every code is a bfloat16 exactly, as the query is; a weight takes two, of which the second is what
// the first left over: 16 bits.

constexpr int UNIT = LINE;                      // numbers in a tile's row
constexpr int MAX_UNITS = MAX_HEAD_DIM / UNIT;  // of a head

typedef uint16_t Bf16;
typedef Bf16 Row[UNIT];

// Lanes of two bfloat16, from the upper halves of two floats, or from halves of two lanes.
inline __m512i upper_halves(__m512i first, __m512i second) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(first, 16), second,
                                   _mm512_set1_epi32(int(0xffff0000)), 0xf8);  // a | b & c
}
inline __m512i lower_halves(__m512i first, __m512i second) {
  return _mm512_ternarylogic_epi32(_mm512_slli_epi32(second, 16), first,
                                   _mm512_set1_epi32(0xffff), 0xf8);
}

// 64 numbers of a slot, two units, as bfloat16.
template <KvFormat F>
inline void widen(const char* codes, __m512i units[2]) {
  for (int u = 0; u < 2; ++u)
    units[u] = F == KvFormat::bf16 ? _mm512_loadu_si512(codes + u * 64) : fp8_as_bf16(codes + u * 32);
}

// The same numbers of two slots, lane by lane: a unit's first row has the numbers at even places.
template <KvFormat F>
inline void interleave(const char* a, const char* b, Row* rows[2][2]) {
  __m512i of_a[2], of_b[2];
  widen<F>(a, of_a);
  widen<F>(b, of_b);
  for (int u = 0; u < 2; ++u) {
    _mm512_store_si512(rows[u][0], lower_halves(of_a[u], of_b[u]));
    _mm512_store_si512(rows[u][1], upper_halves(of_a[u], of_b[u]));
  }
}

template <KvFormat F>
constexpr int unit_bytes() { return F == KvFormat::bf16 ? 64 : 32; }

template <KvFormat F>
struct Widened : Blocks<Widened<F>, 1> {
  using Base = Blocks<Widened<F>, 1>;
  using Base::part, Base::groups, Base::slot_bytes, Base::ahead;

  const int units;
  const int heads;  // per product: its columns

  alignas(64) Bf16 query[MAX_GROUP / QUAD][MAX_UNITS][ROWS * MAX_HEADS * 2];
  alignas(64) Row keys[MAX_UNITS][BLOCK];
  alignas(64) Row values[MAX_UNITS][2][BLOCK / 2];
  alignas(64) float products[BLOCK * MAX_HEADS];
  alignas(64) float key_scale[BLOCK], value_scale[BLOCK];
  alignas(64) Row weights[BLOCK / UNIT][2 * MAX_HEADS];
  alignas(64) float sums[2][2 * MAX_HEADS][ROWS];
  alignas(16) float rise[MAX_HEADS], shrink[MAX_HEADS];

  explicit Widened(const Part& part)
      : Base(part, F == KvFormat::fp8), units(part.head_dim / UNIT),
        heads(part.heads > QUAD ? MAX_HEADS : QUAD) {
    configure(heads, heads);
    for (int first = 0, chunk = 0; first < part.heads; first += heads, ++chunk)
      put_query(first, chunk);
    __builtin_memset(weights, 0, sizeof weights);
    for (int s = 0; s < BLOCK; ++s) key_scale[s] = part.softmax_scale, value_scale[s] = 1;
    this->pace((F == KvFormat::fp8 ? BLOCK / 4 : 0) + BLOCK / 8 +
               BLOCK / UNIT * (2 * units + 2 * heads / QUAD + heads));
  }

  // Two numbers that follow one another in a row of keys are a lane of the query's tile. Number by number
  // it takes about as long as ten slots.
  void put_query(int first, int chunk) {
    const __m512i rows = _mm512_mullo_epi32(lane(), _mm512_set1_epi32(heads));
    for (int h = 0; h < heads; ++h)
      for (int u = 0; u < units; ++u) {
        __m512i lanes = _mm512_setzero_si512();
        if (first + h < part.heads) {
          const float* from = part.query + (first + h) * part.padded + u * UNIT;
          const __m512i low = _mm512_loadu_si512(from), high = _mm512_loadu_si512(from + ROWS);
          const __m512i even = _mm512_slli_epi32(lane(), 1);
          lanes = upper_halves(
              _mm512_permutex2var_epi32(low, even, high),
              _mm512_permutex2var_epi32(low, _mm512_or_si512(even, _mm512_set1_epi32(1)), high));
        }
        _mm512_i32scatter_epi32(query[chunk][u] + h * 2, rows, lanes, 4);
      }
  }

  void block(const Slots& key, const Slots& value, int slots) {
    if (F == KvFormat::fp8) read_keys(key);  // a dense cache's tiles are loaded from itself
    read_values(value);
    for (int s = 0; s < BLOCK && groups; s += LANES) {
      store(key_scale + s, scales(key.scale + s * 2, 1, 0) * all(part.softmax_scale));
      store(value_scale + s, scales(value.scale + s * 2, 1, 0));
    }
    for (int first = 0, chunk = 0; first < part.heads; first += heads, ++chunk) {
      const int left = part.heads - first;
      multiply_keys(key, chunk);
      for (int h = 0; h < heads && h < left; h += QUAD) weigh(first, h, slots);
      multiply_values(first, left < heads ? left : heads);
    }
  }

  void read_keys(const Slots& key) {
    for (int s = 0; s < BLOCK; ++s) {
      if (s % 4 == 0) ahead();
      for (int u = 0; u < units; u += 2) {
        __m512i two[2];
        widen<F>(key.codes + s * slot_bytes + u * unit_bytes<F>(), two);
        _mm512_store_si512(keys[u][s], two[0]);
        _mm512_store_si512(keys[u + 1][s], two[1]);
      }
    }
  }

  void read_values(const Slots& value) {
    for (int tile = 0; tile < BLOCK / UNIT; ++tile)
      for (int s = 0; s < ROWS; ++s) {
        if (s % 4 == 0) ahead();
        const char* slot = value.codes + (tile * UNIT + s) * slot_bytes;
        const int row = tile * ROWS + s;
        for (int u = 0; u < units; u += 2) {
          Row* rows[2][2];
          for (int i = 0; i < 4; ++i) rows[i / 2][i % 2] = &values[u + i / 2][i % 2][row];
          const char* from = slot + u * unit_bytes<F>();
          interleave<F>(from, from + ROWS * slot_bytes, rows);
        }
      }
    compiler_barrier();
  }

  void multiply_keys(const Slots& key, int chunk) {
    const int row_bytes = heads * 4;
    for (int s = 0; s < BLOCK; s += 2 * ROWS) {
      _tile_zero(SCORES_A);
      _tile_zero(SCORES_B);
      for (int u = 0; u < units; ++u) {
        ahead();
        const bool dense = F == KvFormat::bf16;
        const char* from = dense ? key.codes + s * slot_bytes + u * 64
                                 : reinterpret_cast<const char*>(keys[u][s]);
        const int64_t stride = dense ? slot_bytes : 64;
        _tile_loadd(QUERY, query[chunk][u], row_bytes);
        _tile_loadd(CACHE, from, stride);
        _tile_dpbf16ps(SCORES_A, CACHE, QUERY);
        _tile_loadd(CACHE, from + ROWS * stride, stride);
        _tile_dpbf16ps(SCORES_B, CACHE, QUERY);
      }
      _tile_stored(SCORES_A, products + s * heads, row_bytes);
      _tile_stored(SCORES_B, products + (s + ROWS) * heads, row_bytes);
    }
    compiler_barrier();
  }

  // Heads h to h + 3 of the chunk. A weight's upper 16 bits go into one row, the rest
  // into another, `heads` below.
  void weigh(int first, int h, int slots) {
    Vector scores[BLOCK / ROWS][QUAD], most[QUAD], total[QUAD];
    for (int i = 0; i < QUAD; ++i) most[i] = all(NEVER), total[i] = all(0);
    for (int v = 0; v < BLOCK / ROWS; ++v) {
      ahead();
      const float* row = products + v * ROWS * heads + h;
      Vector four[4];
      for (int j = 0; j < 4; ++j, row += 4 * heads) {
        __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(row));
        x = _mm512_insertf32x4(x, _mm_loadu_ps(row + heads), 1);
        x = _mm512_insertf32x4(x, _mm_loadu_ps(row + 2 * heads), 2);
        four[j] = _mm512_insertf32x4(x, _mm_loadu_ps(row + 3 * heads), 3);
      }
      transpose(four, scores[v]);
      for (int i = 0; i < QUAD; ++i) scores[v][i] = scores[v][i] * load(key_scale + v * ROWS);
      this->keep(v * ROWS, slots, scores[v], most);
    }
    float base[QUAD];
    this->begin(first + h, most, base, rise + h, shrink + h);
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    for (int t = 0; t < BLOCK / UNIT; ++t)
      for (int i = 0; i < QUAD; ++i) {
        ahead();
        __m512i whole[2], rest[2];
        for (int j = 0; j < 2; ++j) {
          Vector weight = rough_exponential(scores[2 * t + j][i] - all(base[i]));
          total[i] = total[i] + weight;
          if (groups) weight = weight * load(value_scale + t * UNIT + j * ROWS);
          whole[j] = _mm512_castps_si512(weight);
          rest[j] = _mm512_castps_si512(
              weight - _mm512_castsi512_ps(_mm512_and_si512(whole[j], upper)));
        }
        _mm512_store_si512(weights[t][h + i], upper_halves(whole[0], whole[1]));
        _mm512_store_si512(weights[t][heads + h + i], upper_halves(rest[0], rest[1]));
      }
    this->end(first + h, total, rise + h, shrink + h);
  }

  // part.weighted is in the order of tiles until `finish`.
  void multiply_values(int first, int count) {
    compiler_barrier();
    for (int u = 0; u < units; ++u) {
      _tile_zero(OUT_EVEN);
      _tile_zero(OUT_ODD);
      for (int t = 0; t < BLOCK / UNIT; ++t) {
        ahead();
        _tile_loadd(WEIGHTS, weights[t], 64);
        _tile_loadd(CACHE, values[u][0][t * ROWS], 64);
        _tile_dpbf16ps(OUT_EVEN, WEIGHTS, CACHE);
        _tile_loadd(CACHE, values[u][1][t * ROWS], 64);
        _tile_dpbf16ps(OUT_ODD, WEIGHTS, CACHE);
      }
      _tile_stored(OUT_EVEN, sums[0], 64);
      _tile_stored(OUT_ODD, sums[1], 64);
      compiler_barrier();
      for (int h = 0; h < count; ++h)
        for (int i = 0; i < 2; ++i) {
          float* to = part.weighted + (first + h) * part.padded + u * UNIT + i * ROWS;
          Vector more = load(sums[i][h]) + load(sums[i][heads + h]);
          store(to, multiply_add(more, all(rise[h]), load(to) * all(shrink[h])));
        }
    }
  }

  void finish() { this->put_in_order(); }
};
