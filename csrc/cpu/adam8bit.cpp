#include "adam8bit.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "adam_rule.h"
#include "dynamic_map.h"

namespace dsl {
namespace {

// One block.
template <typename Rule>
struct Block {
  float* param;
  const void* grad;
  void* copy;
  std::int8_t* first;
  std::uint8_t* second;
  float* first_scale;
  float* second_scale;
  std::size_t numel;
  Rule rule;
};

DSL_INLINE std::uint32_t magnitude_bits(float x) {
  return bit_cast<std::uint32_t>(x) & 0x7fffffffu;
}

// The scale of a block whose largest magnitude has these bits.
DSL_INLINE float scale_of(std::uint32_t largest) {
  if (largest >= 0x7f800000u) return std::numeric_limits<float>::quiet_NaN();
  return largest < 0x00800000u ? 0.0f : bit_cast<float>(largest);
}

// See [Note: a line per decade].
DSL_INLINE float stretched(float x) {
  float slope = kDynamicMap.slopes[0];
  float offset = kDynamicMap.offsets[0];
#pragma GCC unroll 6
  for (int i = 1; i < kDecades; ++i) {
    const bool beyond = x >= kDynamicMap.powers[i - 1];
    slope = beyond ? kDynamicMap.slopes[i] : slope;
    offset = beyond ? kDynamicMap.offsets[i] : offset;
  }
  return x * slope + offset;
}

DSL_INLINE float shrunk(float y) {
  const float fraction = bit_cast<float>((bit_cast<std::uint32_t>(y) & 0x007fffffu) | 0x3f800000u);
  float power = kDynamicMap.powers[0];
#pragma GCC unroll 6
  for (int i = 1; i < kDecades; ++i) {
    power = y >= static_cast<float>(1 << i) ? kDynamicMap.powers[i] : power;
  }
  return power * (0.9f * fraction - 0.8f);
}

// The middle of a bin.
DSL_INLINE float signed_value(std::int32_t code) {
  const std::int32_t bin = code < 0 ? -code : code;
  float x = shrunk(static_cast<float>(bin) + 0.5f);
  x = bin == 127 ? 1.0f : x;
  x = bin == 0 ? 0.0f : x;
  return code < 0 ? -x : x;
}

DSL_INLINE float unsigned_value(std::int32_t code) {
  float x = shrunk(static_cast<float>(code) * 0.5f + 0.75f);
  x = code == 255 ? 1.0f : x;
  return code == 0 ? 0.0f : x;
}

DSL_INLINE std::int8_t signed_code(float m, float inverse) {
  const float x = bit_cast<float>(magnitude_bits(m)) * inverse;
  std::int32_t code = static_cast<std::int32_t>(stretched(x));
  code = code > 127 ? 127 : code;
  return static_cast<std::int8_t>(m < 0.0f ? -code : code);
}

// Only zero becomes zero.
DSL_INLINE std::uint8_t unsigned_code(float v, float inverse) {
  const float magnitude = bit_cast<float>(magnitude_bits(v));
  const float x = magnitude * inverse;
  std::int32_t code = static_cast<std::int32_t>(stretched(x) * 2.0f) - 1;
  code = code > 254 ? 254 : code;
  code = x >= kTop ? 255 : code;
  code = code < 1 ? 1 : code;
  return static_cast<std::uint8_t>(magnitude > 0.0f ? code : 0);
}

// [Note: a block at a time] Its moments live in two arrays in the first-level cache between being
// dequantized, updated and quantized: what memory sees is 2 bytes per element read and 2 written.
template <typename Rule, typename Grad, typename Copy>
struct UpdateBlock {
  static DSL_INLINE void run(const Block<Rule>& block) {
    alignas(64) float m[kLargestBlock];
    alignas(64) float v[kLargestBlock];
    const Rule rule = block.rule;
    const std::size_t numel = block.numel;
    float* const param = block.param;
    const void* const grad = block.grad;
    void* const copy = block.copy;
    std::int8_t* const first = block.first;
    std::uint8_t* const second = block.second;
    const float first_scale = load_raw<float>(block.first_scale, 0);
    const float second_scale = load_raw<float>(block.second_scale, 0);
    for (std::size_t i = 0; i < numel; ++i) {
      m[i] = signed_value(first[i]) * first_scale;
      v[i] = unsigned_value(second[i]) * second_scale;
    }
    std::uint32_t largest_m = 0;
    std::uint32_t largest_v = 0;
#pragma GCC ivdep
    for (std::size_t i = 0; i < numel; ++i) {
      float p = Float32::load(param, i);
      rule.step(p, Grad::load(grad, i) * rule.grad_scale, m[i], v[i]);
      Float32::store(param, i, p);
      Copy::store(copy, i, p);
      largest_m = std::max(largest_m, magnitude_bits(m[i]));
      largest_v = std::max(largest_v, magnitude_bits(v[i]));
    }
    const float new_first = scale_of(largest_m);
    const float new_second = scale_of(largest_v);
    store_raw(block.first_scale, 0, new_first);
    store_raw(block.second_scale, 0, new_second);
    if (new_first > 0.0f) {
      const float inverse = 1.0f / new_first;
      for (std::size_t i = 0; i < numel; ++i) first[i] = signed_code(m[i], inverse);
    } else {
      std::memset(first, 0, numel);
    }
    if (new_second > 0.0f) {
      const float inverse = 1.0f / new_second;
      for (std::size_t i = 0; i < numel; ++i) second[i] = unsigned_code(v[i], inverse);
    } else {
      std::memset(second, 0, numel);
    }
  }
};

template <typename Rule>
Loop<Block<Rule>> block_loop_of(const Slices& slices, Isa isa) {
  return with_dtype(slices.grad_dtype, [&](auto grad) {
    using G = typename decltype(grad)::type;
    if (slices.copies.empty()) return loop_for<UpdateBlock<Rule, G, NoCopy>, Block<Rule>>(isa);
    if (slices.copy_dtype == DType::kFloat16) {
      return loop_for<UpdateBlock<Rule, G, Float16>, Block<Rule>>(isa);
    }
    return loop_for<UpdateBlock<Rule, G, BFloat16>, Block<Rule>>(isa);
  });
}

void refuse(const std::string& what) { throw std::invalid_argument("adam8bit: " + what); }

template <typename Rule>
void step(const Slices& slices, const QuantizedMoments& moments, const Rule& rule, int threads,
          Isa isa) {
  const Loop<Block<Rule>> loop = block_loop_of<Rule>(slices, isa);
  const std::size_t grad_size = size_of(slices.grad_dtype);
  const std::size_t copy_size = size_of(slices.copy_dtype);
  // A part takes the blocks that begin in it.
  for_each_part(slices, threads, [&](std::size_t k, std::size_t from, std::size_t count) {
    const void* const borders = reinterpret_cast<const void*>(moments.borders[k]);
    const std::size_t stop = from + count;
    std::size_t number = 0;  // of the first block of the segment
    for (std::size_t s = 0; s + 1 < moments.border_counts[k]; ++s) {
      const auto begin = static_cast<std::size_t>(load_raw<std::int64_t>(borders, s));
      const auto end = static_cast<std::size_t>(load_raw<std::int64_t>(borders, s + 1));
      if (begin >= stop) break;
      const std::size_t skipped =
          from > begin ? (from - begin + moments.block - 1) / moments.block : 0;
      std::size_t block = skipped;
      for (std::size_t at = begin + skipped * moments.block; at < end && at < stop;
           at += moments.block, ++block) {
        const auto pointer = [at](std::uintptr_t base, std::size_t size) {
          return reinterpret_cast<void*>(base + at * size);
        };
        const std::size_t scale = (number + block) * sizeof(float);
        loop({static_cast<float*>(pointer(slices.params[k], sizeof(float))),
              pointer(slices.grads[k], grad_size),
              slices.copies.empty() ? nullptr : pointer(slices.copies[k], copy_size),
              static_cast<std::int8_t*>(pointer(slices.first[k], 1)),
              static_cast<std::uint8_t*>(pointer(slices.second[k], 1)),
              reinterpret_cast<float*>(moments.first_scales[k] + scale),
              reinterpret_cast<float*>(moments.second_scales[k] + scale),
              std::min(moments.block, end - at), rule});
      }
      number += (end - begin + moments.block - 1) / moments.block;
    }
  });
}

}  // namespace

void check(const Slices& slices, const QuantizedMoments& moments) {
  check(slices, 2);
  const std::size_t count = slices.numels.size();
  if (moments.block == 0 || moments.block > kLargestBlock) {
    refuse("a block of " + std::to_string(moments.block) + " elements; it knows 1 to " +
           std::to_string(kLargestBlock));
  }
  if (moments.first_scales.size() != count || moments.second_scales.size() != count ||
      moments.borders.size() != count || moments.border_counts.size() != count ||
      moments.scale_counts.size() != count) {
    refuse("lists of scales or borders are of another length than numels");
  }
  for (std::size_t k = 0; k < count; ++k) {
    const void* const borders = reinterpret_cast<const void*>(moments.borders[k]);
    const std::size_t entries = moments.border_counts[k];
    std::size_t blocks = 0;
    std::int64_t last = entries == 0 ? -1 : load_raw<std::int64_t>(borders, 0);
    if (last != 0) refuse("borders do not begin with 0");
    for (std::size_t s = 1; s < entries; ++s) {
      const std::int64_t border = load_raw<std::int64_t>(borders, s);
      if (border <= last) refuse("borders do not increase");
      blocks += (static_cast<std::size_t>(border - last) + moments.block - 1) / moments.block;
      last = border;
    }
    if (static_cast<std::size_t>(last) != slices.numels[k] || moments.scale_counts[k] != blocks) {
      refuse("a tensor of " + std::to_string(slices.numels[k]) + " elements has borders up to " +
             std::to_string(last) + " and " + std::to_string(moments.scale_counts[k]) +
             " scales for " + std::to_string(blocks) + " blocks");
    }
  }
}

void adam8bit(const Slices& slices, const QuantizedMoments& moments, const AdamOptions& options,
              int threads, Isa isa) {
  check(slices, moments);
  if (!options.decoupled && options.weight_decay != 0.0) {
    step(slices, moments, AdamRule<true>(options), threads, isa);
  } else {
    step(slices, moments, AdamRule<false>(options), threads, isa);
  }
}

}  // namespace dsl
