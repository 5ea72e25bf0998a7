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

constexpr int BLOCK = 64;                       // slots at a time
constexpr int ROWS = 16;                        // of a tile, of 64 bytes each
constexpr int UNIT = 32;                        // numbers in a tile's row; int4's group too
constexpr int MAX_UNITS = MAX_HEAD_DIM / UNIT;  // of a head
constexpr int QUAD = 4;                         // heads
constexpr int MAX_COLUMNS = 2 * QUAD;           // heads at a time: with both parts of a weight, 16 rows
static_assert(UNIT == INT4_GROUP && LANES == ROWS);

typedef uint16_t Bf16;
typedef Bf16 Row[UNIT];

// Which tile holds what; GCC makes a register's name of the very text. Shapes: see `configure`.
#define SCORES_A 0  // (16, columns) of 4 bytes
#define SCORES_B 1
#define QUERY 2
#define CACHE 3    // (16, 64 bytes): keys, or values
#define WEIGHTS 4  // (2 · columns, 64 bytes)
#define OUT_EVEN 5
#define OUT_ODD 6

void configure(int columns) {
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
  for (int tile = WEIGHTS; tile <= OUT_ODD; ++tile) shape(tile, 2 * columns, 64);
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

// 64 numbers of a slot, two units, as bfloat16; PLACES says which lies where.
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

// Which number of the head, as `part.query` has them, lies at a place of a unit.
template <KvFormat F>
int number_at(int unit, int place) {
  if (F == KvFormat::int8) return unit * UNIT + place % 2 * 16 + place / 2;
  if (F == KvFormat::fp8)
    return unit / 2 * 2 * UNIT + place / 8 * 16 + unit % 2 * 8 + place % 8;
  return unit * UNIT + place;
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

inline void prefetch(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

template <KvFormat F>
struct Work {
  static constexpr bool GROUPED = F == KvFormat::int4, ONE_SCALE = F == KvFormat::int8 || F == KvFormat::fp8;
  static constexpr int MAX_GROUPS = GROUPED ? MAX_UNITS : 1;

  const Part& part;
  const int units, columns, groups;
  const int64_t slot_bytes, scale_bytes;

  alignas(64) Bf16 query[MAX_GROUP / MAX_COLUMNS][MAX_UNITS][ROWS][MAX_COLUMNS][2];
  alignas(64) Row keys[MAX_UNITS][BLOCK];
  alignas(64) Row values[MAX_UNITS][2][BLOCK / 2];  // even numbers, then odd; of slots i and 16 + i
  alignas(64) float products[MAX_GROUPS][BLOCK * MAX_COLUMNS];
  alignas(64) float key_scale[MAX_GROUPS][BLOCK], value_scale[MAX_GROUPS][BLOCK];
  alignas(64) float scores[MAX_COLUMNS][BLOCK];
  alignas(64) Row weights[MAX_GROUPS][BLOCK / UNIT][2 * MAX_COLUMNS];
  alignas(64) float sums[2][2 * MAX_COLUMNS][ROWS];
  alignas(64) char tail[2][BLOCK * (MAX_HEAD_DIM * 2 + MAX_GROUPS * 2)];

  explicit Work(const Part& part)
      : part(part), units(part.head_dim / UNIT), columns(part.heads > QUAD ? 2 * QUAD : QUAD),
        groups(GROUPED ? units : ONE_SCALE), slot_bytes(part.key.slot_bytes), scale_bytes(groups * 2) {
    configure(columns);
    for (int first = 0, c = 0; first < part.heads; first += columns, ++c) put_query(first, c);
    __builtin_memset(part.weighted, 0, part.heads * part.padded * sizeof(float));
    for (int h = 0; h < part.heads; ++h) part.largest[h] = -__builtin_inff(), part.sum[h] = 0;
    __builtin_memset(weights, 0, sizeof weights);
    if (!groups)
      for (int s = 0; s < BLOCK; ++s) key_scale[0][s] = part.softmax_scale;
  }

  ~Work() { _tile_release(); }

  void put_query(int first, int chunk) {
    for (int u = 0; u < units; ++u) {
      Bf16* to = &query[chunk][u][0][0][0];
      for (int row = 0; row < ROWS; ++row)
        for (int h = first; h < first + columns; ++h)
          for (int i = 0; i < 2; ++i) {
            float x = h < part.heads
                          ? part.query[h * part.padded + number_at<F>(u, 2 * row + i)] : 0;
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
    read_keys(key);
    read_values(value);
    for (int g = 0; g < groups; ++g)
      for (int s = 0; s < BLOCK; s += LANES) {
        Vector of_keys = scales(key.scale + s * scale_bytes, groups, g);
        store(key_scale[g] + s, of_keys * all(part.softmax_scale));
        store(value_scale[g] + s, scales(value.scale + s * scale_bytes, groups, g));
      }
    for (int first = 0, chunk = 0; first < part.heads; first += columns, ++chunk) {
      const int heads = part.heads - first < columns ? part.heads - first : columns;
      multiply_keys(key, chunk);
      float shrink[MAX_COLUMNS];
      for (int h = first; h < first + heads; ++h)
        shrink[h - first] = soften<BLOCK>(scores[h - first], nullptr, nullptr, slots,
                                          part.largest[h], part.sum[h]);
      put_weights(heads);
      multiply_values(first, heads, shrink);
    }
  }

  void read_keys(const Slots& key) {
    for (int s = 0; s < BLOCK; ++s) {
      const char* slot = key.codes + s * slot_bytes;
      prefetch(slot + BLOCK * slot_bytes, slot_bytes);
      if (F == KvFormat::bf16) continue;  // tiles are loaded from the cache itself
      for (int u = 0; u < units; u += 2) {
        __m512i two[2];
        widen<F>(slot + u * unit_bytes<F>(), two);
        _mm512_store_si512(keys[u][s], two[0]);
        _mm512_store_si512(keys[u + 1][s], two[1]);
      }
    }
  }

  // A lane of a tile's row has the same number of two slots.
  void read_values(const Slots& value) {
    for (int half = 0; half < BLOCK; half += UNIT)
      for (int s = half; s < half + ROWS; ++s) {
        const char* slot = value.codes + s * slot_bytes;
        const char* other = slot + ROWS * slot_bytes;
        prefetch(slot + BLOCK * slot_bytes, slot_bytes);
        prefetch(other + BLOCK * slot_bytes, slot_bytes);
        for (int u = 0; u < units; u += 2) {
          __m512i a[2], b[2];
          widen<F>(slot + u * unit_bytes<F>(), a);
          widen<F>(other + u * unit_bytes<F>(), b);
          for (int i = 0; i < 2; ++i) {
            const int row = half / 2 + s - half;
            _mm512_store_si512(values[u + i][0][row], lower_halves(a[i], b[i]));
            _mm512_store_si512(values[u + i][1][row], upper_halves(a[i], b[i]));
          }
        }
      }
    written();
  }

  void multiply_keys(const Slots& key, int chunk) {
    const int row_bytes = columns * 4;
    for (int s = 0; s < BLOCK; s += 2 * ROWS) {
      for (int u = 0; u < units; ++u) {
        if (GROUPED || u == 0) {
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
        if (GROUPED || u == units - 1) {
          float* to = products[GROUPED ? u : 0] + s * columns;
          _tile_stored(SCORES_A, to, row_bytes);
          _tile_stored(SCORES_B, to + ROWS * columns, row_bytes);
        }
      }
    }
    written();
    for (int s = 0; s < BLOCK; s += ROWS)
      for (int c = 0; c < columns; c += QUAD) {
        Vector total[QUAD];
        for (int h = 0; h < QUAD; ++h) total[h] = all(0);
        for (int g = 0; g < (GROUPED ? units : 1); ++g) {
          Vector product[QUAD], scale = load(key_scale[g] + s);
          transpose(products[g] + s * columns + c, columns, product);
          for (int h = 0; h < QUAD; ++h) total[h] = multiply_add(product[h], scale, total[h]);
        }
        for (int h = 0; h < QUAD; ++h) store(scores[c + h] + s, total[h]);
      }
  }

  // A weight's upper 16 bits in a row of its own, the rest in another, `columns` below.
  void put_weights(int heads) {
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    for (int g = 0; g < (GROUPED ? units : 1); ++g)
      for (int t = 0; t < BLOCK / UNIT; ++t)
        for (int h = 0; h < heads; ++h) {
          __m512i weight[2], rest[2];
          for (int i = 0; i < 2; ++i) {
            const int s = t * UNIT + i * ROWS;
            Vector w = load(scores[h] + s);
            if (groups) w = w * load(value_scale[g] + s);
            weight[i] = _mm512_castps_si512(w);
            rest[i] = _mm512_castps_si512(w - _mm512_castsi512_ps(_mm512_and_si512(weight[i], upper)));
          }
          _mm512_store_si512(weights[g][t][h], upper_halves(weight[0], weight[1]));
          _mm512_store_si512(weights[g][t][columns + h], upper_halves(rest[0], rest[1]));
        }
    written();
  }

  // part.weighted in the order of tiles until `finish`.
  void multiply_values(int first, int heads, const float* shrink) {
    for (int u = 0; u < units; ++u) {
      _tile_zero(OUT_EVEN);
      _tile_zero(OUT_ODD);
      for (int t = 0; t < BLOCK / UNIT; ++t) {
        _tile_loadd(WEIGHTS, weights[GROUPED ? u : 0][t], 64);
        _tile_loadd(CACHE, values[u][0][t * ROWS], 64);
        _tile_dpbf16ps(OUT_EVEN, WEIGHTS, CACHE);
        _tile_loadd(CACHE, values[u][1][t * ROWS], 64);
        _tile_dpbf16ps(OUT_ODD, WEIGHTS, CACHE);
      }
      _tile_stored(OUT_EVEN, sums[0], 64);
      _tile_stored(OUT_ODD, sums[1], 64);
      written();
      for (int h = 0; h < heads; ++h)
        for (int i = 0; i < 2; ++i) {
          float* to = part.weighted + (first + h) * part.padded + u * UNIT + i * ROWS;
          Vector more = load(sums[i][h]) + load(sums[i][columns + h]);
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
          to[number_at<F>(u, place)] = head[u * UNIT + place % 2 * ROWS + place / 2];
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
