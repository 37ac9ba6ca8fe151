// LAMB (arXiv:1904.00962) on segments of flat tensors, each of one parameter, in two passes:
// between them stands a sum over the ranks that share a parameter.
//
//   m = lerp(m, g, 1 - beta1)
//   v = beta2 v + ((1 - beta2) g) g
//   u = m / (sqrt(v) + eps) + weight_decay p,  sqrt(v + eps) where `inside`
//   p = p - step u
//
// The second pass computes u again, which costs less than to keep it: the step is bound by memory.
#pragma once

#include "isa.h"
#include "slices.h"

namespace dsl {

struct LambOptions {
  double beta1, beta2, eps;
  bool inside;
  double weight_decay;
  double grad_scale;
};

// Updates moments. `squares` gets for each slice the sum of squares of p, and behind those of all
// slices that of u, in fp64, in an order that depends on the length of the slice alone.
void lamb_moments(const Slices& slices, const LambOptions& options, double* squares, int threads,
                  Isa isa);

// Updates parameters, each slice with a step of its own. Gradients are not looked at.
void lamb_apply(const Slices& slices, const LambOptions& options, const std::vector<double>& steps,
                int threads, Isa isa);

}  // namespace dsl
