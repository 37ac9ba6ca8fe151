#include "../cpu/optim.h"

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "check.h"

namespace {

using dsl::DType;

// Slices over memory of exactly their size.
class Example {
 public:
  Example(const std::vector<std::size_t>& numels, int moments, DType grad, DType moment,
          bool with_copies, DType copy, std::size_t offset) {
    slices_.numels = numels;
    slices_.grad_dtype = grad;
    slices_.moment_dtype = moment;
    slices_.copy_dtype = copy;
    for (const std::size_t numel : numels) {
      slices_.params.push_back(add(numel, DType::kFloat32, offset, 1.0f));
      slices_.grads.push_back(add(numel, grad, offset, 0.5f));
      if (moments > 0) slices_.first.push_back(add(numel, moment, offset, 0.25f));
      if (moments > 1) slices_.second.push_back(add(numel, moment, offset, 0.125f));
      if (with_copies) slices_.copies.push_back(add(numel, copy, offset, 0.0f));
    }
  }

  const dsl::Slices& slices() const { return slices_; }

  bool operator==(const Example& other) const {
    for (std::size_t k = 0; k < memory_.size(); ++k) {
      const Memory& here = memory_[k];
      if (std::memcmp(here.data(), other.memory_[k].data(), here.nbytes()) != 0) return false;
    }
    return true;
  }

 private:
  std::uintptr_t add(std::size_t numel, DType dtype, std::size_t offset, float value) {
    memory_.emplace_back(numel * dsl::size_of(dtype), offset);
    void* const data = memory_.back().data();
    for (std::size_t i = 0; i < numel; ++i) {
      const float varied = value * static_cast<float>(1 + i % 7);
      if (dtype == DType::kFloat32) dsl::Float32::store(data, i, varied);
      if (dtype == DType::kBFloat16) dsl::BFloat16::store(data, i, varied);
      if (dtype == DType::kFloat16) dsl::Float16::store(data, i, varied);
    }
    return memory_.back().address();
  }

  std::deque<Memory> memory_;
  dsl::Slices slices_;
};

struct Rule {
  int moments;
  void (*step)(const dsl::Slices&, int, dsl::Isa);
};

const Rule kRules[] = {
    {2,
     [](const dsl::Slices& s, int threads, dsl::Isa isa) {
       dsl::adam(s, {0.1, 0.9, 0.99, 1e-8, 0.1, true, 0.5, 0.5, 2.0}, threads, isa);
     }},
    {2,
     [](const dsl::Slices& s, int threads, dsl::Isa isa) {
       dsl::adam(s, {0.1, 0.9, 0.99, 1e-8, 0.1, false, 1.0, 1.0, 2.0}, threads, isa);
     }},
    {1, [](const dsl::Slices& s, int threads,
           dsl::Isa isa) { dsl::lion(s, {0.1, 0.9, 0.99, 0.1, 2.0}, threads, isa); }},
    {1, [](const dsl::Slices& s, int threads,
           dsl::Isa isa) { dsl::adagrad(s, {0.1, 1e-10, 0.1, 2.0}, threads, isa); }},
    {1, [](const dsl::Slices& s, int threads,
           dsl::Isa isa) { dsl::sgd(s, {0.1, 0.9, 0.0, true, 0.1, false, 2.0}, threads, isa); }},
    {1, [](const dsl::Slices& s, int threads,
           dsl::Isa isa) { dsl::sgd(s, {0.1, 0.9, 0.1, false, 0.0, true, 2.0}, threads, isa); }},
    {0, [](const dsl::Slices& s, int threads,
           dsl::Isa isa) { dsl::sgd(s, {0.1, 0.0, 0.0, false, 0.1, false, 2.0}, threads, isa); }},
};

void small_sizes_of_all_dtypes() {
  const std::vector<std::size_t> numels = {0, 1, 15, 16, 17, 0, 67};
  const DType kinds[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const Rule& rule : kRules) {
    for (const DType grad : kinds) {
      for (const DType moment : {DType::kFloat32, DType::kBFloat16}) {
        for (const DType copy : kinds) {  // fp32 for none
          const bool copies = copy != DType::kFloat32;
          const DType copy_dtype = copies ? copy : DType::kBFloat16;
          for (const std::size_t offset : {0, 1, 6}) {
            const Example expected(numels, rule.moments, grad, moment, copies, copy_dtype, offset);
            rule.step(expected.slices(), 1, dsl::Isa::kBaseline);
            for (const std::string& name : dsl::instruction_sets()) {
              const Example found(numels, rule.moments, grad, moment, copies, copy_dtype, offset);
              rule.step(found.slices(), 1, dsl::parse_isa(name));
              CHECK(found == expected);
            }
          }
        }
      }
    }
  }
}

void large_slices_on_several_threads() {
  const std::vector<std::size_t> numels = {100001, 0, 1, 200003, 65536};
  for (const Rule& rule : kRules) {
    const Example expected(numels, rule.moments, DType::kBFloat16, DType::kFloat32, true,
                           DType::kBFloat16, 1);
    rule.step(expected.slices(), 1, dsl::parse_isa("auto"));
    for (const int threads : {2, 3, 5}) {
      const Example found(numels, rule.moments, DType::kBFloat16, DType::kFloat32, true,
                          DType::kBFloat16, 1);
      rule.step(found.slices(), threads, dsl::parse_isa("auto"));
      CHECK(found == expected);
    }
  }
}

}  // namespace

void test_optim() {
  small_sizes_of_all_dtypes();
  large_slices_on_several_threads();
}
