// Python's names of the optimizer steps. Pointers are integers; dtypes are "fp32", "bf16", "fp16".
#include "bind_optim.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>

#include "adam8bit.h"
#include "optim.h"
#include "scan.h"

namespace py = pybind11;

namespace {

using Pointers = const Integers&;
using Text = std::string;

const Integers kNone;

dsl::Slices slices_of(Pointers params, Pointers grads, Pointers first, Pointers second,
                      Pointers copies, Pointers numels, const Text& grad_dtype,
                      const Text& moment_dtype, const Text& copy_dtype, std::uint32_t seed = 0) {
  return {params.values,
          grads.values,
          first.values,
          second.values,
          copies.values,
          {numels.values.begin(), numels.values.end()},
          dsl::parse_dtype(grad_dtype),
          dsl::parse_dtype(moment_dtype),
          dsl::parse_dtype(copy_dtype),
          seed};
}

void adam(Pointers params, Pointers grads, Pointers exp_avgs, Pointers exp_avg_sqs, Pointers copies,
          Pointers numels, const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype,
          double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
          double bias_correction1, double bias_correction2, double grad_scale, int threads,
          const Text& instruction_set, std::uint32_t seed) {
  dsl::adam(slices_of(params, grads, exp_avgs, exp_avg_sqs, copies, numels, grad_dtype,
                      moment_dtype, copy_dtype, seed),
            {lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction1, bias_correction2,
             grad_scale},
            threads, dsl::parse_isa(instruction_set));
}

void adam8bit(Pointers params, Pointers grads, Pointers exp_avgs, Pointers exp_avg_sqs,
              Pointers exp_avg_scales, Pointers exp_avg_sq_scales, Pointers borders,
              Pointers border_counts, Pointers scale_counts, Pointers copies, Pointers numels,
              const Text& grad_dtype, const Text& copy_dtype, std::size_t block, double lr,
              double beta1, double beta2, double eps, double weight_decay, bool decoupled,
              double bias_correction1, double bias_correction2, double grad_scale, int threads,
              const Text& instruction_set) {
  dsl::adam8bit(slices_of(params, grads, exp_avgs, exp_avg_sqs, copies, numels, grad_dtype, "fp32",
                          copy_dtype),
                {block,
                 exp_avg_scales.values,
                 exp_avg_sq_scales.values,
                 borders.values,
                 {border_counts.values.begin(), border_counts.values.end()},
                 {scale_counts.values.begin(), scale_counts.values.end()}},
                {lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction1, bias_correction2,
                 grad_scale},
                threads, dsl::parse_isa(instruction_set));
}

void lion(Pointers params, Pointers grads, Pointers exp_avgs, Pointers copies, Pointers numels,
          const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype, double lr,
          double beta1, double beta2, double weight_decay, double grad_scale, int threads,
          const Text& instruction_set, std::uint32_t seed) {
  dsl::lion(slices_of(params, grads, exp_avgs, kNone, copies, numels, grad_dtype, moment_dtype,
                      copy_dtype, seed),
            {lr, beta1, beta2, weight_decay, grad_scale}, threads, dsl::parse_isa(instruction_set));
}

void adagrad(Pointers params, Pointers grads, Pointers sums, Pointers copies, Pointers numels,
             const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype, double lr,
             double eps, double weight_decay, double grad_scale, int threads,
             const Text& instruction_set, std::uint32_t seed) {
  dsl::adagrad(slices_of(params, grads, sums, kNone, copies, numels, grad_dtype, moment_dtype,
                         copy_dtype, seed),
               {lr, eps, weight_decay, grad_scale}, threads, dsl::parse_isa(instruction_set));
}

void sgd(Pointers params, Pointers grads, Pointers momentum_buffers, Pointers copies,
         Pointers numels, const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype,
         double lr, double momentum, double dampening, bool nesterov, double weight_decay,
         bool first, double grad_scale, int threads, const Text& instruction_set,
         std::uint32_t seed) {
  dsl::sgd(slices_of(params, grads, momentum_buffers, kNone, copies, numels, grad_dtype,
                     moment_dtype, copy_dtype, seed),
           {lr, momentum, dampening, nesterov, weight_decay, first, grad_scale}, threads,
           dsl::parse_isa(instruction_set));
}

// Adds one to each fp32 number and returns the new values: the step counts of 10000 parameters cost
// ten thousand torch operations otherwise.
std::vector<float> increment(Pointers counts) {
  std::vector<float> values;
  values.reserve(counts.values.size());
  for (const std::uintptr_t count : counts.values) {
    float value;
    std::memcpy(&value, reinterpret_cast<const void*>(count), sizeof(value));
    value += 1.0f;
    std::memcpy(reinterpret_cast<void*>(count), &value, sizeof(value));
    values.push_back(value);
  }
  return values;
}

}  // namespace

void bind_optim(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  using py::arg;
  bind_scan(m);
  m.def("instruction_sets", &dsl::instruction_sets);
  m.def("increment", &increment, arg("counts"));
  m.def("adam", &adam, release(), arg("params"), arg("grads"), arg("exp_avgs"), arg("exp_avg_sqs"),
        arg("copies"), arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"),
        arg("lr"), arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"), arg("decoupled"),
        arg("bias_correction1"), arg("bias_correction2"), arg("grad_scale"), arg("threads"),
        arg("instruction_set") = "auto", arg("seed") = 0);
  m.def("adam8bit", &adam8bit, release(), arg("params"), arg("grads"), arg("exp_avgs"),
        arg("exp_avg_sqs"), arg("exp_avg_scales"), arg("exp_avg_sq_scales"), arg("borders"),
        arg("border_counts"), arg("scale_counts"), arg("copies"), arg("numels"), arg("grad_dtype"),
        arg("copy_dtype"), arg("block"), arg("lr"), arg("beta1"), arg("beta2"), arg("eps"),
        arg("weight_decay"), arg("decoupled"), arg("bias_correction1"), arg("bias_correction2"),
        arg("grad_scale"), arg("threads"), arg("instruction_set") = "auto");
  m.def("lion", &lion, release(), arg("params"), arg("grads"), arg("exp_avgs"), arg("copies"),
        arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"), arg("lr"),
        arg("beta1"), arg("beta2"), arg("weight_decay"), arg("grad_scale"), arg("threads"),
        arg("instruction_set") = "auto", arg("seed") = 0);
  m.def("adagrad", &adagrad, release(), arg("params"), arg("grads"), arg("sums"), arg("copies"),
        arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"), arg("lr"),
        arg("eps"), arg("weight_decay"), arg("grad_scale"), arg("threads"),
        arg("instruction_set") = "auto", arg("seed") = 0);
  m.def("sgd", &sgd, release(), arg("params"), arg("grads"), arg("momentum_buffers"), arg("copies"),
        arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"), arg("lr"),
        arg("momentum"), arg("dampening"), arg("nesterov"), arg("weight_decay"), arg("first"),
        arg("grad_scale"), arg("threads"), arg("instruction_set") = "auto", arg("seed") = 0);
}
