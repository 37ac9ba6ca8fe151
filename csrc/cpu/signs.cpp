#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "loops.h"
#include "ops.h"

namespace dsl {
namespace {

#define DSL_DEFINE_SIGNS(ACC)                                                                      \
  /* 1 from zero on, also for -0; 0 below and for NaN. */                                          \
  DSL_VECTORIZED void flags_of(std::uint8_t* flags, const ACC* acc, std::size_t n) {               \
    for (std::size_t i = 0; i < n; ++i) flags[i] = static_cast<std::uint8_t>(acc[i] >= 0 ? 1 : 0); \
  }                                                                                                \
  /* 1 or -1 for each bit of n bytes. */                                                           \
  DSL_VECTORIZED void ones_of(ACC* acc, const std::uint8_t* src, std::size_t n) {                  \
    for (std::size_t byte = 0; byte < n; ++byte) {                                                 \
      const int bits = src[byte];                                                                  \
      for (int k = 0; k < 8; ++k) {                                                                \
        acc[8 * byte + k] = static_cast<ACC>(((bits >> k) & 1) * 2 - 1);                           \
      }                                                                                            \
    }                                                                                              \
  }

DSL_DEFINE_SIGNS(float)
DSL_DEFINE_SIGNS(double)

// Eight bytes of 0 or 1 to the bits of one, the first lowest: the factor moves byte i to bit 56 + i
// and what else it makes stays below or falls out above.
DSL_VECTORIZED void pack_flags(std::uint8_t* dst, const std::uint8_t* flags, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    std::uint64_t eight = 0;
    std::memcpy(&eight, flags + 8 * i, sizeof(eight));
    dst[i] = static_cast<std::uint8_t>((eight * 0x0102040810204080u) >> 56);
  }
}

template <typename Acc>
void pack(const Loops<Acc>& source, std::uint8_t* dst, const void* src, std::size_t numel) {
  alignas(64) Acc acc[kTile];
  alignas(64) std::uint8_t flags[kTile];
  for (std::size_t at = 0; at < numel; at += kTile) {
    const std::size_t n = std::min(kTile, numel - at);
    const std::size_t bytes = (n + 7) / 8;
    source.load(acc, src, at, n);
    flags_of(flags, acc, n);
    std::fill(flags + n, flags + 8 * bytes, std::uint8_t{0});
    pack_flags(dst + at / 8, flags, bytes);
  }
}

template <typename Acc>
void unpack(const Loops<Acc>& destination, void* dst, const std::uint8_t* src, std::size_t numel,
            Acc scale, bool accumulate) {
  alignas(64) Acc acc[kTile];
  const auto finish = accumulate ? destination.accumulate : destination.store;
  for (std::size_t at = 0; at < numel; at += kTile) {
    const std::size_t n = std::min(kTile, numel - at);
    ones_of(acc, src + at / 8, (n + 7) / 8);
    finish(dst, acc, scale, at, n);
  }
}

}  // namespace

void pack_signs(const void* src, void* dst, std::size_t numel, DType src_dtype) {
  auto* bytes = static_cast<std::uint8_t*>(dst);
  if (src_dtype == DType::kFloat64) {
    pack(loops_of_float64(), bytes, src, numel);
  } else {
    pack(loops_of(src_dtype), bytes, src, numel);
  }
}

void unpack_signs(const void* src, void* dst, std::size_t numel, double scale, DType dst_dtype,
                  bool accumulate) {
  const auto* bytes = static_cast<const std::uint8_t*>(src);
  if (dst_dtype == DType::kFloat64) {
    unpack(loops_of_float64(), dst, bytes, numel, scale, accumulate);
  } else {
    unpack(loops_of(dst_dtype), dst, bytes, numel, static_cast<float>(scale), accumulate);
  }
}

}  // namespace dsl
