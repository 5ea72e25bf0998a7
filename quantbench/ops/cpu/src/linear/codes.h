// How codes are unpacked, by format. Included in a variant's namespace, after vector/wide.h.
//
// `read(p, half, quads)` unpacks half of the unit at p, which fits the registers: HALF quads, a byte for each code.
//
// In memory a code is split into planes of 8, 4, 2 and 1 bits, as in ops/packing.py: 5 bits are 4 in one plane and 1 in
// the next. A byte of a plane of w bits holds one row's codes for one column of 8 / w quads that follow one another,
// the first quad's in its lowest bits. Only 6 bits stay together: three vectors of 64 bytes hold four quads, three in
// their low 6 bits, and the fourth in their high ones, 2 bits in each.

// 6-bit codes, the first three quads' with bits of the fourth above them: for lookups that ignore these.
struct Loose6 {
  static INLINE void read(const uint8_t* p, int half, Bytes* quads) {
    for (int i = 0; i < 3; ++i) quads[i] = load<Bytes>(p + 192 * half + 64 * i);
    quads[3] = (shifted(quads[0], -6) & 3) | (shifted(quads[1], -4) & 12) | (shifted(quads[2], -2) & 48);
  }
};

template <int BITS>
struct Codes {
  static INLINE void read(const uint8_t* p, int half, Bytes* quads) {
    if constexpr (BITS == 6) {
      Loose6::read(p, half, quads);
      for (int i = 0; i < 3; ++i) quads[i] &= 63;
    } else if constexpr (BITS == 3 || BITS == 5 || BITS == 7) {  // a plane of the highest bits is last
      constexpr int LOW = BITS - 1;
      Codes<LOW>::read(p, half, quads);
      const Bytes plane = load<Bytes>(p + 64 * LOW);
#pragma GCC unroll 4
      for (int i = 0; i < HALF; ++i)
        quads[i] = quads[i] | (shifted(plane, LOW - HALF * half - i) & uint8_t(1 << LOW));
    } else {
      constexpr int EACH = 8 / BITS;
      constexpr uint8_t MASK = (1 << BITS) - 1;
#pragma GCC unroll 4
      for (int i = 0, q = HALF * half; i < HALF; ++i, ++q) {
        quads[i] = shifted(load<Bytes>(p + q / EACH * 64), -(q % EACH * BITS));
        if (!ZEROS_SHIFTED_IN || q % EACH < EACH - 1) quads[i] &= MASK;
      }
    }
  }
};

// A format whose numbers are integers unpacks a code into PARTS bytes. The number is the sum of (byte - CENTRE) · WEIGHT
// over its parts. Where WORDS is true it is a signed 16-bit integer instead: of a quad, the first vector has the even
// columns, the second the odd ones.
template <class C>
constexpr bool WORDS = false;

template <int BITS>
struct Integer {
  static constexpr int PARTS = 1, BYTES = BITS * 64, CENTRE[] = {1 << (BITS - 1)};
  static constexpr int MOST = (1 << BITS) - 1;
  static constexpr int WEIGHT[] = {1};
  explicit Integer(const Header&) {}
  INLINE void read(const uint8_t* p, int half, Bytes quads[PARTS][HALF]) const {
    Codes<BITS>::read(p, half, quads[0]);
  }
};

template <class C>
inline int32_t centre_of(const Header& header, int part) { return header.from_zero ? 0 : C::CENTRE[part]; }

#if LEVEL < LEVEL_portable
// E3M2 in sixteenths, 256 times a high byte plus a low one that is signed: tables of all 64.
struct Float6 {
  static constexpr int PARTS = 2, BYTES = 6 * 64, CENTRE[] = {128, 128}, WEIGHT[] = {1, 256};
  alignas(64) uint8_t tables[PARTS][64];
  explicit Float6(const Header&) {
    for (int code = 0; code < 64; ++code) {
      const int number = int(16 * small_float(code, 3, 2)) + CENTRE[0];
      tables[0][code] = uint8_t(number), tables[1][code] = uint8_t((number >> 8) + CENTRE[1]);
    }
  }
  INLINE void read(const uint8_t* p, int half, Bytes quads[PARTS][HALF]) const {
    Codes<6>::read(p, half, quads[0]);
    for (int i = 0; i < HALF; ++i)
      for (int part = PARTS - 1; part >= 0; --part) quads[part][i] = lookup64(tables[part], quads[0][i]);
  }
};
#else
// E3M2 in sixteenths: the mantissa with its hidden bit, shifted by the exponent. Sums of 128 products of these
// words and x, half of LARGEST_CHUNK, fit 32 bits. Two bytes for each code would take twice as many products.
struct Float6 {
  static constexpr int PARTS = 2, BYTES = 6 * 64, CENTRE[] = {0}, WEIGHT[] = {1};
  alignas(16) uint8_t powers[16], hidden[16];  // by sign and exponent
  explicit Float6(const Header&) {
    for (int top = 0; top < 16; ++top) {
      const int exponent = top & 7, power = exponent ? 1 << (exponent - 1) : 1;
      powers[top] = uint8_t(top & 8 ? -power : power), hidden[top] = exponent ? 4 : 0;
    }
  }
  INLINE void read(const uint8_t* p, int half, Bytes quads[PARTS][HALF]) const {
    Bytes codes[HALF];
    Loose6::read(p, half, codes);
    for (int i = 0; i < HALF; ++i) {
      const Bytes top = shifted(codes[i], -2) & 15;
      const Bytes mantissa = (codes[i] & 3) | lookup16(hidden, top);
      multiply_bytes(mantissa, lookup16(powers, top), quads[0][i], quads[1][i]);
    }
  }
};
template <>
constexpr bool WORDS<Float6> = true;
#endif

// A table of 16 integers of 8 bits.
struct Bytes4 {
  static constexpr int PARTS = 1, BYTES = 4 * 64, CENTRE[] = {128}, WEIGHT[] = {1};
  alignas(64) uint8_t table[TABLE];
  explicit Bytes4(const Header& header) {
    for (int code = 0; code < TABLE; ++code) table[code] = uint8_t(header.table[code] + CENTRE[0]);
  }
  INLINE void read(const uint8_t* p, int half, Bytes quads[PARTS][HALF]) const {
    Codes<4>::read(p, half, quads[0]);
    for (int i = 0; i < HALF; ++i) quads[0][i] = lookup16(table, quads[0][i]);
  }
};

// A table of 16 integers of 24 bits, in three parts; in two parts they are scaled by DOWN and rounded to 16 bits.
// AVX2 rounds them to 14, as words in the order of their columns, for `dot_long`.
template <int COUNT>
struct Table4 {
  static constexpr bool LONG = COUNT == 2 && LEVEL == LEVEL_avx2;
  static constexpr int PARTS = COUNT, BYTES = 4 * 64;
  static constexpr int CENTRE[] = {0, COUNT == 2 && !LONG ? 128 : 0, LONG ? 0 : 128};
  static constexpr float DOWN = (LONG ? 8191.0f : COUNT == 2 ? 32767.0f : 8388607.0f) / 8388607;
  static constexpr int WEIGHT[] = {1, 256, 65536};
  // Multiplies the parts' sum, which is exact. A factor of each part would make the sum depend on which
  // multiplications a compiler fuses with additions.
  static constexpr float UP = (LONG ? 256 : 1) / DOWN;
  alignas(64) uint8_t tables[PARTS][TABLE];
  explicit Table4(const Header& header) {
    for (int code = 0; code < TABLE; ++code) {
      const float value = float(header.table[code]) * DOWN;
      const int number = int(value + (value < 0 ? -0.5f : 0.5f)) + (LONG ? 0 : 1 << (8 * COUNT - 1));
      for (int part = 0; part < PARTS; ++part) tables[part][code] = uint8_t(number >> (8 * part));
    }
  }
  INLINE void read(const uint8_t* p, int half, Bytes quads[PARTS][HALF]) const {
    Codes<4>::read(p, half, quads[0]);
    for (int i = 0; i < HALF; ++i) {
      for (int part = PARTS - 1; part >= 0; --part)
        quads[part][i] = lookup16(tables[part], quads[0][i]);
#ifdef PAIRS
      if constexpr (LONG) interleave(quads[0][i], quads[1][i]);
#endif
    }
  }
};
template <>
constexpr bool WORDS<Table4<2>> = Table4<2>::LONG;
template <class C>
constexpr bool LONG = requires { requires C::LONG; };

// 2:4 sparse integers: two of every 4 columns are stored, each as a code of 4 bits and a place of 2 bits, which of the
// 4 columns it is. 8 columns have 4 codes, the first two for the first 4 columns. The other columns are unpacked as
// code 8, whose number is 0.
struct Sparse {
  static constexpr int PARTS = 1, BYTES = 3 * 64, CENTRE[] = {8}, WEIGHT[] = {1};
  explicit Sparse(const Header&) {}

  static Bits put(Bits code, Bits place) { return (code ^ 8u) << (place * 8u); }

  INLINE void read(const uint8_t* p, int half, Bytes quads[PARTS][HALF]) const {
    for (int i = 0; i < HALF / 2; ++i) {
      Bits k = (Bits)(shifted(load<Bytes>(p + 64 * half), -4 * i) & 15);
      Bits at = (Bits)(shifted(load<Bytes>(p + 128), -2 * (2 * half + i)) & 3);
      Bits one = put(k & 255u, at & 255u) | put(k >> 8 & 255u, at >> 8 & 255u);
      Bits two = put(k >> 16 & 255u, at >> 16 & 255u) | put(k >> 24, at >> 24);
      quads[0][2 * i] = (Bytes)(one ^ 0x08080808u);
      quads[0][2 * i + 1] = (Bytes)(two ^ 0x08080808u);
    }
  }
};

// E4M3. A normal number's bits are those of a bfloat16 with another bias of the exponent; vectors with subnormal
// numbers are rare, and take `any`. `next` is called with one column's index and its 16 rows after another.
struct Float8 {
  static constexpr int BYTES = UNIT * ROWS;
  explicit Float8(const Header&) {}

  static Bits widened(Bits high_bytes) {
    Words moved = (Words)((SignedWords)high_bytes >> 4) & 0x87f0;
    return (Bits)(moved + 0x3c00);
  }
  static Floats any(Bits code) {
    Bits magnitude = code & 127u;
    Floats small = floats((Ints)magnitude) * 0x1p-9f;
    Bits normal = (Bits)(magnitude > 7u);
    Bits bits = (normal & ((magnitude << 20) + (120u << 23))) | (~normal & (Bits)small);
    return (Floats)(bits | (code & 128u) << 24);
  }

  template <class F>
  static void read(const uint8_t* p, F next) {
    for (int quad = 0; quad < QUADS; ++quad) {
      Bits codes = load<Bits>(p + 64 * quad);
      if (any_zero((Bytes)codes & 0x78)) {
        for (int i = 0; i < 4; ++i) next(4 * quad + i, any(codes >> 8 * i & 255u));
      } else {
        Bits even = widened(codes << 8), odd = widened(codes & 0xff00ff00u);
        next(4 * quad, low_half(even)), next(4 * quad + 1, low_half(odd));
        next(4 * quad + 2, high_half(even)), next(4 * quad + 3, high_half(odd));
      }
    }
  }
};
