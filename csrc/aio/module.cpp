// ds_lightning._aio: asynchronous file I/O on raw pointers and descriptors.
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "engine.h"

namespace py = pybind11;

namespace {

using dsl::aio::Engine;
using dsl::aio::Failure;
using dsl::aio::Options;
using dsl::aio::Request;
using dsl::aio::Ticket;

std::unique_ptr<Engine> make_engine(const std::string& kind, std::size_t block_size,
                                    std::size_t queue_depth, std::size_t threads,
                                    bool single_submit, bool overlap_events) {
  return std::make_unique<Engine>(
      kind, Options{block_size, queue_depth, threads, single_submit, overlap_events});
}

std::shared_ptr<Ticket> submit(Engine& engine, bool is_write, std::uintptr_t address,
                               std::size_t nbytes, std::uint64_t offset, int fd, int direct_fd,
                               std::size_t offset_alignment, std::size_t memory_alignment) {
  return engine.submit(Request{is_write, reinterpret_cast<char*>(address), nbytes, offset, fd,
                               direct_fd, offset_alignment, memory_alignment});
}

// None, or (errno, offset in the file) of the failure.
py::object wait(const std::shared_ptr<Ticket>& ticket) {
  while (true) {
    bool done = false;
    {
      const py::gil_scoped_release release;
      done = ticket->wait_for(std::chrono::milliseconds(100));
    }
    if (done) break;
    // So that Ctrl-C ends a wait for a disk that does not answer.
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  Failure failure;
  if (!ticket->failed(&failure)) return py::none();
  return py::make_tuple(failure.error, failure.offset);
}

}  // namespace

PYBIND11_MODULE(_aio, m) {
  m.doc() = "Asynchronous file I/O of ds_lightning; ds_lightning.ops.aio checks the arguments.";
  py::class_<Ticket, std::shared_ptr<Ticket>>(m, "Ticket")
      .def_property_readonly("done", &Ticket::done)
      .def("wait", &wait);
  py::class_<Engine>(m, "Engine")
      .def(py::init(&make_engine), py::arg("kind"), py::arg("block_size"), py::arg("queue_depth"),
           py::arg("threads"), py::arg("single_submit"), py::arg("overlap_events"))
      .def("submit", &submit, py::arg("is_write"), py::arg("address"), py::arg("nbytes"),
           py::arg("offset"), py::arg("fd"), py::arg("direct_fd"), py::arg("offset_alignment"),
           py::arg("memory_alignment"))
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>());
}
