#include <type_traits>

#include "adam8bit.h"
#include "launch.h"
#include "ops.h"

namespace dsl::cuda {
namespace {

constexpr unsigned kWarp = 32;
constexpr std::size_t kWarpsBlock = 256;  // up to here a warp takes a block of moments of its own
constexpr std::size_t kLargestBlock = 4096;

// The largest of both numbers over the threads of a group, in each of them.
template <unsigned Group>
__device__ void agree(std::uint32_t& a, std::uint32_t& b) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) {
    a = max(a, __shfl_xor_sync(0xffffffffu, a, offset));
    b = max(b, __shfl_xor_sync(0xffffffffu, b, offset));
  }
  if constexpr (Group > kWarp) {
    __shared__ std::uint32_t of_warp[2][Group / kWarp];
    if (threadIdx.x % kWarp == 0) {
      of_warp[0][threadIdx.x / kWarp] = a;
      of_warp[1][threadIdx.x / kWarp] = b;
    }
    __syncthreads();
    for (unsigned warp = 0; warp < Group / kWarp; ++warp) {
      a = max(a, of_warp[0][warp]);
      b = max(b, of_warp[1][warp]);
    }
  }
}

// All threads of a group leave together, so the shuffles and barriers see whole groups. The scales
// are read by all of them before, and written by one of them after they have agreed.
template <unsigned Group, int Quads, typename T>
__global__ void __launch_bounds__(kThreads)
    adam8bit_kernel(const __grid_constant__ T table, const __grid_constant__ Adam rule,
                    const __grid_constant__ Access access, std::uint32_t block) {
  const std::uint32_t number = blockIdx.x * (kThreads / Group) + threadIdx.x / Group;
  if (number >= table.chunks) return;
  const std::uint32_t thread = threadIdx.x % Group;
  const BlockRows rows = block_rows_of(table, access, block, number);
  float scale = access.grad_scale;
  if (access.grad_scale_ptr != nullptr) scale *= *access.grad_scale_ptr;
  Moments<Quads> moments;
  step_block(rule, rows, access, scale, thread, Group, moments);
  agree<Group>(moments.largest_first, moments.largest_second);
  store_block(rows, thread, Group, moments);
}

template <unsigned Group, int Quads>
void launch(const Adam& rule, const BlockLists& lists, const Access& access, cudaStream_t stream) {
  using T = BlockTable<block_capacity_of(kParameterBytes)>;
  static_assert(sizeof(T) + sizeof(Adam) + sizeof(Access) + 16 <= kParameterBytes, "too many");
  static_assert(4 * Quads * Group <= kLargestBlock, "a group holds its block");
  T table{};
  Place next;
  while (next.tensor < lists.numels->size()) {
    next = fill_blocks(table, lists, access, next);
    if (table.count == 0) continue;
    const unsigned per_grid = kThreads / Group;
    adam8bit_kernel<Group, Quads>
        <<<(table.chunks + per_grid - 1) / per_grid, kThreads, 0, stream>>>(
            table, rule, access, static_cast<std::uint32_t>(lists.block));
    check(cudaGetLastError(), "adam8bit");
  }
}

}  // namespace

void adam8bit(const Pointers& params, const Pointers& grads, const Pointers& exp_avgs,
              const Pointers& exp_avg_sqs, const Pointers& exp_avg_scales,
              const Pointers& exp_avg_sq_scales, const Pointers& borders,
              const Sizes& border_counts, const Sizes& scale_counts, const Pointers& copies,
              const Sizes& numels, const std::string& grad_dtype, const std::string& copy_dtype,
              std::size_t block, double lr, double beta1, double beta2, double eps,
              double weight_decay, bool decoupled, double bias_correction1, double bias_correction2,
              double grad_scale, std::uintptr_t stream, std::uintptr_t grad_scale_ptr) {
  const Kind copy = copies.empty() ? Kind::kFloat32 : parse_kind(copy_dtype, "adam8bit");
  const Access access{parse_kind(grad_dtype, "adam8bit"), Kind::kFloat32, copy,
                      static_cast<float>(grad_scale),
                      reinterpret_cast<const float*>(grad_scale_ptr)};
  const BlockLists lists{
      {&params, &grads, &copies, &exp_avgs, &exp_avg_sqs, &exp_avg_scales, &exp_avg_sq_scales},
      &borders,
      &border_counts,
      &scale_counts,
      &numels,
      block};
  check_blocks(lists, kLargestBlock);
  const Adam rule(lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction1,
                  bias_correction2);
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  if (block <= kWarpsBlock) {
    launch<kWarp, 2>(rule, lists, access, on);
  } else if (block <= 2048) {
    launch<kThreads, 2>(rule, lists, access, on);
  } else {
    launch<kThreads, 4>(rule, lists, access, on);
  }
}

}  // namespace dsl::cuda
