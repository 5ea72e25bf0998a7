// 2:4 sparse products like any others, on weights made dense. Included in a variant's namespace.

template <class C, int T, bool FINE>
using SparseChunk = IntegerChunk<C, T, FINE>;

// Some units of x, for one token of a tile.
inline void arrange(const Header&, const int16_t* x, int units, int tile, int32_t* to) {
  for (int q = 0; q < units * QUADS; ++q) arrange_quad(x + 4 * q, to + 2 * q * tile);
}
