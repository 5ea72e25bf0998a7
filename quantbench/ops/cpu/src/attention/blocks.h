// How a part's slots are taken in blocks, and its softmax, for kernels that multiply what a cache holds
// without widening it in memory. Included in a variant's namespace, after vector/lanes.h and
// numbers.h.

constexpr int BLOCK = 64;  // slots at a time
constexpr int ROWS = 16;   // slots, or numbers, in a vector or a tile's column
constexpr int QUAD = 4;    // heads, or what four columns of a product hold
static_assert(LANES == ROWS);

// Each lane's number.
inline __m512i lane() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// 16 slots' scales of one of `groups`, from the first slot's on.
inline Vector scales(const char* from, int groups, int group) {
  if (groups == 1) {
    __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  // Lanes of two scales, of which the group's is the second one unless it is the first of all.
  const char* pair = from + (group ? group - 1 : 0) * 2;
  __m512i both = groups == 2 ? _mm512_loadu_si512(pair)
                             : _mm512_i32gather_epi32(
                                   _mm512_mullo_epi32(lane(), _mm512_set1_epi32(groups)), pair, 2);
  return _mm512_castsi512_ps(group ? _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000)))
                                   : _mm512_slli_epi32(both, 16));
}

// 16 slots' scales, or those of the first `slots` and zeros, where a slot has one.
inline Vector first_scales(const char* from, int slots) {
  const __mmask16 there = slots >= ROWS ? 0xffff : (1 << slots) - 1;
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from)), 16));
}

constexpr int LINE = 2 * LANES;  // numbers of bfloat16 in 64 bytes

// Indices into two vectors that follow one another in memory.
struct Places {
  alignas(64) int32_t even[LANES], odd[LANES];    // of the numbers at even places, and at odd ones
  alignas(64) int32_t first[LANES], last[LANES];  // back from even and odd to the first 16, the last
  constexpr Places() : even(), odd(), first(), last() {
    for (int i = 0; i < LANES; ++i) {
      even[i] = 2 * i, odd[i] = 2 * i + 1;
      first[i] = i / 2 + i % 2 * LANES, last[i] = first[i] + LANES / 2;
    }
  }
};
constexpr Places PLACES;

// Both vectors of each line of a head, rearranged; `to` may be `from`.
inline void rearrange(const float* from, int lines, const int32_t* first, const int32_t* second,
                      float* to) {
  for (int l = 0; l < lines; ++l, from += LINE, to += LINE) {
    const Vector a = load(from), b = load(from + LANES);
    store(to, _mm512_permutex2var_ps(a, _mm512_load_si512(first), b));
    store(to + LANES, _mm512_permutex2var_ps(a, _mm512_load_si512(second), b));
  }
}

// e^x for x <= 0 to 18 bits, as many as a weight keeps. Below -87 it stays e^-87, which is not zero but
// too small to matter.
inline Vector rough_exponential(Vector x) {
  constexpr float TO_INTEGER = 12582912;  // 1.5 · 2^23: see exponential()
  const Vector bounded = larger(all(-87), x);
  const Vector biased = multiply_add(bounded, all(1.44269504f), all(TO_INTEGER));
  const Vector r = multiply_add(biased - all(TO_INTEGER), all(-0.693147181f), bounded);
  Vector y = all(1 / 120.f);
  const float series[] = {1 / 24.f, 1 / 6.f, 0.5f, 1, 1};
  for (float coefficient : series) y = multiply_add(y, r, all(coefficient));
  return y * power_of_two(biased);
}

// Asks for lines, which are behind one another.
template <int LINES>
inline __attribute__((always_inline)) void ask(const char*& next) {
  for (int i = 0; i < LINES; ++i) __builtin_prefetch(next + 64 * i);
  next += 64 * LINES;
}

// How a part's slots are taken: in blocks of SLOTS, the last of a run from a copy with zeros behind it
// unless Work says that it copies none.
template <typename Work, int MAX_GROUPS, int SLOTS = BLOCK>
struct Blocks {
  static_assert(SLOTS_UNIT % SLOTS == 0);
  static constexpr bool COPIES_TAIL = true;
  static constexpr int BLOCKS_AHEAD = 1;  // blocks that are prefetched

  const Part& part;
  const int groups;  // of scales that a slot has
  const int64_t slot_bytes, scale_bytes;

  // A later block's keys and values, asked for a few lines at a time all through this one.
  const char *next_key, *next_value;
  int due, rate;  // in 256ths of a line

  alignas(64) char tail[2][SLOTS * (MAX_HEAD_DIM * 2 + MAX_GROUPS * 2)];

  Blocks(const Part& part, int groups)
      : part(part), groups(groups), slot_bytes(part.key.slot_bytes), scale_bytes(groups * 2) {
    __builtin_memset(part.weighted, 0, part.heads * part.padded * sizeof(float));
    for (int h = 0; h < part.heads; ++h) part.largest[h] = NEVER, part.sum[h] = 0;
  }

  void all_slots() {
    const int64_t before_end = part.slots - part.first;
    run(part.first, part.count < before_end ? part.count : before_end);
    if (part.count > before_end) run(0, part.count - before_end);
    static_cast<Work*>(this)->finish();
  }

  // What Work does after its last block.
  void finish() {}

  // For weighted values that have had the numbers at even places before those at odd ones in each line.
  void put_in_order() {
    for (int h = 0; h < part.heads; ++h) {
      float* head = part.weighted + h * part.padded;
      rearrange(head, part.head_dim / LINE, PLACES.first, PLACES.last, head);
    }
  }

  // Slots that follow one another.
  void run(int64_t first, int64_t count) {
    for (int64_t done = 0; done < count; done += SLOTS) {
      Slots key = from(part.key, first + done), value = from(part.value, first + done);
      const int slots = count - done < SLOTS ? int(count - done) : SLOTS;
      if (Work::COPIES_TAIL && slots < SLOTS)
        copy_tail(key, tail[0], slots), copy_tail(value, tail[1], slots);
      next_key = key.codes + Work::BLOCKS_AHEAD * SLOTS * slot_bytes;
      next_value = value.codes + Work::BLOCKS_AHEAD * SLOTS * slot_bytes;
      due = 0;
      static_cast<Work*>(this)->block(key, value, slots);
    }
  }

  Slots from(Slots side, int64_t slot) const {
    side.codes += slot * slot_bytes;
    if (groups) side.scale += slot * scale_bytes;
    return side;
  }

  void copy_tail(Slots& side, char* to, int slots) const {
    char* scale = to + SLOTS * slot_bytes;
    __builtin_memset(to, 0, SLOTS * (slot_bytes + scale_bytes));
    __builtin_memcpy(to, side.codes, slots * slot_bytes);
    if (groups) __builtin_memcpy(scale, side.scale, slots * scale_bytes);
    side.codes = to, side.scale = scale;
  }

  // Scores of slots s to s + 15 where there are that many, bounded; `most` is their largest.
  template <int HEADS = QUAD>
  void keep(int s, int slots, Vector scores[QUAD], Vector most[QUAD]) const {
    const int left = slots - s;
    const __mmask16 there = left >= ROWS ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
    for (int i = 0; i < HEADS; ++i) {
      if (part.softcap) scores[i] = bounded(scores[i], part.softcap);
      scores[i] = _mm512_mask_mov_ps(all(NEVER), there, scores[i]);
      most[i] = larger(most[i], scores[i]);
    }
  }

  // Softmax as it goes along (Milakov and Gimelshein 2018), of QUAD heads from `head` on. Weights
  // are those of the block, e^(score - base); later they count `rise` times, and what was summed
  // before counts `shrink` times.
  void begin(int head, const Vector most[QUAD], float base[QUAD], float rise[QUAD],
             float shrink[QUAD]) const {
    const __m128 lowest = _mm_set1_ps(-3.4e38f);  // so that a block of -inf weighs nothing
    for (int i = 0; i < QUAD; ++i) base[i] = ::largest(most[i]);
    const __m128 here = _mm_max_ps(lowest, _mm_loadu_ps(base));
    const __m128 before = _mm_maskz_loadu_ps(some(head), part.largest + head);
    const __m128 now = _mm_max_ps(before, here);
    const __m128 falls[] = {_mm_sub_ps(here, now), _mm_sub_ps(before, now)};
    const __m512 both = exponential(_mm512_insertf32x4(_mm512_zextps128_ps512(falls[0]), falls[1], 1));
    _mm_storeu_ps(base, here);
    _mm_storeu_ps(rise, _mm512_castps512_ps128(both));
    _mm_storeu_ps(shrink, _mm512_extractf32x4_ps(both, 1));
    _mm_mask_storeu_ps(part.largest + head, some(head), now);
  }

  void end(int head, const Vector total[QUAD], const float rise[QUAD],
           const float shrink[QUAD]) const {
    float sums[QUAD];
    store_sums(sums, total[0], total[1], total[2], total[3]);
    __m128 sum = _mm_maskz_loadu_ps(some(head), part.sum + head);
    sum = _mm_fmadd_ps(_mm_loadu_ps(sums), _mm_loadu_ps(rise), _mm_mul_ps(sum, _mm_loadu_ps(shrink)));
    _mm_mask_storeu_ps(part.sum + head, some(head), sum);
  }

  // Which of QUAD heads there are.
  __mmask8 some(int head) const {
    return part.heads - head >= QUAD ? 15 : (1 << (part.heads - head)) - 1;
  }

  // `calls` of ahead() will have asked for a whole block.
  void pace(int calls) { rate = (int(slot_bytes) * SLOTS / 64 * 256 + calls - 1) / calls; }

  inline __attribute__((always_inline)) void ahead() {
    for (due += rate; due >= 256; due -= 256) ask<1>(next_key), ask<1>(next_value);
  }
};

