// 16-bit floats to fp32 and back, bit for bit as torch converts them (NaN payloads aside).
//
// Integer and float arithmetic without branches, so that loops over it vectorize for any
// instruction set. Loads and stores go through memcpy: pointers may be misaligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dispatch.h"

namespace dsl {

template <typename To, typename From>
DSL_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
DSL_INLINE T load_raw(const void* base, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
DSL_INLINE void store_raw(void* base, std::size_t i, T value) {
  std::memcpy(static_cast<char*>(base) + i * sizeof(T), &value, sizeof(T));
}

struct Float32 {
  static constexpr std::size_t kSize = 4;
  using Acc = float;
  static DSL_INLINE float load(const void* p, std::size_t i) { return load_raw<float>(p, i); }
  static DSL_INLINE void store(void* p, std::size_t i, float x) { store_raw(p, i, x); }
};

struct Float64 {
  static constexpr std::size_t kSize = 8;
  using Acc = double;
  static DSL_INLINE double load(const void* p, std::size_t i) { return load_raw<double>(p, i); }
  static DSL_INLINE void store(void* p, std::size_t i, double x) { store_raw(p, i, x); }
};

struct BFloat16 {
  static constexpr std::size_t kSize = 2;
  using Acc = float;
  static DSL_INLINE float load(const void* p, std::size_t i) {
    return bit_cast<float>(static_cast<std::uint32_t>(load_raw<std::uint16_t>(p, i)) << 16);
  }
  static DSL_INLINE void store(void* p, std::size_t i, float x) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    store_raw(p, i, static_cast<std::uint16_t>(nan ? 0x7fc0u : rounded));
  }
};

// After M. Dukhan's FP16 library (MIT): https://github.com/Maratyszcza/FP16.
struct Float16 {
  static constexpr std::size_t kSize = 2;
  using Acc = float;
  static DSL_INLINE float load(const void* p, std::size_t i) {
    const std::uint32_t w = static_cast<std::uint32_t>(load_raw<std::uint16_t>(p, i)) << 16;
    const std::uint32_t sign = w & 0x80000000u;
    const std::uint32_t two_w = w + w;
    const float normal = bit_cast<float>((two_w >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    const float denormal = bit_cast<float>((two_w >> 17) | (126u << 23)) - 0.5f;
    const bool is_denormal = two_w < (1u << 27);
    return bit_cast<float>(
        sign | (is_denormal ? bit_cast<std::uint32_t>(denormal) : bit_cast<std::uint32_t>(normal)));
  }
  static DSL_INLINE void store(void* p, std::size_t i, float x) {
    const std::uint32_t w = bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = w & 0x80000000u;
    const std::uint32_t shl1_w = w + w;
    float base = (bit_cast<float>(w & 0x7fffffffu) * 0x1.0p+112f) * 0x1.0p-110f;
    const std::uint32_t exponent = shl1_w & 0xff000000u;
    const std::uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
    base = bit_cast<float>((bias >> 1) + 0x07800000u) + base;
    const std::uint32_t bits = bit_cast<std::uint32_t>(base);
    const std::uint32_t nonsign = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
    const bool nan = shl1_w > 0xff000000u;
    store_raw(p, i, static_cast<std::uint16_t>((sign >> 16) | (nan ? 0x7e00u : nonsign)));
  }
};

}  // namespace dsl
