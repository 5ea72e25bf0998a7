// Memory for what x becomes.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

// Cuts memory into pieces of whole lines, one behind the other. From null it only counts.
struct Room {
  static constexpr int64_t LINE = 64;  // bytes
  uintptr_t next;
  explicit Room(void* memory = nullptr) : next(reinterpret_cast<uintptr_t>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    T* begin = reinterpret_cast<T*>(next);
    next += (count * int64_t(sizeof(T)) + LINE - 1) / LINE * LINE;
    return begin;
  }
};

// Memory that a thread keeps from call to call.
class Scratch {
 public:
  // `size` bytes. What was there is lost.
  char* reserve(int64_t size) {
    if (capacity < size) {
      memory.reset();  // before more is allocated: what it holds is not needed
      capacity = 0;
      memory.reset(static_cast<char*>(::operator new(size, std::align_val_t(Room::LINE))));
      capacity = size;
    }
    return memory.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t(Room::LINE)); }
  };
  std::unique_ptr<char, Free> memory;
  int64_t capacity = 0;
};
