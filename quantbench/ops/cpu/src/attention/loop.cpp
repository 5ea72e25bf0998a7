// Decode attention's inner loop; in AVX-512 dense bfloat16 caches are read from their lines instead.
//
// Slots are taken LOOP_BLOCK at a time: their codes become floats in L1, once for all heads of the
// group; products with tiles of heads × slots follow, then softmax as it goes along (Milakov and
// Gimelshein 2018), then the values the same way.
//
// Variants: portable avx2 avx512

#include "attention/attention.h"

namespace {
#include "attention/numbers.h"

constexpr int LOOP_BLOCK = 32;    // slots at a time
constexpr int PREFETCHED = 4096;  // bytes ahead: some ten lines' latency at full speed
static_assert(LOOP_BLOCK % LANES == 0 && SLOTS_UNIT % LOOP_BLOCK == 0);

// One slot's numbers as floats; of int8 and fp8 the codes, whose one scale comes later.
template <KvFormat F>
INLINE void widen(const Slots& from, int64_t slot, int head_dim, float* __restrict to) {
  const char* codes = from.codes + slot * from.slot_bytes;
  for (int64_t line = 0; line < from.slot_bytes; line += 64)
    __builtin_prefetch(codes + PREFETCHED + line);
  auto each = [&](auto* x, auto number) {
    for (int d = 0; d < head_dim; ++d) to[d] = number(x[d]);
  };
  if constexpr (F == KvFormat::f32) {
    __builtin_memcpy(to, codes, head_dim * sizeof(float));
  } else if constexpr (F == KvFormat::bf16) {
    each((const uint16_t*)codes, [](uint16_t x) { return as_float(uint32_t(x) << 16); });
  } else if constexpr (F == KvFormat::f16) {
    each((const uint16_t*)codes, from_f16);
  } else if constexpr (F == KvFormat::int8) {
    each((const int8_t*)codes, [](int8_t x) { return float(x); });
  } else if constexpr (F == KvFormat::fp8) {
    each((const uint8_t*)codes, from_fp8);
  } else {
    const uint8_t* x = reinterpret_cast<const uint8_t*>(codes);
    constexpr int HALF = INT4_GROUP / 2;
    for (int group = 0; group < head_dim / INT4_GROUP; ++group) {
      float scale = scale_at(from, slot * from.slot_scales + group);
      for (int i = 0; i < HALF; ++i) {
        int code = x[group * HALF + i];
        to[group * INT4_GROUP + i] = float((code & 15) - 8) * scale;
        to[group * INT4_GROUP + HALF + i] = float((code >> 4) - 8) * scale;
      }
    }
  }
}

// scores[h][s] = query[h] · rows[s] for HEADS heads and all slots, padded to a multiple of 4.
template <int HEADS>
inline void dot(const float* query, const float* rows, int padded, int slots, float* scores) {
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

// weighted[h] = weighted[h] · shrink[h] + Σ weights[h][s] · rows[s], in columns of COLUMNS vectors.
template <int HEADS, int COLUMNS>
inline void add_weighted(const float* weights, const float* rows, const float* shrink, int padded,
                         int slots, float* weighted) {
  Vector total[HEADS][COLUMNS];
  for (int h = 0; h < HEADS; ++h)
    for (int c = 0; c < COLUMNS; ++c)
      total[h][c] = load(weighted + h * padded + c * LANES) * all(shrink[h]);
  for (int s = 0; s < slots; ++s) {
    Vector value[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) value[c] = load(rows + s * padded + c * LANES);
    for (int h = 0; h < HEADS; ++h) {
      Vector weight = all(weights[h * LOOP_BLOCK + s]);
      for (int c = 0; c < COLUMNS; ++c)
        total[h][c] = multiply_add(weight, value[c], total[h][c]);
    }
  }
  for (int h = 0; h < HEADS; ++h)
    for (int c = 0; c < COLUMNS; ++c) store(weighted + h * padded + c * LANES, total[h][c]);
}

// One head's scores of a block of slots become their softmax weights, in place. Returns the factor by
// which everything summed for earlier blocks has to be multiplied.
inline float soften(float* scores, const float* key_scale, float softcap, const float* value_scale,
                    int slots, float& running_largest, float& running_sum) {
  constexpr float NEVER = -__builtin_inff();
  Vector top = all(NEVER);
  for (int s = 0; s < LOOP_BLOCK; s += LANES) {
    const Vector scaled = load(scores + s) * load(key_scale + s);
    store(scores + s, softcap ? bounded(scaled, softcap) : scaled);
    for (int i = s; i < s + LANES; ++i)
      if (i >= slots) scores[i] = NEVER;
    top = larger(top, load(scores + s));
  }
  float before = running_largest, now = largest(top);
  now = before > now ? before : now;
  Vector total = all(0);
  for (int s = 0; s < LOOP_BLOCK; s += LANES) {
    Vector weight = exponential(load(scores + s) - all(now));
    total = total + weight;
    store(scores + s, value_scale ? weight * load(value_scale + s) : weight);
  }
  alignas(64) float change[LANES];
  store(change, exponential(all(before - now)));
  running_largest = now;
  running_sum = running_sum * change[0] + sum(total);
  return change[0];
}

template <int HEADS>
inline void add_weighted_columns(const float* weights, const float* rows, const float* shrink,
                                 int padded, int slots, float* weighted) {
  constexpr int COLUMNS = 4;
  int d = 0;
  for (; d + COLUMNS * LANES <= padded; d += COLUMNS * LANES)
    add_weighted<HEADS, COLUMNS>(weights, rows + d, shrink, padded, slots, weighted + d);
  for (; d < padded; d += LANES)
    add_weighted<HEADS, 1>(weights, rows + d, shrink, padded, slots, weighted + d);
}

template <KvFormat F>
void attend_format(const Part& part) {
  constexpr bool ONE_SCALE = F == KvFormat::int8 || F == KvFormat::fp8;
  constexpr int TILE = LANES == 16 ? 4 : 3;  // heads: their sums fit the registers
  alignas(64) float rows[LOOP_BLOCK * MAX_HEAD_DIM];
  alignas(64) float scores[MAX_GROUP * LOOP_BLOCK];
  alignas(64) float key_scale[LOOP_BLOCK], value_scale[LOOP_BLOCK], shrink[MAX_GROUP];
  const int padded = part.padded, heads = part.heads;
  __builtin_memset(rows, 0, LOOP_BLOCK * padded * sizeof(float));  // what pads a row stays zero
  __builtin_memset(key_scale, 0, sizeof key_scale);
  __builtin_memset(value_scale, 0, sizeof value_scale);
  __builtin_memset(part.weighted, 0, heads * padded * sizeof(float));
  for (int h = 0; h < heads; ++h) part.largest[h] = -__builtin_inff(), part.sum[h] = 0;

  int64_t next = part.first;
  for (int64_t done = 0; done < part.count; done += LOOP_BLOCK) {
    const int slots = part.count - done < LOOP_BLOCK ? int(part.count - done) : LOOP_BLOCK;
    const int64_t start = next;
    for (int s = 0; s < slots; ++s) {
      widen<F>(part.key, next, part.head_dim, rows + s * padded);
      key_scale[s] = part.softmax_scale;
      if (ONE_SCALE) {
        key_scale[s] *= scale_at(part.key, next);
        value_scale[s] = scale_at(part.value, next);
      }
      if (++next == part.slots) next = 0;
    }
    int h = 0;
    for (; h + TILE <= heads; h += TILE)
      dot<TILE>(part.query + h * padded, rows, padded, slots, scores + h * LOOP_BLOCK);
    for (; h < heads; ++h)
      dot<1>(part.query + h * padded, rows, padded, slots, scores + h * LOOP_BLOCK);

    for (h = 0; h < heads; ++h)
      shrink[h] = soften(scores + h * LOOP_BLOCK, key_scale, part.softcap,
                         ONE_SCALE ? value_scale : nullptr, slots, part.largest[h], part.sum[h]);

    next = start;
    for (int s = 0; s < slots; ++s) {
      widen<F>(part.value, next, part.head_dim, rows + s * padded);
      if (++next == part.slots) next = 0;
    }
    for (h = 0; h + TILE <= heads; h += TILE)
      add_weighted_columns<TILE>(scores + h * LOOP_BLOCK, rows, shrink + h, padded, slots,
                                 part.weighted + h * padded);
    for (; h < heads; ++h)
      add_weighted_columns<1>(scores + h * LOOP_BLOCK, rows, shrink + h, padded, slots,
                              part.weighted + h * padded);
  }
}

inline void attend(const Part& part) {
  switch (part.format) {
    case KvFormat::f32: return attend_format<KvFormat::f32>(part);
    case KvFormat::bf16: return attend_format<KvFormat::bf16>(part);
    case KvFormat::f16: return attend_format<KvFormat::f16>(part);
    case KvFormat::int8: return attend_format<KvFormat::int8>(part);
    case KvFormat::fp8: return attend_format<KvFormat::fp8>(part);
    case KvFormat::int4: return attend_format<KvFormat::int4>(part);
  }
}

#if LEVEL == LEVEL_avx512
#include "attention/blocks.h"

#include "attention/lines.h"

constexpr int LONG_SLOT = 256;  // bytes: 64 such keys and values leave the next ones no room in L1

template <int SLOTS>
void attend_dense(const Part& part) {
  Lines<KvFormat::bf16, SLOTS> lines(part);
  lines.all_slots();
  lines.finish();
}
#endif

}  // namespace

void NAMED(attend)(const Part& part) {
#if LEVEL == LEVEL_avx512
  if (part.format == KvFormat::bf16 && in_bf16(part) && part.head_dim % LINE == 0) {
    // With more heads computing takes longer than reading, and longer in short blocks.
    if (part.key.slot_bytes >= LONG_SLOT && part.heads <= QUAD) return attend_dense<BLOCK / 2>(part);
    return attend_dense<BLOCK>(part);
  }
#endif
  attend(part);
}
