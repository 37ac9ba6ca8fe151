#include <unistd.h>

#include <cerrno>

#include "queue.h"

namespace dsl::aio {

namespace {

class Blocking final : public Queue {
 public:
  std::size_t submit(Operation* const* operations, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) {
      over_.push_back({operations[i], carry_out(*operations[i])});
    }
    return count;
  }

  void reap(std::size_t, std::vector<Completion>& done) override {
    done.insert(done.end(), over_.begin(), over_.end());
    over_.clear();
  }

 private:
  std::vector<Completion> over_;
};

}  // namespace

long carry_out(const Operation& operation) {
  while (true) {
    const auto offset = static_cast<off_t>(operation.offset);
    const ssize_t result = operation.is_write
                               ? pwrite(operation.fd, operation.address, operation.nbytes, offset)
                               : pread(operation.fd, operation.address, operation.nbytes, offset);
    if (result >= 0) return static_cast<long>(result);
    if (errno != EINTR) return -static_cast<long>(errno);
  }
}

std::unique_ptr<Queue> make_blocking() { return std::make_unique<Blocking>(); }

}  // namespace dsl::aio
