// All of linear layers' inner loops but the loops themselves. Included in a variant's namespace.

#include "vector/wide.h"

#include "linear/codes.h"
#include "linear/formats.h"
#include "linear/few/loop.h"
#if LEVEL >= LEVEL_avx512vnni
#include "linear/few/sparse_vnni.h"
#else
#include "linear/few/sparse.h"
#endif
#include "linear/activations.h"
#include "linear/results.h"
