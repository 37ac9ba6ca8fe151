#include "slices.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace dsl {
namespace {

void check_length(const char* name, std::size_t length, std::size_t expected) {
  if (length == expected) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(length) +
                              " entries, not " + std::to_string(expected));
}

}  // namespace

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

void check(const Slices& slices, int moments) {
  const std::size_t count = slices.numels.size();
  check_length("params", slices.params.size(), count);
  check_length("grads", slices.grads.size(), count);
  check_length("the first list of moments", slices.first.size(), moments > 0 ? count : 0);
  check_length("the second list of moments", slices.second.size(), moments > 1 ? count : 0);
  check_length("copies", slices.copies.size(), slices.copies.empty() ? 0 : count);
  if (slices.grad_dtype == DType::kFloat64) {
    throw std::invalid_argument("gradients are fp32, bf16 or fp16");
  }
  if (slices.moment_dtype != DType::kFloat32 && slices.moment_dtype != DType::kBFloat16) {
    throw std::invalid_argument("moments are fp32 or bf16");
  }
  if (size_of(slices.copy_dtype) != 2) throw std::invalid_argument("copies are bf16 or fp16");
}

void for_each_part(const Slices& slices, int threads,
                   const std::function<void(std::size_t, std::size_t, std::size_t)>& body) {
  std::vector<std::size_t> ends;
  ends.reserve(slices.numels.size());
  std::size_t total = 0;
  for (const std::size_t numel : slices.numels) ends.push_back(total += numel);
  parallel_for(total, threads, [&](std::size_t begin, std::size_t end) {
    std::size_t k = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const std::size_t stop = std::min(end, ends[k]);
      if (stop > begin) body(k, begin - (ends[k] - slices.numels[k]), stop - begin);
      begin = stop;
      ++k;
    }
  });
}

}  // namespace dsl
