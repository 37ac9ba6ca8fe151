// Optimizer steps on lists of slices, one pass over memory each. fp32 arithmetic; a multiply and an
// add are two roundings, so the result is the same for every instruction set, number of threads and
// cut into slices. Moments of 16 bits are rounded stochastically when stored, by a hash of the
// number and of Slices::seed; the step uses them as they were before. Infinities and NaNs spread.
//
// In the formulas g is the gradient times grad_scale, and lerp(a, b, w) = a + w (b - a), or
// b + (1 - w) (a - b) for w of at least a half. Numbers that depend on hyper-parameters alone are
// computed in fp64 and rounded once.
#pragma once

#include "isa.h"
#include "slices.h"

namespace dsl {

// Adam (arXiv:1412.6980), or AdamW (arXiv:1711.05101) where `decoupled`.
//
//   decoupled:  p = p (1 - lr weight_decay)
//   otherwise:  g = g + weight_decay p
//   m = lerp(m, g, 1 - beta1)
//   v = beta2 v + ((1 - beta2) g) g
//   p = p - ((lr / bias_correction1 c) m) / (sqrt(v) + eps c),  c = sqrt(bias_correction2)
//
// torch divides sqrt(v) by c instead, which is the same but for the last bit and would be a third
// slow operation per element: with bf16 moments, not memory but division would set the pace.
struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;
  double bias_correction1, bias_correction2;  // 1 - beta^step, or 1
  double grad_scale;
};
void adam(const Slices& slices, const AdamOptions& options, int threads, Isa isa);

// Lion (arXiv:2302.06675).
//
//   c = lerp(m, g, 1 - beta1)
//   p = p (1 - lr weight_decay) - lr sign(c),  sign(0) = 0 and sign(NaN) = NaN
//   m = lerp(m, g, 1 - beta2)
struct LionOptions {
  double lr, beta1, beta2, weight_decay, grad_scale;
};
void lion(const Slices& slices, const LionOptions& options, int threads, Isa isa);

// Adagrad (Duchi et al., JMLR 12, 2011).
//
//   g = g + weight_decay p
//   s = s + g g
//   p = p - (lr g) / (sqrt(s) + eps)
struct AdagradOptions {
  double lr, eps, weight_decay, grad_scale;
};
void adagrad(const Slices& slices, const AdagradOptions& options, int threads, Isa isa);

// SGD with momentum as torch has it (Sutskever et al., ICML 2013, for nesterov). Without buffers
// there is no momentum.
//
//   g = g + weight_decay p
//   b = momentum b + (1 - dampening) g, or g where `first`
//   p = p - lr (g + momentum b where nesterov, else b)
struct SgdOptions {
  double lr, momentum, dampening;
  bool nesterov;
  double weight_decay;
  bool first;
  double grad_scale;
};
void sgd(const Slices& slices, const SgdOptions& options, int threads, Isa isa);

}  // namespace dsl
