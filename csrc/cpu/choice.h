// Choices that are the same for all elements of a loop, without a condition inside it.
#pragma once

#include <cstdint>

#include "convert.h"

namespace dsl {

// `a` where `condition` was true, else `b`, bit for bit. A conditional expression on a flag keeps
// GCC from vectorizing loops over elements of several sizes.
struct Choice {
  explicit Choice(bool condition) : mask(condition ? 0xffffffffu : 0u) {}

  DSL_INLINE float operator()(float a, float b) const {
    return bit_cast<float>((bit_cast<std::uint32_t>(a) & mask) |
                           (bit_cast<std::uint32_t>(b) & ~mask));
  }

  std::uint32_t mask;
};

// Linear interpolation in the order in which torch computes it: a + w (b - a), or, with a weight of
// at least a half, b + (1 - w) (a - b), which is exact at both ends.
struct Lerp {
  explicit Lerp(double w)
      : near_b(static_cast<float>(w) >= 0.5f),
        coefficient(static_cast<float>(w) < 0.5f ? static_cast<float>(w)
                                                 : 1.0f - static_cast<float>(w)) {}

  DSL_INLINE float operator()(float a, float b) const {
    const float base = near_b(b, a);
    return base + coefficient * (near_b(a, b) - base);
  }

  Choice near_b;
  float coefficient;
};

}  // namespace dsl
