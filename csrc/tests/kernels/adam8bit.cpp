// Adam with moments of 8 bits, group by group and thread by thread, against the CPU's step, bit for
// bit, and its moments against the formula in fp64.
#include "../../cuda/adam8bit.h"

#include <cstring>

#include "../../cpu/adam8bit.cpp"
#include "../../cpu/isa.cpp"
#include "../../cpu/parallel.cpp"
#include "../../cpu/slices.cpp"
#include "check.h"

namespace {

using dsl::cuda::Buffer;
using dsl::cuda::Kind;

struct Layout {
  std::size_t block;
  Kind grad, copy;
  bool copies;
  std::size_t offset;
  bool agree;  // do all columns begin at the same element after an aligned address?
};

// Bytes that end where their memory ends.
class Codes {
 public:
  Codes(std::size_t numel, std::size_t offset)
      : buffer_((numel + offset + 1) / 2 + 2, Kind::kBFloat16, 0) {
    data_ = static_cast<std::uint8_t*>(buffer_.data()) + offset;
  }
  std::uint8_t* data() { return data_; }
  std::uintptr_t pointer() const { return reinterpret_cast<std::uintptr_t>(data_); }

 private:
  Buffer buffer_;
  std::uint8_t* data_;
};

dsl::DType dtype_of(Kind kind) {
  return kind == Kind::kFloat32    ? dsl::DType::kFloat32
         : kind == Kind::kBFloat16 ? dsl::DType::kBFloat16
                                   : dsl::DType::kFloat16;
}

// Everything that a step reads and writes.
struct State {
  std::vector<std::size_t> numels;
  std::vector<std::vector<std::int64_t>> borders;
  std::vector<Buffer> params, grads, copies, first_scales, second_scales;
  std::vector<Codes> first, second;
  std::vector<std::size_t> scale_counts, border_counts;

  State(const Layout& layout, const std::vector<std::size_t>& sizes) : numels(sizes) {
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      const auto numel = static_cast<std::int64_t>(sizes[t]);
      std::vector<std::int64_t> cuts{0};
      for (const std::int64_t cut : {std::int64_t{8}, numel / 2 + 3, numel}) {
        if (cut > cuts.back() && cut <= numel) cuts.push_back(cut);
      }
      std::size_t blocks = 0;
      for (std::size_t s = 0; s + 1 < cuts.size(); ++s) {
        const auto length = static_cast<std::size_t>(cuts[s + 1] - cuts[s]);
        blocks += (length + layout.block - 1) / layout.block;
      }
      const std::size_t offset = layout.offset;
      params.emplace_back(sizes[t], Kind::kFloat32, offset);
      grads.emplace_back(sizes[t], layout.grad, layout.agree ? offset : (offset + 1) % 4);
      copies.emplace_back(sizes[t], layout.copy, offset);
      first_scales.emplace_back(blocks, Kind::kFloat32, 0);
      second_scales.emplace_back(blocks, Kind::kFloat32, 0);
      first.emplace_back(sizes[t], offset);
      second.emplace_back(sizes[t], offset);
      const auto seed = static_cast<std::uint32_t>(t + 1);
      params[t].fill(seed);
      grads[t].fill(seed + 100);
      copies[t].fill(seed);
      first_scales[t].fill(seed + 200);
      second_scales[t].fill(seed + 300);
      for (std::size_t b = 0; b < blocks; ++b) {
        first_scales[t].set(b, std::abs(first_scales[t].get(b)) + 0.01f);
        second_scales[t].set(b, std::abs(second_scales[t].get(b)) + 0.01f);
      }
      for (std::size_t i = 0; i < sizes[t]; ++i) {
        const auto code = static_cast<std::int8_t>(static_cast<int>(i * 37 % 255) - 127);
        std::memcpy(first[t].data() + i, &code, 1);
        second[t].data()[i] = static_cast<std::uint8_t>(i * 91 % 256);
      }
      // A block of nothing but zeros, and one with an overflow.
      if (t % 3 == 1) {
        std::memset(first[t].data(), 0, sizes[t]);
        std::memset(second[t].data(), 0, sizes[t]);
        for (std::size_t i = 0; i < sizes[t]; ++i) grads[t].set(i, 0.0f);
      }
      if (t % 3 == 2) grads[t].set(sizes[t] / 2, INFINITY);
      borders.push_back(cuts);
      border_counts.push_back(cuts.size());
      scale_counts.push_back(blocks);
    }
  }

  template <typename T>
  static std::vector<std::uintptr_t> pointers(const std::vector<T>& list) {
    std::vector<std::uintptr_t> found;
    for (const T& each : list) found.push_back(each.pointer());
    return found;
  }
};

constexpr double kLr = 1e-2, kBeta1 = 0.9, kBeta2 = 0.99, kEps = 1e-3, kDecay = 0.1;
constexpr double kCorrection1 = 0.271, kCorrection2 = 0.0297, kScale = 0.125;

void step_on_cpu(State& state, const Layout& layout, bool decoupled) {
  dsl::Slices slices;
  slices.params = State::pointers(state.params);
  slices.grads = State::pointers(state.grads);
  slices.first = State::pointers(state.first);
  slices.second = State::pointers(state.second);
  if (layout.copies) slices.copies = State::pointers(state.copies);
  slices.numels = state.numels;
  slices.grad_dtype = dtype_of(layout.grad);
  slices.copy_dtype = layout.copies ? dtype_of(layout.copy) : dsl::DType::kBFloat16;
  dsl::QuantizedMoments moments{layout.block,
                                State::pointers(state.first_scales),
                                State::pointers(state.second_scales),
                                {},
                                state.border_counts,
                                state.scale_counts};
  for (const auto& cuts : state.borders) {
    moments.borders.push_back(reinterpret_cast<std::uintptr_t>(cuts.data()));
  }
  dsl::adam8bit(slices, moments,
                {kLr, kBeta1, kBeta2, kEps, kDecay, decoupled, kCorrection1, kCorrection2, kScale},
                1, dsl::Isa::kBaseline);
}

// All groups of all launches, the last one first, with a small table.
template <int Quads>
int step_on_device(State& state, const Layout& layout, bool decoupled, std::uint32_t threads) {
  using namespace dsl::cuda;
  const std::vector<std::uintptr_t> none;
  const auto params = State::pointers(state.params), grads = State::pointers(state.grads),
             copies = layout.copies ? State::pointers(state.copies) : none,
             first = State::pointers(state.first), second = State::pointers(state.second),
             first_scales = State::pointers(state.first_scales),
             second_scales = State::pointers(state.second_scales);
  std::vector<std::uintptr_t> borders;
  for (const auto& cuts : state.borders) {
    borders.push_back(reinterpret_cast<std::uintptr_t>(cuts.data()));
  }
  const BlockLists lists{{&params, &grads, &copies, &first, &second, &first_scales, &second_scales},
                         &borders,
                         &state.border_counts,
                         &state.scale_counts,
                         &state.numels,
                         layout.block};
  check_blocks(lists, 4096);
  const Access access{layout.grad, Kind::kFloat32, layout.copies ? layout.copy : Kind::kFloat32,
                      static_cast<float>(kScale), nullptr};
  const Adam rule(kLr, kBeta1, kBeta2, kEps, kDecay, decoupled, kCorrection1, kCorrection2);
  BlockTable<4> table;
  Place next;
  int launches = 0;
  for (; next.tensor < state.numels.size(); ++launches) {
    next = fill_blocks(table, lists, access, next);
    for (std::uint32_t number = table.chunks; number-- > 0;) {
      const BlockRows rows =
          block_rows_of(table, access, static_cast<std::uint32_t>(layout.block), number);
      std::vector<Moments<Quads>> moments(threads);
      std::uint32_t largest_first = 0, largest_second = 0;
      for (std::uint32_t thread = threads; thread-- > 0;) {
        step_block(rule, rows, access, access.grad_scale, thread, threads, moments[thread]);
        largest_first = std::max(largest_first, moments[thread].largest_first);
        largest_second = std::max(largest_second, moments[thread].largest_second);
      }
      for (std::uint32_t thread = threads; thread-- > 0;) {
        moments[thread].largest_first = largest_first;
        moments[thread].largest_second = largest_second;
        store_block(rows, thread, threads, moments[thread]);
      }
    }
  }
  return launches;
}

void check_same(Buffer& left, Buffer& right, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const float a = left.get(i), b = right.get(i);
    CHECK(a == b || (std::isnan(a) && std::isnan(b)));
  }
}

template <int Quads>
void compare(const Layout& layout, std::uint32_t threads, bool decoupled) {
  const std::vector<std::size_t> numels = {1, 7, 9, 33, 8, 255, 256, 257, 1000, 4099};
  State cpu(layout, numels), device(layout, numels);
  step_on_cpu(cpu, layout, decoupled);
  CHECK(step_on_device<Quads>(device, layout, decoupled, threads) > 1);
  for (std::size_t t = 0; t < numels.size(); ++t) {
    check_same(cpu.params[t], device.params[t], numels[t]);
    check_same(cpu.copies[t], device.copies[t], numels[t]);
    check_same(cpu.first_scales[t], device.first_scales[t], cpu.scale_counts[t]);
    check_same(cpu.second_scales[t], device.second_scales[t], cpu.scale_counts[t]);
    CHECK(std::memcmp(cpu.first[t].data(), device.first[t].data(), numels[t]) == 0);
    CHECK(std::memcmp(cpu.second[t].data(), device.second[t].data(), numels[t]) == 0);
  }
}

// Each code stands for the middle of its bin, and comes back from there.
void test_codes_are_those_of_the_map() {
  using namespace dsl::cuda;
  double power = 1e-6;
  int code = 1;
  for (int decade = 0; decade < 7; ++decade, power *= 10) {
    for (int k = 0; k < 1 << decade; ++k, ++code) {
      const double middle = power * (0.1 + 0.9 * (k + 0.5) / (1 << decade));
      const double wanted = code == 127 ? 1.0 : middle;
      const float value = signed_value(static_cast<std::uint32_t>(code));
      CHECK(std::abs(value - wanted) <= 1e-6 * wanted);
      CHECK(signed_value(static_cast<std::uint32_t>(-code) & 0xffu) == -value);
    }
  }
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    CHECK(unsigned_code(unsigned_value(byte), 1.0f, 1.0f) == byte);
    if (byte != 128) CHECK(signed_code(signed_value(byte), 1.0f, 1.0f) == byte);
  }
  CHECK(unsigned_value(255) == 1.0f && unsigned_value(0) == 0.0f);
  CHECK(unsigned_code(1e-30f, 1.0f, 1.0f) == 1 && signed_code(1e-30f, 1.0f, 1.0f) == 0);
}

void test_tables_fit_in_kernel_parameters() {
  using namespace dsl::cuda;
  constexpr int capacity = block_capacity_of(kParameterBytes);
  CHECK(capacity == 58);
  CHECK(sizeof(BlockTable<capacity>) + sizeof(Adam) + sizeof(Access) + 16 <= kParameterBytes);
}

void test_lists_that_do_not_fit_are_refused() {
  using namespace dsl::cuda;
  const std::vector<std::uintptr_t> one = {64}, none;
  const std::vector<std::size_t> numels = {9}, two = {2};
  const auto refused = [&](const std::vector<std::int64_t>& cuts, std::size_t scales,
                           std::size_t block, const std::vector<std::uintptr_t>& grads) {
    const std::vector<std::uintptr_t> borders = {reinterpret_cast<std::uintptr_t>(cuts.data())};
    const std::vector<std::size_t> counts = {cuts.size()}, of_scales = {scales};
    try {
      check_blocks({{&one, &grads, &none, &one, &one, &one, &one},
                    &borders,
                    &counts,
                    &of_scales,
                    &numels,
                    block},
                   4096);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!refused({0, 8, 9}, 2, 8, one));
  CHECK(refused({0, 8, 9}, 3, 8, one));
  CHECK(refused({0, 8}, 1, 8, one));
  CHECK(refused({1, 9}, 1, 8, one));
  CHECK(refused({0, 9, 9}, 2, 8, one));
  CHECK(refused({0, 9}, 1, 8192, one));
  CHECK(refused({0, 9}, 2, 8, none));
}

}  // namespace

int main() {
  const Layout layouts[] = {
      {256, Kind::kFloat32, Kind::kBFloat16, false, 0, true},
      {256, Kind::kBFloat16, Kind::kBFloat16, true, 0, true},
      {64, Kind::kFloat16, Kind::kFloat16, true, 1, false},
      {8, Kind::kFloat32, Kind::kFloat16, true, 4, true},
  };
  for (const Layout& layout : layouts) {
    compare<2>(layout, 32, true);
    compare<2>(layout, 32, false);
  }
  compare<2>({2048, Kind::kBFloat16, Kind::kBFloat16, true, 0, true}, 256, true);
  compare<4>({4096, Kind::kFloat32, Kind::kBFloat16, false, 3, true}, 256, true);
  test_codes_are_those_of_the_map();
  test_tables_fit_in_kernel_parameters();
  test_lists_that_do_not_fit_are_refused();
}
