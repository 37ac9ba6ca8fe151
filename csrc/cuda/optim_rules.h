// What each optimizer does to one element, in fp32: the same operations in the same order as the
// CPU's steps, so that both give the same bits.
//
// Numbers that depend on hyper-parameters alone are computed in fp64 and rounded once.
#pragma once

#include <cmath>

#include "element.h"

namespace dsl::cuda {

// a + w (b - a); from the other end for a weight of at least a half, as torch does.
struct Lerp {
  float coefficient;
  bool near_b;

  explicit Lerp(double weight)
      : coefficient(static_cast<float>(weight)), near_b(coefficient >= 0.5f) {
    if (near_b) coefficient = 1.0f - coefficient;
  }

  DSL_BOTH float operator()(float a, float b) const {
    return near_b ? b + coefficient * (a - b) : a + coefficient * (b - a);
  }
};

// Adam (arXiv:1412.6980), or AdamW (arXiv:1711.05101) where decoupled.
struct Adam {
  static constexpr int kStates = 2;
  float weight_decay, shrink;
  Lerp average;
  float beta2, rest2, step_size, eps;

  // With c = sqrt(bias_correction2), lr and eps are multiplied by c once instead of dividing
  // sqrt(v) by it for each element.
  Adam(double lr, double beta1, double b2, double epsilon, double decay, bool decoupled,
       double bias_correction1, double bias_correction2)
      : weight_decay(static_cast<float>(decoupled ? 0.0 : decay)),
        shrink(static_cast<float>(decoupled ? 1.0 - lr * decay : 1.0)),
        average(1.0 - beta1),
        beta2(static_cast<float>(b2)),
        rest2(static_cast<float>(1.0 - b2)),
        step_size(static_cast<float>(-(lr / bias_correction1 * std::sqrt(bias_correction2)))),
        eps(static_cast<float>(epsilon * std::sqrt(bias_correction2))) {}

  DSL_BOTH void operator()(float& p, float g, float& m, float& v) const {
    p = p * shrink;
    if (weight_decay != 0.0f) g = g + weight_decay * p;
    m = average(m, g);
    v = v * beta2 + (rest2 * g) * g;
    p = p + (step_size * m) / (sqrtf(v) + eps);
  }
};

// Lion (arXiv:2302.06675). sign(0) is 0 and sign(NaN) is NaN.
struct Lion {
  static constexpr int kStates = 1;
  float lr, shrink;
  Lerp direction, average;

  Lion(double rate, double beta1, double beta2, double decay)
      : lr(static_cast<float>(rate)),
        shrink(static_cast<float>(1.0 - rate * decay)),
        direction(1.0 - beta1),
        average(1.0 - beta2) {}

  DSL_BOTH void operator()(float& p, float g, float& m, float&) const {
    const float c = direction(m, g);
    const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;
    p = p * shrink - lr * sign;
    m = average(m, g);
  }
};

// Adagrad (Duchi et al., JMLR 12, 2011).
struct Adagrad {
  static constexpr int kStates = 1;
  float weight_decay, step_size, eps;

  Adagrad(double lr, double epsilon, double decay)
      : weight_decay(static_cast<float>(decay)),
        step_size(static_cast<float>(-lr)),
        eps(static_cast<float>(epsilon)) {}

  DSL_BOTH void operator()(float& p, float g, float& sum, float&) const {
    if (weight_decay != 0.0f) g = g + weight_decay * p;
    sum = sum + g * g;
    p = p + (step_size * g) / (sqrtf(sum) + eps);
  }
};

// SGD as torch has it. `first` fills the buffer with the gradient, whatever it held.
struct Sgd {
  static constexpr int kStates = 1;
  float weight_decay, momentum, rest, step_size;
  bool has_buffer, nesterov, first;

  Sgd(double lr, double mu, double dampening, bool is_nesterov, double decay, bool is_first,
      bool with_buffer)
      : weight_decay(static_cast<float>(decay)),
        momentum(static_cast<float>(mu)),
        rest(static_cast<float>(1.0 - dampening)),
        step_size(static_cast<float>(-lr)),
        has_buffer(with_buffer),
        nesterov(is_nesterov),
        first(is_first) {}

  DSL_BOTH void operator()(float& p, float g, float& buffer, float&) const {
    if (weight_decay != 0.0f) g = g + weight_decay * p;
    if (has_buffer) {
      buffer = first ? g : buffer * momentum + rest * g;
      g = nesterov ? g + momentum * buffer : buffer;
    }
    p = p + step_size * g;
  }
};

}  // namespace dsl::cuda
