// Memory for what x becomes, kept from call to call by each thread that calls.
#pragma once

#include <cstdint>
#include <vector>

struct Scratch {
  std::vector<char> bytes;
  char* next = nullptr;

  // Room for `size` bytes, what is taken from it rounded up to whole lines.
  void reserve(int64_t size) {
    if (int64_t(bytes.size()) < size + 64) bytes.resize(size + 64);
    next = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
  }
  template <typename T>
  T* take(int64_t count) {
    T* found = reinterpret_cast<T*>(next);
    next += (count * sizeof(T) + 63) / 64 * 64;
    return found;
  }
};
