// What the tensors of a Python list have in common, for calls that take thousands of them: asking
// each through Python for its pointer, size, dtype, device and layout would cost more than the op.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

// Pointers or sizes; a Python list is taken for one too.
struct Integers {
  std::vector<std::uintptr_t> values;
};

struct Scan {
  Integers pointers;
  Integers numels;
  pybind11::object dtype = pybind11::none();   // torch's, or None for an empty list
  pybind11::object device = pybind11::none();  // likewise
};

// A Scan, or None where a tensor is not of one of the `types`, not contiguous, or of another dtype
// or device than the first.
pybind11::object scan(const pybind11::list& tensors, const pybind11::tuple& types);

void bind_scan(pybind11::module_& m);
