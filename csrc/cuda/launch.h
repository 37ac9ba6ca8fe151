// What all launches share: names of dtypes, and errors as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "element.h"

namespace dsl::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline Kind parse_kind(const std::string& name, const char* what) {
  if (name == "fp32") return Kind::kFloat32;
  if (name == "bf16") return Kind::kBFloat16;
  if (name == "fp16") return Kind::kFloat16;
  throw std::invalid_argument(std::string(what) + " on CUDA knows fp32, bf16, fp16, not " + name);
}

}  // namespace dsl::cuda
