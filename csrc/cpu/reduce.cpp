#include <algorithm>
#include <stdexcept>

#include "convert.h"
#include "dispatch.h"
#include "ops.h"

namespace dsl {
namespace {

// [Note: one pass over memory]
// The sum of a block is built in a buffer that stays in the first-level cache: each source and the
// destination are touched once in memory, whatever the number of sources. Splitting the work into
// these small loops also keeps the number of clones at types x loops instead of types x types.
constexpr std::size_t kBlock = 2048;

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

template <typename Acc>
struct Loops {
  void (*load)(Acc*, const void*, std::size_t, std::size_t);
  void (*add)(Acc*, const void*, std::size_t, std::size_t);
  void (*store)(void*, const Acc*, Acc, std::size_t, std::size_t);
  void (*accumulate)(void*, const Acc*, Acc, std::size_t, std::size_t);
};

DSL_DEFINE_LOOPS(Float32, Float32)
DSL_DEFINE_LOOPS(BFloat16, BFloat16)
DSL_DEFINE_LOOPS(Float16, Float16)
DSL_DEFINE_LOOPS(Float64, Float64)

template <typename Acc>
void run(const Loops<Acc>& source, const Loops<Acc>& destination, void* dst,
         const std::vector<const void*>& srcs, std::size_t numel, Acc scale, bool accumulate) {
  alignas(64) Acc acc[kBlock];
  const auto finish = accumulate ? destination.accumulate : destination.store;
  for (std::size_t at = 0; at < numel; at += kBlock) {
    const std::size_t n = std::min(kBlock, numel - at);
    source.load(acc, srcs[0], at, n);
    for (std::size_t k = 1; k < srcs.size(); ++k) source.add(acc, srcs[k], at, n);
    finish(dst, acc, scale, at, n);
  }
}

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

}  // namespace

DType parse_dtype(const std::string& name) {
  if (name == "fp32") return DType::kFloat32;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "fp16") return DType::kFloat16;
  if (name == "fp64") return DType::kFloat64;
  throw std::invalid_argument("unknown dtype '" + name + "', not one of fp32, bf16, fp16, fp64");
}

void reduce_sum(void* dst, const std::vector<const void*>& srcs, std::size_t numel, DType src_dtype,
                DType dst_dtype, double scale, bool accumulate) {
  if (srcs.empty()) throw std::invalid_argument("reduce_sum needs at least one source");
  if ((src_dtype == DType::kFloat64) != (dst_dtype == DType::kFloat64)) {
    throw std::invalid_argument("reduce_sum adds fp64 only to fp64");
  }
  if (src_dtype == DType::kFloat64) {
    run(kFloat64, kFloat64, dst, srcs, numel, scale, accumulate);
  } else {
    run(loops_of(src_dtype), loops_of(dst_dtype), dst, srcs, numel, static_cast<float>(scale),
        accumulate);
  }
}

}  // namespace dsl
