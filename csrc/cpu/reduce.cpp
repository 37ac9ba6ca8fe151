#include <algorithm>
#include <stdexcept>

#include "loops.h"
#include "ops.h"

namespace dsl {
namespace {

template <typename Acc>
void run(const Loops<Acc>& source, const Loops<Acc>& destination, void* dst,
         const std::vector<const void*>& srcs, std::size_t numel, Acc scale, bool accumulate) {
  alignas(64) Acc acc[kTile];
  const auto finish = accumulate ? destination.accumulate : destination.store;
  for (std::size_t at = 0; at < numel; at += kTile) {
    const std::size_t n = std::min(kTile, numel - at);
    source.load(acc, srcs[0], at, n);
    for (std::size_t k = 1; k < srcs.size(); ++k) source.add(acc, srcs[k], at, n);
    finish(dst, acc, scale, at, n);
  }
}

}  // namespace

void reduce_sum(void* dst, const std::vector<const void*>& srcs, std::size_t numel, DType src_dtype,
                DType dst_dtype, double scale, bool accumulate) {
  if (srcs.empty()) throw std::invalid_argument("reduce_sum needs at least one source");
  if ((src_dtype == DType::kFloat64) != (dst_dtype == DType::kFloat64)) {
    throw std::invalid_argument("reduce_sum adds fp64 only to fp64");
  }
  if (src_dtype == DType::kFloat64) {
    run(loops_of_float64(), loops_of_float64(), dst, srcs, numel, scale, accumulate);
  } else {
    run(loops_of(src_dtype), loops_of(dst_dtype), dst, srcs, numel, static_cast<float>(scale),
        accumulate);
  }
}

}  // namespace dsl
