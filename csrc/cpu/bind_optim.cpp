// Python's names of the optimizer steps. Pointers are integers; dtypes are "fp32", "bf16", "fp16".
#include "bind_optim.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "optim.h"

namespace py = pybind11;

namespace {

using Pointers = std::vector<std::uintptr_t>;
using Sizes = std::vector<std::size_t>;
using Text = std::string;

dsl::Slices slices_of(Pointers&& params, Pointers&& grads, Pointers&& first, Pointers&& second,
                      Pointers&& copies, Sizes&& numels, const Text& grad_dtype,
                      const Text& moment_dtype, const Text& copy_dtype) {
  return {std::move(params),
          std::move(grads),
          std::move(first),
          std::move(second),
          std::move(copies),
          std::move(numels),
          dsl::parse_dtype(grad_dtype),
          dsl::parse_dtype(moment_dtype),
          dsl::parse_dtype(copy_dtype)};
}

void adam(Pointers params, Pointers grads, Pointers exp_avgs, Pointers exp_avg_sqs, Pointers copies,
          Sizes numels, const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype,
          double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
          double bias_correction1, double bias_correction2, double grad_scale, int threads,
          const Text& instruction_set) {
  dsl::adam(
      slices_of(std::move(params), std::move(grads), std::move(exp_avgs), std::move(exp_avg_sqs),
                std::move(copies), std::move(numels), grad_dtype, moment_dtype, copy_dtype),
      {lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction1, bias_correction2,
       grad_scale},
      threads, dsl::parse_isa(instruction_set));
}

void lion(Pointers params, Pointers grads, Pointers exp_avgs, Pointers copies, Sizes numels,
          const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype, double lr,
          double beta1, double beta2, double weight_decay, double grad_scale, int threads,
          const Text& instruction_set) {
  dsl::lion(slices_of(std::move(params), std::move(grads), std::move(exp_avgs), {},
                      std::move(copies), std::move(numels), grad_dtype, moment_dtype, copy_dtype),
            {lr, beta1, beta2, weight_decay, grad_scale}, threads, dsl::parse_isa(instruction_set));
}

void adagrad(Pointers params, Pointers grads, Pointers sums, Pointers copies, Sizes numels,
             const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype, double lr,
             double eps, double weight_decay, double grad_scale, int threads,
             const Text& instruction_set) {
  dsl::adagrad(
      slices_of(std::move(params), std::move(grads), std::move(sums), {}, std::move(copies),
                std::move(numels), grad_dtype, moment_dtype, copy_dtype),
      {lr, eps, weight_decay, grad_scale}, threads, dsl::parse_isa(instruction_set));
}

void sgd(Pointers params, Pointers grads, Pointers momentum_buffers, Pointers copies, Sizes numels,
         const Text& grad_dtype, const Text& moment_dtype, const Text& copy_dtype, double lr,
         double momentum, double dampening, bool nesterov, double weight_decay, bool first,
         double grad_scale, int threads, const Text& instruction_set) {
  dsl::sgd(slices_of(std::move(params), std::move(grads), std::move(momentum_buffers), {},
                     std::move(copies), std::move(numels), grad_dtype, moment_dtype, copy_dtype),
           {lr, momentum, dampening, nesterov, weight_decay, first, grad_scale}, threads,
           dsl::parse_isa(instruction_set));
}

// What the tensors of a list have in common, looked up through Python's C API: with ten thousand
// small tensors, these look-ups are what a step costs besides its kernel.
//
// Returns (pointers, sizes in elements, dtype, device), or None where one is not of the `types`,
// not contiguous, or of another dtype or device than the first.
py::object scan(const py::list& tensors, const py::tuple& types) {
  const py::str dtype_name("dtype"), device_name("device"), is_cpu_name("is_cpu");
  const py::str contiguous_name("is_contiguous"), numel_name("numel"), pointer_name("data_ptr");
  const auto get = [](PyObject* object, const py::str& name) {
    PyObject* found = PyObject_GetAttr(object, name.ptr());
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  };
  const auto call = [](PyObject* object, const py::str& name) {
    PyObject* found = PyObject_CallMethodNoArgs(object, name.ptr());
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  };
  const Py_ssize_t count = PyList_GET_SIZE(tensors.ptr());
  py::list pointers(count), sizes(count);
  py::object dtype = py::none(), device = py::none();
  bool cpu = false;
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), k);
    bool known = false;
    for (const auto type : types) {
      known |= reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type.ptr();
    }
    if (!known) return py::none();
    const py::object own = get(tensor, dtype_name);
    if (k == 0) {
      dtype = own;
      device = get(tensor, device_name);
      cpu = get(tensor, is_cpu_name).ptr() == Py_True;
    } else if (own.ptr() != dtype.ptr()) {
      return py::none();
    } else if (cpu ? get(tensor, is_cpu_name).ptr() != Py_True
                   : !get(tensor, device_name).equal(device)) {
      return py::none();
    }
    if (call(tensor, contiguous_name).ptr() != Py_True) return py::none();
    PyList_SET_ITEM(pointers.ptr(), k, call(tensor, pointer_name).release().ptr());
    PyList_SET_ITEM(sizes.ptr(), k, call(tensor, numel_name).release().ptr());
  }
  return py::make_tuple(pointers, sizes, dtype, device);
}

// Adds one to each fp32 number and returns the new values: the step counts of 10000 parameters cost
// ten thousand torch operations otherwise.
std::vector<float> increment(const Pointers& counts) {
  std::vector<float> values;
  values.reserve(counts.size());
  for (const std::uintptr_t count : counts) {
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
  m.def("instruction_sets", &dsl::instruction_sets);
  m.def("scan", &scan, arg("tensors"), arg("types"));
  m.def("increment", &increment, arg("counts"));
  m.def("adam", &adam, release(), arg("params"), arg("grads"), arg("exp_avgs"), arg("exp_avg_sqs"),
        arg("copies"), arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"),
        arg("lr"), arg("beta1"), arg("beta2"), arg("eps"), arg("weight_decay"), arg("decoupled"),
        arg("bias_correction1"), arg("bias_correction2"), arg("grad_scale"), arg("threads"),
        arg("instruction_set") = "auto");
  m.def("lion", &lion, release(), arg("params"), arg("grads"), arg("exp_avgs"), arg("copies"),
        arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"), arg("lr"),
        arg("beta1"), arg("beta2"), arg("weight_decay"), arg("grad_scale"), arg("threads"),
        arg("instruction_set") = "auto");
  m.def("adagrad", &adagrad, release(), arg("params"), arg("grads"), arg("sums"), arg("copies"),
        arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"), arg("lr"),
        arg("eps"), arg("weight_decay"), arg("grad_scale"), arg("threads"),
        arg("instruction_set") = "auto");
  m.def("sgd", &sgd, release(), arg("params"), arg("grads"), arg("momentum_buffers"), arg("copies"),
        arg("numels"), arg("grad_dtype"), arg("moment_dtype"), arg("copy_dtype"), arg("lr"),
        arg("momentum"), arg("dampening"), arg("nesterov"), arg("weight_decay"), arg("first"),
        arg("grad_scale"), arg("threads"), arg("instruction_set") = "auto");
}
