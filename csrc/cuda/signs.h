// Eight signs to a byte and back: what one thread does with one byte.
#pragma once

#include "element.h"

namespace dsl::cuda {

// 1 from zero on, also for -0; 0 below and for NaN.
DSL_BOTH std::uint32_t sign_bit(float x) { return x >= 0.0f ? 1u : 0u; }

DSL_BOTH std::size_t bytes_of_signs(std::size_t numel) { return numel / 8 + (numel % 8 != 0); }

// `quads`: whether src is aligned for them.
DSL_BOTH void pack_byte(const void* src, std::uint8_t* dst, std::size_t numel, Kind kind,
                        bool quads, std::size_t byte) {
  const std::size_t begin = byte * 8;
  std::uint32_t bits = 0;
  if (quads && numel - begin >= 8) {
    const Quad low = load_quad(src, begin, kind);
    const Quad high = load_quad(src, begin + 4, kind);
    float x[4];
    decode_quad(low, kind, x);
    for (int k = 0; k < 4; ++k) bits |= sign_bit(x[k]) << k;
    decode_quad(high, kind, x);
    for (int k = 0; k < 4; ++k) bits |= sign_bit(x[k]) << (k + 4);
  } else {
    const std::size_t count = numel - begin < 8 ? numel - begin : 8;
    for (std::size_t k = 0; k < count; ++k) {
      bits |= sign_bit(load_one(src, begin + k, kind)) << k;
    }
  }
  dst[byte] = static_cast<std::uint8_t>(bits);
}

DSL_BOTH void unpack_byte(const std::uint8_t* src, void* dst, std::size_t numel, float scale,
                          Kind kind, bool accumulate, bool quads, std::size_t byte) {
  const std::size_t begin = byte * 8;
  const std::uint32_t bits = src[byte];
  if (quads && numel - begin >= 8) {
    for (int half = 0; half < 8; half += 4) {
      float x[4];
      for (int k = 0; k < 4; ++k) x[k] = (bits >> (half + k)) & 1u ? scale : -scale;
      if (accumulate) {
        float old[4];
        decode_quad(load_quad(dst, begin + half, kind), kind, old);
        for (int k = 0; k < 4; ++k) x[k] = old[k] + x[k];
      }
      store_quad(dst, begin + half, kind, x);
    }
  } else {
    const std::size_t count = numel - begin < 8 ? numel - begin : 8;
    for (std::size_t k = 0; k < count; ++k) {
      const float x = (bits >> k) & 1u ? scale : -scale;
      store_one(dst, begin + k, kind, accumulate ? load_one(dst, begin + k, kind) + x : x);
    }
  }
}

}  // namespace dsl::cuda
