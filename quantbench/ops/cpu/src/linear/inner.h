// All of linear layers' inner loops but the loops themselves. Included in a variant's namespace.

#include "vector/wide.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#if LEVEL != LEVEL_portable
#include "linear/few/sparse.h"
#else
// 2:4 sparse products like any others, on weights made dense.
template <class C, int T, bool FINE>
using SparseChunk = IntegerChunk<C, T, FINE>;
#endif
#include "linear/activations.h"
#include "linear/results.h"
