// Elements in memory and in registers: fp32, bf16 and fp16, one at a time or four at once.
//
// [Note: kernels that also run on the host]
// What a kernel does with its indices and numbers is written as functions for both sides, given the
// number of the thread; a kernel only calls them. csrc/tests/kernels loops over blocks and threads
// on the CPU and runs the very same code there. What only a GPU has (shuffles, barriers, launches)
// stays in the .cu files and is kept small.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DSL_BOTH __host__ __device__ __forceinline__
#else
#define DSL_BOTH inline
#endif

#include "../rounding.h"
#ifndef __CUDA_ARCH__
#include "../cpu/convert.h"
#endif

namespace dsl::cuda {

// The kind of an element is looked up at run time, not a template parameter: all threads agree on
// it and memory is the bottleneck, so a branch costs nothing and dozens of kernels are saved.
enum class Kind : std::uint32_t { kFloat32, kBFloat16, kFloat16 };

DSL_BOTH constexpr std::size_t size_of(Kind kind) { return kind == Kind::kFloat32 ? 4 : 2; }

DSL_BOTH std::uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return dsl::bit_cast<std::uint32_t>(x);
#endif
}

DSL_BOTH float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return dsl::bit_cast<float>(bits);
#endif
}

// From the bits of one element, in the low half for 16-bit kinds.
DSL_BOTH float decode(std::uint32_t bits, Kind kind) {
  if (kind == Kind::kFloat32) return float_of(bits);
  const auto half = static_cast<std::uint16_t>(bits);
  if (kind == Kind::kBFloat16) return float_of(static_cast<std::uint32_t>(half) << 16);
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(half));
#else
  return dsl::Float16::load(&half, 0);
#endif
}

// Rounds to nearest, ties to even.
DSL_BOTH std::uint32_t encode(float x, Kind kind) {
  if (kind == Kind::kFloat32) return bits_of(x);
#ifdef __CUDA_ARCH__
  if (kind == Kind::kBFloat16) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return __half_as_ushort(__float2half_rn(x));
#else
  std::uint16_t half;
  if (kind == Kind::kBFloat16) {
    dsl::BFloat16::store(&half, 0, x);
  } else {
    dsl::Float16::store(&half, 0, x);
  }
  return half;
#endif
}

// What a state is stored as: bf16 is rounded stochastically; `seed` is mixed.
DSL_BOTH std::uint32_t encode_state(float x, Kind kind, std::uint32_t seed) {
  return kind == Kind::kFloat32 ? bits_of(x) : dsl::round_to_bfloat16(bits_of(x), seed);
}

DSL_BOTH float load_one(const void* base, std::size_t i, Kind kind) {
  if (kind == Kind::kFloat32) return static_cast<const float*>(base)[i];
  return decode(static_cast<const std::uint16_t*>(base)[i], kind);
}

DSL_BOTH void store_one(void* base, std::size_t i, Kind kind, float x) {
  if (kind == Kind::kFloat32) {
    static_cast<float*>(base)[i] = x;
  } else {
    static_cast<std::uint16_t*>(base)[i] = static_cast<std::uint16_t>(encode(x, kind));
  }
}

DSL_BOTH void store_state(void* base, std::size_t i, Kind kind, float x, std::uint32_t seed) {
  if (kind == Kind::kFloat32) {
    static_cast<float*>(base)[i] = x;
  } else {
    static_cast<std::uint16_t*>(base)[i] = static_cast<std::uint16_t>(encode_state(x, kind, seed));
  }
}

// One access each; on the host they alias whatever lies there.
#ifdef __CUDACC__
#define DSL_ALIASES
#else
#define DSL_ALIASES [[gnu::may_alias]]
#endif
struct alignas(16) DSL_ALIASES Wide {
  std::uint32_t x, y, z, w;
};
struct alignas(8) DSL_ALIASES Narrow {
  std::uint32_t x, y;
};
struct alignas(4) DSL_ALIASES Word {
  std::uint32_t x;
};
struct alignas(2) DSL_ALIASES HalfWord {
  std::uint16_t x;
};

// Four elements as they lie in memory: 16 bytes, or 8 of which the last two words are unused.
using Quad = Wide;

// Whether four elements from `base` on may be loaded at once.
DSL_BOTH bool fits_quads(const void* base, Kind kind) {
  return reinterpret_cast<std::uintptr_t>(base) % (4 * size_of(kind)) == 0;
}

// Only loads: the wait for memory comes with `decode_quad`, after all loads have been sent.
DSL_BOTH Quad load_quad(const void* base, std::size_t i, Kind kind) {
  if (kind == Kind::kFloat32) {
    return *reinterpret_cast<const Wide*>(static_cast<const float*>(base) + i);
  }
  const Narrow raw = *reinterpret_cast<const Narrow*>(static_cast<const std::uint16_t*>(base) + i);
  return Quad{raw.x, raw.y, 0, 0};
}

DSL_BOTH void decode_quad(const Quad& raw, Kind kind, float (&out)[4]) {
  if (kind == Kind::kFloat32) {
    out[0] = float_of(raw.x);
    out[1] = float_of(raw.y);
    out[2] = float_of(raw.z);
    out[3] = float_of(raw.w);
  } else {
    out[0] = decode(raw.x & 0xffffu, kind);
    out[1] = decode(raw.x >> 16, kind);
    out[2] = decode(raw.y & 0xffffu, kind);
    out[3] = decode(raw.y >> 16, kind);
  }
}

DSL_BOTH void store_bits(void* base, std::size_t i, Kind kind, const Wide& bits) {
  if (kind == Kind::kFloat32) {
    *reinterpret_cast<Wide*>(static_cast<float*>(base) + i) = bits;
  } else {
    *reinterpret_cast<Narrow*>(static_cast<std::uint16_t*>(base) + i) =
        Narrow{bits.x | (bits.y << 16), bits.z | (bits.w << 16)};
  }
}

DSL_BOTH void store_quad(void* base, std::size_t i, Kind kind, const float (&x)[4]) {
  store_bits(base, i, kind,
             Wide{encode(x[0], kind), encode(x[1], kind), encode(x[2], kind), encode(x[3], kind)});
}

DSL_BOTH void store_state_quad(void* base, std::size_t i, Kind kind, const float (&x)[4],
                               std::uint32_t seed) {
  store_bits(base, i, kind,
             Wide{encode_state(x[0], kind, seed), encode_state(x[1], kind, seed),
                  encode_state(x[2], kind, seed), encode_state(x[3], kind, seed)});
}

}  // namespace dsl::cuda
