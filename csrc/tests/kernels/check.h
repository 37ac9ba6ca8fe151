// What the host tests share. See [Note: kernels that also run on the host].
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../../cuda/element.h"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

namespace dsl::cuda {

constexpr Kind kKinds[] = {Kind::kFloat32, Kind::kBFloat16, Kind::kFloat16};

// Numbers in about [-2, 2), the same in every run.
class Numbers {
 public:
  explicit Numbers(std::uint32_t seed) : state_(seed * 2654435761u + 1) {}
  float next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<std::int32_t>(state_)) * 0x1.0p-30f;
  }

 private:
  std::uint32_t state_;
};

// A tensor that begins `offset` elements after an aligned address and ends where its memory ends,
// so that a sanitizer sees the first step too far.
class Buffer {
 public:
  Buffer(std::size_t numel, Kind kind, std::size_t offset)
      : kind_(kind),
        numel_(numel),
        memory_(new (std::align_val_t(64)) std::uint8_t[(offset + numel) * size_of(kind)]),
        data_(memory_.get() + offset * size_of(kind)) {}

  void fill(std::uint32_t seed) {
    Numbers numbers(seed);
    for (std::size_t i = 0; i < numel_; ++i) set(i, numbers.next());
  }
  void* data() const { return data_; }
  std::uintptr_t pointer() const { return reinterpret_cast<std::uintptr_t>(data_); }
  float get(std::size_t i) const { return load_one(data_, i, kind_); }
  void set(std::size_t i, float x) { store_one(data_, i, kind_, x); }
  Kind kind() const { return kind_; }

 private:
  struct Free {
    void operator()(std::uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  Kind kind_;
  std::size_t numel_;
  std::unique_ptr<std::uint8_t[], Free> memory_;
  std::uint8_t* data_;
};

// Of rounding a number to a kind.
inline double epsilon_of(Kind kind) {
  return kind == Kind::kFloat32 ? 0x1.0p-24 : kind == Kind::kBFloat16 ? 0x1.0p-9 : 0x1.0p-12;
}

}  // namespace dsl::cuda
