#include "engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace dsl::aio {

namespace {

constexpr std::size_t kMostBlockingThreads = 16;
// The kernel moves less than 2 GiB per call.
constexpr std::size_t kLargestBlock = std::size_t{1} << 30;
// How long an idle thread keeps them: long enough for the next transfer of a training step.
constexpr std::chrono::seconds kKeepBounces{1};
constexpr std::size_t kLargestDepth = 4096;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// Threads that are born meanwhile take no signals: those are for the threads of the program, and
// SIGXFSZ, which a write past RLIMIT_FSIZE brings besides EFBIG, would end the process.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

std::unique_ptr<Queue> make_queue(const std::string& kind, const Options& options) {
  if (kind == "io_uring") return make_io_uring(options.queue_depth, options.single_submit);
  if (kind == "libaio") return make_libaio(options.queue_depth, options.single_submit);
  if (kind == "threads") return make_blocking();
  throw std::invalid_argument("unknown engine '" + kind +
                              "', not one of io_uring, libaio, threads");
}

}  // namespace

// One operation under way and what it belongs to.
struct Engine::Slot : Operation {
  Request request;
  std::shared_ptr<Ticket> ticket;
  std::size_t at = 0;                  // of the operation in the request
  std::unique_ptr<char, Free> bounce;  // aligned memory, kept for the next one
  std::size_t bounce_bytes = 0;
  std::size_t bounce_alignment = 0;
  bool is_bounced = false;
  bool is_direct = false;

  static Slot* of(Operation* operation) { return static_cast<Slot*>(operation); }

  char* memory() const { return request.address + at; }

  // Sets the operation to what is left of it, past the page cache if the piece and memory allow.
  void prepare(bool direct) {
    is_direct = direct;
    is_bounced = false;
    is_write = request.is_write;
    offset = request.offset + at;
    address = memory();
    if (is_direct && reinterpret_cast<std::uintptr_t>(memory()) % request.memory_alignment != 0) {
      is_bounced = is_direct = make_bounce();
    }
    if (is_bounced) {
      address = bounce.get();
      if (is_write) std::memcpy(bounce.get(), memory(), nbytes);
    }
    fd = is_direct ? request.direct_fd : request.fd;
  }

  // False without memory for it: then the page cache has to do.
  bool make_bounce() {
    const std::size_t alignment = std::max(request.memory_alignment, request.offset_alignment);
    if (bounce_bytes >= nbytes && bounce_alignment >= alignment) return true;
    void* aligned = nullptr;
    if (posix_memalign(&aligned, alignment, nbytes) != 0) return false;
    bounce.reset(static_cast<char*>(aligned));
    bounce_bytes = nbytes;
    bounce_alignment = alignment;
    return true;
  }

  void free_bounce() {
    bounce.reset();
    bounce_bytes = 0;
  }

  // Takes the result of the operation; false if something is left of it to do.
  bool settle(long result) {
    if (result == -EINTR || result == -EAGAIN || result == -ECANCELED) result = carry_out(*this);
    if (result == -EINVAL && is_direct) {
      // The kernel knows alignments that it does not tell: the page cache takes anything.
      prepare(false);
      return false;
    }
    if (result <= 0) {
      const Failure failure{result < 0 ? static_cast<int>(-result) : (is_write ? EIO : 0), offset};
      finish(nbytes, &failure);
      return true;
    }
    const std::size_t moved = std::min(static_cast<std::size_t>(result), nbytes);
    if (is_bounced && !is_write) std::memcpy(memory(), bounce.get(), moved);
    if (moved == nbytes) {
      finish(moved, nullptr);
      return true;
    }
    ticket->count(moved, nullptr);
    at += moved;
    nbytes -= moved;
    const std::size_t alignment = request.offset_alignment;
    prepare(is_direct && (request.offset + at) % alignment == 0 && nbytes % alignment == 0);
    return false;
  }

  void finish(std::size_t bytes, const Failure* failure) {
    // The last use of memory and descriptors was before this: who waits may free them now.
    std::shared_ptr<Ticket> last = std::move(ticket);
    last->count(bytes, failure);
  }
};

struct Engine::State {
  Options options;
  std::vector<std::unique_ptr<Queue>> queues;
  std::mutex ending;  // of the threads
  std::vector<std::thread> threads;
  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  std::deque<Work> work;
  bool is_closing = false;

  // Fills slots with the next pieces of the oldest requests. Blocks while there are none if it
  // may; then no pieces mean that the end has come.
  void claim(std::vector<Slot*>& free, std::vector<Operation*>& ready, bool may_wait) {
    std::unique_lock<std::mutex> lock(mutex);
    if (may_wait) {
      const auto is_over = [this] { return is_closing || !work.empty(); };
      const auto soon = std::chrono::system_clock::now() + kKeepBounces;
      if (!changed.wait_until(lock, soon, is_over)) {
        for (Slot* slot : free) slot->free_bounce();
        changed.wait(lock, is_over);
      }
    }
    while (!work.empty() && !free.empty()) {
      Work& oldest = work.front();
      // No more than this thread's share of what is left, so that the others get theirs.
      const std::size_t left = oldest.request.nbytes - oldest.at;
      const std::size_t blocks = (left + options.block_size - 1) / options.block_size;
      std::size_t share = (blocks + options.threads - 1) / options.threads;
      for (; share > 0 && !free.empty() && oldest.at < oldest.request.nbytes; --share) {
        const Piece piece = next_piece(oldest.request, oldest.at, options.block_size);
        Slot& slot = *free.back();
        free.pop_back();
        slot.request = oldest.request;
        slot.ticket = oldest.ticket;
        slot.at = piece.at;
        slot.nbytes = piece.nbytes;
        slot.is_direct = piece.is_direct;
        oldest.at += piece.nbytes;
        ready.push_back(&slot);
      }
      if (oldest.at < oldest.request.nbytes) break;
      work.pop_front();
    }
  }

  void run(Queue& queue) {
    std::vector<Slot> slots(options.queue_depth);
    std::vector<Slot*> free;
    for (Slot& slot : slots) free.push_back(&slot);
    std::vector<Operation*> ready;
    std::vector<Completion> done;
    std::size_t under_way = 0;
    while (true) {
      const std::size_t old = ready.size();
      const bool is_idle = ready.empty() && under_way == 0;
      if (options.overlap_events || under_way == 0) claim(free, ready, is_idle);
      if (is_idle && ready.empty()) return;
      for (std::size_t i = old; i < ready.size(); ++i) {
        Slot& slot = *Slot::of(ready[i]);
        slot.prepare(slot.is_direct);
      }
      const std::size_t taken = queue.submit(ready.data(), ready.size());
      ready.erase(ready.begin(), ready.begin() + static_cast<std::ptrdiff_t>(taken));
      under_way += taken;
      if (under_way == 0) {  // the kernel has no room for even one now
        sched_yield();
        continue;
      }
      done.clear();
      queue.reap(options.overlap_events ? 1 : under_way, done);
      under_way -= done.size();
      for (const Completion& completion : done) {
        Slot* slot = Slot::of(completion.operation);
        if (slot->settle(completion.result)) {
          free.push_back(slot);
        } else {
          ready.push_back(slot);
        }
      }
    }
  }
};

Engine::Engine(const std::string& kind, const Options& options)
    : pid_(static_cast<long>(getpid())), state_(nullptr) {
  auto state = std::make_unique<State>();
  state->options = options;
  Options& own = state->options;
  own.block_size = std::min(std::max<std::size_t>(own.block_size, 1), kLargestBlock);
  own.queue_depth = std::min(std::max<std::size_t>(own.queue_depth, 1), kLargestDepth);
  own.threads = std::max<std::size_t>(own.threads, 1);
  if (kind == "threads") {
    own.threads = std::min(own.threads * own.queue_depth, kMostBlockingThreads);
    own.queue_depth = 1;
  }
  for (std::size_t i = 0; i < own.threads; ++i) state->queues.push_back(make_queue(kind, own));
  state_ = state.release();
  const SignalsBlocked blocked;
  try {
    for (auto& queue : state_->queues) {
      state_->threads.emplace_back(
          [owner = state_, own_queue = queue.get()] { owner->run(*own_queue); });
    }
  } catch (...) {
    close();
    delete state_;
    throw;
  }
}

Engine::~Engine() {
  if (static_cast<long>(getpid()) != pid_) return;
  close();
  delete state_;
}

std::shared_ptr<Ticket> Engine::submit(const Request& request) {
  auto ticket = std::make_shared<Ticket>(request.nbytes);
  if (request.nbytes == 0) return ticket;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->is_closing) throw std::runtime_error("the engine was closed");
    state_->work.push_back({request, ticket, 0});
  }
  state_->changed.notify_all();
  return ticket;
}

void Engine::close() {
  if (static_cast<long>(getpid()) != pid_) return;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->is_closing = true;
  }
  state_->changed.notify_all();
  const std::lock_guard<std::mutex> lock(state_->ending);
  for (auto& thread : state_->threads) {
    if (thread.joinable()) thread.join();
  }
  state_->queues.clear();
}

}  // namespace dsl::aio
