#include "isa.h"

#include <stdexcept>

namespace dsl {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};

bool has(Isa isa) {
  if (isa == Isa::kBaseline) return true;
#ifdef DSL_HAS_X86_TARGETS
  // The same features as of the levels x86-64-v3 and x86-64-v4, for compilers that do not know
  // these names here.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (isa == Isa::kAvx2) return v3;
  return v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> found;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (has(isa)) found.emplace_back(kNames[static_cast<int>(isa)]);
  }
  return found;
}

Isa parse_isa(const std::string& name) {
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kBaseline}) {
    if (has(isa) && (name == "auto" || name == kNames[static_cast<int>(isa)])) return isa;
  }
  std::string known = "auto";
  for (const std::string& found : instruction_sets()) known += ", " + found;
  throw std::invalid_argument("instruction set '" + name +
                              "' is not one of this machine's: " + known);
}

}  // namespace dsl
