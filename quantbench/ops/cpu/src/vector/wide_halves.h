// A vector of 64 bytes as two of 32, for vector/wide.h: GCC cuts vectors that are wider than the registers,
// too, but keeps them in memory between one operation and the next.
#define HALVES

template <class T>
struct Halves {
  typedef T Half __attribute__((vector_size(32)));
  using Mask = Halves<std::conditional_t<sizeof(T) == 4, int32_t,
                                        std::conditional_t<sizeof(T) == 2, int16_t, int8_t>>>;
  Half a, b;

  template <class U>
  explicit operator Halves<U>() const {
    typedef typename Halves<U>::Half Other;
    return {(Other)a, (Other)b};
  }
  T operator[](int i) const {
    constexpr int EACH = 32 / sizeof(T);
    return i < EACH ? a[i] : b[i - EACH];
  }

  friend Halves operator-(Halves x) { return {-x.a, -x.b}; }
  friend Halves operator~(Halves x) { return {~x.a, ~x.b}; }

#define BINARY(op)                                                                     \
  friend Halves operator op(Halves x, Halves y) { return {x.a op y.a, x.b op y.b}; } \
  friend Halves operator op(Halves x, T y) { return {x.a op y, x.b op y}; }          \
  template <class Y>                                                                 \
  Halves& operator op##=(Y y) { return *this = *this op y; }
  BINARY(+) BINARY(-) BINARY(*) BINARY(/) BINARY(&) BINARY(|) BINARY(^) BINARY(<<) BINARY(>>)
#undef BINARY
#define COMPARISON(op)                                                               \
  friend Mask operator op(Halves x, Halves y) { return {x.a op y.a, x.b op y.b}; } \
  friend Mask operator op(Halves x, T y) { return {x.a op y, x.b op y}; }
  COMPARISON(<) COMPARISON(>) COMPARISON(!=)
#undef COMPARISON
};

template <class V>
constexpr bool IN_HALVES = false;
template <class T>
constexpr bool IN_HALVES<Halves<T>> = true;

template <class V>
inline V load(const void* p) {
  V v;
  if constexpr (IN_HALVES<V>) {
    __builtin_memcpy(&v.a, p, 32);
    __builtin_memcpy(&v.b, static_cast<const char*>(p) + 32, 32);
  } else {
    __builtin_memcpy(&v, p, sizeof v);
  }
  return v;
}

template <class V>
inline void store(void* p, V v) {
  if constexpr (IN_HALVES<V>) {
    __builtin_memcpy(p, &v.a, 32);
    __builtin_memcpy(static_cast<char*>(p) + 32, &v.b, 32);
  } else {
    __builtin_memcpy(p, &v, sizeof v);
  }
}

template <class T>
inline Halves<T> select(typename Halves<T>::Mask mask, Halves<T> x, Halves<T> y) {
  return {mask.a ? x.a : y.a, mask.b ? x.b : y.b};
}

// Converts each number: to a type of the same size, from 16 to 32 bits, or from 32 to 16 bits.
template <class V, class From>
inline V converted(From v) {
  typedef uint16_t EightWords __attribute__((vector_size(16)));
  if constexpr (IN_HALVES<V> && IN_HALVES<From>) {
    return {__builtin_convertvector(v.a, typename V::Half),
            __builtin_convertvector(v.b, typename V::Half)};
  } else if constexpr (IN_HALVES<V>) {
    EightWords words[2];
    __builtin_memcpy(words, &v, 32);
    return {__builtin_convertvector(words[0], typename V::Half),
            __builtin_convertvector(words[1], typename V::Half)};
  } else {
    EightWords words[2] = {__builtin_convertvector(v.a, EightWords),
                           __builtin_convertvector(v.b, EightWords)};
    V joined;
    __builtin_memcpy(&joined, words, 32);
    return joined;
  }
}
