#include "choice.h"
#include "optim.h"

namespace dsl {
namespace {

enum class Momentum { kNone, kFirst, kLater };

template <Momentum kMomentum>
struct Sgd {
  static constexpr int kMoments = kMomentum == Momentum::kNone ? 0 : 1;

  explicit Sgd(const SgdOptions& o)
      : grad_scale(static_cast<float>(o.grad_scale)),
        weight_decay(static_cast<float>(o.weight_decay)),
        momentum(static_cast<float>(o.momentum)),
        rest(static_cast<float>(1.0 - o.dampening)),
        step_size(static_cast<float>(-o.lr)),
        decay(o.weight_decay != 0.0),
        nesterov(o.nesterov) {}

  DSL_INLINE void step(float& p, float g, float& buffer, float&) const {
    g = decay(g + weight_decay * p, g);
    if constexpr (kMomentum != Momentum::kNone) {
      buffer = kMomentum == Momentum::kFirst ? g : buffer * momentum + rest * g;
      g = nesterov(g + momentum * buffer, buffer);
    }
    p = p + step_size * g;
  }

  float grad_scale, weight_decay, momentum, rest, step_size;
  Choice decay, nesterov;
};

}  // namespace

void sgd(const Slices& slices, const SgdOptions& options, int threads, Isa isa) {
  if (slices.first.empty()) {
    update(slices, Sgd<Momentum::kNone>(options), threads, isa);
  } else if (options.first) {
    update(slices, Sgd<Momentum::kFirst>(options), threads, isa);
  } else {
    update(slices, Sgd<Momentum::kLater>(options), threads, isa);
  }
}

}  // namespace dsl
