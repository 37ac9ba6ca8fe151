// ds_lightning._native: the CPU ops, addressed by pointer, run without the interpreter's lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "bind_optim.h"
#include "ops.h"

namespace py = pybind11;

namespace {

void reduce_sum(std::uintptr_t dst, const std::vector<std::uintptr_t>& srcs, std::size_t numel,
                const std::string& src_dtype, const std::string& dst_dtype, double scale,
                bool accumulate) {
  std::vector<const void*> pointers;
  pointers.reserve(srcs.size());
  for (const auto src : srcs) pointers.push_back(reinterpret_cast<const void*>(src));
  dsl::reduce_sum(reinterpret_cast<void*>(dst), pointers, numel, dsl::parse_dtype(src_dtype),
                  dsl::parse_dtype(dst_dtype), scale, accumulate);
}

void pack_signs(std::uintptr_t src, std::uintptr_t dst, std::size_t numel,
                const std::string& src_dtype) {
  dsl::pack_signs(reinterpret_cast<const void*>(src), reinterpret_cast<void*>(dst), numel,
                  dsl::parse_dtype(src_dtype));
}

void unpack_signs(std::uintptr_t src, std::uintptr_t dst, std::size_t numel, double scale,
                  const std::string& dst_dtype, bool accumulate) {
  dsl::unpack_signs(reinterpret_cast<const void*>(src), reinterpret_cast<void*>(dst), numel, scale,
                    dsl::parse_dtype(dst_dtype), accumulate);
}

void quantize(std::uintptr_t src, std::uintptr_t dst, std::uintptr_t scales, std::size_t numel,
              std::size_t block, int bits, const std::string& src_dtype) {
  dsl::quantize(reinterpret_cast<const void*>(src), reinterpret_cast<void*>(dst),
                reinterpret_cast<void*>(scales), numel, block, bits, dsl::parse_dtype(src_dtype));
}

void dequantize(std::uintptr_t src, std::uintptr_t scales, std::uintptr_t dst, std::size_t numel,
                std::size_t block, int bits, const std::string& dst_dtype, bool accumulate) {
  dsl::dequantize(reinterpret_cast<const void*>(src), reinterpret_cast<const void*>(scales),
                  reinterpret_cast<void*>(dst), numel, block, bits, dsl::parse_dtype(dst_dtype),
                  accumulate);
}

void round_stochastic(std::uintptr_t src, std::uintptr_t dst, std::size_t numel,
                      const std::string& dst_dtype, std::uint32_t seed) {
  dsl::round_stochastic(reinterpret_cast<const void*>(src), reinterpret_cast<void*>(dst), numel,
                        dsl::parse_dtype(dst_dtype), seed);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.doc() = "CPU ops of ds_lightning on raw pointers; ds_lightning.ops checks their arguments.";
  m.def("reduce_sum", &reduce_sum, release(), py::arg("dst_ptr"), py::arg("src_ptrs"),
        py::arg("numel"), py::arg("src_dtype"), py::arg("dst_dtype"), py::arg("scale"),
        py::arg("accumulate"));
  m.def("pack_signs", &pack_signs, release(), py::arg("src_ptr"), py::arg("dst_ptr"),
        py::arg("numel"), py::arg("src_dtype"));
  m.def("unpack_signs", &unpack_signs, release(), py::arg("src_ptr"), py::arg("dst_ptr"),
        py::arg("numel"), py::arg("scale"), py::arg("dst_dtype"), py::arg("accumulate"));
  m.def("quantize", &quantize, release(), py::arg("src_ptr"), py::arg("dst_ptr"),
        py::arg("scales_ptr"), py::arg("numel"), py::arg("block"), py::arg("bits"),
        py::arg("src_dtype"));
  m.def("dequantize", &dequantize, release(), py::arg("src_ptr"), py::arg("scales_ptr"),
        py::arg("dst_ptr"), py::arg("numel"), py::arg("block"), py::arg("bits"),
        py::arg("dst_dtype"), py::arg("accumulate"));
  m.def("round_stochastic", &round_stochastic, release(), py::arg("src_ptr"), py::arg("dst_ptr"),
        py::arg("numel"), py::arg("dst_dtype"), py::arg("seed"));
  m.def("keep_freed_memory", &dsl::keep_freed_memory, release(), py::arg("mmap_threshold_bytes"),
        py::arg("trim_threshold_bytes"));
  m.def("release_free_memory", &dsl::release_free_memory, release());
  bind_optim(m);
  bind_lamb(m);
}
