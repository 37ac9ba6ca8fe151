#include "choice.h"
#include "optim.h"

namespace dsl {
namespace {

struct Lion {
  static constexpr int kMoments = 1;

  explicit Lion(const LionOptions& o)
      : grad_scale(static_cast<float>(o.grad_scale)),
        shrink(static_cast<float>(1.0 - o.lr * o.weight_decay)),
        lr(static_cast<float>(o.lr)),
        direction(1.0 - o.beta1),
        average(1.0 - o.beta2) {}

  DSL_INLINE void step(float& p, float g, float& m, float&) const {
    const float c = direction(m, g);
    const float negative = c < 0.0f ? -1.0f : c;  // zero and NaN stay
    const float sign = c > 0.0f ? 1.0f : negative;
    p = p * shrink - lr * sign;
    m = average(m, g);
  }

  float grad_scale, shrink, lr;
  Lerp direction, average;
};

}  // namespace

void lion(const Slices& slices, const LionOptions& options, int threads, Isa isa) {
  update(slices, Lion(options), threads, isa);
}

}  // namespace dsl
