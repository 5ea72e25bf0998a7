// A unit's codes, from memory to one byte each: 8 quads of 64. Included in a version's namespace.
// How they share bytes: ops/packing.py's planes, but that a byte of a plane of 4, 2 or 1 bits
// has codes of 2, 4 or 8 quads instead of as many columns, the first quad's in its lowest bits. Of
// 6-bit codes a fourth lies in the high bits of the three others.

template <int BITS>
struct Codes;

template <>
struct Codes<8> {
  static void read(const uint8_t* p, Bytes* quads) {
    for (int i = 0; i < QUADS; ++i) quads[i] = load<Bytes>(p + 64 * i);
  }
};

template <>
struct Codes<4> {
  static void read(const uint8_t* p, Bytes* quads) {
    for (int i = 0; i < 4; ++i) {
      Bytes v = load<Bytes>(p + 64 * i);
      quads[2 * i] = v & 15;
      quads[2 * i + 1] = shifted<-4>(v) & 15;
    }
  }
};

template <>
struct Codes<2> {
  static void read(const uint8_t* p, Bytes* quads) {
    for (int i = 0; i < 2; ++i) {
      Bytes v = load<Bytes>(p + 64 * i);
      quads[4 * i] = v & 3;
      quads[4 * i + 1] = shifted<-2>(v) & 3;
      quads[4 * i + 2] = shifted<-4>(v) & 3;
      quads[4 * i + 3] = shifted<-6>(v) & 3;
    }
  }
};

// The bit of a quad's codes in a plane of single bits, moved to bit TO: others are left around it.
template <int QUAD, int TO>
inline Bytes bit(Bytes plane) {
  return shifted<TO - QUAD>(plane);
}

template <>
struct Codes<1> {
  static void read(const uint8_t* p, Bytes* quads) {
    Bytes v = load<Bytes>(p);
    quads[0] = bit<0, 0>(v) & 1, quads[1] = bit<1, 0>(v) & 1;
    quads[2] = bit<2, 0>(v) & 1, quads[3] = bit<3, 0>(v) & 1;
    quads[4] = bit<4, 0>(v) & 1, quads[5] = bit<5, 0>(v) & 1;
    quads[6] = bit<6, 0>(v) & 1, quads[7] = bit<7, 0>(v) & 1;
  }
};

// Codes of BITS - 1 bits, and behind them a plane of their highest ones.
template <int BITS>
struct WithBit {
  static void read(const uint8_t* p, Bytes* quads) {
    constexpr int LOW = BITS - 1;
    constexpr uint8_t MASK = (1 << LOW) - 1, ALL = (1 << BITS) - 1;
    Codes<LOW>::read(p, quads);
    Bytes v = load<Bytes>(p + 64 * LOW);
    quads[0] = merged(MASK, quads[0], bit<0, LOW>(v)) & ALL;
    quads[1] = merged(MASK, quads[1], bit<1, LOW>(v)) & ALL;
    quads[2] = merged(MASK, quads[2], bit<2, LOW>(v)) & ALL;
    quads[3] = merged(MASK, quads[3], bit<3, LOW>(v)) & ALL;
    quads[4] = merged(MASK, quads[4], bit<4, LOW>(v)) & ALL;
    quads[5] = merged(MASK, quads[5], bit<5, LOW>(v)) & ALL;
    quads[6] = merged(MASK, quads[6], bit<6, LOW>(v)) & ALL;
    quads[7] = merged(MASK, quads[7], bit<7, LOW>(v)) & ALL;
  }
};
template <>
struct Codes<3> : WithBit<3> {};
template <>
struct Codes<5> : WithBit<5> {};
template <>
struct Codes<7> : WithBit<7> {};

// With anything in the two high bits.
struct Loose6 {
  static void read(const uint8_t* p, Bytes* quads) {
    for (int i = 0; i < 2; ++i) {
      Bytes a = load<Bytes>(p + 192 * i), b = load<Bytes>(p + 192 * i + 64),
            c = load<Bytes>(p + 192 * i + 128);
      quads[4 * i] = a, quads[4 * i + 1] = b, quads[4 * i + 2] = c;
      quads[4 * i + 3] =
          merged(15, merged(3, shifted<-6>(a), shifted<-4>(b)), shifted<-2>(c));
    }
  }
};

template <>
struct Codes<6> {
  static void read(const uint8_t* p, Bytes* quads) {
    Loose6::read(p, quads);
    for (int i = 0; i < QUADS; ++i) quads[i] &= 63;
  }
};

// What the inner loop multiplies by: `PARTS` bytes for each code, whose sum, each less its centre
// and times its weight, is the code's value.
template <int BITS>
struct Integer {
  static constexpr int PARTS = 1, BYTES = BITS * 64, CENTRE[] = {1 << (BITS - 1)};
  static constexpr int WEIGHT[] = {1};
  explicit Integer(const Header&) {}
  void read(const uint8_t* p, Bytes quads[PARTS][QUADS]) const { Codes<BITS>::read(p, quads[0]); }
};

// E3M2 in sixteenths.
struct Float6 {
  static constexpr int PARTS = 2, BYTES = 6 * 64, CENTRE[] = {0, 112}, WEIGHT[] = {1, 4};
  alignas(64) uint8_t tables[2][64];
  explicit Float6(const Header&) {
    for (int code = 0; code < 64; ++code) {
      int exponent = code >> 2 & 7, mantissa = code & 3;
      int sixteenths = exponent ? (4 + mantissa) << (exponent - 1) : mantissa;
      int value = (code & 32 ? -sixteenths : sixteenths) + 4 * CENTRE[1];
      tables[0][code] = value & 3, tables[1][code] = value >> 2;
    }
  }
  void read(const uint8_t* p, Bytes quads[PARTS][QUADS]) const {
    Loose6::read(p, quads[0]);
    for (int i = 0; i < QUADS; ++i) {
      quads[1][i] = lookup64(tables[1], quads[0][i]);
      quads[0][i] = lookup64(tables[0], quads[0][i]);
    }
  }
};

// E2M1 in halves.
struct Float4 {
  static constexpr int PARTS = 1, BYTES = 4 * 64, CENTRE[] = {12}, WEIGHT[] = {1};
  alignas(64) uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  explicit Float4(const Header&) {}
  void read(const uint8_t* p, Bytes quads[PARTS][QUADS]) const {
    Codes<4>::read(p, quads[0]);
    for (int i = 0; i < QUADS; ++i) quads[0][i] = lookup16(table, quads[0][i]);
  }
};

// Any 16 numbers, as integers of 24 bits.
struct Table4 {
  static constexpr int PARTS = 3, BYTES = 4 * 64, CENTRE[] = {0, 0, 128};
  static constexpr int WEIGHT[] = {1, 1 << 8, 1 << 16};
  alignas(64) uint8_t tables[PARTS][TABLE];
  explicit Table4(const Header& header) {
    for (int code = 0; code < TABLE; ++code)
      for (int part = 0; part < PARTS; ++part)
        tables[part][code] = uint8_t((header.table[code] + (1 << 23)) >> (8 * part));
  }
  void read(const uint8_t* p, Bytes quads[PARTS][QUADS]) const {
    Codes<4>::read(p, quads[0]);
    for (int i = 0; i < QUADS; ++i)
      for (int part = PARTS - 1; part >= 0; --part)
        quads[part][i] = lookup16(tables[part], quads[0][i]);
  }
};

// Of every 4 columns two: for each 8 columns 4 codes, 2 for the first 4 columns, and in the same
// order 4 places of 2 bits. Here made dense, with 8, which means 0, where nothing is stored.
struct Sparse {
  static constexpr int PARTS = 1, BYTES = 3 * 64, CENTRE[] = {8}, WEIGHT[] = {1};
  explicit Sparse(const Header&) {}

  static void read_kept(const uint8_t* p, Bytes* codes, Bytes* places) {
    for (int i = 0; i < 2; ++i) {
      Bytes v = load<Bytes>(p + 64 * i);
      codes[2 * i] = v & 15;
      codes[2 * i + 1] = shifted<-4>(v) & 15;
    }
    Bytes v = load<Bytes>(p + 128);
    places[0] = v & 3, places[1] = shifted<-2>(v) & 3;
    places[2] = shifted<-4>(v) & 3, places[3] = shifted<-6>(v) & 3;
  }

  static Bits put(Bits code, Bits place) { return (code ^ 8u) << (place * 8u); }

  void read(const uint8_t* p, Bytes quads[PARTS][QUADS]) const {
    Bytes kept[4], places[4];
    read_kept(p, kept, places);
    for (int i = 0; i < 4; ++i) {
      Bits k = (Bits)kept[i], at = (Bits)places[i];
      Bits one = put(k & 255u, at & 255u) | put(k >> 8 & 255u, at >> 8 & 255u);
      Bits two = put(k >> 16 & 255u, at >> 16 & 255u) | put(k >> 24, at >> 24);
      quads[0][2 * i] = (Bytes)(one ^ 0x08080808u);
      quads[0][2 * i + 1] = (Bytes)(two ^ 0x08080808u);
    }
  }
};
