// Stochastic rounding of one fp32 number to 16 bits, for host and device code. The dice are a hash
// of the number and a seed, so the result depends on nothing else: not on the place, not on the
// cut.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DSL_ROUNDING __host__ __device__ inline
#else
#define DSL_ROUNDING inline __attribute__((always_inline))
#endif

namespace dsl {

// The finalizer of MurmurHash3 (public domain).
DSL_ROUNDING std::uint32_t mixed(std::uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}

// 16 random bits; `seed` is mixed already.
DSL_ROUNDING std::uint32_t dice(std::uint32_t bits, std::uint32_t seed) {
  return mixed(bits ^ seed) >> 16;
}

// The bits of fp32 to those of bf16. What is finite stays finite.
DSL_ROUNDING std::uint16_t round_to_bfloat16(std::uint32_t bits, std::uint32_t seed) {
  const std::uint32_t sign = bits & 0x80000000u;
  const std::uint32_t size = bits & 0x7fffffffu;
  const std::uint32_t sum = size + dice(bits, seed);
  const std::uint32_t limited = sum < 0x7f800000u ? sum : 0x7f7f0000u;
  const std::uint32_t special = size > 0x7f800000u ? 0x7fc00000u : 0x7f800000u;  // NaN, infinity
  return static_cast<std::uint16_t>((sign | (size < 0x7f800000u ? limited : special)) >> 16);
}

// The bits of fp32 to those of fp16. Beyond its largest number lies infinity.
DSL_ROUNDING std::uint16_t round_to_float16(std::uint32_t bits, std::uint32_t seed) {
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t size = bits & 0x7fffffffu;
  const std::uint32_t random = dice(bits, seed);
  const std::uint32_t exponent = size >> 23;
  // From 2^-14 on 13 bits go. Below, what stays are multiples of 2^-24: more bits go the smaller
  // the number is. The dice decide on the highest 16 of them.
  const std::uint32_t normal = ((size + (random >> 3)) >> 13) - (112u << 10);
  const std::uint32_t gone = exponent > 112u ? 14u : exponent < 86u ? 40u : 126u - exponent;
  const std::uint64_t mantissa = exponent == 0u ? 0u : (size & 0x7fffffu) | 0x800000u;
  const std::uint64_t dust =
      gone < 16u ? random >> (16u - gone) : static_cast<std::uint64_t>(random) << (gone - 16u);
  const auto small = static_cast<std::uint32_t>((mantissa + dust) >> gone);
  const std::uint32_t found = exponent < 113u ? small : normal;
  const std::uint32_t limited = found < 0x7c00u ? found : 0x7c00u;
  const std::uint32_t special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return static_cast<std::uint16_t>(sign | (size < 0x7f800000u ? limited : special));
}

}  // namespace dsl
