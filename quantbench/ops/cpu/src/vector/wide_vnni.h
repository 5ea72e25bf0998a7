// VNNI, in registers of 32 or 64 bytes. Included after `add_bytes` and `add_words`.

using ByteSums = Ints;
inline Ints total(Ints sum, Ints more) { return sum + more; }

// A quad of unsigned codes times x: the high bytes of four 16-bit integers, then the low ones, signed both.
inline void dot(Ints& high, Ints& low, Bytes codes, const int32_t* x) {
  high = add_bytes(high, codes, (Bytes)all(x[0])), low = add_bytes(low, codes, (Bytes)all(x[1]));
}
inline Ints dotted(Ints high, Ints low) { return (high << 8) + low; }

// A quad of words times x: four 16-bit integers, the first and third, then the second and fourth.
inline void dot_words(Ints& a, Ints& b, Bytes even, Bytes odd, const int32_t* x) {
  a = add_words(a, even, (Bytes)all(x[0])), b = add_words(b, odd, (Bytes)all(x[1]));
}
