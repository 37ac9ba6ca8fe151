#include <climits>

#include "ops.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace dsl {

#ifdef __GLIBC__

bool keep_freed_memory(std::size_t mmap_threshold_bytes, std::size_t trim_threshold_bytes) {
  // glibc refuses a threshold above half a heap; past that, asking for no mapping at all is the
  // same wish.
  constexpr std::size_t kHighestThreshold = std::size_t{1} << 25;
  constexpr int kDefaultMaps = 65536;
  const bool never_map = mmap_threshold_bytes > kHighestThreshold;
  const std::size_t threshold = never_map ? kHighestThreshold : mmap_threshold_bytes;
  const int trim = trim_threshold_bytes > INT_MAX ? -1 : static_cast<int>(trim_threshold_bytes);
  return mallopt(M_MMAP_THRESHOLD, static_cast<int>(threshold)) == 1 &&
         mallopt(M_MMAP_MAX, never_map ? 0 : kDefaultMaps) == 1 &&
         mallopt(M_TRIM_THRESHOLD, trim) == 1;
}

bool release_free_memory() { return malloc_trim(0) == 1; }

#else

bool keep_freed_memory(std::size_t, std::size_t) { return false; }

bool release_free_memory() { return false; }

#endif

}  // namespace dsl
