// What both kinds of AMX attention share, with attention/blocks.h. Included in the namespace of
// attention/amx.cpp. A tile has up to ROWS rows of 64 bytes.
//
// A block's keys times the queries are one product, (slots, head_dim) by (head_dim, heads), and the
// weights times its values another, (heads, slots) by (slots, head_dim). Scales are applied in
// float32, to the scores and to the weights.

constexpr int MAX_HEADS = 2 * QUAD;  // at a time: with both parts of a weight, 16 rows
constexpr int MAX_COLUMNS = 16;      // of a product of keys and queries

// Which tile register holds what; `configure` sets their shapes. Macros, because GCC pastes the text
// into the instruction.
#define SCORES_A 0  // (16, columns) of 4 bytes
#define SCORES_B 1
#define QUERY 2
#define CACHE 3    // (16, 64 bytes): keys, or values
#define WEIGHTS 4  // (2 · heads, 64 bytes)
#define OUT_EVEN 5
#define OUT_ODD 6

void configure(int columns, int heads) {
  TileShapes shapes;
  for (int tile = SCORES_A; tile <= QUERY; ++tile) shapes.set(tile, ROWS, columns * 4);
  shapes.set(CACHE, ROWS, 64);
  for (int tile = WEIGHTS; tile <= OUT_ODD; ++tile) shapes.set(tile, 2 * heads, 64);
  configure(shapes);
}

// Four columns of 16 rows, each as a vector. four[j] has rows 4j to 4j + 3.
inline void transpose(const Vector four[4], Vector out[QUAD]) {
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512d low[2], high[2];
  for (int i = 0; i < 2; ++i) {
    low[i] = _mm512_castps_pd(_mm512_unpacklo_ps(four[2 * i], four[2 * i + 1]));
    high[i] = _mm512_castps_pd(_mm512_unpackhi_ps(four[2 * i], four[2 * i + 1]));
  }
  const __m512d column[QUAD] = {
      _mm512_unpacklo_pd(low[0], low[1]), _mm512_unpackhi_pd(low[0], low[1]),
      _mm512_unpacklo_pd(high[0], high[1]), _mm512_unpackhi_pd(high[0], high[1])};
  for (int c = 0; c < QUAD; ++c)
    out[c] = _mm512_permutexvar_ps(in_order, _mm512_castpd_ps(column[c]));
}
