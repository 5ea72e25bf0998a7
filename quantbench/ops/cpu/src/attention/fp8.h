// What E4M3 codes are as bfloat16, which is exact. Included in a variant's namespace.

struct Fp8Table {
  alignas(64) uint16_t bits[128];  // by a code without its sign
  constexpr Fp8Table() : bits() {
    for (int code = 0; code < 128; ++code)  // 127: NaN
      bits[code] = code == 127 ? 0x7fc0 : __builtin_bit_cast(uint32_t, small_float(code, 4, 3)) >> 16;
  }
};
constexpr Fp8Table FP8;

// 32 codes as bfloat16, in their order.
inline __attribute__((always_inline)) __m512i fp8_as_bf16(const char* codes) {
  auto of = [](__m512i code, const uint16_t* table) {  // by the lower six bits
    return _mm512_permutex2var_epi16(_mm512_load_si512(table), code, _mm512_load_si512(table + 32));
  };
  const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64));
  const __m512i bits = _mm512_mask_mov_epi16(of(code, FP8.bits), upper, of(code, FP8.bits + 64));
  return _mm512_ternarylogic_epi32(bits, code, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);  // a | b & c
}
