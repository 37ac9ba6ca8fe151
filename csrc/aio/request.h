// Bytes of memory and the same bytes of a file, and how they are cut into operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace dsl::aio {

struct Request {
  bool is_write = false;
  char* address = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t offset = 0;          // in the file
  int fd = -1;                       // takes any offset, length and address
  int direct_fd = -1;                // opened past the page cache; -1 where there is none
  std::size_t offset_alignment = 1;  // of offsets and lengths through direct_fd
  std::size_t memory_alignment = 1;  // of addresses through direct_fd
};

struct Piece {
  std::size_t at = 0;  // bytes from the start of the request
  std::size_t nbytes = 0;
  bool is_direct = false;
};

// The piece that begins `at` bytes into the request.
//
// A page that a request covers in part is always touched through the page cache, by every request,
// and whole pages never are: the two ways meet in no page, so neither sees the other's stale bytes.
inline Piece next_piece(const Request& request, std::size_t at, std::size_t block_size) {
  const std::size_t left = request.nbytes - at;
  if (request.direct_fd < 0) return {at, std::min(block_size, left), false};
  const std::size_t alignment = request.offset_alignment;
  const std::size_t past = static_cast<std::size_t>((request.offset + at) % alignment);
  if (past != 0) return {at, std::min(alignment - past, left), false};
  if (left < alignment) return {at, left, false};
  const std::size_t block = (block_size + alignment - 1) / alignment * alignment;
  return {at, std::min(block, left / alignment * alignment), true};
}

}  // namespace dsl::aio
