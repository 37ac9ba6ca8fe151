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

}  // namespace

PYBIND11_MODULE(_native, m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.doc() = "CPU ops of ds_lightning on raw pointers; ds_lightning.ops checks their arguments.";
  m.def("reduce_sum", &reduce_sum, release(), py::arg("dst_ptr"), py::arg("src_ptrs"),
        py::arg("numel"), py::arg("src_dtype"), py::arg("dst_dtype"), py::arg("scale"),
        py::arg("accumulate"));
  m.def("keep_freed_memory", &dsl::keep_freed_memory, release(), py::arg("mmap_threshold_bytes"),
        py::arg("trim_threshold_bytes"));
  m.def("release_free_memory", &dsl::release_free_memory, release());
  bind_optim(m);
}
