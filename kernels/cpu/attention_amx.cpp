// Decode attention's inner loop in AMX: tiles of bfloat16 multiplied into float32.
//
// A block's keys times the queries are one product, (slots, head_dim) by (head_dim, heads), and the
// weights times its values another, (heads, slots) by (slots, head_dim). Every code of a cache is a
// bfloat16 exactly, as is a bfloat16 query; a weight takes two of them, of which the second is what
// the first left over: 16 bits. Scales are applied in float32, to the scores and to the weights. So
// nothing is rounded that the versions in float do not round, but for a weight's last 8 bits.
//
// Whatever else a query or a scale is, and whatever does not fill tiles, goes to AVX-512.

#include <immintrin.h>

#include "attention.h"

namespace {
#include "vector_avx512.h"

#include "attention_numbers.h"

constexpr float NEVER = -__builtin_inff();
constexpr int BLOCK = 64;                       // slots at a time
constexpr int ROWS = 16;                        // of a tile, of 64 bytes each
constexpr int UNIT = 32;                        // numbers in a tile's row; int4's group too
constexpr int MAX_UNITS = MAX_HEAD_DIM / UNIT;  // of a head
constexpr int QUAD = 4;                         // heads, or what four columns of a product hold
constexpr int MAX_HEADS = 2 * QUAD;             // at a time: with both parts of a weight, 16 rows
constexpr int MAX_COLUMNS = 16;                 // of a product of keys and queries
static_assert(UNIT == INT4_GROUP && LANES == ROWS);

typedef uint16_t Bf16;
typedef Bf16 Row[UNIT];

// Which tile holds what; GCC makes a register's name of the very text. Shapes: see `configure`.
#define SCORES_A 0  // (16, columns) of 4 bytes
#define SCORES_B 1
#define QUERY 2
#define CACHE 3    // (16, 64 bytes): keys, or values
#define WEIGHTS 4  // (2 · heads, 64 bytes)
#define OUT_EVEN 5
#define OUT_ODD 6

void configure(int columns, int heads) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  auto shape = [&](int tile, int rows, int row_bytes) {
    config.rows[tile] = uint8_t(rows), config.row_bytes[tile] = uint16_t(row_bytes);
  };
  for (int tile = SCORES_A; tile <= QUERY; ++tile) shape(tile, ROWS, columns * 4);
  shape(CACHE, ROWS, 64);
  for (int tile = WEIGHTS; tile <= OUT_ODD; ++tile) shape(tile, 2 * heads, 64);
  _tile_loadconfig(&config);
}

// The compiler does not know that tiles are loaded from memory: what was written must be there.
inline void written() { asm volatile("" ::: "memory"); }

struct Fp8Table {
  alignas(64) uint8_t high[128], low[128];
  constexpr Fp8Table() : high(), low() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7, bits = 0;
      if (code == 127) {
        bits = 0x7fc0;  // NaN
      } else if (exponent) {
        bits = (exponent - 7 + 127) << 7 | mantissa << 4;
      } else if (mantissa) {  // denormal: mantissa · 2^-9
        int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
        bits = (top - 9 + 127) << 7 | (mantissa - (1 << top)) << (7 - top);
      }
      high[code] = uint8_t(bits >> 8), low[code] = uint8_t(bits);
    }
  }
};
constexpr Fp8Table FP8;

// (code - 8) as bfloat16 for a code's 5 lowest bits: the fifth belongs to its neighbour.
alignas(64) constexpr Bf16 INT4[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
};

// Words of int4 bytes, one of either slot in turn; `both` has 32 bytes of each.
struct Spread {
  alignas(64) uint8_t bytes[2][64];
  constexpr Spread() : bytes() {
    for (int unit = 0; unit < 2; ++unit)
      for (int i = 0; i < 64; ++i) bytes[unit][i] = uint8_t(i / 2 % 2 * 32 + unit * 16 + i / 4);
  }
};
constexpr Spread SPREAD;

// Lanes of two bfloat16, from the upper halves of two floats, or from halves of two lanes.
inline __m512i upper_halves(__m512i first, __m512i second) {
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(first, 16), second,
                                   _mm512_set1_epi32(int(0xffff0000)), 0xf8);  // a | b & c
}
inline __m512i lower_halves(__m512i first, __m512i second) {
  return _mm512_ternarylogic_epi32(_mm512_slli_epi32(second, 16), first,
                                   _mm512_set1_epi32(0xffff), 0xf8);
}

inline __m512i int8_floats(const char* codes) {
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
}

// 64 numbers of a slot, two units, as bfloat16; `number_at` says which lies where.
template <KvFormat F>
inline void widen(const char* codes, __m512i units[2]) {
  if constexpr (F == KvFormat::bf16) {
    for (int u = 0; u < 2; ++u) units[u] = _mm512_loadu_si512(codes + u * 64);
  } else if constexpr (F == KvFormat::int8) {
    for (int u = 0; u < 2; ++u)
      units[u] = upper_halves(int8_floats(codes + u * UNIT), int8_floats(codes + u * UNIT + 16));
  } else if constexpr (F == KvFormat::fp8) {
    __m512i code = _mm512_loadu_si512(codes);
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(FP8.high), code,
                                            _mm512_load_si512(FP8.high + 64));
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(FP8.low), code,
                                           _mm512_load_si512(FP8.low + 64));
    high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(char(0x80)), 0xf8);
    units[0] = _mm512_unpacklo_epi8(low, high);
    units[1] = _mm512_unpackhi_epi8(low, high);
  } else {
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    for (int u = 0; u < 2; ++u) {
      __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + u * UNIT / 2));
      __m512i words = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(bytes));
      units[u] = _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts),
                                          _mm512_load_si512(INT4));
    }
  }
}

// The same numbers of two slots, lane by lane: a unit in two rows. `number_in` says which lies where.
template <KvFormat F>
inline void interleave(const char* a, const char* b, Row* rows[2][2]) {
  if constexpr (F == KvFormat::int8) {
    for (int i = 0; i < 4; ++i)
      _mm512_store_si512(rows[i / 2][i % 2],
                         upper_halves(int8_floats(a + i * 16), int8_floats(b + i * 16)));
  } else if constexpr (F == KvFormat::int4) {
    const __m256i* bytes[] = {reinterpret_cast<const __m256i*>(a), reinterpret_cast<const __m256i*>(b)};
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(bytes[0])),
                                      _mm256_loadu_si256(bytes[1]), 1);
    for (int u = 0; u < 2; ++u) {
      __m512i words = _mm512_permutexvar_epi8(_mm512_load_si512(SPREAD.bytes[u]), both);
      const __m512i table = _mm512_load_si512(INT4);
      _mm512_store_si512(rows[u][0], _mm512_permutexvar_epi16(words, table));
      _mm512_store_si512(rows[u][1],
                         _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table));
    }
  } else {
    __m512i of_a[2], of_b[2];
    widen<F>(a, of_a);
    widen<F>(b, of_b);
    for (int u = 0; u < 2; ++u) {
      _mm512_store_si512(rows[u][0], lower_halves(of_a[u], of_b[u]));
      _mm512_store_si512(rows[u][1], upper_halves(of_a[u], of_b[u]));
    }
  }
}

// Which number of the head, as `part.query` has them, `widen` puts at a place of a unit.
template <KvFormat F>
int number_at(int unit, int place) {
  if (F == KvFormat::int8) return unit * UNIT + place % 2 * 16 + place / 2;
  if (F == KvFormat::fp8)
    return unit / 2 * 2 * UNIT + place / 8 * 16 + unit % 2 * 8 + place % 8;
  return unit * UNIT + place;
}

// And which `interleave` puts into a lane of one of a unit's two rows.
template <KvFormat F>
int number_in(int unit, int row, int lane) {
  if (F == KvFormat::int8 || F == KvFormat::int4) return unit * UNIT + row * 16 + lane;
  return number_at<F>(unit, 2 * lane + row);
}

template <KvFormat F>
constexpr int unit_bytes() { return F == KvFormat::bf16 ? 64 : F == KvFormat::int4 ? 16 : 32; }

// 16 slots' scales of one of `groups`, from the first slot's on; `groups` is 1 or even.
inline Vector scales(const char* from, int groups, int group) {
  if (groups == 1) {
    __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  const char* pair = from + group / 2 * 4;
  __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i both = groups == 2 ? _mm512_loadu_si512(pair)
                             : _mm512_i32gather_epi32(
                                   _mm512_mullo_epi32(lane, _mm512_set1_epi32(groups / 2)), pair, 4);
  return _mm512_castsi512_ps(group % 2
                                 ? _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000)))
                                 : _mm512_slli_epi32(both, 16));
}

// Four columns of 16 rows, each as a vector.
inline void transpose(const float* rows, int columns, Vector out[QUAD]) {
  Vector four[4];  // rows 4j to 4j + 3
  for (int j = 0; j < 4; ++j) {
    const float* from = rows + 4 * j * columns;
    if (columns == QUAD) {
      four[j] = load(from);
    } else {
      __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(from));
      x = _mm512_insertf32x4(x, _mm_loadu_ps(from + columns), 1);
      x = _mm512_insertf32x4(x, _mm_loadu_ps(from + 2 * columns), 2);
      four[j] = _mm512_insertf32x4(x, _mm_loadu_ps(from + 3 * columns), 3);
    }
  }
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512d low[2], high[2];
  for (int i = 0; i < 2; ++i) {
    low[i] = _mm512_castps_pd(_mm512_unpacklo_ps(four[2 * i], four[2 * i + 1]));
    high[i] = _mm512_castps_pd(_mm512_unpackhi_ps(four[2 * i], four[2 * i + 1]));
  }
  const __m512d column[QUAD] = {
      _mm512_unpacklo_pd(low[0], low[1]), _mm512_unpackhi_pd(low[0], low[1]),
      _mm512_unpacklo_pd(high[0], high[1]), _mm512_unpackhi_pd(high[0], high[1])};
  for (int c = 0; c < QUAD; ++c)
    out[c] = _mm512_permutexvar_ps(in_order, _mm512_castpd_ps(column[c]));
}

template <KvFormat F>
struct Work {
  static constexpr bool GROUPED = F == KvFormat::int4;
  static constexpr bool ONE_SCALE = F == KvFormat::int8 || F == KvFormat::fp8;
  static constexpr int MAX_GROUPS = GROUPED ? MAX_UNITS : 1;

  // int4 has a scale for each unit, so each has columns of its own, for four heads; they are zero
  // in the queries of other units. A product has room for four units; `passes` are that many more.
  static constexpr int UNITS_OF_PASS = GROUPED ? MAX_COLUMNS / QUAD : MAX_UNITS;
  static constexpr int MAX_PASSES = MAX_UNITS / UNITS_OF_PASS;

  const Part& part;
  const int units, groups;
  const int heads;    // at a time
  const int columns;  // of a product
  const int64_t slot_bytes, scale_bytes;

  // The next block's keys and values, asked for a few lines at a time all through this one.
  const char *next_key, *next_value;
  int due, rate;  // in 256ths of a line

  alignas(64) Bf16 query[MAX_GROUP / QUAD][MAX_UNITS][ROWS * MAX_COLUMNS * 2];
  alignas(64) Row keys[MAX_UNITS][BLOCK];
  alignas(64) Row values[MAX_UNITS][2][BLOCK / 2];
  alignas(64) float products[MAX_PASSES][BLOCK * MAX_COLUMNS];
  alignas(64) float key_scale[MAX_GROUPS][BLOCK], value_scale[MAX_GROUPS][BLOCK];
  alignas(64) float scores[MAX_HEADS][BLOCK];
  alignas(64) float largest[MAX_HEADS][LANES];  // score of a head, lane by lane
  alignas(16) float shrink[MAX_HEADS];          // of what was summed before, by this block
  alignas(64) Row weights[MAX_GROUPS][BLOCK / UNIT][2 * MAX_HEADS];
  alignas(64) float sums[2][2 * MAX_HEADS][ROWS];
  alignas(64) char tail[2][BLOCK * (MAX_HEAD_DIM * 2 + MAX_GROUPS * 2)];

  explicit Work(const Part& part)
      : part(part), units(part.head_dim / UNIT), groups(GROUPED ? units : ONE_SCALE),
        heads(part.heads > QUAD && !GROUPED ? MAX_HEADS : QUAD),
        columns(GROUPED ? QUAD * (units < UNITS_OF_PASS ? units : UNITS_OF_PASS) : heads),
        slot_bytes(part.key.slot_bytes), scale_bytes(groups * 2) {
    configure(columns, heads);
    for (int first = 0, c = 0; first < part.heads; first += heads, ++c) put_query(first, c);
    __builtin_memset(part.weighted, 0, part.heads * part.padded * sizeof(float));
    __builtin_memset(weights, 0, sizeof weights);
    for (int h = 0; h < part.heads; ++h) part.largest[h] = NEVER, part.sum[h] = 0;
    if (!groups)
      for (int s = 0; s < BLOCK; ++s) key_scale[0][s] = part.softmax_scale;
    // Calls of `ahead` in a block, as `block` and what it calls make them.
    const int calls = BLOCK / 8 + BLOCK / UNIT * (2 * units + 2 * heads / QUAD + heads) +
                      (F == KvFormat::bf16 ? 0 : BLOCK / 4);
    rate = (int(slot_bytes) * BLOCK / 64 * 256 + calls - 1) / calls;
  }

  ~Work() { _tile_release(); }

  void put_query(int first, int chunk) {
    for (int u = 0; u < units; ++u) {
      Bf16* to = query[chunk][u];
      for (int row = 0; row < ROWS; ++row)
        for (int c = 0; c < columns; ++c)
          for (int i = 0; i < 2; ++i) {
            const int h = first + (GROUPED ? c % QUAD : c);
            const bool there = h < part.heads && (!GROUPED || c / QUAD == u % UNITS_OF_PASS);
            float x = there ? part.query[h * part.padded + number_at<F>(u, 2 * row + i)] : 0;
            uint32_t bits;
            __builtin_memcpy(&bits, &x, sizeof bits);
            *to++ = Bf16(bits >> 16);
          }
    }
  }

  // Slots that follow one another.
  void run(int64_t first, int64_t count) {
    for (int64_t done = 0; done < count; done += BLOCK) {
      const int64_t at = first + done;
      Slots key = from(part.key, at), value = from(part.value, at);
      if (count - done >= BLOCK) {
        block(key, value, BLOCK);
      } else {
        copy_tail(key, tail[0], int(count - done));
        copy_tail(value, tail[1], int(count - done));
        block(key, value, int(count - done));
      }
    }
  }

  Slots from(Slots side, int64_t slot) const {
    side.codes += slot * slot_bytes;
    if (groups) side.scale += slot * scale_bytes;
    return side;
  }

  void copy_tail(Slots& side, char* to, int slots) {
    char* scale = to + BLOCK * slot_bytes;
    __builtin_memset(to, 0, BLOCK * (slot_bytes + scale_bytes));
    __builtin_memcpy(to, side.codes, slots * slot_bytes);
    if (groups) __builtin_memcpy(scale, side.scale, slots * scale_bytes);
    side.codes = to, side.scale = scale;
  }

  void block(const Slots& key, const Slots& value, int slots) {
    next_key = key.codes + BLOCK * slot_bytes, next_value = value.codes + BLOCK * slot_bytes;
    due = 0;
    if (F != KvFormat::bf16) read_keys(key);  // whose tiles are loaded from the cache itself
    read_values(value);
    for (int g = 0; g < groups; ++g)
      for (int s = 0; s < BLOCK; s += LANES) {
        Vector of_keys = scales(key.scale + s * scale_bytes, groups, g);
        store(key_scale[g] + s, of_keys * all(part.softmax_scale));
        store(value_scale[g] + s, scales(value.scale + s * scale_bytes, groups, g));
      }
    for (int first = 0, chunk = 0; first < part.heads; first += heads, ++chunk) {
      const int left = part.heads - first;
      multiply_keys(key, chunk);
      for (int h = 0; h < heads && h < left; h += QUAD) {
        score(h, slots);
        soften(first, h);
      }
      multiply_values(first, left < heads ? left : heads);
    }
  }

  inline __attribute__((always_inline)) void ahead() {
    for (due += rate; due >= 256; due -= 256, next_key += 64, next_value += 64) {
      __builtin_prefetch(next_key);
      __builtin_prefetch(next_value);
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
        const char* other = slot + ROWS * slot_bytes;
        const int row = tile * ROWS + s;
        for (int u = 0; u < units; u += 2) {
          Row* rows[2][2];
          for (int i = 0; i < 4; ++i) rows[i / 2][i % 2] = &values[u + i / 2][i % 2][row];
          interleave<F>(slot + u * unit_bytes<F>(), other + u * unit_bytes<F>(), rows);
        }
      }
    written();
  }

  void multiply_keys(const Slots& key, int chunk) {
    const int row_bytes = columns * 4;
    for (int s = 0; s < BLOCK; s += 2 * ROWS)
      for (int u = 0; u < units; ++u) {
        ahead();
        if (u % UNITS_OF_PASS == 0) {
          _tile_zero(SCORES_A);
          _tile_zero(SCORES_B);
        }
        const char* from = F == KvFormat::bf16 ? key.codes + s * slot_bytes + u * 64
                                               : reinterpret_cast<const char*>(keys[u][s]);
        const int64_t stride = F == KvFormat::bf16 ? slot_bytes : 64;
        _tile_loadd(QUERY, query[chunk][u], row_bytes);
        _tile_loadd(CACHE, from, stride);
        _tile_dpbf16ps(SCORES_A, CACHE, QUERY);
        _tile_loadd(CACHE, from + ROWS * stride, stride);
        _tile_dpbf16ps(SCORES_B, CACHE, QUERY);
        if (u == units - 1 || u % UNITS_OF_PASS == UNITS_OF_PASS - 1) {
          float* to = products[u / UNITS_OF_PASS] + s * columns;
          _tile_stored(SCORES_A, to, row_bytes);
          _tile_stored(SCORES_B, to + ROWS * columns, row_bytes);
        }
      }
    written();
  }

  // Of heads h to h + 3 of the chunk.
  void score(int h, int slots) {
    Vector most[QUAD];
    for (int i = 0; i < QUAD; ++i) most[i] = all(NEVER);
    for (int s = 0; s < BLOCK; s += ROWS) {
      ahead();
      Vector total[QUAD];
      for (int i = 0; i < QUAD; ++i) total[i] = all(0);
      for (int g = 0; g < (GROUPED ? units : 1); ++g) {
        const int column = GROUPED ? g % UNITS_OF_PASS * QUAD : h;
        Vector product[QUAD], scale = load(key_scale[g] + s);
        transpose(products[g / UNITS_OF_PASS] + s * columns + column, columns, product);
        for (int i = 0; i < QUAD; ++i) total[i] = multiply_add(product[i], scale, total[i]);
      }
      const int left = slots - s;
      const __mmask16 there = left >= ROWS ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
      for (int i = 0; i < QUAD; ++i) {
        total[i] = _mm512_mask_mov_ps(all(NEVER), there, total[i]);
        most[i] = larger(most[i], total[i]);
        store(scores[h + i] + s, total[i]);
      }
    }
    for (int i = 0; i < QUAD; ++i) store(largest[h + i], most[i]);
  }

  // Softmax as it goes along (Milakov and Gimelshein 2018) for heads h to h + 3 of the chunk. A
  // weight's upper 16 bits go into a row of their own, the rest into another, `heads` below.
  void soften(int first, int h) {
    const int head = first + h, left = part.heads - head;
    const __mmask8 there = left >= QUAD ? 15 : (1 << left) - 1;
    alignas(16) float sums_of_4[QUAD], now_of_4[QUAD];
    for (int i = 0; i < QUAD; ++i) now_of_4[i] = ::largest(load(largest[h + i]));
    __m128 before = _mm_maskz_loadu_ps(there, part.largest + head);
    __m128 now = _mm_max_ps(before, _mm_load_ps(now_of_4));
    _mm_store_ps(now_of_4, now);
    _mm_mask_storeu_ps(part.largest + head, there, now);
    __m512 fall = exponential(_mm512_zextps128_ps512(_mm_sub_ps(before, now)));
    _mm_store_ps(shrink + h, _mm512_castps512_ps128(fall));

    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    Vector total[QUAD];
    for (int i = 0; i < QUAD; ++i) total[i] = all(0);
    for (int t = 0; t < BLOCK / UNIT; ++t)
      for (int i = 0; i < QUAD; ++i) {
        ahead();
        Vector weight[2];
        for (int j = 0; j < 2; ++j) {
          weight[j] = exponential(load(scores[h + i] + t * UNIT + j * ROWS) - all(now_of_4[i]));
          total[i] = total[i] + weight[j];
        }
        for (int g = 0; g < (GROUPED ? units : 1); ++g) {
          __m512i whole[2], rest[2];
          for (int j = 0; j < 2; ++j) {
            Vector w = groups ? weight[j] * load(value_scale[g] + t * UNIT + j * ROWS) : weight[j];
            whole[j] = _mm512_castps_si512(w);
            rest[j] = _mm512_castps_si512(
                w - _mm512_castsi512_ps(_mm512_and_si512(whole[j], upper)));
          }
          _mm512_store_si512(weights[g][t][h + i], upper_halves(whole[0], whole[1]));
          _mm512_store_si512(weights[g][t][heads + h + i], upper_halves(rest[0], rest[1]));
        }
      }
    store_sums(sums_of_4, total[0], total[1], total[2], total[3]);
    __m128 sum = _mm_maskz_loadu_ps(there, part.sum + head);
    sum = _mm_fmadd_ps(sum, _mm_load_ps(shrink + h), _mm_load_ps(sums_of_4));
    _mm_mask_storeu_ps(part.sum + head, there, sum);
  }

  // part.weighted is in the order of tiles until `finish`.
  void multiply_values(int first, int count) {
    written();
    for (int u = 0; u < units; ++u) {
      _tile_zero(OUT_EVEN);
      _tile_zero(OUT_ODD);
      for (int t = 0; t < BLOCK / UNIT; ++t) {
        ahead();
        _tile_loadd(WEIGHTS, weights[GROUPED ? u : 0][t], 64);
        _tile_loadd(CACHE, values[u][0][t * ROWS], 64);
        _tile_dpbf16ps(OUT_EVEN, WEIGHTS, CACHE);
        _tile_loadd(CACHE, values[u][1][t * ROWS], 64);
        _tile_dpbf16ps(OUT_ODD, WEIGHTS, CACHE);
      }
      _tile_stored(OUT_EVEN, sums[0], 64);
      _tile_stored(OUT_ODD, sums[1], 64);
      written();
      for (int h = 0; h < count; ++h)
        for (int i = 0; i < 2; ++i) {
          float* to = part.weighted + (first + h) * part.padded + u * UNIT + i * ROWS;
          Vector more = load(sums[i][h]) + load(sums[i][heads + h]);
          store(to, multiply_add(load(to), all(shrink[h]), more));
        }
    }
  }

  void finish() {
    float head[MAX_HEAD_DIM];
    for (int h = 0; h < part.heads; ++h) {
      float* to = part.weighted + h * part.padded;
      __builtin_memcpy(head, to, part.head_dim * sizeof(float));
      for (int u = 0; u < units; ++u)
        for (int place = 0; place < UNIT; ++place)
          to[number_in<F>(u, place / ROWS, place % ROWS)] = head[u * UNIT + place];
    }
  }
};

template <KvFormat F>
void attend(const Part& part) {
  Work<F> work(part);
  const int64_t before_end = part.slots - part.first;
  work.run(part.first, part.count < before_end ? part.count : before_end);
  if (part.count > before_end) work.run(0, part.count - before_end);
  work.finish();
}

bool fits(const Part& part) {
  return part.query_type == Number::bf16 && part.head_dim % (2 * UNIT) == 0 &&
         (!part.key.scale || part.key.scale_type == Number::bf16) &&
         (!part.value.scale || part.value.scale_type == Number::bf16);
}

}  // namespace

void attend_amx(const Part& part) {
  if (fits(part)) switch (part.format) {
      case KvFormat::bf16: return attend<KvFormat::bf16>(part);
      case KvFormat::int8: return attend<KvFormat::int8>(part);
      case KvFormat::fp8: return attend<KvFormat::fp8>(part);
      case KvFormat::int4: return attend<KvFormat::int4>(part);
      default: break;
    }
  attend_avx512(part);
}
