// A vector of 64 bytes as two of 32, and with NEON these as two of 16, for vector/wide.h: GCC cuts vectors that
// are wider than the registers, too, but keeps them in memory between one operation and the next.
#define HALVES

constexpr int REGISTER = LEVEL > LEVEL_portable ? 32 : 16;  // bytes

template <class T, int BYTES>
struct Halves;
template <class T, int BYTES>
struct PieceOf {
  using Type = Halves<T, BYTES>;
};
template <class T, int BYTES>
  requires(BYTES <= REGISTER)
struct PieceOf<T, BYTES> {
  typedef T Type __attribute__((vector_size(BYTES)));
};
template <class T, int BYTES>
using Piece = typename PieceOf<T, BYTES>::Type;

template <class T, int BYTES>
struct Halves {
  using Half = Piece<T, BYTES / 2>;
  using Mask = Halves<std::conditional_t<sizeof(T) == 4, int32_t,
                                         std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>, BYTES>;
  Half a, b;

  template <class U>
  explicit INLINE operator Halves<U, BYTES>() const {
    using Other = Piece<U, BYTES / 2>;
    return {(Other)a, (Other)b};
  }
  T operator[](int i) const {
    constexpr int EACH = BYTES / 2 / sizeof(T);
    return i < EACH ? a[i] : b[i - EACH];
  }

  friend INLINE Halves operator-(Halves x) { return {-x.a, -x.b}; }
  friend INLINE Halves operator~(Halves x) { return {~x.a, ~x.b}; }

#define BINARY(op)                                                                            \
  friend INLINE Halves operator op(Halves x, Halves y) { return {x.a op y.a, x.b op y.b}; } \
  friend INLINE Halves operator op(Halves x, T y) { return {x.a op y, x.b op y}; }          \
  template <class Y>                                                                        \
  INLINE Halves& operator op##=(Y y) { return *this = *this op y; }
  BINARY(+) BINARY(-) BINARY(*) BINARY(/) BINARY(&) BINARY(|) BINARY(^) BINARY(<<) BINARY(>>)
#undef BINARY
#define COMPARISON(op)                                                                      \
  friend INLINE Mask operator op(Halves x, Halves y) { return {x.a op y.a, x.b op y.b}; } \
  friend INLINE Mask operator op(Halves x, T y) { return {x.a op y, x.b op y}; }
  COMPARISON(<) COMPARISON(>) COMPARISON(!=)
#undef COMPARISON
};

template <class V>
constexpr bool IN_HALVES = false;
template <class T, int BYTES>
constexpr bool IN_HALVES<Halves<T, BYTES>> = true;

template <class V>
INLINE V load(const void* p) {
  if constexpr (IN_HALVES<V>) {
    using Half = typename V::Half;
    return {load<Half>(p), load<Half>(static_cast<const char*>(p) + sizeof(Half))};
  } else {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
}

template <class V>
INLINE void store(void* p, V v) {
  if constexpr (IN_HALVES<V>) store(p, v.a), store(static_cast<char*>(p) + sizeof v.a, v.b);
  else __builtin_memcpy(p, &v, sizeof v);
}

template <class Mask, class V>
INLINE V select(Mask mask, V x, V y) {
  if constexpr (IN_HALVES<V>) return {select(mask.a, x.a, y.a), select(mask.b, x.b, y.b)};
  else return mask ? x : y;
}

// What `f` makes of each register.
template <class V, class F, class... From>
INLINE V by_register(F f, From... v) {
  if constexpr (IN_HALVES<V>) return {by_register<typename V::Half>(f, v.a...), by_register<typename V::Half>(f, v.b...)};
  else return (V)f(v...);
}

// Two vectors side by side, as one.
template <class V, class Half>
INLINE V beside(Half a, Half b) {
  Half both[] = {a, b};
  return load<V>(both);
}

// Converts each number: to a type of the same size, from 8 to 16 bits, from 16 to 32, or from 32 to 16.
template <class V, class From>
INLINE V converted(From v) {
  if constexpr (IN_HALVES<V> && IN_HALVES<From>) {
    return {converted<typename V::Half>(v.a), converted<typename V::Half>(v.b)};
  } else if constexpr (IN_HALVES<V>) {
    typedef std::remove_cvref_t<decltype(v[0])> Half __attribute__((vector_size(sizeof v / 2)));
    Half halves[2];
    __builtin_memcpy(halves, &v, sizeof v);
    return {converted<typename V::Half>(halves[0]), converted<typename V::Half>(halves[1])};
  } else if constexpr (IN_HALVES<From>) {
    typedef uint16_t Half __attribute__((vector_size(sizeof(V) / 2)));
    return beside<V>(converted<Half>(v.a), converted<Half>(v.b));
  } else {
    return __builtin_convertvector(v, V);
  }
}
