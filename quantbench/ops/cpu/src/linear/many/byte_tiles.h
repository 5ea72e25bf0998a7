// Products of a few tokens (5 to 16) in tiles of bytes. Weights' codes are only unpacked to bytes:
// there are too few products to pay for a conversion to bfloat16. x is integers of 16 bits, in units
// of a power of two for each chunk, as for linear/few/loop.h; here their high and their low bytes are
// two tiles. Included in the namespace of linear/many/amx.cpp, after linear/many/bf16_tiles.h.

// Which tile register holds what. Macros, because GCC pastes the text into the instruction.
#define HIGH_SUMS 0
#define LOW_SUMS 1
#define HIGH_X 2
#define LOW_X 3
#define BYTES_OF_WEIGHTS 4

// Where x is: tiles of TOKENS tokens, for each of them (columns / width, 2, TOKENS, width) bytes, then
// (chunks, TOKENS) scales and (chunks, TOKENS) sums of integers.
struct ByteTiles {
  static constexpr int BYTES = 3;  // for each number: a scale and a sum have at least UNIT of them
  int8_t* x;
  int width;  // columns of a tile of bytes
  int64_t columns, chunks;

  ByteTiles(const Geometry& g, void* x)
      : x(static_cast<int8_t*>(x)), width(g.units % 2 ? UNIT : 2 * UNIT),
        columns(g.padded_columns), chunks(g.chunks) {}

  int8_t* bytes(int64_t tile) const { return x + tile * TOKENS * columns * BYTES; }
  float* scales(int64_t tile) const {
    return reinterpret_cast<float*>(bytes(tile) + TOKENS * columns * 2);
  }
  int32_t* sums(int64_t tile) const {
    return reinterpret_cast<int32_t*>(scales(tile) + TOKENS * chunks);
  }
};

// 16 integers of 16 bits as signed bytes: 256 times the high byte plus the low byte is the number.
inline void put_bytes(const int16_t* x, int8_t* high, int8_t* low) {
  const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  const __m512i highs = _mm512_srai_epi32(_mm512_add_epi32(wide, _mm512_set1_epi32(128)), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(highs));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(wide));
}

inline void prepare_token(const Problem& problem, int64_t token) {
  const Geometry& g = problem.geometry;
  const ByteTiles to(g, problem.tiles);
  const int64_t tile = token / TOKENS, t = token % TOKENS;
  int8_t* bytes = to.bytes(tile) + t * to.width;
  float* scales = to.scales(tile) + t;
  int32_t* sums = to.sums(tile) + t;
  const bool there = token < problem.outputs, rounded = problem.header->rounding != Rounding::none;
  float* row = problem.row;
  if (there) read_row(problem, token);
  else __builtin_memset(row, 0, to.columns * sizeof(float));
  if (there && rounded)
    problem.token_scales[token] = round_row(problem.header->rounding, row, to.columns);
  for (int64_t chunk = 0; chunk < g.chunks; ++chunk, scales += TOKENS, sums += TOKENS) {
    const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
    alignas(64) int16_t integers[LARGEST_CHUNK];
    *scales = rounded ? 1.0f : power(largest(row, units));
    to_integers(row, units, *scales, integers);
    int32_t sum = 0;
    for (int k = 0; k < units * UNIT; ++k) sum += integers[k];
    *sums = sum;
    for (int k = 0; k < units * UNIT; k += to.width, bytes += 2 * TOKENS * to.width)
      for (int i = 0; i < to.width; i += 16)
        put_bytes(integers + k + i, bytes + i, bytes + TOKENS * to.width + i);
    row += units * UNIT;
  }
}

void prepare_bytes(const Problem& problem, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) prepare_token(problem, token);
}

inline void configure_bytes(int tokens, int width) {
  TileShapes shapes;
  shapes.set(HIGH_SUMS, tokens, 64), shapes.set(LOW_SUMS, tokens, 64);
  shapes.set(HIGH_X, tokens, width), shapes.set(LOW_X, tokens, width);
  shapes.set(BYTES_OF_WEIGHTS, width / 4, 64);
  configure(shapes);
}

// Some units' codes as bytes: where they are then.
template <class C>
struct AsBytes {
  const C codes;
  explicit AsBytes(const Header& header) : codes(header) {}
  INLINE const uint8_t* operator()(const uint8_t* p, int units, uint8_t* to) const {
    for (int unit = 0; unit < units; ++unit, p += C::BYTES, to += UNIT * ROWS) {
      for (int line = 0; line < C::BYTES; line += 64) __builtin_prefetch(p + PREFETCHED + line);
      for (int half = 0; half < 2; ++half) {
        Bytes read[1][HALF];
        codes.read(p, half, read);
        for (int q = 0; q < HALF; ++q) store(to + 64 * (HALF * half + q), read[0][q]);
      }
    }
    return to - units * UNIT * ROWS;
  }
};
template <>
struct AsBytes<Integer<8>> {
  explicit AsBytes(const Header&) {}
  INLINE const uint8_t* operator()(const uint8_t* p, int units, uint8_t*) const {
    for (int line = 0; line < units * UNIT * ROWS; line += 64)
      __builtin_prefetch(p + PREFETCHED + line);
    return p;
  }
};

// One block times one tile of x.
template <class C>
void block_of_bytes(const Problem& problem, const ByteTiles& from, int64_t tile, int tokens,
                    int64_t block) {
  const Header& header = *problem.header;
  const Geometry& g = problem.geometry;
  const int8_t* x_bytes = from.bytes(tile);
  const float* x_scales = from.scales(tile);
  const int32_t* x_sums = from.sums(tile);
  const AsBytes<C> as_bytes(header);
  const int tile_bytes = TOKENS * from.width;
  alignas(64) uint8_t unpacked[2][LARGEST_CHUNK * ROWS];
  alignas(64) int32_t sums[2][2][TOKENS * ROWS];
  Floats totals[TOKENS] = {};
  ask_for_results(problem, tile * TOKENS, tile * TOKENS + tokens, block);
  const uint8_t* start = problem.blocks + block * g.block_bytes;
  const uint8_t* p = start + g.head_bytes;
  for (int64_t chunk = 0; chunk < g.chunks; ++chunk, x_scales += TOKENS, x_sums += TOKENS) {
    const int units = chunk + 1 < g.chunks ? g.units : g.last_units;
    const uint8_t* scales = p;
    const ScaleAndZero by = read_scale(header, scales, read_outer(header, outer_at(g, start, chunk * g.units)));
    p += g.scale_bytes;
    const uint8_t* weights = as_bytes(p, units, unpacked[chunk % 2]);
    p += units * g.unit_bytes;
    compiler_barrier();
    _tile_zero(HIGH_SUMS);
    _tile_zero(LOW_SUMS);
    for (int k = 0; k < units * UNIT; k += from.width, x_bytes += 2 * tile_bytes) {
      _tile_loadd(BYTES_OF_WEIGHTS, weights + k * ROWS, 64);
      _tile_loadd(HIGH_X, x_bytes, from.width);
      _tile_dpbsud(HIGH_SUMS, HIGH_X, BYTES_OF_WEIGHTS);
      _tile_loadd(LOW_X, x_bytes + tile_bytes, from.width);
      _tile_dpbsud(LOW_SUMS, LOW_X, BYTES_OF_WEIGHTS);
    }
    int32_t* high = sums[chunk % 2][0];
    int32_t* low = sums[chunk % 2][1];
    _tile_stored(HIGH_SUMS, high, 64);
    _tile_stored(LOW_SUMS, low, 64);
    compiler_barrier();
    for (int t = 0; t < tokens; ++t) {
      const Ints whole = (load<Ints>(high + t * ROWS) << 8) + load<Ints>(low + t * ROWS);
      const Floats sum = floats(whole - centre_of<C>(header, 0) * x_sums[t]);
      Floats total = totals[t] + sum * (by.scale * x_scales[t]);
      if (header.zeros) total += by.zero * (x_sums[t] * x_scales[t]);
      totals[t] = total;
    }
  }
  const Floats scales = row_scales(problem, block) * header.factor;
  for (int t = 0; t < tokens; ++t) put_rows(problem, totals[t] * scales, tile * TOKENS + t, block);
}

#undef HIGH_SUMS
#undef LOW_SUMS
#undef HIGH_X
#undef LOW_X
#undef BYTES_OF_WEIGHTS

typedef void (*BlockOfBytes)(const Problem&, const ByteTiles&, int64_t, int, int64_t);

// Null for formats that take more than a byte for a code.
inline BlockOfBytes block_of_bytes(const Header& header) {
  return with_format(header, []<class C>(Format<C>) -> BlockOfBytes {
    if constexpr (requires { requires C::PARTS == 1; }) return block_of_bytes<C>;
    return nullptr;
  });
}

void multiply_bytes(const Problem& problem, int64_t first, int64_t last) {
  const ByteTiles from(problem.geometry, problem.tiles);
  const BlockOfBytes one = block_of_bytes(*problem.header);
  for (int64_t tile = 0; tile * TOKENS < problem.outputs; ++tile) {
    const int64_t left = problem.outputs - tile * TOKENS;
    const int tokens = left < TOKENS ? int(left) : TOKENS;
    configure_bytes(tokens, from.width);
    for (int64_t block = first; block < last; ++block)
      one(problem, from, tile, tokens, block);
  }
  _tile_release();
}
