// Python's names of the two passes of LAMB. Lists are by segment; see lamb.h.
#include <pybind11/stl.h>

#include "bind_optim.h"
#include "lamb.h"
#include "scan.h"

namespace py = pybind11;

namespace {

using Numbers = std::vector<std::uintptr_t>;
using Text = std::string;

// Where the segments of tensors begin in memory.
Numbers starts_of(const Integers& tensors, const Numbers& of, const Numbers& starts,
                  std::size_t size) {
  Numbers pointers;
  if (tensors.values.empty()) return pointers;
  pointers.reserve(of.size());
  for (std::size_t k = 0; k < of.size(); ++k) {
    pointers.push_back(tensors.values.at(of[k]) + starts.at(k) * size);
  }
  return pointers;
}

dsl::Slices segments(const Integers& params, const Integers& grads, const Integers& first,
                     const Integers& second, const Integers& copies, const Numbers& of,
                     const Numbers& starts, const Numbers& numels, const Text& grad_dtype,
                     const Text& moment_dtype, const Text& copy_dtype) {
  const dsl::DType grad = dsl::parse_dtype(grad_dtype);
  const dsl::DType moment = dsl::parse_dtype(moment_dtype);
  const dsl::DType copy = dsl::parse_dtype(copy_dtype);
  return {starts_of(params, of, starts, sizeof(float)),
          starts_of(grads, of, starts, dsl::size_of(grad)),
          starts_of(first, of, starts, dsl::size_of(moment)),
          starts_of(second, of, starts, dsl::size_of(moment)),
          starts_of(copies, of, starts, dsl::size_of(copy)),
          {numels.begin(), numels.end()},
          grad,
          moment,
          copy};
}

std::vector<double> moments(const Integers& params, const Integers& grads, const Integers& exp_avgs,
                            const Integers& exp_avg_sqs, const Numbers& of, const Numbers& starts,
                            const Numbers& numels, const Text& grad_dtype, const Text& moment_dtype,
                            double beta1, double beta2, double eps, bool inside,
                            double weight_decay, double grad_scale, int threads,
                            const Text& instruction_set) {
  std::vector<double> squares(2 * of.size());
  dsl::lamb_moments(segments(params, grads, exp_avgs, exp_avg_sqs, {}, of, starts, numels,
                             grad_dtype, moment_dtype, "bf16"),
                    {beta1, beta2, eps, inside, weight_decay, grad_scale}, squares.data(), threads,
                    dsl::parse_isa(instruction_set));
  return squares;
}

void apply(const Integers& params, const Integers& exp_avgs, const Integers& exp_avg_sqs,
           const Integers& copies, const Numbers& of, const Numbers& starts, const Numbers& numels,
           const Text& moment_dtype, const Text& copy_dtype, const std::vector<double>& steps,
           double eps, bool inside, double weight_decay, int threads, const Text& instruction_set) {
  // No gradients, but their list must have its length.
  dsl::lamb_apply(segments(params, params, exp_avgs, exp_avg_sqs, copies, of, starts, numels,
                           "fp32", moment_dtype, copy_dtype),
                  {0.0, 0.0, eps, inside, weight_decay, 1.0}, steps, threads,
                  dsl::parse_isa(instruction_set));
}

}  // namespace

void bind_lamb(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  using py::arg;
  m.def("lamb_moments", &moments, release(), arg("params"), arg("grads"), arg("exp_avgs"),
        arg("exp_avg_sqs"), arg("of"), arg("starts"), arg("numels"), arg("grad_dtype"),
        arg("moment_dtype"), arg("beta1"), arg("beta2"), arg("eps"), arg("inside"),
        arg("weight_decay"), arg("grad_scale"), arg("threads"), arg("instruction_set") = "auto");
  m.def("lamb_apply", &apply, release(), arg("params"), arg("exp_avgs"), arg("exp_avg_sqs"),
        arg("copies"), arg("of"), arg("starts"), arg("numels"), arg("moment_dtype"),
        arg("copy_dtype"), arg("steps"), arg("eps"), arg("inside"), arg("weight_decay"),
        arg("threads"), arg("instruction_set") = "auto");
}
