// Splits a range of elements over threads.
#pragma once

#include <cstddef>
#include <functional>

namespace dsl {

// Calls body(begin, end) on up to `threads` equal parts of [0, total) at the same time, one of them
// on the calling thread, and waits for all. Small ranges get fewer threads. Where the system gives
// no more threads the caller does their part; the body must not throw.
void parallel_for(std::size_t total, int threads,
                  const std::function<void(std::size_t, std::size_t)>& body);

}  // namespace dsl
