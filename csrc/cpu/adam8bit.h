// Adam with moments of 8 bits, in blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"
#include "optim.h"

namespace dsl {

// Most elements of a block.
constexpr std::size_t kLargestBlock = 4096;

// The moments of `Slices`: `first` and `second` are codes, int8 and uint8, with these scales, fp32,
// one for each block. Slice k is cut at `borders[k]`: int64 from 0 to its number of elements, in
// increasing order. A segment begins with a block of its own; its last one may be shorter.
struct QuantizedMoments {
  std::size_t block;
  std::vector<std::uintptr_t> first_scales;
  std::vector<std::uintptr_t> second_scales;
  std::vector<std::uintptr_t> borders;
  std::vector<std::size_t> border_counts;
  std::vector<std::size_t> scale_counts;  // of each of the two lists
};

// Throws std::invalid_argument where the parts do not fit each other.
void check(const Slices& slices, const QuantizedMoments& moments);

// One step: moments are dequantized, updated as by `adam`, used, and quantized again, block by
// block in one pass over memory.
void adam8bit(const Slices& slices, const QuantizedMoments& moments, const AdamOptions& options,
              int threads, Isa isa);

}  // namespace dsl
