// The CUDA ops behind ds_lightning._cuda. Each launches on the given stream and returns at once;
// a failed launch throws std::runtime_error with the CUDA error's own words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dsl::cuda {

constexpr std::size_t kMaxSources = 256;

// As dsl::reduce_sum of the CPU, for fp32, bf16 and fp16 on device pointers.
void reduce_sum(std::uintptr_t dst, const std::vector<std::uintptr_t>& srcs, std::size_t numel,
                const std::string& src_dtype, const std::string& dst_dtype, double scale,
                bool accumulate, std::uintptr_t stream);

// Devices the driver shows; 0 without a driver.
int device_count();

}  // namespace dsl::cuda
