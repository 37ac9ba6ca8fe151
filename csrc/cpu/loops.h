// Loops over elements of any dtype, through a small buffer of fp32 (of fp64 for fp64).
//
// [Note: one pass over memory]
// An op works on a tile in a buffer that stays in the first-level cache: each source and the
// destination are touched once in memory, whatever happens between. Splitting the work into these
// small loops also keeps the number of clones at types x loops instead of types x types.
#pragma once

#include <cstddef>

#include "ops.h"

namespace dsl {

constexpr std::size_t kTile = 2048;

// `at` is the first element in memory, `n` their number; `acc` is read and written from 0 on.
template <typename Acc>
struct Loops {
  void (*load)(Acc* acc, const void* src, std::size_t at, std::size_t n);
  void (*add)(Acc* acc, const void* src, std::size_t at, std::size_t n);
  // dst = acc * scale, and dst = dst + acc * scale
  void (*store)(void* dst, const Acc* acc, Acc scale, std::size_t at, std::size_t n);
  void (*accumulate)(void* dst, const Acc* acc, Acc scale, std::size_t at, std::size_t n);
};

// For every dtype but fp64.
const Loops<float>& loops_of(DType dtype);
const Loops<double>& loops_of_float64();

}  // namespace dsl
