// A condition that must hold in these tests, and memory that ends where an op may last write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                 \
    }                                                                               \
  } while (false)

// `nbytes` bytes that begin `offset` bytes into a block of the heap and end with it, so that the
// address sanitizer sees a read or write past them.
class Memory {
 public:
  Memory(std::size_t nbytes, std::size_t offset)
      : block_(new unsigned char[nbytes + offset]), offset_(offset), nbytes_(nbytes) {
    for (std::size_t i = 0; i < nbytes + offset; ++i) block_[i] = 0;
  }

  unsigned char* data() const { return block_.get() + offset_; }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data()); }
  std::size_t nbytes() const { return nbytes_; }

 private:
  std::unique_ptr<unsigned char[]> block_;
  std::size_t offset_, nbytes_;
};
