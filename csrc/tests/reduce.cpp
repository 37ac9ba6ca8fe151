#include <cstring>
#include <vector>

#include "../cpu/ops.h"
#include "check.h"

void test_reduce() {
  using dsl::DType;
  const auto size_of = [](DType dtype) {
    return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
  };
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  for (const DType from : dtypes) {
    for (const DType to : dtypes) {
      if ((from == DType::kFloat64) != (to == DType::kFloat64)) continue;
      for (const std::size_t numel : {0, 1, 15, 16, 17, 67, 2047, 2048, 2049, 5001}) {
        for (const std::size_t offset : {0, 1, 3, 8}) {
          const Memory first(numel * size_of(from), offset), second(numel * size_of(from), 0);
          const Memory sum(numel * size_of(to), offset);
          if (from == DType::kFloat32) {
            for (std::size_t i = 0; i < numel; ++i) {
              const float value = static_cast<float>(i % 100);
              std::memcpy(first.data() + 4 * i, &value, 4);
            }
          }
          for (const bool accumulate : {false, true}) {
            dsl::reduce_sum(sum.data(), {first.data(), second.data()}, numel, from, to, 0.5,
                            accumulate);
          }
          if (from == DType::kFloat32 && to == DType::kFloat32) {
            for (std::size_t i = 0; i < numel; ++i) {
              float value;
              std::memcpy(&value, sum.data() + 4 * i, 4);
              CHECK(value == static_cast<float>(i % 100));
            }
          }
        }
      }
    }
  }
}
