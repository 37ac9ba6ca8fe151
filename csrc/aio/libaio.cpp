// Linux AIO by its system calls alone: the library of that name has to be neither there nor linked.
#include <stdexcept>

#include "queue.h"

#if defined(__linux__) && __has_include(<linux/aio_abi.h>)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#endif

// Some ports have io_pgetevents alone.
#if defined(__NR_io_setup) && defined(__NR_io_getevents)
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace dsl::aio {

namespace {

[[noreturn]] void refuse(int error) {
  switch (error) {
    case ENOSYS:
      throw std::runtime_error("this kernel has no asynchronous I/O (CONFIG_AIO)");
    case EPERM:
    case EACCES:
      throw std::runtime_error("Linux AIO is forbidden here (a container's seccomp profile)");
    case EAGAIN:
      throw std::runtime_error(
          "all requests that Linux AIO allows are taken (raise sysctl fs.aio-max-nr)");
    default:
      throw std::runtime_error(std::string("Linux AIO fails to start: ") + std::strerror(error));
  }
}

class LinuxAio final : public Queue {
 public:
  LinuxAio(std::size_t depth, bool single_submit)
      : single_submit_(single_submit), entries_(depth), pointers_(depth), events_(depth) {
    if (syscall(__NR_io_setup, static_cast<unsigned>(depth), &context_) < 0) refuse(errno);
  }
  ~LinuxAio() override { syscall(__NR_io_destroy, context_); }
  LinuxAio(const LinuxAio&) = delete;
  LinuxAio& operator=(const LinuxAio&) = delete;

  std::size_t submit(Operation* const* operations, std::size_t count) override {
    std::size_t taken = 0;
    while (taken < count) {
      const std::size_t batch =
          std::min<std::size_t>(single_submit_ ? 1 : entries_.size(), count - taken);
      // The kernel copies entries when it takes them: they are free again afterwards.
      for (std::size_t i = 0; i < batch; ++i) fill(i, operations[taken + i]);
      const long result =
          syscall(__NR_io_submit, context_, static_cast<long>(batch), pointers_.data());
      if (result > 0) {
        taken += static_cast<std::size_t>(result);
      } else if (result == 0 || errno == EAGAIN) {
        break;
      } else if (errno != EINTR) {
        // The first one does not suit the kernel: the plain call does it, or says why not.
        refused_.push_back({operations[taken], carry_out(*operations[taken])});
        ++taken;
      }
    }
    return taken;
  }

  void reap(std::size_t at_least, std::vector<Completion>& done) override {
    const std::size_t before = done.size();
    done.insert(done.end(), refused_.begin(), refused_.end());
    refused_.clear();
    while (true) {
      const std::size_t found = done.size() - before;
      if (found >= at_least) return;
      const long result = syscall(__NR_io_getevents, context_, static_cast<long>(at_least - found),
                                  static_cast<long>(events_.size()), events_.data(), nullptr);
      if (result < 0) {
        if (errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      for (long i = 0; i < result; ++i) {
        const io_event& event = events_[static_cast<std::size_t>(i)];
        done.push_back({reinterpret_cast<Operation*>(static_cast<std::uintptr_t>(event.data)),
                        static_cast<long>(event.res)});
      }
    }
  }

 private:
  void fill(std::size_t i, Operation* operation) {
    iocb& entry = entries_[i];
    std::memset(&entry, 0, sizeof(entry));
    entry.aio_data = reinterpret_cast<std::uintptr_t>(operation);
    entry.aio_lio_opcode = operation->is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    entry.aio_fildes = static_cast<unsigned>(operation->fd);
    entry.aio_buf = reinterpret_cast<std::uintptr_t>(operation->address);
    entry.aio_nbytes = operation->nbytes;
    entry.aio_offset = static_cast<std::int64_t>(operation->offset);
    pointers_[i] = &entry;
  }

  bool single_submit_;
  aio_context_t context_ = 0;
  std::vector<iocb> entries_;
  std::vector<iocb*> pointers_;
  std::vector<io_event> events_;
  std::vector<Completion> refused_;  // carried out here instead
};

}  // namespace

std::unique_ptr<Queue> make_libaio(std::size_t depth, bool single_submit) {
  return std::make_unique<LinuxAio>(depth, single_submit);
}

}  // namespace dsl::aio

#else

namespace dsl::aio {

std::unique_ptr<Queue> make_libaio(std::size_t, bool) {
  throw std::runtime_error("it was built without <linux/aio_abi.h>");
}

}  // namespace dsl::aio

#endif
