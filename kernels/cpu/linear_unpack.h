// Blocks of a packed weight as plain numbers, transposed: for products of many tokens, which another
// library does. Included in a version's namespace, after linear_run.h.

// 16 rows' numbers of one column, from what they are before scales.
struct Unpacked {
  const Problem& problem;
  Floats scale, zero;
  char* to;
  int64_t column_bytes;
  int64_t left;  // columns that are no padding

  void put(int64_t column, Floats value) {
    if (column >= left) return;
    Floats v = (value * scale + zero) * problem.header->factor;
    char* at = to + column * column_bytes;
    if (problem.type == Number::f32) return store(at, v);
    store(at, problem.type == Number::bf16 ? as_bf16(v) : as_f16(v));
  }
};

template <class C>
void unpack_unit(const C& codes, const uint8_t* p, Unpacked& into, const uint8_t*& scales) {
  const Header& header = *into.problem.header;
  Bytes read[C::PARTS][QUADS];
  codes.read(p, read);
  for (int quad = 0; quad < QUADS; ++quad) {
    if (header.scale_columns < UNIT && quad * 4 % header.scale_columns == 0) {
      ScaleAndZero by = read_scale(header, scales);
      into.scale = by.scale, into.zero = by.zero;
    }
    for (int j = 0; j < 4; ++j) {
      Floats value{};
      for (int part = 0; part < C::PARTS; ++part) {
        Ints code = (Ints)((Bits)read[part][quad] >> (8 * j) & 255u) - C::CENTRE[part];
        value += floats(code) * float(C::WEIGHT[part]);
      }
      into.put(4 * quad + j, value);
    }
  }
}

template <class C>
struct FloatCodes {
  static constexpr int BYTES = C::BYTES;
  explicit FloatCodes(const Header&) {}
};

template <class C>
void unpack_unit(const FloatCodes<C>&, const uint8_t* p, Unpacked& into, const uint8_t*&) {
  C::read(p, [&](int column, Floats one, Floats other) {
    into.put(column, one);
    into.put(column + 1, other);
  });
}

template <class C>
void unpack_block(const Problem& problem, int64_t block) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const C codes(header);
  const int size = problem.type == Number::f32 ? 4 : 2;
  const int64_t row = block * ROWS - problem.x_row, width = problem.outputs;
  Unpacked into{problem, all(1.0f), Floats{}, static_cast<char*>(problem.y) + row * size,
                width * size, header.columns};
  const uint8_t* p = problem.blocks + block * g.block_bytes;
  if (header.scales == Scales::row)
    into.scale = load<Floats>(p + g.padded_columns() / UNIT * C::BYTES);
  for (int64_t chunk = 0; chunk < g.chunks; ++chunk) {
    const uint8_t* scales = p;
    if (header.scales != Scales::row && header.scale_columns >= UNIT) {
      ScaleAndZero by = read_scale(header, scales);
      into.scale = by.scale, into.zero = by.zero;
    }
    p += g.scale_bytes;
    const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
    for (int unit = 0; unit < units; ++unit, p += C::BYTES) {
      unpack_unit(codes, p, into, scales);
      into.to += UNIT * into.column_bytes;
      into.left -= UNIT;
    }
  }
}

typedef void (*Unpack)(const Problem&, int64_t);

inline Unpack unpacker(const Header& header) {
  switch (header.coding) {
    case Coding::fp6: return unpack_block<Float6>;
    case Coding::fp4: return unpack_block<Float4>;
    case Coding::table: return unpack_block<Table4>;
    case Coding::fp8: return unpack_block<FloatCodes<Float8>>;
    case Coding::bf16: return unpack_block<FloatCodes<BFloat16>>;
    case Coding::f16: return unpack_block<FloatCodes<Float16>>;
    case Coding::f32: return unpack_block<FloatCodes<Float32>>;
    case Coding::sparse: return unpack_block<Sparse>;
    case Coding::integer: break;
  }
  switch (header.bits) {
    case 1: return unpack_block<Integer<1>>;
    case 2: return unpack_block<Integer<2>>;
    case 3: return unpack_block<Integer<3>>;
    case 4: return unpack_block<Integer<4>>;
    case 5: return unpack_block<Integer<5>>;
    case 6: return unpack_block<Integer<6>>;
    case 7: return unpack_block<Integer<7>>;
    default: return unpack_block<Integer<8>>;
  }
}

inline void unpack(const Problem& problem, int64_t first, int64_t last) {
  const Unpack one = unpacker(*problem.header);
  for (int64_t block = first; block < last; ++block) one(problem, block);
}
