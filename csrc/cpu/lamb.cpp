#include "lamb.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "choice.h"
#include "parallel.h"

namespace dsl {
namespace {

constexpr std::size_t kBlockNumel = 4096;  // u of a block stays in the first-level cache
constexpr std::size_t kLanes = 16;

struct Lamb {
  explicit Lamb(const LambOptions& o)
      : average(1.0 - o.beta1),
        beta2(static_cast<float>(o.beta2)),
        rest2(static_cast<float>(1.0 - o.beta2)),
        under_root(static_cast<float>(o.inside ? o.eps : 0.0)),
        beside_root(static_cast<float>(o.inside ? 0.0 : o.eps)),
        weight_decay(static_cast<float>(o.weight_decay)),
        grad_scale(static_cast<float>(o.grad_scale)) {}

  DSL_INLINE float direction(float p, float m, float v) const {
    return m / (__builtin_sqrtf(v + under_root) + beside_root) + weight_decay * p;
  }

  Lerp average;
  float beta2, rest2, under_root, beside_root, weight_decay, grad_scale;
};

struct Block {
  void* param;
  const void* grad;
  void* first;
  void* second;
  void* copy;
  std::size_t numel;
  Lamb rule;
  float step;
  double* of_param;
  double* of_direction;
};

DSL_INLINE double sum_of_squares(const float* values, std::size_t numel) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::size_t l = 0; l < kLanes; ++l) {
      const double x = load_raw<float>(values, i + l);
      lanes[l] += x * x;
    }
  }
  for (std::size_t l = 0; i < numel; ++i, ++l) {
    const double x = load_raw<float>(values, i);
    lanes[l] += x * x;
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <typename Grad, typename Moment>
struct Moments {
  static DSL_INLINE void run(const Block& block) {
    const Lamb rule = block.rule;
    alignas(64) float direction[kBlockNumel];
#pragma GCC ivdep
    for (std::size_t i = 0; i < block.numel; ++i) {
      const float g = Grad::load(block.grad, i) * rule.grad_scale;
      const float m = rule.average(Moment::load(block.first, i), g);
      const float v = Moment::load(block.second, i) * rule.beta2 + (rule.rest2 * g) * g;
      Moment::store(block.first, i, m);
      Moment::store(block.second, i, v);
      // What the second pass will read, so that it computes the same.
      direction[i] = rule.direction(Float32::load(block.param, i), Moment::load(block.first, i),
                                    Moment::load(block.second, i));
    }
    *block.of_param = sum_of_squares(static_cast<const float*>(block.param), block.numel);
    *block.of_direction = sum_of_squares(direction, block.numel);
  }
};

template <typename Moment, typename Copy>
struct Apply {
  static DSL_INLINE void run(const Block& block) {
    const Lamb rule = block.rule;
    const float step = block.step;
#pragma GCC ivdep
    for (std::size_t i = 0; i < block.numel; ++i) {
      const float p = Float32::load(block.param, i);
      const float u =
          rule.direction(p, Moment::load(block.first, i), Moment::load(block.second, i));
      const float updated = p - step * u;
      Float32::store(block.param, i, updated);
      Copy::store(block.copy, i, updated);
    }
  }
};

struct Place {
  std::size_t slice, from, numel;
};

std::vector<Place> blocks_of(const Slices& slices) {
  std::vector<Place> places;
  for (std::size_t k = 0; k < slices.numels.size(); ++k) {
    for (std::size_t from = 0; from < slices.numels[k]; from += kBlockNumel) {
      places.push_back({k, from, std::min(kBlockNumel, slices.numels[k] - from)});
    }
  }
  return places;
}

// Calls body(place) for every block, on up to `threads` threads that have equal numbers of
// elements.
template <typename Body>
void for_each_block(const std::vector<Place>& places, int threads, const Body& body) {
  std::vector<std::size_t> ends;
  ends.reserve(places.size());
  std::size_t total = 0;
  for (const Place& place : places) ends.push_back(total += place.numel);
  parallel_for(total, threads, [&](std::size_t begin, std::size_t end) {
    // A block belongs to the thread in whose range it begins.
    const auto first_from = [&](std::size_t element) {
      std::size_t k = std::upper_bound(ends.begin(), ends.end(), element) - ends.begin();
      if (k < places.size() && ends[k] - places[k].numel < element) ++k;
      return k;
    };
    const std::size_t stop = end == total ? places.size() : first_from(end);
    for (std::size_t k = first_from(begin); k < stop; ++k) body(k);
  });
}

Block block_of(const Slices& slices, const Place& place, const Lamb& rule) {
  const auto at = [&place](const std::vector<std::uintptr_t>& list, std::size_t size) {
    return list.empty() ? nullptr : reinterpret_cast<void*>(list[place.slice] + place.from * size);
  };
  return {at(slices.params, sizeof(float)),
          at(slices.grads, size_of(slices.grad_dtype)),
          at(slices.first, size_of(slices.moment_dtype)),
          at(slices.second, size_of(slices.moment_dtype)),
          at(slices.copies, size_of(slices.copy_dtype)),
          place.numel,
          rule,
          0.0f,
          nullptr,
          nullptr};
}

template <typename Visit>
auto with_moment(DType dtype, Visit visit) {
  return dtype == DType::kBFloat16 ? visit(Type<BFloat16>{}) : visit(Type<Float32>{});
}

}  // namespace

void lamb_moments(const Slices& slices, const LambOptions& options, double* squares, int threads,
                  Isa isa) {
  check(slices, 2);
  const Loop<Block> loop = with_dtype(slices.grad_dtype, [&](auto grad) {
    return with_moment(slices.moment_dtype, [&](auto moment) {
      using Body = Moments<typename decltype(grad)::type, typename decltype(moment)::type>;
      return loop_for<Body, Block>(isa);
    });
  });
  const Lamb rule(options);
  const std::vector<Place> places = blocks_of(slices);
  std::vector<double> partial(2 * places.size());
  for_each_block(places, threads, [&](std::size_t k) {
    Block block = block_of(slices, places[k], rule);
    block.of_param = &partial[2 * k];
    block.of_direction = &partial[2 * k + 1];
    loop(block);
  });
  const std::size_t count = slices.numels.size();
  std::fill(squares, squares + 2 * count, 0.0);
  for (std::size_t k = 0; k < places.size(); ++k) {
    squares[places[k].slice] += partial[2 * k];
    squares[count + places[k].slice] += partial[2 * k + 1];
  }
}

void lamb_apply(const Slices& slices, const LambOptions& options, const std::vector<double>& steps,
                int threads, Isa isa) {
  check(slices, 2);
  if (steps.size() != slices.numels.size()) {
    throw std::invalid_argument("there must be one step for each slice");
  }
  const Loop<Block> loop = with_moment(slices.moment_dtype, [&](auto moment) {
    using M = typename decltype(moment)::type;
    if (slices.copies.empty()) return loop_for<Apply<M, NoCopy>, Block>(isa);
    if (slices.copy_dtype == DType::kFloat16) return loop_for<Apply<M, Float16>, Block>(isa);
    return loop_for<Apply<M, BFloat16>, Block>(isa);
  });
  const Lamb rule(options);
  const std::vector<Place> places = blocks_of(slices);
  for_each_block(places, threads, [&](std::size_t k) {
    Block block = block_of(slices, places[k], rule);
    block.step = static_cast<float>(steps[places[k].slice]);
    loop(block);
  });
}

}  // namespace dsl
