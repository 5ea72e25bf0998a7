// AMX's instructions in C++, for processors without them: included before every source by make test-amx. As Intel's
// manual describes them (Architecture Instruction Set Extensions, chapter 3), but for denormals, which they
// take for zero.
#pragma once

#if defined(__AMX_TILE__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace amx_tiles {

struct Tile {
  int rows, bytes;
  alignas(64) uint8_t data[16][64];
};
inline thread_local Tile tiles[8];

inline void configure(const void* from) {
  const uint8_t* shapes = static_cast<const uint8_t*>(from);
  for (int i = 0; i < 8; ++i) {
    tiles[i].bytes = shapes[16 + 2 * i] + 256 * shapes[17 + 2 * i];
    tiles[i].rows = shapes[48 + i];
  }
}
inline void zero(int i) { std::memset(tiles[i].data, 0, sizeof tiles[i].data); }
inline void load(int i, const void* from, int64_t step) {
  zero(i);
  for (int row = 0; row < tiles[i].rows; ++row)
    std::memcpy(tiles[i].data[row], static_cast<const char*>(from) + row * step, tiles[i].bytes);
}
inline void store(int i, void* to, int64_t step) {
  for (int row = 0; row < tiles[i].rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * step, tiles[i].data[row], tiles[i].bytes);
}

inline float as_float(const uint8_t* bfloat16) {
  const uint32_t bits = uint32_t(bfloat16[0]) << 16 | uint32_t(bfloat16[1]) << 24;
  return __builtin_bit_cast(float, bits);
}

// sum (M, N) += a (M, K) · b (K, N): lanes of 4 bytes, of which a's and b's hold some numbers each.
template <typename Sum, typename Lane>
inline void multiply(int sum, int a, int b, Lane lane) {
  for (int m = 0; m < tiles[sum].rows; ++m)
    for (int k = 0; k < tiles[a].bytes / 4; ++k)
      for (int n = 0; n < tiles[sum].bytes / 4; ++n) {
        uint8_t* at = tiles[sum].data[m] + 4 * n;
        Sum x;
        std::memcpy(&x, at, 4);
        lane(x, tiles[a].data[m] + 4 * k, tiles[b].data[k] + 4 * n);
        std::memcpy(at, &x, 4);
      }
}
inline void bfloat16(int sum, int a, int b) {
  multiply<float>(sum, a, b, [](float& x, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; i += 2) x += as_float(a + i) * as_float(b + i);
  });
}
template <typename B>
inline void bytes(int sum, int a, int b) {  // a's are signed
  multiply<int32_t>(sum, a, b, [](int32_t& x, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; ++i) x += int32_t(int8_t(a[i])) * int32_t(B(b[i]));
  });
}

}  // namespace amx_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(from) amx_tiles::configure(from)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(i) amx_tiles::zero(i)
#define _tile_loadd(i, from, step) amx_tiles::load(i, from, step)
#define _tile_stored(i, to, step) amx_tiles::store(i, to, step)
#define _tile_dpbf16ps(sum, a, b) amx_tiles::bfloat16(sum, a, b)
#define _tile_dpbssd(sum, a, b) amx_tiles::bytes<int8_t>(sum, a, b)
#define _tile_dpbsud(sum, a, b) amx_tiles::bytes<uint8_t>(sum, a, b)
#endif
