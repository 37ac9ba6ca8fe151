// Lists of flat tensors on which one call of an optimizer works, and the walk over them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "../rounding.h"
#include "convert.h"
#include "isa.h"
#include "ops.h"

namespace dsl {

// Four lists of pointers to flat tensors that belong together, slice by slice. Parameters are fp32.
// Pointers may be misaligned; no two tensors may overlap.
struct Slices {
  std::vector<std::uintptr_t> params;
  std::vector<std::uintptr_t> grads;
  std::vector<std::uintptr_t> first;   // moments; empty where the rule has none
  std::vector<std::uintptr_t> second;  // likewise
  std::vector<std::uintptr_t> copies;  // 16-bit copies of the updated parameters; empty for none
  std::vector<std::size_t> numels;
  DType grad_dtype = DType::kFloat32;
  DType moment_dtype = DType::kFloat32;
  DType copy_dtype = DType::kBFloat16;
  std::uint32_t seed = 0;  // of the rounding of bf16 moments; its low 31 bits count
};

// A part of one slice.
template <typename Rule>
struct Part {
  void* param;
  const void* grad;
  void* first;
  void* second;
  void* copy;
  std::size_t numel;
  std::uint32_t first_seed;  // mixed
  std::uint32_t second_seed;
  Rule rule;
};

struct NoCopy {
  static DSL_INLINE void store(void*, std::size_t, float) {}
};

// The seed of a list of moments: the two lists of a rule throw different dice. Not mixed.
DSL_INLINE std::uint32_t seed_of(std::uint32_t seed, std::uint32_t list) { return 2 * seed + list; }

// Moments of 16 bits are rounded stochastically: to nearest, an average could not take the small
// steps by which it decays.
template <typename Moment>
DSL_INLINE void store_moment(void* base, std::size_t i, float x, std::uint32_t seed) {
  if constexpr (std::is_same<Moment, BFloat16>::value) {
    store_raw(base, i, round_to_bfloat16(bit_cast<std::uint32_t>(x), seed));
  } else {
    Moment::store(base, i, x);
  }
}

// [Note: prefetching for 16-bit moments] Streams of elements of several sizes confuse the
// hardware's prefetcher: asking for each block two blocks ahead makes steps with bf16 moments some
// 10 % faster. With fp32 moments it makes them slower by as much, so there the hardware is left
// alone.
constexpr std::size_t kBlock = 256;
constexpr std::size_t kAhead = 2 * kBlock;

template <typename T>
DSL_INLINE void prefetch(const void* base, std::size_t i) {
  // Each line once: `i` goes by 16 elements, which are a line of 4 bytes or half a line of 2 bytes.
  if (T::kSize == 4 || i % 32 == 0) {
    __builtin_prefetch(static_cast<const char*>(base) + i * T::kSize);
  }
}

// [Note: one pass per element] All that an element needs is read once, its new values are written
// once: the gradient is widened and scaled, moments are widened and narrowed and the 16-bit copy is
// rounded in registers. One loop per combination of dtypes is the price.
template <typename Rule, typename Grad, typename Moment, typename Copy>
struct Update {
  static DSL_INLINE void run(const Part<Rule>& part) {
    const Rule rule = part.rule;
    const std::size_t numel = part.numel;
    void* const param = part.param;
    const void* const grad = part.grad;
    void* const first = part.first;
    void* const second = part.second;
    void* const copy = part.copy;
    const std::uint32_t first_seed = part.first_seed;
    const std::uint32_t second_seed = part.second_seed;
    constexpr bool kPrefetch = Rule::kMoments > 0 && Moment::kSize == 2;
    const std::size_t block = kPrefetch ? kBlock : numel;
    for (std::size_t begin = 0; begin < numel; begin += block) {
      const std::size_t end = std::min(numel, begin + block);
      if (kPrefetch && numel - begin >= kAhead + kBlock) {
        for (std::size_t i = begin + kAhead; i < begin + kAhead + kBlock; i += 16) {
          prefetch<Float32>(param, i);
          prefetch<Grad>(grad, i);
          prefetch<Moment>(first, i);
          if constexpr (Rule::kMoments > 1) prefetch<Moment>(second, i);
        }
      }
#pragma GCC ivdep
      for (std::size_t i = begin; i < end; ++i) {
        float p = Float32::load(param, i);
        float m = 0.0f;
        float v = 0.0f;
        if constexpr (Rule::kMoments > 0) m = Moment::load(first, i);
        if constexpr (Rule::kMoments > 1) v = Moment::load(second, i);
        rule.step(p, Grad::load(grad, i) * rule.grad_scale, m, v);
        if constexpr (Rule::kMoments > 0) store_moment<Moment>(first, i, m, first_seed);
        if constexpr (Rule::kMoments > 1) store_moment<Moment>(second, i, v, second_seed);
        Float32::store(param, i, p);
        Copy::store(copy, i, p);
      }
    }
  }
};

template <typename T>
struct Type {
  using type = T;
};

template <typename Visit>
auto with_dtype(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(Type<BFloat16>{});
    case DType::kFloat16:
      return visit(Type<Float16>{});
    default:
      return visit(Type<Float32>{});
  }
}

template <typename Rule>
Loop<Part<Rule>> loop_of(const Slices& slices, Isa isa) {
  return with_dtype(slices.grad_dtype, [&](auto grad) {
    const auto with_copy = [&](auto moment) {
      using G = typename decltype(grad)::type;
      using M = typename decltype(moment)::type;
      if (slices.copies.empty()) return loop_for<Update<Rule, G, M, NoCopy>, Part<Rule>>(isa);
      if (slices.copy_dtype == DType::kFloat16) {
        return loop_for<Update<Rule, G, M, Float16>, Part<Rule>>(isa);
      }
      return loop_for<Update<Rule, G, M, BFloat16>, Part<Rule>>(isa);
    };
    if constexpr (Rule::kMoments > 0) {
      if (slices.moment_dtype == DType::kBFloat16) return with_copy(Type<BFloat16>{});
    }
    return with_copy(Type<Float32>{});
  });
}

// Throws std::invalid_argument where lists are of unequal length or dtypes are not served.
void check(const Slices& slices, int moments);

// Calls body(slice, first element, number of elements) for all parts, on up to `threads` threads.
void for_each_part(const Slices& slices, int threads,
                   const std::function<void(std::size_t, std::size_t, std::size_t)>& body);

std::size_t size_of(DType dtype);

// One step of a rule on all slices.
template <typename Rule>
void update(const Slices& slices, const Rule& rule, int threads, Isa isa) {
  check(slices, Rule::kMoments);
  const Loop<Part<Rule>> loop = loop_of<Rule>(slices, isa);
  const std::size_t grad_size = size_of(slices.grad_dtype);
  const std::size_t moment_size = size_of(slices.moment_dtype);
  const std::size_t copy_size = size_of(slices.copy_dtype);
  const std::uint32_t first_seed = mixed(seed_of(slices.seed, 0));
  const std::uint32_t second_seed = mixed(seed_of(slices.seed, 1));
  for_each_part(slices, threads, [&](std::size_t k, std::size_t from, std::size_t numel) {
    const auto at = [k, from](const std::vector<std::uintptr_t>& list, std::size_t size) {
      return list.empty() ? nullptr : reinterpret_cast<void*>(list[k] + from * size);
    };
    loop({at(slices.params, sizeof(float)), at(slices.grads, grad_size),
          at(slices.first, moment_size), at(slices.second, moment_size),
          at(slices.copies, copy_size), numel, first_seed, second_seed, rule});
  });
}

}  // namespace dsl
