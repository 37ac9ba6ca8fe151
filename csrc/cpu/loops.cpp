#include "loops.h"

#include <stdexcept>

#include "convert.h"
#include "dispatch.h"

namespace dsl {
namespace {

#define DSL_DEFINE_LOOPS(NAME, T)                                                                \
  DSL_VECTORIZED void load_##NAME(T::Acc* acc, const void* src, std::size_t at, std::size_t n) { \
    for (std::size_t i = 0; i < n; ++i) acc[i] = T::load(src, at + i);                           \
  }                                                                                              \
  DSL_VECTORIZED void add_##NAME(T::Acc* acc, const void* src, std::size_t at, std::size_t n) {  \
    for (std::size_t i = 0; i < n; ++i) acc[i] = acc[i] + T::load(src, at + i);                  \
  }                                                                                              \
  DSL_VECTORIZED void store_##NAME(void* dst, const T::Acc* acc, T::Acc scale, std::size_t at,   \
                                   std::size_t n) {                                              \
    for (std::size_t i = 0; i < n; ++i) T::store(dst, at + i, acc[i] * scale);                   \
  }                                                                                              \
  DSL_VECTORIZED void accumulate_##NAME(void* dst, const T::Acc* acc, T::Acc scale,              \
                                        std::size_t at, std::size_t n) {                         \
    for (std::size_t i = 0; i < n; ++i) {                                                        \
      T::store(dst, at + i, T::load(dst, at + i) + acc[i] * scale);                              \
    }                                                                                            \
  }                                                                                              \
  constexpr Loops<T::Acc> k##NAME{load_##NAME, add_##NAME, store_##NAME, accumulate_##NAME};

DSL_DEFINE_LOOPS(Float32, Float32)
DSL_DEFINE_LOOPS(BFloat16, BFloat16)
DSL_DEFINE_LOOPS(Float16, Float16)
DSL_DEFINE_LOOPS(Float64, Float64)

}  // namespace

const Loops<float>& loops_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return kBFloat16;
    case DType::kFloat16:
      return kFloat16;
    default:
      return kFloat32;
  }
}

const Loops<double>& loops_of_float64() { return kFloat64; }

DType parse_dtype(const std::string& name) {
  if (name == "fp32") return DType::kFloat32;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "fp16") return DType::kFloat16;
  if (name == "fp64") return DType::kFloat64;
  throw std::invalid_argument("unknown dtype '" + name + "', not one of fp32, bf16, fp16, fp64");
}

}  // namespace dsl
