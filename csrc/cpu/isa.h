// The instruction set of a call, chosen at run time; unlike with target_clones it can be forced.
#pragma once

#include <string>
#include <vector>

#include "dispatch.h"

namespace dsl {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// What this machine has, by name, the slowest first: "baseline", "avx2", "avx512".
std::vector<std::string> instruction_sets();

// The best one for "auto". Throws std::invalid_argument on a name that is unknown or that this
// machine does not have.
Isa parse_isa(const std::string& name);

#if defined(__x86_64__) && defined(__GNUC__) && (!defined(__clang__) || __clang_major__ >= 17)
#define DSL_HAS_X86_TARGETS 1
#endif

// Body::run(args), compiled for each instruction set. Body::run must be DSL_INLINE.
template <typename Body, typename Args>
void run_baseline(const Args& args) {
  Body::run(args);
}

#ifdef DSL_HAS_X86_TARGETS
template <typename Body, typename Args>
__attribute__((target("arch=x86-64-v3"))) void run_avx2(const Args& args) {
  Body::run(args);
}

template <typename Body, typename Args>
__attribute__((target("arch=x86-64-v4"))) void run_avx512(const Args& args) {
  Body::run(args);
}
#endif

template <typename Args>
using Loop = void (*)(const Args&);

template <typename Body, typename Args>
Loop<Args> loop_for(Isa isa) {
  switch (isa) {
#ifdef DSL_HAS_X86_TARGETS
    case Isa::kAvx512:
      return run_avx512<Body, Args>;
    case Isa::kAvx2:
      return run_avx2<Body, Args>;
#endif
    default:
      return run_baseline<Body, Args>;
  }
}

}  // namespace dsl
