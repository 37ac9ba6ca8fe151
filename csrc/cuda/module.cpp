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
  m.def("adam", &dsl::cuda::adam, release(), py::arg("params"), py::arg("grads"),
        py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("copies"), py::arg("numels"),
        py::arg("grad_dtype"), py::arg("moment_dtype"), py::arg("copy_dtype"), py::arg("lr"),
        py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
        py::arg("decoupled"), py::arg("bias_correction1"), py::arg("bias_correction2"),
        py::arg("grad_scale"), py::arg("stream"), py::arg("grad_scale_ptr") = 0,
        py::arg("seed") = 0);
  m.def("adam8bit", &dsl::cuda::adam8bit, release(), py::arg("params"), py::arg("grads"),
        py::arg("exp_avgs"), py::arg("exp_avg_sqs"), py::arg("exp_avg_scales"),
        py::arg("exp_avg_sq_scales"), py::arg("borders"), py::arg("border_counts"),
        py::arg("scale_counts"), py::arg("copies"), py::arg("numels"), py::arg("grad_dtype"),
        py::arg("copy_dtype"), py::arg("block"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
        py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"), py::arg("bias_correction1"),
        py::arg("bias_correction2"), py::arg("grad_scale"), py::arg("stream"),
        py::arg("grad_scale_ptr") = 0);
  m.def("lion", &dsl::cuda::lion, release(), py::arg("params"), py::arg("grads"),
        py::arg("exp_avgs"), py::arg("copies"), py::arg("numels"), py::arg("grad_dtype"),
        py::arg("moment_dtype"), py::arg("copy_dtype"), py::arg("lr"), py::arg("beta1"),
        py::arg("beta2"), py::arg("weight_decay"), py::arg("grad_scale"), py::arg("stream"),
        py::arg("grad_scale_ptr") = 0, py::arg("seed") = 0);
  m.def("adagrad", &dsl::cuda::adagrad, release(), py::arg("params"), py::arg("grads"),
        py::arg("sums"), py::arg("copies"), py::arg("numels"), py::arg("grad_dtype"),
        py::arg("moment_dtype"), py::arg("copy_dtype"), py::arg("lr"), py::arg("eps"),
        py::arg("weight_decay"), py::arg("grad_scale"), py::arg("stream"),
        py::arg("grad_scale_ptr") = 0, py::arg("seed") = 0);
  m.def("sgd", &dsl::cuda::sgd, release(), py::arg("params"), py::arg("grads"),
        py::arg("momentum_buffers"), py::arg("copies"), py::arg("numels"), py::arg("grad_dtype"),
        py::arg("moment_dtype"), py::arg("copy_dtype"), py::arg("lr"), py::arg("momentum"),
        py::arg("dampening"), py::arg("nesterov"), py::arg("weight_decay"), py::arg("first"),
        py::arg("grad_scale"), py::arg("stream"), py::arg("grad_scale_ptr") = 0,
        py::arg("seed") = 0);
  m.def("pack_signs", &dsl::cuda::pack_signs, release(), py::arg("src_ptr"), py::arg("dst_ptr"),
        py::arg("numel"), py::arg("src_dtype"), py::arg("stream"));
  m.def("unpack_signs", &dsl::cuda::unpack_signs, release(), py::arg("src_ptr"), py::arg("dst_ptr"),
        py::arg("numel"), py::arg("scale"), py::arg("dst_dtype"), py::arg("accumulate"),
        py::arg("stream"), py::arg("scale_ptr") = 0);
  m.def("quantize", &dsl::cuda::quantize, release(), py::arg("src_ptr"), py::arg("dst_ptr"),
        py::arg("scales_ptr"), py::arg("numel"), py::arg("block"), py::arg("bits"),
        py::arg("src_dtype"), py::arg("stream"));
  m.def("dequantize", &dsl::cuda::dequantize, release(), py::arg("src_ptr"), py::arg("scales_ptr"),
        py::arg("dst_ptr"), py::arg("numel"), py::arg("block"), py::arg("bits"),
        py::arg("dst_dtype"), py::arg("accumulate"), py::arg("stream"));
  m.def("round_stochastic", &dsl::cuda::round_stochastic, release(), py::arg("src_ptr"),
        py::arg("dst_ptr"), py::arg("numel"), py::arg("dst_dtype"), py::arg("seed"),
        py::arg("stream"));
  m.def("device_count", &dsl::cuda::device_count, release());
}
