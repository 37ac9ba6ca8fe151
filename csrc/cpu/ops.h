// The CPU ops behind ds_lightning._native. Pointers may be misaligned; sizes may be zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dsl {

enum class DType { kFloat32, kBFloat16, kFloat16, kFloat64 };

// Throws std::invalid_argument on a name it does not know.
DType parse_dtype(const std::string& name);

// dst[i] = (accumulate ? dst[i] : 0) + scale * ((srcs[0][i] + srcs[1][i]) + srcs[2][i] ...)
//
// Added in the order given, in fp32 (fp64 throughout for fp64), in one pass over memory. dst may be
// one of the sources when both have the same dtype; any other overlap is undefined.
void reduce_sum(void* dst, const std::vector<const void*>& srcs, std::size_t numel, DType src_dtype,
                DType dst_dtype, double scale, bool accumulate);

// One bit per element, 1 for x >= 0 (also -0; not NaN): element i goes to bit i % 8 of byte i / 8.
// The last byte's spare bits are 0.
void pack_signs(const void* src, void* dst, std::size_t numel, DType src_dtype);

// dst[i] = (accumulate ? dst[i] : 0) + (bit i ? scale : -scale)
void unpack_signs(const void* src, void* dst, std::size_t numel, double scale, DType dst_dtype,
                  bool accumulate);

// Blocks of `block` elements, the last one shorter, each with one fp32 scale of
// max|x| / (2^(bits-1) - 1); dst = x / scale, rounded to nearest even. bits is 8 (int8) or 4 (two
// to a byte, the even element low; block must be even). A block with anything not finite gets the
// scale NaN, and one whose scale would not be a normal number the scale 0; both a payload of zeros.
void quantize(const void* src, void* dst, void* scales, std::size_t numel, std::size_t block,
              int bits, DType src_dtype);

// dst[i] = (accumulate ? dst[i] : 0) + src[i] * scale of its block
void dequantize(const void* src, const void* scales, void* dst, std::size_t numel,
                std::size_t block, int bits, DType dst_dtype, bool accumulate);

// dst[i] = src[i], fp32, rounded to bf16 or fp16: up or down with odds that make the mean exact, by
// dice that depend on the number and the seed alone. Both aligned to their elements.
void round_stochastic(const void* src, void* dst, std::size_t numel, DType dst_dtype,
                      std::uint32_t seed);

// Sets glibc's mmap and trim thresholds, so that freed blocks are kept for the next allocation.
// False where the C library has no such setting or refuses the values.
bool keep_freed_memory(std::size_t mmap_threshold_bytes, std::size_t trim_threshold_bytes);

// Gives free heap memory back to the system; false where nothing was released.
bool release_free_memory();

}  // namespace dsl
