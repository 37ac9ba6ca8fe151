#include "scan.h"

#include <pybind11/stl.h>

#include <utility>

namespace py = pybind11;

namespace {

// [Note: tensors without torch's ABI] DLPack 1.2 has a table of C functions that a tensor type
// hands out as a capsule (https://dmlc.github.io/dlpack/latest/c_api.html). One of them describes a
// tensor in some 10 ns. It is stable, so nothing here depends on the version of torch; types
// without the capsule are asked by attribute. The structs are those of dlpack.h, for version 1.
constexpr const char* kCapsuleAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsuleName = "dlpack_exchange_api";
constexpr std::uint32_t kMajor = 1;

struct Described {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major, minor;
  void* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*describe)(void* object, Described* out);
  void* current_stream;
};

const ExchangeApi* exchange_api(PyObject* type) {
  const py::object capsule = py::getattr(py::handle(type), kCapsuleAttribute, py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), kCapsuleName)) return nullptr;
  const auto* api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
  return api->major == kMajor && api->describe != nullptr ? api : nullptr;
}

bool contiguous(const Described& tensor, std::size_t* numel) {
  std::int64_t expected = 1;
  bool dense = true;
  for (std::int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    const std::int64_t size = tensor.shape[axis];
    dense &= size == 1 || tensor.strides == nullptr || tensor.strides[axis] == expected;
    expected *= size;
  }
  *numel = static_cast<std::size_t>(expected);
  return dense || expected == 0;
}

py::object attribute(PyObject* object, const py::str& name) {
  PyObject* const found = PyObject_GetAttr(object, name.ptr());
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

py::object call(PyObject* object, const py::str& name) {
  PyObject* const found = PyObject_CallMethodNoArgs(object, name.ptr());
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

// By attribute; false where the tensor does not fit the first one.
class Attributes {
 public:
  bool describe(PyObject* tensor, const Scan& first, void** data, std::size_t* numel) const {
    if (attribute(tensor, dtype_).ptr() != first.dtype.ptr()) return false;
    if (!attribute(tensor, device_).equal(first.device)) return false;
    if (call(tensor, contiguous_).ptr() != Py_True) return false;
    *data = reinterpret_cast<void*>(call(tensor, pointer_).cast<std::uintptr_t>());
    *numel = call(tensor, numel_).cast<std::size_t>();
    return true;
  }

 private:
  const py::str dtype_{"dtype"}, device_{"device"}, contiguous_{"is_contiguous"};
  const py::str pointer_{"data_ptr"}, numel_{"numel"};
};

}  // namespace

py::object scan(const py::list& tensors, const py::tuple& types) {
  const Py_ssize_t count = PyList_GET_SIZE(tensors.ptr());
  Scan found;
  found.pointers.values.reserve(count);
  found.numels.values.reserve(count);
  const Attributes attributes;
  const ExchangeApi* api = nullptr;
  Described first{};
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* const tensor = PyList_GET_ITEM(tensors.ptr(), k);
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    bool known = false;
    for (const py::handle each : types) known |= type == each.ptr();
    if (!known) return py::none();
    if (k == 0) {
      found.dtype = py::getattr(tensor, "dtype");
      found.device = py::getattr(tensor, "device");
      api = exchange_api(type);
      // Sparse and lazy ones cannot be described; the first one tells, for torch would raise.
      if (api != nullptr && api->describe(tensor, &first) != 0) {
        PyErr_Clear();
        return py::none();
      }
    }
    void* data = nullptr;
    std::size_t numel = 0;
    if (api == nullptr) {
      if (!attributes.describe(tensor, found, &data, &numel)) return py::none();
    } else {
      Described own{};
      if (api->describe(tensor, &own) != 0) {
        PyErr_Clear();
        return py::none();
      }
      if (own.code != first.code || own.bits != first.bits || own.lanes != first.lanes ||
          own.device_type != first.device_type || own.device_id != first.device_id ||
          !contiguous(own, &numel)) {
        return py::none();
      }
      data = static_cast<char*>(own.data) + own.byte_offset;
    }
    found.pointers.values.push_back(reinterpret_cast<std::uintptr_t>(data));
    found.numels.values.push_back(numel);
  }
  return py::cast(std::move(found));
}

void bind_scan(py::module_& m) {
  py::class_<Integers>(m, "Integers")
      .def(py::init<std::vector<std::uintptr_t>>(), py::arg("values"))
      .def("__len__", [](const Integers& self) { return self.values.size(); })
      .def("__eq__",
           [](const Integers& self, const Integers& other) { return self.values == other.values; })
      .def("tolist", [](const Integers& self) { return self.values; });
  py::implicitly_convertible<py::list, Integers>();
  py::class_<Scan>(m, "Scan")
      .def_readonly("pointers", &Scan::pointers)
      .def_readonly("numels", &Scan::numels)
      .def_readonly("dtype", &Scan::dtype)
      .def_readonly("device", &Scan::device);
  m.def("scan", &scan, py::arg("tensors"), py::arg("types"));
}
