// The engines of file I/O without Python, to be run under sanitizers:
//
//     cmake -S csrc -B build-asan -G Ninja -DDS_LIGHTNING_SANITIZE=address,undefined
//     cmake --build build-asan --target aio_tests && build-asan/aio_tests FOLDER
//
// and likewise with -DDS_LIGHTNING_SANITIZE=thread. It ends with status 0 if all bytes are right.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../aio/engine.h"

namespace {

using namespace dsl::aio;

constexpr std::size_t kPage = 4096;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

// A file opened twice, past the page cache where the file system takes that.
class TestFile {
 public:
  explicit TestFile(std::string path, bool direct = true) : path_(std::move(path)) {
    fd = open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
#ifdef O_DIRECT
    if (direct) direct_fd = open(path_.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
#endif
  }
  ~TestFile() {
    close(fd);
    if (direct_fd >= 0) close(direct_fd);
    unlink(path_.c_str());
  }

  Request request(bool is_write, char* address, std::size_t nbytes, std::uint64_t offset) const {
    return {is_write, address, nbytes, offset, fd, direct_fd, kPage, 512};
  }

  int fd = -1;
  int direct_fd = -1;

 private:
  std::string path_;
};

// Exactly so many bytes, `skew` past the start of a page, so that a byte too many is seen.
class Bytes {
 public:
  Bytes(std::size_t nbytes, std::size_t skew) : nbytes_(nbytes), skew_(skew) {
    CHECK(posix_memalign(&base_, kPage, nbytes + skew) == 0);
    std::memset(base_, 0, nbytes + skew);
  }
  ~Bytes() { std::free(base_); }
  Bytes(const Bytes&) = delete;

  char* data() { return static_cast<char*>(base_) + skew_; }
  void number(unsigned seed) {
    for (std::size_t i = 0; i < nbytes_; ++i) data()[i] = static_cast<char>((i * 131 + seed) >> 3);
  }
  bool equals(Bytes& other) { return std::memcmp(data(), other.data(), nbytes_) == 0; }

 private:
  std::size_t nbytes_;
  std::size_t skew_;
  void* base_ = nullptr;
};

void wait(const std::shared_ptr<Ticket>& ticket) {
  while (!ticket->wait_for(std::chrono::milliseconds(100))) {
  }
}

bool fails(const std::shared_ptr<Ticket>& ticket, Failure* failure) {
  wait(ticket);
  return ticket->failed(failure);
}

void expect_success(const std::shared_ptr<Ticket>& ticket) {
  Failure failure;
  CHECK(!fails(ticket, &failure));
}

void test_bytes(Engine& engine, const std::string& folder) {
  const TestFile file(folder + "/bytes");
  for (const std::size_t nbytes : {0, 1, 511, 512, 513, 4095, 4096, 4097, 12288, 100000, 1048580}) {
    for (const std::size_t skew : {0, 3, 512}) {
      for (const std::uint64_t offset : {0, 100, 4096}) {
        Bytes written(nbytes, skew);
        Bytes plain(nbytes, 0);
        Bytes read(nbytes, skew);
        written.number(static_cast<unsigned>(nbytes + skew + offset));
        expect_success(engine.submit(file.request(true, written.data(), nbytes, offset)));
        const Operation operation{false, file.fd, plain.data(), nbytes, offset};
        CHECK(carry_out(operation) == static_cast<long>(nbytes));
        CHECK(plain.equals(written));
        expect_success(engine.submit(file.request(false, read.data(), nbytes, offset)));
        CHECK(read.equals(written));
      }
    }
  }
}

// Several threads, each with several transfers under way, in one file.
void test_many(Engine& engine, const std::string& folder) {
  const TestFile file(folder + "/many");
  static constexpr std::size_t kThreads = 4, kEach = 8, kBytes = 70000;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&engine, &file, t] {
      std::vector<std::unique_ptr<Bytes>> written, read;
      std::vector<std::shared_ptr<Ticket>> tickets;
      for (std::size_t k = 0; k < kEach; ++k) {
        const std::uint64_t offset = (t * kEach + k) * kBytes;
        written.push_back(std::make_unique<Bytes>(kBytes, k));
        written.back()->number(static_cast<unsigned>(offset));
        tickets.push_back(
            engine.submit(file.request(true, written.back()->data(), kBytes, offset)));
      }
      for (const auto& ticket : tickets) expect_success(ticket);
      tickets.clear();
      for (std::size_t k = 0; k < kEach; ++k) {
        const std::uint64_t offset = (t * kEach + k) * kBytes;
        read.push_back(std::make_unique<Bytes>(kBytes, k + 1));
        tickets.push_back(engine.submit(file.request(false, read.back()->data(), kBytes, offset)));
      }
      for (std::size_t k = 0; k < kEach; ++k) {
        expect_success(tickets[k]);
        CHECK(read[k]->equals(*written[k]));
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

void test_failures(Engine& engine, const std::string& folder) {
  const TestFile file(folder + "/failures");
  CHECK(ftruncate(file.fd, 10000) == 0);
  Bytes bytes(300000, 0);
  Failure failure;
  CHECK(fails(engine.submit(file.request(false, bytes.data(), 300000, 0)), &failure));
  CHECK(failure.error == 0 && failure.offset == 10000);
  Request closed = file.request(false, bytes.data(), 10000, 0);
  closed.fd = closed.direct_fd = 9999;
  CHECK(fails(engine.submit(closed), &failure));
  CHECK(failure.error == EBADF && failure.offset == 0);
  Request nowhere = file.request(false, reinterpret_cast<char*>(kPage), 10000, 0);
  CHECK(fails(engine.submit(nowhere), &failure));
  CHECK(failure.error == EFAULT);
  // The signal that comes besides the error must not end the process.
  rlimit before{};
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit limit = before;
  limit.rlim_cur = 20001;
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  CHECK(fails(engine.submit(file.request(true, bytes.data(), 300000, 0)), &failure));
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  CHECK(failure.error == EFBIG && failure.offset <= 24576);
}

void test_end(const std::string& kind, const Options& options, const std::string& folder) {
  const TestFile file(folder + "/end");
  Bytes bytes(1 << 20, 0);
  auto engine = std::make_unique<Engine>(kind, options);
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int k = 0; k < 8; ++k) {
    tickets.push_back(engine->submit(file.request(true, bytes.data(), 1 << 20, 0)));
  }
  engine->close();
  for (const auto& ticket : tickets) CHECK(ticket->done());
  bool refused = false;
  try {
    engine->submit(file.request(true, bytes.data(), 1, 0));
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused);
  engine->close();
}

// A child may destroy what it inherited.
void test_fork(const std::string& kind, const Options& options) {
  auto engine = std::make_unique<Engine>(kind, options);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    engine->close();
    engine.reset();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string folder = count > 1 ? arguments[1] : ".";
  for (const std::string kind : {"io_uring", "libaio", "threads"}) {
    for (const Options& options : {
             Options{1 << 20, 8, 1, false, true},
             Options{8192, 3, 3, false, false},
             Options{5000, 16, 2, true, true},
         }) {
      std::unique_ptr<Engine> engine;
      try {
        engine = std::make_unique<Engine>(kind, options);
      } catch (const std::runtime_error& error) {
        std::printf("%s is left out: %s\n", kind.c_str(), error.what());
        break;
      }
      test_bytes(*engine, folder);
      test_many(*engine, folder);
      test_failures(*engine, folder);
      engine.reset();
      test_end(kind, options, folder);
      test_fork(kind, options);
      std::printf("%s with blocks of %zu: right\n", kind.c_str(), options.block_size);
    }
  }
  return 0;
}
