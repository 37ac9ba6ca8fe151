// What one request has come to; shared by who waits for it and by the threads that carry it out.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace dsl::aio {

struct Failure {
  int error = 0;             // errno; 0 when a read met the end of the file
  std::uint64_t offset = 0;  // in the file
};

class Ticket {
 public:
  explicit Ticket(std::size_t nbytes) : left_(nbytes), done_(nbytes == 0) {}

  bool done() const { return done_.load(std::memory_order_acquire); }

  // True once it is done; false when the time is over first.
  bool wait_for(std::chrono::milliseconds time) {
    if (done()) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    // By the system clock, which every sanitizer knows how to wait for; a jump of it only makes
    // the caller ask again.
    return over_.wait_until(lock, std::chrono::system_clock::now() + time,
                            [this] { return done(); });
  }

  // The failure at the lowest offset; only once it is done.
  bool failed(Failure* failure) const {
    if (has_failed_) *failure = failure_;
    return has_failed_;
  }

  // `nbytes` more are over, for good or ill.
  void count(std::size_t nbytes, const Failure* failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure != nullptr && (!has_failed_ || failure->offset < failure_.offset)) {
      failure_ = *failure;
      has_failed_ = true;
    }
    left_ -= nbytes;
    if (left_ == 0) {
      done_.store(true, std::memory_order_release);
      over_.notify_all();  // under the lock: who waits may destroy this as soon as it is free
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  std::size_t left_;
  std::atomic<bool> done_;
  bool has_failed_ = false;
  Failure failure_;
};

}  // namespace dsl::aio
