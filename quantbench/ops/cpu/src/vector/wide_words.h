// For instruction sets that multiply 16-bit integers, but no bytes. Included after vector/wide.h and `dot_words`.

// A quad of weights, 4 unsigned codes for each of 16 rows, times x: four 16-bit integers, the first
// and third, then the second and fourth. The sum is spread over both accumulators.
inline void dot(Ints& a, Ints& b, Bytes codes, const int32_t* x) {
  dot_words(a, b, (Bytes)((Words)codes & 255), (Bytes)((Words)codes >> 8), x);
}

// The sum of both accumulators of `dot`.
inline Ints dotted(Ints a, Ints b) { return a + b; }
