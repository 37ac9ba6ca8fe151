#include "optim.h"

namespace dsl {
namespace {

template <bool kDecay>
struct Adagrad {
  static constexpr int kMoments = 1;

  explicit Adagrad(const AdagradOptions& o)
      : grad_scale(static_cast<float>(o.grad_scale)),
        weight_decay(static_cast<float>(o.weight_decay)),
        step_size(static_cast<float>(-o.lr)),
        eps(static_cast<float>(o.eps)) {}

  DSL_INLINE void step(float& p, float g, float& sum, float&) const {
    if constexpr (kDecay) g = g + weight_decay * p;
    sum = sum + g * g;
    p = p + (step_size * g) / (__builtin_sqrtf(sum) + eps);
  }

  float grad_scale, weight_decay, step_size, eps;
};

}  // namespace

void adagrad(const Slices& slices, const AdagradOptions& options, int threads, Isa isa) {
  if (options.weight_decay != 0.0) {
    update(slices, Adagrad<true>(options), threads, isa);
  } else {
    update(slices, Adagrad<false>(options), threads, isa);
  }
}

}  // namespace dsl
