// Memory for what x becomes, kept from call to call by each thread that calls.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

class Scratch {
 public:
  // Room for `size` bytes in all, each `take` rounded up to whole lines. What was there is lost.
  void reserve(int64_t size) {
    if (capacity < size) {
      memory.reset();  // before more is allocated: what it holds is not needed
      capacity = 0;
      memory.reset(static_cast<char*>(::operator new(size, std::align_val_t(LINE))));
      capacity = size;
    }
    next = memory.get();
  }

  template <typename T>
  T* take(int64_t count) {
    T* begin = reinterpret_cast<T*>(next);
    next += (count * int64_t(sizeof(T)) + LINE - 1) / LINE * LINE;
    return begin;
  }

 private:
  static constexpr int64_t LINE = 64;  // bytes
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t(LINE)); }
  };
  std::unique_ptr<char, Free> memory;
  int64_t capacity = 0;
  char* next = nullptr;
};
