#include "../rounding.h"

#include <cstring>

#include "dispatch.h"
#include "ops.h"

namespace dsl {
namespace {

DSL_VECTORIZED void to_bfloat16(std::uint16_t* dst, const std::uint32_t* src, std::size_t n,
                                std::uint32_t seed) {
  for (std::size_t i = 0; i < n; ++i) dst[i] = round_to_bfloat16(src[i], seed);
}

DSL_VECTORIZED void to_float16(std::uint16_t* dst, const std::uint32_t* src, std::size_t n,
                               std::uint32_t seed) {
  for (std::size_t i = 0; i < n; ++i) dst[i] = round_to_float16(src[i], seed);
}

}  // namespace

void round_stochastic(const void* src, void* dst, std::size_t numel, DType dst_dtype,
                      std::uint32_t seed) {
  const auto* bits = static_cast<const std::uint32_t*>(src);
  auto* out = static_cast<std::uint16_t*>(dst);
  if (dst_dtype == DType::kBFloat16) {
    to_bfloat16(out, bits, numel, mixed(seed));
  } else {
    to_float16(out, bits, numel, mixed(seed));
  }
}

}  // namespace dsl
