// Symmetric quantization in blocks: what one thread of the group that shares a block does.
//
// The first pass finds the largest magnitude, the second writes; between the two the group agrees
// on the scale. The payload of 8 bits is int8; of 4 bits two to a byte, the even element low.
#pragma once

#include "element.h"

namespace dsl::cuda {

constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// Compared as integers: the order of magnitudes is theirs, and NaN stands above infinity.
DSL_BOTH std::uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

DSL_BOTH std::uint32_t larger(std::uint32_t a, std::uint32_t b) { return a < b ? b : a; }

// NaN if something in the block is not finite; 0 where the scale would not be a normal number.
DSL_BOTH float scale_of(std::uint32_t largest, int bits) {
  if (largest >= kInfinityBits) return float_of(0x7fc00000u);
  const float scale = float_of(largest) / (bits == 8 ? 127.0f : 7.0f);
  return scale < 0x1.0p-126f ? 0.0f : scale;
}

// x / scale to the nearest integer, ties to even: next to 1.5 * 2^23 floats are one apart. 0 for a
// scale of 0 or NaN.
DSL_BOTH std::int32_t quantized(float x, float scale) {
  if (!(scale > 0.0f)) return 0;
  return static_cast<std::int32_t>(bits_of(x / scale + 0x1.8p+23f) - 0x4b400000u);
}

// The elements of one block, and whether four of them may be read and written at once. Floats is
// const where they are quantized, Bytes where they come from the payload.
template <typename Floats, typename Bytes>
struct Stretch {
  Floats* floats;
  Bytes* payload;
  std::size_t numel;
  bool quads;
};

DSL_BOTH const void* skip(const void* base, std::size_t n, Kind kind) {
  return static_cast<const char*>(base) + n * size_of(kind);
}
DSL_BOTH void* skip(void* base, std::size_t n, Kind kind) {
  return static_cast<char*>(base) + n * size_of(kind);
}

template <typename Floats, typename Bytes>
DSL_BOTH Stretch<Floats, Bytes> stretch_of(Floats* floats, Bytes* payload, std::size_t numel,
                                           std::size_t block, int bits, Kind kind,
                                           std::size_t number) {
  const std::size_t begin = number * block;
  Stretch<Floats, Bytes> stretch;
  stretch.floats = skip(floats, begin, kind);
  stretch.payload = payload + (bits == 8 ? begin : begin / 2);
  stretch.numel = numel - begin < block ? numel - begin : block;
  const std::uintptr_t access = bits == 8 ? 4 : 2;  // bytes
  stretch.quads = fits_quads(stretch.floats, kind) &&
                  reinterpret_cast<std::uintptr_t>(stretch.payload) % access == 0;
  return stretch;
}

using Input = Stretch<const void, std::uint8_t>;
using Output = Stretch<void, const std::uint8_t>;

DSL_BOTH std::uint32_t largest_of(const Input& in, Kind kind, std::uint32_t thread,
                                  std::uint32_t threads) {
  std::uint32_t largest = 0;
  const std::size_t in_quads = in.quads ? in.numel / 4 * 4 : 0;
  for (std::size_t i = 4 * static_cast<std::size_t>(thread); i < in_quads; i += 4 * threads) {
    float x[4];
    decode_quad(load_quad(in.floats, i, kind), kind, x);
    for (int k = 0; k < 4; ++k) largest = larger(largest, magnitude_bits(x[k]));
  }
  for (std::size_t i = in_quads + thread; i < in.numel; i += threads) {
    largest = larger(largest, magnitude_bits(load_one(in.floats, i, kind)));
  }
  return largest;
}

DSL_BOTH std::uint32_t low_bits(std::int32_t q, int bits) {
  return static_cast<std::uint32_t>(q) & (bits == 8 ? 0xffu : 0xfu);
}

// Elements [i, i + count) of a block, at most four and never across its end.
DSL_BOTH void quantize_few(const Input& in, Kind kind, int bits, float scale, std::size_t i,
                           std::size_t count) {
  std::uint32_t low = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const std::uint32_t q = low_bits(quantized(load_one(in.floats, i + k, kind), scale), bits);
    if (bits == 8) {
      in.payload[i + k] = static_cast<std::uint8_t>(q);
    } else if (k % 2 == 0) {
      low = q;
      if (k + 1 == count) in.payload[(i + k) / 2] = static_cast<std::uint8_t>(q);
    } else {
      in.payload[(i + k) / 2] = static_cast<std::uint8_t>(low | (q << 4));
    }
  }
}

DSL_BOTH void quantize_quad(const Input& in, Kind kind, int bits, float scale, std::size_t i) {
  float x[4];
  decode_quad(load_quad(in.floats, i, kind), kind, x);
  std::uint32_t word = 0;
  for (int k = 0; k < 4; ++k) word |= low_bits(quantized(x[k], scale), bits) << (bits * k);
  if (bits == 8) {
    *reinterpret_cast<Word*>(in.payload + i) = Word{word};
  } else {
    *reinterpret_cast<HalfWord*>(in.payload + i / 2) = HalfWord{static_cast<std::uint16_t>(word)};
  }
}

DSL_BOTH void quantize_part(const Input& in, Kind kind, int bits, float scale, std::uint32_t thread,
                            std::uint32_t threads) {
  for (std::size_t i = 4 * static_cast<std::size_t>(thread); i < in.numel; i += 4 * threads) {
    if (in.quads && in.numel - i >= 4) {
      quantize_quad(in, kind, bits, scale, i);
    } else {
      quantize_few(in, kind, bits, scale, i, in.numel - i < 4 ? in.numel - i : 4);
    }
  }
}

// The k-th number of a payload's word, with its sign.
DSL_BOTH float dequantized(std::uint32_t word, int k, int bits, float scale) {
  const std::uint32_t at_top = word << (32 - bits * (k + 1));
  return static_cast<float>(static_cast<std::int32_t>(at_top) >> (32 - bits)) * scale;
}

DSL_BOTH void dequantize_few(const Output& out, Kind kind, int bits, float scale, bool accumulate,
                             std::size_t i, std::size_t count) {
  for (std::size_t k = i; k < i + count; ++k) {
    const std::uint32_t byte = out.payload[bits == 8 ? k : k / 2];
    const float x = dequantized(byte, bits == 8 ? 0 : static_cast<int>(k % 2), bits, scale);
    store_one(out.floats, k, kind, accumulate ? load_one(out.floats, k, kind) + x : x);
  }
}

DSL_BOTH void dequantize_quad(const Output& out, Kind kind, int bits, float scale, bool accumulate,
                              std::size_t i) {
  const std::uint32_t word = bits == 8 ? reinterpret_cast<const Word*>(out.payload + i)->x
                                       : reinterpret_cast<const HalfWord*>(out.payload + i / 2)->x;
  float x[4];
  for (int k = 0; k < 4; ++k) x[k] = dequantized(word, k, bits, scale);
  if (accumulate) {
    float old[4];
    decode_quad(load_quad(out.floats, i, kind), kind, old);
    for (int k = 0; k < 4; ++k) x[k] = old[k] + x[k];
  }
  store_quad(out.floats, i, kind, x);
}

DSL_BOTH void dequantize_part(const Output& out, Kind kind, int bits, float scale, bool accumulate,
                              std::uint32_t thread, std::uint32_t threads) {
  for (std::size_t i = 4 * static_cast<std::size_t>(thread); i < out.numel; i += 4 * threads) {
    if (out.quads && out.numel - i >= 4) {
      dequantize_quad(out, kind, bits, scale, accumulate, i);
    } else {
      const std::size_t count = out.numel - i < 4 ? out.numel - i : 4;
      dequantize_few(out, kind, bits, scale, accumulate, i, count);
    }
  }
}

}  // namespace dsl::cuda
