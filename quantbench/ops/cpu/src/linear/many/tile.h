// A tile of products in registers, the inner step of both loops of many tokens: T numbers of x, each in all lanes, by V
// vectors of weights. Included in a variant's namespace.

template <int T, int V, class Vector, class Plus>
INLINE void add_tile(Vector (&products)[T][V], const Vector (&w)[V], Plus plus) {
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) products[t][v] = plus(products[t][v], w[v], t);
}

// The step alone, on numbers x that are at hand; returns a number that depends on all products.
template <int T, int V, class Vector, class X, class Plus>
INLINE int64_t spin_tile(int64_t rounds, X x, Plus plus) {
  Vector products[T][V] = {}, w[V] = {};
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : : "r"(x), "r"(&w) : "memory");  // whose products are not known before
    add_tile(products, w, plus);
  }
  Vector sum{};
  for (auto& of_token : products)
    for (Vector& product : of_token) sum += product;
  return int64_t(sum[0]);
}
