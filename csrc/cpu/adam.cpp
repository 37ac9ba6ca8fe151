#include "adam_rule.h"

namespace dsl {

void adam(const Slices& slices, const AdamOptions& options, int threads, Isa isa) {
  if (!options.decoupled && options.weight_decay != 0.0) {
    update(slices, AdamRule<true>(options), threads, isa);
  } else {
    update(slices, AdamRule<false>(options), threads, isa);
  }
}

}  // namespace dsl
