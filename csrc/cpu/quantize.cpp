#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "convert.h"
#include "dispatch.h"
#include "loops.h"
#include "ops.h"

namespace dsl {
namespace {

// Magnitudes compare as integers; NaN stands above infinity.
DSL_VECTORIZED std::uint32_t largest_of(const float* x, std::size_t n) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    largest = std::max(largest, bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
  }
  return largest;
}

// NaN if something in the block is not finite; 0 where the scale would not be a normal number.
float scale_of(std::uint32_t largest, int bits) {
  if (largest >= 0x7f800000u) return std::numeric_limits<float>::quiet_NaN();
  const float scale = bit_cast<float>(largest) / (bits == 8 ? 127.0f : 7.0f);
  return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

// x / scale to the nearest integer, ties to even: next to 1.5 * 2^23 floats are one apart.
DSL_INLINE std::uint32_t quantized(float x, float scale) {
  return bit_cast<std::uint32_t>(x / scale + 0x1.8p+23f) - 0x4b400000u;
}

DSL_VECTORIZED void quantize_8(std::uint8_t* dst, const float* x, float scale, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) dst[i] = static_cast<std::uint8_t>(quantized(x[i], scale));
}

// The even element of a pair goes to the low half.
DSL_VECTORIZED void quantize_4(std::uint8_t* dst, const float* x, float scale, std::size_t n) {
  for (std::size_t i = 0; i < n / 2; ++i) {
    const std::uint32_t low = quantized(x[2 * i], scale) & 0xfu;
    const std::uint32_t high = quantized(x[2 * i + 1], scale) & 0xfu;
    dst[i] = static_cast<std::uint8_t>(low | (high << 4));
  }
  if (n % 2 != 0) dst[n / 2] = static_cast<std::uint8_t>(quantized(x[n - 1], scale) & 0xfu);
}

DSL_VECTORIZED void dequantize_8(float* x, const std::uint8_t* src, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(static_cast<std::int8_t>(src[i]));
}

// Also writes the second of a pair that has no second.
DSL_VECTORIZED void dequantize_4(float* x, const std::uint8_t* src, std::size_t n) {
  for (std::size_t i = 0; i < (n + 1) / 2; ++i) {
    const int byte = src[i];
    x[2 * i] = static_cast<float>(((byte & 0xf) ^ 8) - 8);
    x[2 * i + 1] = static_cast<float>(((byte >> 4) ^ 8) - 8);
  }
}

void check_format(std::size_t block, int bits) {
  if (block > 0 && (bits == 8 || (bits == 4 && block % 2 == 0))) return;
  throw std::invalid_argument("quantization knows 8 bits, and 4 bits with an even block");
}

const Loops<float>& loops_of_at_most_fp32(DType dtype) {
  if (dtype == DType::kFloat64) throw std::invalid_argument("quantization does not know fp64");
  return loops_of(dtype);
}

std::size_t bytes_of(std::size_t numel, int bits) { return bits == 8 ? numel : (numel + 1) / 2; }

}  // namespace

void quantize(const void* src, void* dst, void* scales, std::size_t numel, std::size_t block,
              int bits, DType src_dtype) {
  check_format(block, bits);
  const Loops<float>& source = loops_of_at_most_fp32(src_dtype);
  auto* bytes = static_cast<std::uint8_t*>(dst);
  const auto write = bits == 8 ? quantize_8 : quantize_4;
  alignas(64) float x[kTile];
  for (std::size_t begin = 0, number = 0; begin < numel; begin += block, ++number) {
    const std::size_t end = begin + std::min(block, numel - begin);
    std::uint32_t largest = 0;
    for (std::size_t at = begin; at < end; at += kTile) {
      const std::size_t n = std::min(kTile, end - at);
      source.load(x, src, at, n);
      largest = std::max(largest, largest_of(x, n));
    }
    const float scale = scale_of(largest, bits);
    store_raw(scales, number, scale);
    if (!(scale > 0.0f)) {
      std::memset(bytes + bytes_of(begin, bits), 0, bytes_of(end - begin, bits));
      continue;
    }
    for (std::size_t at = begin; at < end; at += kTile) {
      const std::size_t n = std::min(kTile, end - at);
      if (end - begin > kTile) source.load(x, src, at, n);  // else it is still there
      write(bytes + bytes_of(at, bits), x, scale, n);
    }
  }
}

void dequantize(const void* src, const void* scales, void* dst, std::size_t numel,
                std::size_t block, int bits, DType dst_dtype, bool accumulate) {
  check_format(block, bits);
  const Loops<float>& destination = loops_of_at_most_fp32(dst_dtype);
  const auto finish = accumulate ? destination.accumulate : destination.store;
  const auto read = bits == 8 ? dequantize_8 : dequantize_4;
  const auto* bytes = static_cast<const std::uint8_t*>(src);
  alignas(64) float x[kTile];
  for (std::size_t begin = 0, number = 0; begin < numel; begin += block, ++number) {
    const std::size_t end = begin + std::min(block, numel - begin);
    const auto scale = load_raw<float>(scales, number);
    for (std::size_t at = begin; at < end; at += kTile) {
      const std::size_t n = std::min(kTile, end - at);
      read(x, bytes + bytes_of(at, bits), n);
      finish(dst, x, scale, at, n);
    }
  }
}

}  // namespace dsl
