// io_uring by its system calls alone: no library has to be there.
#include <stdexcept>

#include "queue.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif

// IORING_REGISTER_PROBE came with the operations used here (Linux 5.6).
#if defined(__NR_io_uring_setup) && defined(IO_URING_OP_SUPPORTED)
#include <sys/mman.h>
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
      throw std::runtime_error("this kernel has no io_uring (Linux 5.6 or later has)");
    case EPERM:
    case EACCES:
      throw std::runtime_error(
          "io_uring is forbidden here (sysctl kernel.io_uring_disabled, or a container's seccomp "
          "profile)");
    case ENOMEM:
      throw std::runtime_error("io_uring gets no memory (before Linux 5.12: raise ulimit -l)");
    default:
      throw std::runtime_error(std::string("io_uring fails to start: ") + std::strerror(error));
  }
}

// A mapping that children do not inherit: two processes must never move the same ring.
class Mapping {
 public:
  Mapping(int fd, std::uint64_t offset, std::size_t nbytes) : nbytes_(nbytes) {
    base_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                 static_cast<off_t>(offset));
    if (base_ == MAP_FAILED) refuse(errno);
    madvise(base_, nbytes, MADV_DONTFORK);
  }
  ~Mapping() { munmap(base_, nbytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + offset);
  }

 private:
  void* base_;
  std::size_t nbytes_;
};

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

class Uring final : public Queue {
 public:
  Uring(std::size_t depth, bool single_submit) : single_submit_(single_submit) {
    io_uring_params params{};
    params.flags = IORING_SETUP_CLAMP;
    ring_.fd =
        static_cast<int>(syscall(__NR_io_uring_setup, static_cast<unsigned>(depth), &params));
    if (ring_.fd < 0) refuse(errno);
    check_operations();
    if (!(params.features & IORING_FEAT_SINGLE_MMAP)) refuse(ENOSYS);
    const std::size_t submitted = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t completed = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_ =
        std::make_unique<Mapping>(ring_.fd, IORING_OFF_SQ_RING, std::max(submitted, completed));
    entries_ = std::make_unique<Mapping>(ring_.fd, IORING_OFF_SQES,
                                         params.sq_entries * sizeof(io_uring_sqe));
    capacity_ = params.sq_entries;
    sq_head_ = rings_->at<unsigned>(params.sq_off.head);
    sq_tail_ = rings_->at<unsigned>(params.sq_off.tail);
    sq_mask_ = *rings_->at<unsigned>(params.sq_off.ring_mask);
    sq_array_ = rings_->at<unsigned>(params.sq_off.array);
    cq_head_ = rings_->at<unsigned>(params.cq_off.head);
    cq_tail_ = rings_->at<unsigned>(params.cq_off.tail);
    cq_mask_ = *rings_->at<unsigned>(params.cq_off.ring_mask);
    cqes_ = rings_->at<io_uring_cqe>(params.cq_off.cqes);
  }

  std::size_t submit(Operation* const* operations, std::size_t count) override {
    std::size_t taken = 0;
    while (taken < count) {
      const std::size_t batch =
          std::min<std::size_t>(single_submit_ ? 1 : capacity_, count - taken);
      const std::size_t entered = enter(operations + taken, batch);
      taken += entered;
      if (entered < batch) break;
    }
    return taken;
  }

  void reap(std::size_t at_least, std::vector<Completion>& done) override {
    const std::size_t before = done.size();
    done.insert(done.end(), refused_.begin(), refused_.end());
    refused_.clear();
    while (true) {
      collect(done);
      const std::size_t found = done.size() - before;
      if (found >= at_least) return;
      const long result =
          syscall(__NR_io_uring_enter, ring_.fd, 0, static_cast<unsigned>(at_least - found),
                  IORING_ENTER_GETEVENTS, nullptr, 0);
      // What is under way ends whatever becomes of this call, and shows in memory.
      if (result < 0 && errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  // Room for the answer about every operation there can be.
  static constexpr unsigned kMostOperations = 256;

  void check_operations() {
    std::vector<char> memory(sizeof(io_uring_probe) + kMostOperations * sizeof(io_uring_probe_op));
    auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
    if (syscall(__NR_io_uring_register, ring_.fd, IORING_REGISTER_PROBE, probe, kMostOperations) <
        0) {
      refuse(errno == EINVAL ? ENOSYS : errno);
    }
    for (const int op : {IORING_OP_READ, IORING_OP_WRITE}) {
      if (op > probe->last_op || !(probe->ops[op].flags & IO_URING_OP_SUPPORTED)) refuse(ENOSYS);
    }
  }

  // Writes entries and has the kernel take them; what it does not take is as if never written.
  std::size_t enter(Operation* const* operations, std::size_t count) {
    const unsigned first = *sq_tail_;  // only this thread moves it
    for (std::size_t i = 0; i < count; ++i) {
      const unsigned index = (first + static_cast<unsigned>(i)) & sq_mask_;
      const Operation& operation = *operations[i];
      io_uring_sqe& entry = entries_->at<io_uring_sqe>(0)[index];
      std::memset(&entry, 0, sizeof(entry));
      entry.opcode = operation.is_write ? IORING_OP_WRITE : IORING_OP_READ;
      entry.fd = operation.fd;
      entry.off = operation.offset;
      entry.addr = reinterpret_cast<std::uintptr_t>(operation.address);
      entry.len = static_cast<unsigned>(operation.nbytes);
      entry.user_data = reinterpret_cast<std::uintptr_t>(operations[i]);
      sq_array_[index] = index;
    }
    __atomic_store_n(sq_tail_, first + static_cast<unsigned>(count), __ATOMIC_RELEASE);
    std::size_t taken = 0;
    while (taken < count) {
      const long result = syscall(__NR_io_uring_enter, ring_.fd,
                                  static_cast<unsigned>(count - taken), 0, 0, nullptr, 0);
      if (result > 0) {
        taken += static_cast<std::size_t>(result);
      } else if (result == 0 || errno == EAGAIN || errno == EBUSY) {
        break;
      } else if (errno != EINTR) {
        // Whatever keeps the kernel from queueing it (a seccomp profile that came later, say).
        refused_.push_back({operations[taken], carry_out(*operations[taken])});
        ++taken;
        __atomic_store_n(sq_tail_, __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
        return taken;
      }
    }
    __atomic_store_n(sq_tail_, __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
    return taken;
  }

  void collect(std::vector<Completion>& done) {
    unsigned head = *cq_head_;  // only this thread moves it
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& entry = cqes_[head & cq_mask_];
      done.push_back({reinterpret_cast<Operation*>(static_cast<std::uintptr_t>(entry.user_data)),
                      static_cast<long>(entry.res)});
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
  }

  bool single_submit_;
  Descriptor ring_;
  std::unique_ptr<Mapping> rings_;
  std::unique_ptr<Mapping> entries_;
  std::size_t capacity_ = 0;
  unsigned* sq_head_ = nullptr;
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_array_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  std::vector<Completion> refused_;  // carried out here instead
};

}  // namespace

std::unique_ptr<Queue> make_io_uring(std::size_t depth, bool single_submit) {
  return std::make_unique<Uring>(depth, single_submit);
}

}  // namespace dsl::aio

#else

namespace dsl::aio {

std::unique_ptr<Queue> make_io_uring(std::size_t, bool) {
  throw std::runtime_error("it was built without <linux/io_uring.h> of Linux 5.6 or later");
}

}  // namespace dsl::aio

#endif
