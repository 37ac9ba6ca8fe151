#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>

#include "launch.h"
#include "ops.h"

namespace dsl::cuda {
namespace {

// Passed by value: kernel parameters reach every thread without a copy of our own to manage.
struct Sources {
  const void* data[kMaxSources];
  int count;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <typename Src, typename Dst>
__global__ void reduce_sum_kernel(Dst* dst, const __grid_constant__ Sources srcs, std::size_t numel,
                                  float scale, bool accumulate) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < numel;
       i += stride) {
    float acc = to_float(static_cast<const Src*>(srcs.data[0])[i]);
    for (int k = 1; k < srcs.count; ++k) acc += to_float(static_cast<const Src*>(srcs.data[k])[i]);
    acc *= scale;
    dst[i] = from_float<Dst>(accumulate ? to_float(dst[i]) + acc : acc);
  }
}

template <typename Src, typename Dst>
void launch(void* dst, const Sources& srcs, std::size_t numel, float scale, bool accumulate,
            cudaStream_t stream) {
  constexpr std::size_t kThreads = 256;
  constexpr std::size_t kMaxBlocks = 4096;
  const auto blocks =
      static_cast<unsigned>(std::min((numel + kThreads - 1) / kThreads, kMaxBlocks));
  reduce_sum_kernel<Src, Dst>
      <<<blocks, kThreads, 0, stream>>>(static_cast<Dst*>(dst), srcs, numel, scale, accumulate);
  check(cudaGetLastError(), "launching reduce_sum");
}

template <typename Src>
void launch_to(const std::string& dst_dtype, void* dst, const Sources& srcs, std::size_t numel,
               float scale, bool accumulate, cudaStream_t stream) {
  if (dst_dtype == "fp32") return launch<Src, float>(dst, srcs, numel, scale, accumulate, stream);
  if (dst_dtype == "fp16") return launch<Src, __half>(dst, srcs, numel, scale, accumulate, stream);
  if (dst_dtype == "bf16") {
    return launch<Src, __nv_bfloat16>(dst, srcs, numel, scale, accumulate, stream);
  }
  throw std::invalid_argument("reduce_sum on CUDA writes fp32, bf16, fp16, not " + dst_dtype);
}

}  // namespace

void reduce_sum(std::uintptr_t dst, const std::vector<std::uintptr_t>& srcs, std::size_t numel,
                const std::string& src_dtype, const std::string& dst_dtype, double scale,
                bool accumulate, std::uintptr_t stream) {
  if (srcs.empty() || srcs.size() > kMaxSources) {
    throw std::invalid_argument("reduce_sum on CUDA takes 1 to 256 sources");
  }
  if (numel == 0) return;
  Sources sources{};
  sources.count = static_cast<int>(srcs.size());
  for (std::size_t k = 0; k < srcs.size(); ++k) {
    sources.data[k] = reinterpret_cast<const void*>(srcs[k]);
  }
  const auto out = reinterpret_cast<void*>(dst);
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const auto factor = static_cast<float>(scale);
  if (src_dtype == "fp32") {
    launch_to<float>(dst_dtype, out, sources, numel, factor, accumulate, on);
  } else if (src_dtype == "fp16") {
    launch_to<__half>(dst_dtype, out, sources, numel, factor, accumulate, on);
  } else if (src_dtype == "bf16") {
    launch_to<__nv_bfloat16>(dst_dtype, out, sources, numel, factor, accumulate, on);
  } else {
    throw std::invalid_argument("reduce_sum on CUDA reads fp32, bf16, fp16, not " + src_dtype);
  }
}

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace dsl::cuda
