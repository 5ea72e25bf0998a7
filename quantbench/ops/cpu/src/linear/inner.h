// All of linear layers' inner loops but the loops themselves. Included in a variant's namespace.

#include "vector/wide.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#if LEVEL >= LEVEL_avx512vnni
#include "linear/few/sparse_vnni.h"
#else
// 2:4 sparse products like any others, on weights made dense.
template <class C, int T, bool FINE>
using SparseChunk = IntegerChunk<C, T, FINE>;

// Some units of x, for one token of a tile.
inline void arrange(const Header&, const int16_t* x, int units, int tile, int32_t* to) {
  for (int q = 0; q < units * QUADS; ++q) arrange_quad(x + 4 * q, to + 2 * q * tile);
}
#endif
#include "linear/activations.h"
#include "linear/results.h"
