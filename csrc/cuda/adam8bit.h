// Adam with moments of 8 bits: what one thread of the group that shares a block of moments does.
//
// A group holds the moments of its block in registers between reading and writing; between the two
// it agrees on the largest magnitudes. The same bits as on the CPU.
#pragma once

#include <stdexcept>
#include <string>

#include "../cpu/dynamic_map.h"
#include "optim_rules.h"
#include "optim_table.h"

namespace dsl::cuda {

// See [Note: a line per decade].
DSL_BOTH float stretched(float x) {
  constexpr DynamicMap map;
  float slope = map.slopes[0];
  float offset = map.offsets[0];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 1; i < kDecades; ++i) {
    if (x >= map.powers[i - 1]) {
      slope = map.slopes[i];
      offset = map.offsets[i];
    }
  }
  return x * slope + offset;
}

DSL_BOTH float shrunk(float y) {
  constexpr DynamicMap map;
  const float fraction = float_of((bits_of(y) & 0x007fffffu) | 0x3f800000u);
  float power = map.powers[0];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 1; i < kDecades; ++i) {
    if (y >= static_cast<float>(1 << i)) power = map.powers[i];
  }
  return power * (0.9f * fraction - 0.8f);
}

DSL_BOTH float signed_value(std::uint32_t byte) {
  const std::int32_t code = static_cast<std::int8_t>(byte);
  const std::int32_t bin = code < 0 ? -code : code;
  float x = shrunk(static_cast<float>(bin) + 0.5f);
  if (bin == 127) x = 1.0f;
  if (bin == 0) x = 0.0f;
  return code < 0 ? -x : x;
}

DSL_BOTH float unsigned_value(std::uint32_t byte) {
  const float x = shrunk(static_cast<float>(byte) * 0.5f + 0.75f);
  return byte == 255 ? 1.0f : byte == 0 ? 0.0f : x;
}

DSL_BOTH std::uint32_t moment_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// Of a block whose largest magnitude has these bits.
DSL_BOTH float moment_scale(std::uint32_t largest) {
  if (largest >= 0x7f800000u) return float_of(0x7fc00000u);
  return largest < 0x00800000u ? 0.0f : float_of(largest);
}

DSL_BOTH std::uint32_t signed_code(float m, float scale, float inverse) {
  if (!(scale > 0.0f)) return 0;
  std::int32_t code = static_cast<std::int32_t>(stretched(float_of(moment_bits(m)) * inverse));
  if (code > 127) code = 127;
  return static_cast<std::uint32_t>(m < 0.0f ? -code : code) & 0xffu;
}

DSL_BOTH std::uint32_t unsigned_code(float v, float scale, float inverse) {
  if (!(scale > 0.0f) || moment_bits(v) == 0) return 0;
  const float x = float_of(moment_bits(v)) * inverse;
  std::int32_t code = static_cast<std::int32_t>(stretched(x) * 2.0f) - 1;
  if (code > 254) code = 254;
  if (x >= kTop) code = 255;
  return static_cast<std::uint32_t>(code < 1 ? 1 : code);
}

// Columns of a table of segments.
enum BlockColumn { kBParam, kBGrad, kBCopy, kBFirst, kBSecond, kBFirstScale, kBSecondScale };
constexpr int kBlockColumns = 7;
constexpr int block_capacity_of(std::size_t bytes) {
  return static_cast<int>((bytes - kReservedBytes) / (8 * kBlockColumns + 12));
}

// Rows are segments; "chunks" are blocks of moments, so that `tensor_of` finds a block's segment.
template <int Capacity>
struct BlockTable {
  static constexpr int kCapacity = Capacity;
  void* data[kBlockColumns][Capacity];
  std::uint64_t numel[Capacity];
  std::uint32_t first_chunk[Capacity];
  std::uint32_t chunks;
  std::uint32_t count;
};

struct BlockLists {
  const std::vector<std::uintptr_t>* columns[kBlockColumns];  // copies may be empty
  const std::vector<std::uintptr_t>* borders;                 // int64 on the host
  const std::vector<std::size_t>* border_counts;
  const std::vector<std::size_t>* scale_counts;
  const std::vector<std::size_t>* numels;
  std::size_t block;
};

// The next segment to be put into a table.
struct Place {
  std::size_t tensor = 0, segment = 0, block = 0;
};

template <typename T>
Place fill_blocks(T& table, const BlockLists& lists, const Access& access, Place next) {
  table.chunks = table.count = 0;
  const std::size_t sizes[kBlockColumns] = {4, size_of(access.grad), size_of(access.copy), 1, 1, 4,
                                            4};
  for (; next.tensor < lists.numels->size(); ++next.tensor, next.segment = next.block = 0) {
    const auto* borders = reinterpret_cast<const std::int64_t*>((*lists.borders)[next.tensor]);
    for (; next.segment + 1 < (*lists.border_counts)[next.tensor]; ++next.segment) {
      const auto begin = static_cast<std::uint64_t>(borders[next.segment]);
      const auto numel = static_cast<std::uint64_t>(borders[next.segment + 1]) - begin;
      const std::uint64_t blocks = (numel + lists.block - 1) / lists.block;
      if (blocks > kMaxChunks) throw std::invalid_argument("a tensor is too large for one launch");
      if (table.count == T::kCapacity || table.chunks + blocks > kMaxChunks) return next;
      for (int column = 0; column < kBlockColumns; ++column) {
        const auto* list = lists.columns[column];
        const std::uint64_t at = column < kBFirstScale ? begin : next.block;
        table.data[column][table.count] =
            list->empty() ? nullptr
                          : reinterpret_cast<void*>((*list)[next.tensor] + at * sizes[column]);
      }
      table.numel[table.count] = numel;
      table.first_chunk[table.count] = table.chunks;
      table.chunks += static_cast<std::uint32_t>(blocks);
      ++table.count;
      next.block += blocks;
    }
  }
  return next;
}

inline void check_blocks(const BlockLists& lists, std::size_t largest_block) {
  const auto fail = [](const std::string& what) {
    throw std::invalid_argument("adam8bit on CUDA: " + what);
  };
  const std::size_t count = lists.numels->size();
  if (lists.block == 0 || lists.block > largest_block) fail("a block of unknown size");
  for (int column = 0; column < kBlockColumns; ++column) {
    const auto* list = lists.columns[column];
    if (list->size() != count && !(column == kBCopy && list->empty())) {
      fail("lists of pointers differ in length from numels");
    }
  }
  if (lists.borders->size() != count || lists.border_counts->size() != count ||
      lists.scale_counts->size() != count) {
    fail("lists of borders or scales differ in length from numels");
  }
  for (std::size_t k = 0; k < count; ++k) {
    const auto* borders = reinterpret_cast<const std::int64_t*>((*lists.borders)[k]);
    const std::size_t entries = (*lists.border_counts)[k];
    if (entries == 0 || borders[0] != 0) fail("borders do not begin with 0");
    std::size_t blocks = 0;
    for (std::size_t s = 1; s < entries; ++s) {
      if (borders[s] <= borders[s - 1]) fail("borders do not increase");
      const auto numel = static_cast<std::size_t>(borders[s] - borders[s - 1]);
      blocks += (numel + lists.block - 1) / lists.block;
    }
    if (static_cast<std::size_t>(borders[entries - 1]) != (*lists.numels)[k] ||
        blocks != (*lists.scale_counts)[k]) {
      fail("borders and scales do not fit the number of elements");
    }
  }
}

// A block of moments with all that belongs to it.
struct BlockRows {
  void *param, *grad, *copy;
  std::uint8_t *first, *second;
  float *first_scale, *second_scale;
  std::uint32_t numel;
  bool quads;  // may four elements be read and written at once?
};

template <typename T>
DSL_BOTH BlockRows block_rows_of(const T& table, const Access& access, std::uint32_t block,
                                 std::uint32_t number) {
  const std::uint32_t t = tensor_of(table, number);
  const std::uint64_t index = number - table.first_chunk[t];
  const std::uint64_t begin = index * block;
  const std::uint64_t left = table.numel[t] - begin;
  BlockRows rows;
  rows.param = at(table.data[kBParam][t], begin, Kind::kFloat32);
  rows.grad = at(table.data[kBGrad][t], begin, access.grad);
  rows.copy = at(table.data[kBCopy][t], begin, access.copy);
  rows.first = static_cast<std::uint8_t*>(table.data[kBFirst][t]) + begin;
  rows.second = static_cast<std::uint8_t*>(table.data[kBSecond][t]) + begin;
  rows.first_scale = static_cast<float*>(table.data[kBFirstScale][t]) + index;
  rows.second_scale = static_cast<float*>(table.data[kBSecondScale][t]) + index;
  rows.numel = left < block ? static_cast<std::uint32_t>(left) : block;
  rows.quads = fits_quads(rows.param, Kind::kFloat32) && fits_quads(rows.grad, access.grad) &&
               (rows.copy == nullptr || fits_quads(rows.copy, access.copy)) &&
               reinterpret_cast<std::uintptr_t>(rows.first) % 4 == 0 &&
               reinterpret_cast<std::uintptr_t>(rows.second) % 4 == 0;
  return rows;
}

// The moments of one thread: quads of elements, `threads` quads apart.
template <int Quads>
struct Moments {
  float first[Quads][4];
  float second[Quads][4];
  std::uint32_t largest_first, largest_second;  // bits of magnitudes
};

DSL_BOTH std::uint32_t word_of(const std::uint8_t* base, std::uint32_t i, std::uint32_t count,
                               bool whole) {
  if (whole) return reinterpret_cast<const Word*>(base + i)->x;
  std::uint32_t word = 0;
  for (std::uint32_t k = 0; k < count; ++k) word |= std::uint32_t{base[i + k]} << (8 * k);
  return word;
}

DSL_BOTH void store_word(std::uint8_t* base, std::uint32_t i, std::uint32_t count, bool whole,
                         std::uint32_t word) {
  if (whole) {
    *reinterpret_cast<Word*>(base + i) = Word{word};
    return;
  }
  for (std::uint32_t k = 0; k < count; ++k) {
    base[i + k] = static_cast<std::uint8_t>(word >> (8 * k));
  }
}

DSL_BOTH std::uint32_t count_at(const BlockRows& rows, std::uint32_t i) {
  return i >= rows.numel ? 0 : rows.numel - i < 4 ? rows.numel - i : 4;
}

// Updates parameters and moments; the latter stay with the thread.
template <int Quads>
DSL_BOTH void step_block(const Adam& rule, const BlockRows& rows, const Access& access, float scale,
                         std::uint32_t thread, std::uint32_t threads, Moments<Quads>& moments) {
  const float first_scale = *rows.first_scale;
  const float second_scale = *rows.second_scale;
  moments.largest_first = moments.largest_second = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int q = 0; q < Quads; ++q) {
    const std::uint32_t i = 4 * (thread + static_cast<std::uint32_t>(q) * threads);
    const std::uint32_t count = count_at(rows, i);
    const bool whole = rows.quads && count == 4;
    float p[4] = {}, g[4] = {};
    std::uint32_t first = 0, second = 0;
    if (count > 0) {
      first = word_of(rows.first, i, count, whole);
      second = word_of(rows.second, i, count, whole);
    }
    if (whole) {
      decode_quad(load_quad(rows.param, i, Kind::kFloat32), Kind::kFloat32, p);
      decode_quad(load_quad(rows.grad, i, access.grad), access.grad, g);
    } else {
      for (std::uint32_t k = 0; k < count; ++k) {
        p[k] = load_one(rows.param, i + k, Kind::kFloat32);
        g[k] = load_one(rows.grad, i + k, access.grad);
      }
    }
    for (std::uint32_t k = 0; k < 4; ++k) {
      float m = signed_value((first >> (8 * k)) & 0xffu) * first_scale;
      float v = unsigned_value((second >> (8 * k)) & 0xffu) * second_scale;
      rule(p[k], g[k] * scale, m, v);
      moments.first[q][k] = m;
      moments.second[q][k] = v;
      if (k < count) {  // elsewhere a scale of NaN would make one
        const std::uint32_t of_m = moment_bits(m), of_v = moment_bits(v);
        if (of_m > moments.largest_first) moments.largest_first = of_m;
        if (of_v > moments.largest_second) moments.largest_second = of_v;
      }
    }
    if (whole) {
      store_quad(rows.param, i, Kind::kFloat32, p);
      if (rows.copy != nullptr) store_quad(rows.copy, i, access.copy, p);
    } else {
      for (std::uint32_t k = 0; k < count; ++k) {
        store_one(rows.param, i + k, Kind::kFloat32, p[k]);
        if (rows.copy != nullptr) store_one(rows.copy, i + k, access.copy, p[k]);
      }
    }
  }
}

// Writes the moments by the largest magnitudes of the whole group.
template <int Quads>
DSL_BOTH void store_block(const BlockRows& rows, std::uint32_t thread, std::uint32_t threads,
                          const Moments<Quads>& moments) {
  const float first_scale = moment_scale(moments.largest_first);
  const float second_scale = moment_scale(moments.largest_second);
  if (thread == 0) {
    *rows.first_scale = first_scale;
    *rows.second_scale = second_scale;
  }
  const float first_inverse = 1.0f / first_scale;
  const float second_inverse = 1.0f / second_scale;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int q = 0; q < Quads; ++q) {
    const std::uint32_t i = 4 * (thread + static_cast<std::uint32_t>(q) * threads);
    const std::uint32_t count = count_at(rows, i);
    std::uint32_t first = 0, second = 0;
    for (std::uint32_t k = 0; k < 4; ++k) {
      first |= signed_code(moments.first[q][k], first_scale, first_inverse) << (8 * k);
      second |= unsigned_code(moments.second[q][k], second_scale, second_inverse) << (8 * k);
    }
    if (count > 0) {
      store_word(rows.first, i, count, rows.quads && count == 4, first);
      store_word(rows.second, i, count, rows.quads && count == 4, second);
    }
  }
}

}  // namespace dsl::cuda
