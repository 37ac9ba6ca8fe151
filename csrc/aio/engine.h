// Threads that carry out requests, each with a queue of its own to the kernel.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "queue.h"
#include "request.h"
#include "ticket.h"

namespace dsl::aio {

struct Options {
  std::size_t block_size = std::size_t{1} << 20;  // bytes per operation
  std::size_t queue_depth = 8;                    // operations under way per thread
  std::size_t threads = 1;
  bool single_submit = false;  // each operation is a system call of its own
  bool overlap_events = true;  // refill the queue while operations are under way
};

// Memory and descriptors of a request must live until its ticket is done. All methods may be called
// by several threads. A fork leaves the child without the threads: there it may only be destroyed.
class Engine {
 public:
  // `kind` is "io_uring", "libaio" or "threads". The last carries operations out by blocking calls
  // and has as many threads as operations under way: threads * queue_depth, at most 16.
  // Throws std::runtime_error, in words, where this system has no such queue.
  Engine(const std::string& kind, const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws std::runtime_error after close().
  std::shared_ptr<Ticket> submit(const Request& request);

  // Finishes what was submitted and ends the threads; may be called again.
  void close();

 private:
  struct Work {
    Request request;
    std::shared_ptr<Ticket> ticket;
    std::size_t at = 0;  // bytes that were claimed
  };
  struct Slot;
  struct State;
  class Worker;

  long pid_;
  State* state_;  // not deleted in a forked child, where its threads cannot be waited for
};

}  // namespace dsl::aio
