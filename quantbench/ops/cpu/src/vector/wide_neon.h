// NEON with products of bytes: the same functions as in vector/wide_portable.h. Included after
// vector/wide_halves.h and vector/wide.h.

inline Bytes lookup16(const uint8_t* table, Bytes index) {  // the index's high bits have to be 0
  const uint8x16_t numbers = vld1q_u8(table);
  return by_register<Bytes>([=](auto at) { return vqtbl1q_u8(numbers, at); }, index);
}
inline Bytes lookup64(const uint8_t* table, Bytes index) {  // the same
  const uint8x16x4_t numbers = vld1q_u8_x4(table);
  return by_register<Bytes>([=](auto at) { return vqtbl4q_u8(numbers, at); }, index);
}

inline bool any_zero(Bytes v) {
  return !vminvq_u8(vminq_u8(vminq_u8(v.a.a, v.a.b), vminq_u8(v.b.a, v.b.b)));
}

inline Floats from_f16(HalfWords h) {
  auto eight = [](auto words) -> Piece<float, 32> {
    const float16x8_t halves = (float16x8_t)words;
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  };
  return {eight(h.a), eight(h.b)};
}
inline HalfWords as_f16(Floats v) {
  auto eight = [](auto v) { return vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b); };
  return {(Piece<uint16_t, 16>)eight(v.a), (Piece<uint16_t, 16>)eight(v.b)};
}

// 8 bytes, by indices of 3 bits for each byte.
inline Bytes picked(int64_t eight, Bytes index) {
  const uint8x16_t numbers = vreinterpretq_u8_s64(vdupq_n_s64(eight));
  return by_register<Bytes>([=](auto at) { return vqtbl1q_u8(numbers, at); }, index);
}

using ByteSums = Ints;
inline Ints total(Ints sum, Ints more) { return sum + more; }
inline Ints add_bytes(Ints sum, Bytes a, Bytes b) {  // signed both
  return by_register<Ints>([](auto sum, auto a, auto b) {
    return vdotq_s32(sum, (int8x16_t)a, (int8x16_t)b);
  }, sum, a, b);
}

// Two quads times x: 8 bytes of x for each quad, in the order of `paired`. Each sum is spread over two
// accumulators, which start at a number and are added at the end.
#if LEVEL == LEVEL_neon_i8mm
// A product of matrices: 2 rows of the weight, 8 unsigned codes each, by the high and the low bytes of 8 numbers.
constexpr bool SIGNED_CODES = false;
inline void begin(Ints& a, Ints& b, int32_t low) { a = b = (Ints)(Wide<int64_t>{} + (int64_t(low) << 32)); }
inline void dot_two(Ints& a, Ints& b, Bytes first, Bytes second, const int32_t* x, int stride) {
  const int8x16_t numbers = vcombine_s8(vld1_s8((const int8_t*)x), vld1_s8((const int8_t*)(x + stride)));
  a = by_register<Ints>([=](auto sum, auto p, auto q) {
    return vusmmlaq_s32(sum, (uint8x16_t)vzip1q_u32((uint32x4_t)p, (uint32x4_t)q), numbers);
  }, a, first, second);
  b = by_register<Ints>([=](auto sum, auto p, auto q) {
    return vusmmlaq_s32(sum, (uint8x16_t)vzip2q_u32((uint32x4_t)p, (uint32x4_t)q), numbers);
  }, b, first, second);
}
inline Ints dotted(Ints a, Ints b) {
  return by_register<Ints>([](auto a, auto b) {
    return vaddq_s32(vshlq_n_s32(vuzp1q_s32(a, b), 8), vuzp2q_s32(a, b));
  }, a, b);
}
inline int64x2x2_t paired(int8x16_t high, int8x16_t low) {
  return {vzip1q_s64((int64x2_t)high, (int64x2_t)low), vzip2q_s64((int64x2_t)high, (int64x2_t)low)};
}
#else
constexpr bool SIGNED_CODES = true;
inline void begin(Ints& high, Ints& low, int32_t number) { high = all(0), low = all(number); }
inline void dot_two(Ints& high, Ints& low, Bytes first, Bytes second, const int32_t* x, int stride) {
  const int8x8_t one = vld1_s8((const int8_t*)x), two = vld1_s8((const int8_t*)(x + stride));
  high = by_register<Ints>([=](auto sum, auto p, auto q) {
    return vdotq_lane_s32(vdotq_lane_s32(sum, (int8x16_t)p, one, 0), (int8x16_t)q, two, 0);
  }, high, first, second);
  low = by_register<Ints>([=](auto sum, auto p, auto q) {
    return vdotq_lane_s32(vdotq_lane_s32(sum, (int8x16_t)p, one, 1), (int8x16_t)q, two, 1);
  }, low, first, second);
}
inline Ints dotted(Ints high, Ints low) { return (high << 8) + low; }
inline int64x2x2_t paired(int8x16_t high, int8x16_t low) {
  return {(int64x2_t)vzip1q_s32((int32x4_t)high, (int32x4_t)low), (int64x2_t)vzip2q_s32((int32x4_t)high, (int32x4_t)low)};
}
#endif
