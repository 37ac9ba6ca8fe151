#include <type_traits>

#include "launch.h"
#include "ops.h"
#include "optim_rules.h"
#include "optim_table.h"

namespace dsl::cuda {
namespace {

template <typename Rule, typename T>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ T table, const __grid_constant__ Rule rule,
                const __grid_constant__ Access access) {
  step_chunk(rule, table, access, blockIdx.x, threadIdx.x, kThreads);
}

template <std::size_t kBytes, typename Rule>
std::size_t launch(const Rule& rule, const Lists& lists, const Access& access, std::size_t next,
                   cudaStream_t stream, const char* op) {
  using T = Table<Rule::kStates, capacity_of(Rule::kStates, kBytes)>;
  static_assert(sizeof(T) + sizeof(Rule) + sizeof(Access) + 16 <= kBytes, "too many parameters");
  static_assert(std::is_trivially_copyable<Rule>::value, "passed as kernel parameters");
  T table{};
  next = fill(table, lists, next);
  if (table.count > 0) {
    step_kernel<<<table.chunks, kThreads, 0, stream>>>(table, rule, access);
    check(cudaGetLastError(), op);
  }
  return next;
}

// Parameters of more than 4 KB need a compiler and a driver that know them.
constexpr bool kCompilesMany = CUDART_VERSION >= 12010;

bool driver_takes_many() {
  int driver = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010;
}

template <typename Rule>
void step(const Rule& rule, const Lists& lists, const Access& access, std::uintptr_t stream,
          const char* op) {
  check_lists(lists, access, op);
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const std::size_t count = lists.numels->size();
  std::size_t next = 0;
  if constexpr (kCompilesMany) {
    // For a few tensors the small table is the cheaper one to hand over.
    constexpr std::size_t kFew = capacity_of(Rule::kStates, kParameterBytes);
    while (count - next > kFew && driver_takes_many()) {
      next = launch<kManyParameterBytes>(rule, lists, access, next, on, op);
    }
  }
  while (next < count) next = launch<kParameterBytes>(rule, lists, access, next, on, op);
}

Access access_of(const std::string& grad_dtype, const std::string& moment_dtype,
                 const Pointers& copies, const std::string& copy_dtype, double grad_scale,
                 std::uintptr_t grad_scale_ptr, std::uint32_t seed, const char* op) {
  const Kind state = parse_kind(moment_dtype, op);
  if (state == Kind::kFloat16) {
    throw std::invalid_argument(std::string(op) + " on CUDA keeps moments in fp32 or bf16");
  }
  const Kind copy = copies.empty() ? Kind::kFloat32 : parse_kind(copy_dtype, op);
  return Access{parse_kind(grad_dtype, op),
                state,
                copy,
                static_cast<float>(grad_scale),
                reinterpret_cast<const float*>(grad_scale_ptr),
                {mixed(2 * seed), mixed(2 * seed + 1)}};
}

}  // namespace

void adam(const Pointers& params, const Pointers& grads, const Pointers& exp_avgs,
          const Pointers& exp_avg_sqs, const Pointers& copies, const Sizes& numels,
          const std::string& grad_dtype, const std::string& moment_dtype,
          const std::string& copy_dtype, double lr, double beta1, double beta2, double eps,
          double weight_decay, bool decoupled, double bias_correction1, double bias_correction2,
          double grad_scale, std::uintptr_t stream, std::uintptr_t grad_scale_ptr,
          std::uint32_t seed) {
  const Access access = access_of(grad_dtype, moment_dtype, copies, copy_dtype, grad_scale,
                                  grad_scale_ptr, seed, "adam");
  if (exp_avgs.empty() != numels.empty() || exp_avg_sqs.empty() != numels.empty()) {
    throw std::invalid_argument("adam needs exp_avgs and exp_avg_sqs");
  }
  step(Adam(lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction1, bias_correction2),
       Lists{{&params, &grads, &copies, &exp_avgs, &exp_avg_sqs}, &numels}, access, stream, "adam");
}

void lion(const Pointers& params, const Pointers& grads, const Pointers& exp_avgs,
          const Pointers& copies, const Sizes& numels, const std::string& grad_dtype,
          const std::string& moment_dtype, const std::string& copy_dtype, double lr, double beta1,
          double beta2, double weight_decay, double grad_scale, std::uintptr_t stream,
          std::uintptr_t grad_scale_ptr, std::uint32_t seed) {
  const Access access = access_of(grad_dtype, moment_dtype, copies, copy_dtype, grad_scale,
                                  grad_scale_ptr, seed, "lion");
  if (exp_avgs.empty() != numels.empty()) throw std::invalid_argument("lion needs exp_avgs");
  step(Lion(lr, beta1, beta2, weight_decay), Lists{{&params, &grads, &copies, &exp_avgs}, &numels},
       access, stream, "lion");
}

void adagrad(const Pointers& params, const Pointers& grads, const Pointers& sums,
             const Pointers& copies, const Sizes& numels, const std::string& grad_dtype,
             const std::string& moment_dtype, const std::string& copy_dtype, double lr, double eps,
             double weight_decay, double grad_scale, std::uintptr_t stream,
             std::uintptr_t grad_scale_ptr, std::uint32_t seed) {
  const Access access = access_of(grad_dtype, moment_dtype, copies, copy_dtype, grad_scale,
                                  grad_scale_ptr, seed, "adagrad");
  if (sums.empty() != numels.empty()) throw std::invalid_argument("adagrad needs sums");
  step(Adagrad(lr, eps, weight_decay), Lists{{&params, &grads, &copies, &sums}, &numels}, access,
       stream, "adagrad");
}

void sgd(const Pointers& params, const Pointers& grads, const Pointers& momentum_buffers,
         const Pointers& copies, const Sizes& numels, const std::string& grad_dtype,
         const std::string& moment_dtype, const std::string& copy_dtype, double lr, double momentum,
         double dampening, bool nesterov, double weight_decay, bool first, double grad_scale,
         std::uintptr_t stream, std::uintptr_t grad_scale_ptr, std::uint32_t seed) {
  const Access access = access_of(grad_dtype, moment_dtype, copies, copy_dtype, grad_scale,
                                  grad_scale_ptr, seed, "sgd");
  const bool with_buffer = !momentum_buffers.empty();
  step(Sgd(lr, momentum, dampening, nesterov, weight_decay, first, with_buffer),
       Lists{{&params, &grads, &copies, &momentum_buffers}, &numels}, access, stream, "sgd");
}

}  // namespace dsl::cuda
