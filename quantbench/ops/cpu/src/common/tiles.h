// AMX's tile registers: their shapes, and what the compiler does not know about them. Included in
// the namespace of an amx.cpp, after <immintrin.h>.

// As the instruction reads it: 8 tiles of up to 16 rows of up to 64 bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count, int bytes) {
    rows[tile] = uint8_t(count), row_bytes[tile] = uint16_t(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64);

inline void configure(const TileShapes& shapes) {
  // GCC 12's intrinsic says that it reads 8 of the 64 bytes, so that stores to the others may be
  // dropped. This says that all of them are read.
  asm volatile("" : : "m"(shapes));
  _tile_loadconfig(&shapes);
}

// The compiler does not know what tiles read from memory and write to it: no access moves across.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// 16 vectors of 4-byte lanes: rows become columns.
inline void transpose(__m512i v[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      b[i + 2 * half] = _mm512_unpacklo_epi64(a[i + half], a[i + 2 + half]);
      b[i + 2 * half + 1] = _mm512_unpackhi_epi64(a[i + half], a[i + 2 + half]);
    }
  // b[4 i + c] has column c of each group of four, of rows 4 i to 4 i + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i p = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88);
    const __m512i q = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
    const __m512i r = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    const __m512i s = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    v[c] = _mm512_shuffle_i32x4(p, q, 0x88), v[8 + c] = _mm512_shuffle_i32x4(p, q, 0xdd);
    v[4 + c] = _mm512_shuffle_i32x4(r, s, 0x88), v[12 + c] = _mm512_shuffle_i32x4(r, s, 0xdd);
  }
}
