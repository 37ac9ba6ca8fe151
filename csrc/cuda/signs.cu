#include <algorithm>

#include "launch.h"
#include "ops.h"
#include "signs.h"

namespace dsl::cuda {
namespace {

constexpr std::size_t kThreads = 256;

__global__ void pack_kernel(const void* src, std::uint8_t* dst, std::size_t numel, Kind kind,
                            bool quads) {
  const std::size_t stride = gridDim.x * kThreads;
  const std::size_t bytes = bytes_of_signs(numel);
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < bytes; i += stride) {
    pack_byte(src, dst, numel, kind, quads, i);
  }
}

__global__ void unpack_kernel(const std::uint8_t* src, void* dst, std::size_t numel, float scale,
                              const float* scale_ptr, Kind kind, bool accumulate, bool quads) {
  if (scale_ptr != nullptr) scale *= *scale_ptr;
  const std::size_t stride = gridDim.x * kThreads;
  const std::size_t bytes = bytes_of_signs(numel);
  for (std::size_t i = blockIdx.x * kThreads + threadIdx.x; i < bytes; i += stride) {
    unpack_byte(src, dst, numel, scale, kind, accumulate, quads, i);
  }
}

unsigned grid_of(std::size_t numel) {
  constexpr std::size_t kMaxBlocks = 1 << 16;
  const std::size_t blocks = (bytes_of_signs(numel) + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::min(blocks, kMaxBlocks));
}

}  // namespace

void pack_signs(std::uintptr_t src, std::uintptr_t dst, std::size_t numel,
                const std::string& src_dtype, std::uintptr_t stream) {
  const Kind kind = parse_kind(src_dtype, "pack_signs");
  if (numel == 0) return;
  const auto* in = reinterpret_cast<const void*>(src);
  pack_kernel<<<grid_of(numel), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      in, reinterpret_cast<std::uint8_t*>(dst), numel, kind, fits_quads(in, kind));
  check(cudaGetLastError(), "launching pack_signs");
}

void unpack_signs(std::uintptr_t src, std::uintptr_t dst, std::size_t numel, double scale,
                  const std::string& dst_dtype, bool accumulate, std::uintptr_t stream,
                  std::uintptr_t scale_ptr) {
  const Kind kind = parse_kind(dst_dtype, "unpack_signs");
  if (numel == 0) return;
  auto* out = reinterpret_cast<void*>(dst);
  unpack_kernel<<<grid_of(numel), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const std::uint8_t*>(src), out, numel, static_cast<float>(scale),
      reinterpret_cast<const float*>(scale_ptr), kind, accumulate, fits_quads(out, kind));
  check(cudaGetLastError(), "launching unpack_signs");
}

}  // namespace dsl::cuda
