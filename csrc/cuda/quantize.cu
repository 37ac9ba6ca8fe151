#include "launch.h"
#include "ops.h"
#include "quantize.h"

namespace dsl::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
// Up to here a warp takes a block of its own, above it takes all threads of a thread block.
constexpr std::size_t kWarpsBlock = 2048;

// The largest of all threads of the group, in each of them.
template <unsigned kGroup>
__device__ std::uint32_t largest_in_group(std::uint32_t largest) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) {
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  if constexpr (kGroup > kWarp) {
    __shared__ std::uint32_t of_warp[kThreads / kWarp];
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = largest;
    __syncthreads();
    largest = of_warp[threadIdx.x % (kThreads / kWarp)];
    for (unsigned offset = kThreads / kWarp / 2; offset > 0; offset /= 2) {
      largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
  }
  return largest;
}

template <unsigned kGroup>
__device__ std::size_t number_of_group() {
  return static_cast<std::size_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
}

// All threads of a group leave together, so the shuffles and barriers see whole groups.
template <unsigned kGroup>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const void* src, std::uint8_t* dst, float* scales, std::size_t numel,
                    std::size_t block, int bits, Kind kind) {
  const std::size_t number = number_of_group<kGroup>();
  if (number * block >= numel) return;
  const unsigned thread = threadIdx.x % kGroup;
  const Input in = stretch_of(src, dst, numel, block, bits, kind, number);
  const float scale =
      scale_of(largest_in_group<kGroup>(largest_of(in, kind, thread, kGroup)), bits);
  if (thread == 0) scales[number] = scale;
  quantize_part(in, kind, bits, scale, thread, kGroup);
}

template <unsigned kGroup>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const std::uint8_t* src, const float* scales, void* dst, std::size_t numel,
                      std::size_t block, int bits, Kind kind, bool accumulate) {
  const std::size_t number = number_of_group<kGroup>();
  if (number * block >= numel) return;
  const Output out = stretch_of(dst, src, numel, block, bits, kind, number);
  dequantize_part(out, kind, bits, scales[number], accumulate, threadIdx.x % kGroup, kGroup);
}

unsigned grid_of(std::size_t numel, std::size_t block, unsigned group) {
  const std::size_t blocks = numel / block + (numel % block != 0);
  const std::size_t per_grid = kThreads / group;
  const std::size_t grid = (blocks + per_grid - 1) / per_grid;
  if (grid > 0x7fffffffu) throw std::invalid_argument("too many blocks for one launch");
  return static_cast<unsigned>(grid);
}

void check_format(std::size_t block, int bits, const char* op) {
  if ((bits == 8 && block > 0) || (bits == 4 && block > 0 && block % 2 == 0)) return;
  throw std::invalid_argument(std::string(op) + " knows 8 bits, and 4 bits with an even block");
}

}  // namespace

void quantize(std::uintptr_t src, std::uintptr_t dst, std::uintptr_t scales, std::size_t numel,
              std::size_t block, int bits, const std::string& src_dtype, std::uintptr_t stream) {
  const Kind kind = parse_kind(src_dtype, "quantize");
  check_format(block, bits, "quantize");
  if (numel == 0) return;
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const auto* in = reinterpret_cast<const void*>(src);
  auto* out = reinterpret_cast<std::uint8_t*>(dst);
  auto* out_scales = reinterpret_cast<float*>(scales);
  if (block <= kWarpsBlock) {
    quantize_kernel<kWarp><<<grid_of(numel, block, kWarp), kThreads, 0, on>>>(
        in, out, out_scales, numel, block, bits, kind);
  } else {
    quantize_kernel<kThreads><<<grid_of(numel, block, kThreads), kThreads, 0, on>>>(
        in, out, out_scales, numel, block, bits, kind);
  }
  check(cudaGetLastError(), "launching quantize");
}

void dequantize(std::uintptr_t src, std::uintptr_t scales, std::uintptr_t dst, std::size_t numel,
                std::size_t block, int bits, const std::string& dst_dtype, bool accumulate,
                std::uintptr_t stream) {
  const Kind kind = parse_kind(dst_dtype, "dequantize");
  check_format(block, bits, "dequantize");
  if (numel == 0) return;
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const auto* in = reinterpret_cast<const std::uint8_t*>(src);
  const auto* in_scales = reinterpret_cast<const float*>(scales);
  auto* out = reinterpret_cast<void*>(dst);
  if (block <= kWarpsBlock) {
    dequantize_kernel<kWarp><<<grid_of(numel, block, kWarp), kThreads, 0, on>>>(
        in, in_scales, out, numel, block, bits, kind, accumulate);
  } else {
    dequantize_kernel<kThreads><<<grid_of(numel, block, kThreads), kThreads, 0, on>>>(
        in, in_scales, out, numel, block, bits, kind, accumulate);
  }
  check(cudaGetLastError(), "launching dequantize");
}

}  // namespace dsl::cuda
