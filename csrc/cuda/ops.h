// The CUDA ops behind ds_lightning._cuda. Each launches on the given stream and returns at once;
// a failed launch throws std::runtime_error with the CUDA error's own words. Pointers are device
// pointers to whole elements, as multiples of the element size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dsl::cuda {

using Pointers = std::vector<std::uintptr_t>;
using Sizes = std::vector<std::size_t>;

constexpr std::size_t kMaxSources = 256;

// As dsl::reduce_sum of the CPU, for fp32, bf16 and fp16 on device pointers.
void reduce_sum(std::uintptr_t dst, const std::vector<std::uintptr_t>& srcs, std::size_t numel,
                const std::string& src_dtype, const std::string& dst_dtype, double scale,
                bool accumulate, std::uintptr_t stream);

// One step of an optimizer on a list of tensors, in as few launches as their number allows: one for
// up to 76 tensors, then one for each 627 (two states; more with one).
//
// Parameters are fp32, gradients fp32, bf16 or fp16, moments fp32 or bf16. Arithmetic is fp32, and
// moments reach the parameter before they are rounded to bf16, stochastically, by a hash of the
// number and the seed. A gradient is multiplied by grad_scale, and by the fp32 scalar on the device
// at grad_scale_ptr unless that is 0. Where copies has pointers, each new parameter is also written
// there as copy_dtype.
//
// Without bias correction pass 1 for both corrections, else 1 - beta^step.
void adam(const Pointers& params, const Pointers& grads, const Pointers& exp_avgs,
          const Pointers& exp_avg_sqs, const Pointers& copies, const Sizes& numels,
          const std::string& grad_dtype, const std::string& moment_dtype,
          const std::string& copy_dtype, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool decoupled, double bias_correction1, double bias_correction2,
          double grad_scale, std::uintptr_t stream, std::uintptr_t grad_scale_ptr,
          std::uint32_t seed);

// Adam with moments of 8 bits, in blocks, as dsl::adam8bit of the CPU; borders are on the host.
void adam8bit(const Pointers& params, const Pointers& grads, const Pointers& exp_avgs,
              const Pointers& exp_avg_sqs, const Pointers& exp_avg_scales,
              const Pointers& exp_avg_sq_scales, const Pointers& borders,
              const Sizes& border_counts, const Sizes& scale_counts, const Pointers& copies,
              const Sizes& numels, const std::string& grad_dtype, const std::string& copy_dtype,
              std::size_t block, double lr, double beta1, double beta2, double eps,
              double weight_decay, bool decoupled, double bias_correction1, double bias_correction2,
              double grad_scale, std::uintptr_t stream, std::uintptr_t grad_scale_ptr);

void lion(const Pointers& params, const Pointers& grads, const Pointers& exp_avgs,
          const Pointers& copies, const Sizes& numels, const std::string& grad_dtype,
          const std::string& moment_dtype, const std::string& copy_dtype, double lr, double beta1,
          double beta2, double weight_decay, double grad_scale, std::uintptr_t stream,
          std::uintptr_t grad_scale_ptr, std::uint32_t seed);

void adagrad(const Pointers& params, const Pointers& grads, const Pointers& sums,
             const Pointers& copies, const Sizes& numels, const std::string& grad_dtype,
             const std::string& moment_dtype, const std::string& copy_dtype, double lr, double eps,
             double weight_decay, double grad_scale, std::uintptr_t stream,
             std::uintptr_t grad_scale_ptr, std::uint32_t seed);

// Without momentum_buffers there is no momentum.
void sgd(const Pointers& params, const Pointers& grads, const Pointers& momentum_buffers,
         const Pointers& copies, const Sizes& numels, const std::string& grad_dtype,
         const std::string& moment_dtype, const std::string& copy_dtype, double lr, double momentum,
         double dampening, bool nesterov, double weight_decay, bool first, double grad_scale,
         std::uintptr_t stream, std::uintptr_t grad_scale_ptr, std::uint32_t seed);

// As dsl::round_stochastic of the CPU.
void round_stochastic(std::uintptr_t src, std::uintptr_t dst, std::size_t numel,
                      const std::string& dst_dtype, std::uint32_t seed, std::uintptr_t stream);

// As dsl::pack_signs and dsl::unpack_signs of the CPU; scale is also multiplied by the fp32 scalar
// on the device at scale_ptr unless that is 0.
void pack_signs(std::uintptr_t src, std::uintptr_t dst, std::size_t numel,
                const std::string& src_dtype, std::uintptr_t stream);
void unpack_signs(std::uintptr_t src, std::uintptr_t dst, std::size_t numel, double scale,
                  const std::string& dst_dtype, bool accumulate, std::uintptr_t stream,
                  std::uintptr_t scale_ptr);

// As dsl::quantize and dsl::dequantize of the CPU.
void quantize(std::uintptr_t src, std::uintptr_t dst, std::uintptr_t scales, std::size_t numel,
              std::size_t block, int bits, const std::string& src_dtype, std::uintptr_t stream);
void dequantize(std::uintptr_t src, std::uintptr_t scales, std::uintptr_t dst, std::size_t numel,
                std::size_t block, int bits, const std::string& dst_dtype, bool accumulate,
                std::uintptr_t stream);

// Devices the driver shows; 0 without a driver.
int device_count();

}  // namespace dsl::cuda
