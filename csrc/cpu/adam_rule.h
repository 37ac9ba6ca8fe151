// What Adam does to one element, whatever its moments are kept in.
#pragma once

#include <cmath>

#include "choice.h"
#include "optim.h"

namespace dsl {

template <bool kCoupledDecay>
struct AdamRule {
  static constexpr int kMoments = 2;

  explicit AdamRule(const AdamOptions& o)
      : grad_scale(static_cast<float>(o.grad_scale)),
        shrink(static_cast<float>(o.decoupled ? 1.0 - o.lr * o.weight_decay : 1.0)),
        weight_decay(static_cast<float>(o.weight_decay)),
        average(1.0 - o.beta1),
        beta2(static_cast<float>(o.beta2)),
        rest2(static_cast<float>(1.0 - o.beta2)),
        step_size(static_cast<float>(-(o.lr / o.bias_correction1 * std::sqrt(o.bias_correction2)))),
        eps(static_cast<float>(o.eps * std::sqrt(o.bias_correction2))) {}

  DSL_INLINE void step(float& p, float g, float& m, float& v) const {
    if constexpr (kCoupledDecay) {
      g = g + weight_decay * p;
    } else {
      p = p * shrink;
    }
    m = average(m, g);
    v = v * beta2 + (rest2 * g) * g;
    p = p + (step_size * m) / (__builtin_sqrtf(v) + eps);
  }

  float grad_scale, shrink, weight_decay;
  Lerp average;
  float beta2, rest2, step_size, eps;
};

}  // namespace dsl
