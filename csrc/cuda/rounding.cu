#include <algorithm>
#include <stdexcept>

#include "../rounding.h"
#include "launch.h"
#include "ops.h"

namespace dsl::cuda {
namespace {

constexpr std::size_t kThreads = 256;

__global__ void round_kernel(const std::uint32_t* src, std::uint16_t* dst, std::size_t numel,
                             bool brain, std::uint32_t seed) {
  const std::size_t stride = gridDim.x * kThreads;
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < numel; i += stride) {
    dst[i] = brain ? round_to_bfloat16(src[i], seed) : round_to_float16(src[i], seed);
  }
}

}  // namespace

void round_stochastic(std::uintptr_t src, std::uintptr_t dst, std::size_t numel,
                      const std::string& dst_dtype, std::uint32_t seed, std::uintptr_t stream) {
  if (dst_dtype != "bf16" && dst_dtype != "fp16") {
    throw std::invalid_argument("round_stochastic makes bf16 or fp16, not " + dst_dtype);
  }
  if (numel == 0) return;
  constexpr std::size_t kMaxBlocks = 1 << 16;
  const auto blocks =
      static_cast<unsigned>(std::min((numel + kThreads - 1) / kThreads, kMaxBlocks));
  round_kernel<<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const std::uint32_t*>(src), reinterpret_cast<std::uint16_t*>(dst), numel,
      dst_dtype == "bf16", mixed(seed));
  check(cudaGetLastError(), "launching round_stochastic");
}

}  // namespace dsl::cuda
