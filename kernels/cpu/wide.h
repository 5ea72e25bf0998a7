// Vectors of 64 bytes in what every compiler has: it cuts them into the registers there are.
// Included in a version's namespace; wide_*.h has what needs instructions of its own.

typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int8_t SignedBytes __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));
typedef int16_t SignedWords __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t HalfWords __attribute__((vector_size(32)));

template <class V>
inline V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

inline Floats all(float x) { return Floats{} + x; }
inline Ints all(int32_t x) { return Ints{} + x; }
inline Bytes all_bytes(uint8_t x) { return Bytes{} + x; }
inline Floats floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Bytes shifted by less than 8 bits, with bits of their neighbours where zeros belong.
template <int BITS>
inline Bytes shifted(Bytes v) {
  if constexpr (BITS > 0) return (Bytes)((Words)v << BITS);
  else if constexpr (BITS < 0) return (Bytes)((Words)v >> -BITS);
  else return v;
}

// The low and the high halves of pairs of bfloat16, as floats.
inline Floats low_half(Bits pairs) { return (Floats)(pairs << 16); }
inline Floats high_half(Bits pairs) { return (Floats)(pairs & 0xffff0000u); }

// The largest magnitude among units of 32 floats; NaN counts as the largest.
inline float largest(const float* x, int units) {
  Bits most{};
  for (int i = 0; i < 2 * units; ++i) {
    Bits bits = load<Bits>(x + 16 * i) & 0x7fffffffu;
    Bits more = (Bits)(bits > most);
    most = (more & bits) | (~more & most);
  }
  uint32_t found = 0;
  for (int i = 0; i < 16; ++i) found = most[i] > found ? most[i] : found;
  float x_largest;
  __builtin_memcpy(&x_largest, &found, sizeof found);
  return x_largest;
}

// The smallest power of two in whose units a number's size rounds to less than 127.5 · 256 (so that
// its high byte is not over 127), but none below the normal numbers'. NaN for what is not finite.
inline float power(float largest) {
  uint32_t bits;
  __builtin_memcpy(&bits, &largest, sizeof bits);
  if (bits >= 0x7f800000u) return __builtin_nanf("");
  constexpr uint32_t MOST = 0x7eff00;  // the mantissa of 32639.5
  int exponent = int(bits >> 23) - 14 + ((bits & 0x7fffffu) >= MOST);
  bits = uint32_t(exponent > 1 ? exponent : 1) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale;
}

inline float finer(float scale) {
  float wanted = scale * 0x1p-15f;
  return wanted < 0x1p-126f ? 0x1p-126f : wanted;  // NaN stays NaN
}

// x in units of a power of two, rounded; in x what is left over.
inline void to_integers(float* x, int units, float scale, int16_t* to) {
  constexpr float SHIFT = 12582912;  // 1.5 · 2^23: adding it leaves an integer in the low bits
  const float inverse = 1 / scale;
  for (int i = 0; i < 2 * units; ++i) {
    Floats v = load<Floats>(x + 16 * i), shifted = v * inverse + SHIFT;
    store(x + 16 * i, v - (shifted - SHIFT) * scale);
    Ints integers = (Ints)shifted - 0x4b400000;
    store(to + 16 * i, __builtin_convertvector(integers, HalfWords));
  }
}
