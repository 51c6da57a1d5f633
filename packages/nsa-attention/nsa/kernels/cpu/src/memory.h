// Aligned memory: whole-call arrays, and a scratch area that each thread keeps between calls.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nsa {

constexpr size_t kAlign = 64;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Fresh memory is mapped page by page when it is first written, which takes longer than writing it: request large pages.
// A hint: where the kernel has no huge pages, nothing changes.
inline void prefer_large_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kLarge = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kLarge - 1) & ~(kLarge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kLarge - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(int64_t n) { reset(n); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { std::free(data_); }
  void reset(int64_t n) {
    std::free(data_);
    data_ = static_cast<T*>(std::aligned_alloc(kAlign, round_up((n + 1) * int64_t{sizeof(T)}, kAlign)));
    if (!data_) throw std::bad_alloc();
    prefer_large_pages(data_, n * int64_t{sizeof(T)});
  }
  T* get() { return data_; }
  const T* get() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
};

// Hands out pieces of one thread's area; everything goes back when the Scratch does.
class Scratch {
 public:
  Scratch() : used_(0) { chunks().reserve(16); }
  template <class T>
  T* take(int64_t n) {
    if (used_ == chunks().size()) chunks().push_back({});
    Chunk& chunk = chunks()[used_++];
    const size_t bytes = round_up(n * int64_t{sizeof(T)} + int64_t{kAlign}, kAlign);
    if (chunk.bytes < bytes) {
      std::free(chunk.data);
      chunk.data = std::aligned_alloc(kAlign, bytes);
      if (!chunk.data) throw std::bad_alloc();
      chunk.bytes = bytes;
    }
    return static_cast<T*>(chunk.data);
  }

 private:
  struct Chunk {
    void* data = nullptr;
    size_t bytes = 0;
  };
  struct Chunks : std::vector<Chunk> {
    ~Chunks() {
      for (auto& chunk : *this) std::free(chunk.data);
    }
  };
  static Chunks& chunks() {
    static thread_local Chunks area;
    return area;
  }
  size_t used_;
};

}  // namespace nsa
