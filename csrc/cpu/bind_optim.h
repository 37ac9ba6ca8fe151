#pragma once

#include <pybind11/pybind11.h>

// Adds the optimizer steps to a module.
void bind_optim(pybind11::module_& m);
void bind_lamb(pybind11::module_& m);
