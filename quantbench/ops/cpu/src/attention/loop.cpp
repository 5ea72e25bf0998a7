// Decode attention's inner loop; AVX-512 and AMX take it for what theirs are not exact enough for.
//
// Some slots are taken at a time: products of keys with tiles of heads × slots, then softmax as it goes
// along (Milakov and Gimelshein 2018), then the values. Numbers are multiplied as floats, which L1 holds for
// all heads of the group, or as integers.
//
// Variants: portable avx2 avxvnni

#include "attention/attention.h"

namespace {
#include "attention/numbers.h"

constexpr int LOOP_BLOCK = 64;    // slots at a time, at most; softmax has a cost per block
constexpr int PREFETCHED = 4096;  // bytes ahead: some ten lines' latency at full speed
static_assert(LOOP_BLOCK % LANES == 0 && SLOTS_UNIT % LOOP_BLOCK == 0);

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Asks for what is PREFETCHED behind these bytes.
inline void prefetch(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + PREFETCHED + line);
}

// One head's scores of a block of slots become their softmax weights, in place. Returns the factor by
// which everything summed for earlier blocks has to be multiplied.
inline float soften(float* scores, float scale, const float* key_scale, float softcap,
                    const float* value_scale, int slots, float& running_largest, float& running_sum) {
  Vector top = all(NEVER);
  for (int s = 0; s < slots; s += LANES) {
    const Vector scaled = load(scores + s) * (load(key_scale + s) * all(scale));
    store(scores + s, softcap ? bounded(scaled, softcap) : scaled);
    for (int i = slots; i < s + LANES; ++i) scores[i] = NEVER;
    top = larger(top, load(scores + s));
  }
  float before = running_largest, now = largest(top);
  now = before > now ? before : now;
  Vector total = all(0);
  for (int s = 0; s < slots; s += LANES) {
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

#include "attention/floats.h"
#ifdef REGISTER
#include "attention/words.h"
#endif

template <int HEADS>
struct Heads {
  static constexpr int COUNT = HEADS;
};

// Calls `some` for TILE heads at a time, then for one.
template <int TILE, typename F>
inline void in_tiles(int heads, F some) {
  int h = 0;
  for (; h + TILE <= heads; h += TILE) some(Heads<TILE>(), h);
  for (; h < heads; ++h) some(Heads<1>(), h);
}

template <typename Rows>
void attend_in(const Part& part) {
  alignas(64) float scores[MAX_GROUP * LOOP_BLOCK], shrink[MAX_GROUP];
  Rows rows(part);
  __builtin_memset(part.weighted, 0, part.heads * part.padded * sizeof(float));
  for (int h = 0; h < part.heads; ++h) part.largest[h] = NEVER, part.sum[h] = 0;

  int64_t first = part.first;
  for (int64_t done = 0, slots; done < part.count; done += slots) {
    slots = int(least(Rows::SLOTS, least(part.count - done, part.slots - first)));
    rows.read_keys(first, slots);
    in_tiles<Rows::KEY_TILE>(part.heads, [&](auto heads, int h) {
      rows.template dot<heads.COUNT>(h, slots, scores + h * LOOP_BLOCK);
    });
    for (int h = 0; h < part.heads; ++h)
      shrink[h] = soften(scores + h * LOOP_BLOCK, rows.scale(h), rows.key_scale, part.softcap,
                         rows.value_scale, slots, part.largest[h], part.sum[h]);
    rows.read_values(first, slots);
    in_tiles<Rows::VALUE_TILE>(part.heads, [&](auto heads, int h) {
      rows.template add_weighted<heads.COUNT>(h, slots, scores + h * LOOP_BLOCK, shrink + h);
    });
    if ((first += slots) == part.slots) first = 0;
  }
}

template <KvFormat F>
void attend_codes(const Part& part) {
#ifdef REGISTER
  if (in_bf16(part) && part.head_dim % 32 == 0) return attend_in<InWords<F>>(part);
#endif
  attend_in<InFloats<F>>(part);
}

}  // namespace

void NAMED(attend)(const Part& part) {
  switch (part.format) {
    case KvFormat::f32: return attend_in<InFloats<KvFormat::f32>>(part);
    case KvFormat::bf16: return attend_in<InFloats<KvFormat::bf16>>(part);
    case KvFormat::f16: return attend_in<InFloats<KvFormat::f16>>(part);
    case KvFormat::int8: return attend_codes<KvFormat::int8>(part);
    case KvFormat::fp8: return attend_in<InFloats<KvFormat::fp8>>(part);
    case KvFormat::int4: return attend_codes<KvFormat::int4>(part);
  }
}
