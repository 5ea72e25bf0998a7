// What E4M3 codes are as bfloat16, which is exact. Included in a variant's namespace, where there is VBMI.

struct Fp8Table {
  alignas(64) uint8_t high[128], low[128];  // bytes, by a code without its sign
  constexpr Fp8Table() : high(), low() {
    for (int code = 0; code < 128; ++code) {
      const uint32_t wide = __builtin_bit_cast(uint32_t, small_float(code, 4, 3));
      const uint32_t bits = code == 127 ? 0x7fc0 : wide >> 16;  // 127: NaN
      high[code] = uint8_t(bits >> 8), low[code] = uint8_t(bits);
    }
  }
};
constexpr Fp8Table FP8;

// Each byte twice.
struct Twice {
  alignas(64) uint8_t from[64];
  constexpr Twice() : from() {
    for (int i = 0; i < 64; ++i) from[i] = uint8_t(i / 2);
  }
};
constexpr Twice TWICE;

// 32 codes as bfloat16, in their order.
inline __attribute__((always_inline)) __m512i fp8_as_bf16(const char* codes) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m512i code =
      _mm512_permutexvar_epi8(_mm512_load_si512(TWICE.from), _mm512_castsi256_si512(half));
  constexpr __mmask64 LOW = 0x5555555555555555;
  __m512i bits = _mm512_mask2_permutex2var_epi8(_mm512_load_si512(FP8.low), code, LOW,
                                                _mm512_load_si512(FP8.low + 64));
  bits = _mm512_mask2_permutex2var_epi8(_mm512_load_si512(FP8.high), bits, ~LOW,
                                        _mm512_load_si512(FP8.high + 64));
  return _mm512_ternarylogic_epi32(bits, code, _mm512_set1_epi16(int16_t(0x8000)), 0xf8);  // a | b & c
}
