// For instruction sets that multiply 16-bit integers, but no bytes. Included after vector/wide.h.

// Bits of a where the mask has ones, of b where it has zeros.
inline Bytes merged(uint8_t mask, Bytes a, Bytes b) { return (a & mask) | (b & uint8_t(~mask)); }

// Four numbers of x as `dot` takes them: the first and third, then the second and fourth.
inline void arrange_quad(const int16_t* x, int32_t* to) {
  const int16_t words[4] = {x[0], x[2], x[1], x[3]};
  __builtin_memcpy(to, words, sizeof words);
}

// The sum of both accumulators of `dot`.
inline Ints dotted(Ints a, Ints b) { return a + b; }
