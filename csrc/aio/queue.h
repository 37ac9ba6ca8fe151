// A queue of operations to the kernel. Each is used by one thread alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dsl::aio {

// One call to the kernel: read or write so many bytes.
struct Operation {
  bool is_write = false;
  int fd = -1;
  char* address = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t offset = 0;
};

struct Completion {
  Operation* operation = nullptr;
  long result = 0;  // bytes, or the negative errno
};

class Queue {
 public:
  virtual ~Queue() = default;

  // Hands operations to the kernel, the first first; returns how many it took, which may be none
  // while others are under way. The addresses of those taken stay valid until they are reaped.
  virtual std::size_t submit(Operation* const* operations, std::size_t count) = 0;

  // Appends what is over, at least so many (no more than are under way).
  virtual void reap(std::size_t at_least, std::vector<Completion>& done) = 0;
};

// A queue for `depth` operations under way. `single_submit` makes each a system call of its own.
// They throw std::runtime_error, in words, where this system has no such queue.
std::unique_ptr<Queue> make_io_uring(std::size_t depth, bool single_submit);
std::unique_ptr<Queue> make_libaio(std::size_t depth, bool single_submit);
// Carries each operation out when it is submitted.
std::unique_ptr<Queue> make_blocking();

// One read or write, repeated when a signal interrupts it; bytes or the negative errno.
long carry_out(const Operation& operation);

}  // namespace dsl::aio
