// ds_lightning._cuda: the CUDA ops, addressed by device pointer and stream handle.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ops.h"

namespace py = pybind11;

PYBIND11_MODULE(_cuda, m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.doc() = "CUDA ops of ds_lightning on raw pointers; ds_lightning.ops checks their arguments.";
  m.attr("MAX_SOURCES") = dsl::cuda::kMaxSources;
  m.def("reduce_sum", &dsl::cuda::reduce_sum, release(), py::arg("dst_ptr"), py::arg("src_ptrs"),
        py::arg("numel"), py::arg("src_dtype"), py::arg("dst_dtype"), py::arg("scale"),
        py::arg("accumulate"), py::arg("stream"));
  m.def("device_count", &dsl::cuda::device_count, release());
}
