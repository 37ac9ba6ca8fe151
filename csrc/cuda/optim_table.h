// One launch steps on many tensors: a table of them, cut into chunks, one chunk to a block.
//
// The table is passed by value, as kernel parameters: no buffer on the device, no copy to it, no
// lifetime to think of. A block finds its tensor by bisection, so that a tensor of any size takes
// one row and the number of blocks has no bound of its own.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "element.h"

namespace dsl::cuda {

constexpr std::uint32_t kChunk = 8192;  // elements; a multiple of 4, so that quads stay aligned
constexpr unsigned kThreads = 256;
constexpr std::uint32_t kMaxChunks = 1u << 30;  // a grid holds 2^31 - 1 blocks

// Bytes a kernel's parameters may take: everywhere, and from CUDA 12.1 on.
constexpr std::size_t kParameterBytes = 4096;
constexpr std::size_t kManyParameterBytes = 32764;
constexpr std::size_t kReservedBytes = 128;  // for the rule and the Access beside the table

// Columns of a table. A state an optimizer does not have, and a copy not asked for, are null.
enum Column { kParam, kGrad, kCopy, kState0, kState1 };
constexpr int columns_of(int states) { return 3 + states; }
constexpr int capacity_of(int states, std::size_t bytes) {
  return static_cast<int>((bytes - kReservedBytes) / (8 * columns_of(states) + 12));
}

template <int States, int Capacity>
struct Table {
  static constexpr int kStates = States;
  static constexpr int kCapacity = Capacity;
  void* data[columns_of(States)][Capacity];
  std::uint64_t numel[Capacity];
  std::uint32_t first_chunk[Capacity];  // of each tensor, among all chunks of the launch
  std::uint32_t chunks;
  std::uint32_t count;
};

// How the columns are read and written. Parameters are fp32.
struct Access {
  Kind grad, state, copy;
  float grad_scale;
  const float* grad_scale_ptr;      // multiplies grad_scale unless null; read on the device
  std::uint32_t seeds[2] = {0, 0};  // of the rounding of bf16 states, mixed
};

struct Lists {
  std::vector<const std::vector<std::uintptr_t>*> columns;  // in the order of Column; empty: none
  const std::vector<std::size_t>* numels;
};

inline std::uint32_t chunks_of(std::uint64_t numel) {
  const std::uint64_t chunks = (numel + kChunk - 1) / kChunk;
  if (chunks > kMaxChunks) throw std::invalid_argument("a tensor is too large for one launch");
  return static_cast<std::uint32_t>(chunks);
}

// Fills the table with tensors from number `next` on and returns the number of the first one that
// did not fit. Tensors without elements take no row.
template <typename T>
std::size_t fill(T& table, const Lists& lists, std::size_t next) {
  table.chunks = table.count = 0;
  for (; next < lists.numels->size(); ++next) {
    const std::uint64_t numel = (*lists.numels)[next];
    if (numel == 0) continue;
    const std::uint32_t chunks = chunks_of(numel);
    if (table.count == T::kCapacity || table.chunks + chunks > kMaxChunks) break;
    for (std::size_t column = 0; column < lists.columns.size(); ++column) {
      const auto* list = lists.columns[column];
      const bool none = list->empty();
      table.data[column][table.count] = none ? nullptr : reinterpret_cast<void*>((*list)[next]);
    }
    table.numel[table.count] = numel;
    table.first_chunk[table.count] = table.chunks;
    table.chunks += chunks;
    ++table.count;
  }
  return next;
}

// Throws std::invalid_argument if lists differ in length or a pointer is null or not on an element.
inline void check_lists(const Lists& lists, const Access& access, const char* op) {
  const auto fail = [op](const std::string& what) {
    throw std::invalid_argument(std::string(op) + " on CUDA: " + what);
  };
  for (std::size_t column = 0; column < lists.columns.size(); ++column) {
    const auto* list = lists.columns[column];
    if (list->empty() && column >= kCopy) continue;
    if (list->size() != lists.numels->size()) {
      fail("lists of pointers differ in length from numels");
    }
    const Kind kind = column == kParam  ? Kind::kFloat32
                      : column == kGrad ? access.grad
                      : column == kCopy ? access.copy
                                        : access.state;
    for (std::size_t i = 0; i < list->size(); ++i) {
      if ((*lists.numels)[i] == 0) continue;
      if ((*list)[i] == 0) fail("a null pointer for a tensor with elements");
      if ((*list)[i] % size_of(kind) != 0) {
        fail("a pointer that is no multiple of the element size");
      }
    }
  }
}

// The last tensor whose first chunk is not after `chunk`.
template <typename T>
DSL_BOTH std::uint32_t tensor_of(const T& table, std::uint32_t chunk) {
  std::uint32_t low = 0;
  std::uint32_t high = table.count;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (table.first_chunk[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// One chunk's share of each column.
struct Rows {
  void *param, *grad, *copy, *state0, *state1;
  std::uint32_t numel;
};

DSL_BOTH void* at(void* base, std::uint64_t i, Kind kind) {
  return base == nullptr ? nullptr : static_cast<char*>(base) + i * size_of(kind);
}

template <typename T>
DSL_BOTH Rows rows_of(const T& table, const Access& access, std::uint32_t chunk) {
  const std::uint32_t t = tensor_of(table, chunk);
  const std::uint64_t begin = static_cast<std::uint64_t>(chunk - table.first_chunk[t]) * kChunk;
  const std::uint64_t left = table.numel[t] - begin;
  Rows rows{};
  rows.param = at(table.data[kParam][t], begin, Kind::kFloat32);
  rows.grad = at(table.data[kGrad][t], begin, access.grad);
  rows.copy = at(table.data[kCopy][t], begin, access.copy);
  rows.state0 = at(table.data[kState0][t], begin, access.state);
  if constexpr (T::kStates > 1) rows.state1 = at(table.data[kState1][t], begin, access.state);
  rows.numel = left < kChunk ? static_cast<std::uint32_t>(left) : kChunk;
  return rows;
}

// Elements before the first address at which four of them may be loaded at once.
DSL_BOTH std::uint32_t elements_before_quads(const void* base, Kind kind) {
  const auto index = reinterpret_cast<std::uintptr_t>(base) / size_of(kind);
  return static_cast<std::uint32_t>((4 - index % 4) % 4);
}

// Elements [begin, end) of a chunk go four at once, the others one by one.
struct Quads {
  std::uint32_t begin, end;
};

// Slices of flat buffers begin anywhere, but at the same element in each: after at most three
// elements all columns are aligned. Where they disagree there are no quads.
DSL_BOTH Quads quads_of(const Rows& rows, const Access& access) {
  const std::uint32_t head = elements_before_quads(rows.param, Kind::kFloat32);
  const auto agrees = [head](const void* base, Kind kind) {
    return base == nullptr || elements_before_quads(base, kind) == head;
  };
  if (head >= rows.numel || !agrees(rows.grad, access.grad) || !agrees(rows.copy, access.copy) ||
      !agrees(rows.state0, access.state) || !agrees(rows.state1, access.state)) {
    return Quads{rows.numel, rows.numel};
  }
  return Quads{head, head + (rows.numel - head) / 4 * 4};
}

template <typename Rule>
DSL_BOTH void step_one(const Rule& rule, const Rows& rows, const Access& access, float scale,
                       std::uint32_t i) {
  auto* params = static_cast<float*>(rows.param);
  float p = params[i];
  const float g = load_one(rows.grad, i, access.grad) * scale;
  float first = rows.state0 == nullptr ? 0.0f : load_one(rows.state0, i, access.state);
  float second = rows.state1 == nullptr ? 0.0f : load_one(rows.state1, i, access.state);
  rule(p, g, first, second);
  params[i] = p;
  if (rows.state0 != nullptr) {
    store_state(rows.state0, i, access.state, first, access.seeds[0]);
  }
  if (rows.state1 != nullptr) {
    store_state(rows.state1, i, access.state, second, access.seeds[1]);
  }
  if (rows.copy != nullptr) store_one(rows.copy, i, access.copy, p);
}

template <typename Rule>
DSL_BOTH void step_quad(const Rule& rule, const Rows& rows, const Access& access, float scale,
                        std::uint32_t i) {
  const Quad raw_p = load_quad(rows.param, i, Kind::kFloat32);
  const Quad raw_g = load_quad(rows.grad, i, access.grad);
  Quad raw_first{};
  Quad raw_second{};
  if (rows.state0 != nullptr) raw_first = load_quad(rows.state0, i, access.state);
  if (rows.state1 != nullptr) raw_second = load_quad(rows.state1, i, access.state);
  float p[4], g[4], first[4], second[4];
  decode_quad(raw_p, Kind::kFloat32, p);
  decode_quad(raw_g, access.grad, g);
  decode_quad(raw_first, access.state, first);
  decode_quad(raw_second, access.state, second);
  for (int k = 0; k < 4; ++k) rule(p[k], g[k] * scale, first[k], second[k]);
  store_quad(rows.param, i, Kind::kFloat32, p);
  if (rows.state0 != nullptr) {
    store_state_quad(rows.state0, i, access.state, first, access.seeds[0]);
  }
  if (rows.state1 != nullptr) {
    store_state_quad(rows.state1, i, access.state, second, access.seeds[1]);
  }
  if (rows.copy != nullptr) store_quad(rows.copy, i, access.copy, p);
}

// The share of one of `threads` threads in the step on one chunk.
template <typename Rule, typename T>
DSL_BOTH void step_chunk(const Rule& rule, const T& table, const Access& access,
                         std::uint32_t chunk, std::uint32_t thread, std::uint32_t threads) {
  const Rows rows = rows_of(table, access, chunk);
  const Quads quads = quads_of(rows, access);
  float scale = access.grad_scale;
  if (access.grad_scale_ptr != nullptr) scale *= *access.grad_scale_ptr;
  for (std::uint32_t i = quads.begin + 4 * thread; i < quads.end; i += 4 * threads) {
    step_quad(rule, rows, access, scale, i);
  }
  for (std::uint32_t i = thread; i < quads.begin; i += threads) {
    step_one(rule, rows, access, scale, i);
  }
  for (std::uint32_t i = quads.end + thread; i < rows.numel; i += threads) {
    step_one(rule, rows, access, scale, i);
  }
}

}  // namespace dsl::cuda
