// The kernels of quantization, block by block and thread by thread, against fp64.
#include "../../cuda/quantize.h"

#include "check.h"

using namespace dsl::cuda;

namespace {

struct Format {
  std::size_t numel, block;
  int bits;
  Kind kind;
  std::size_t offset;
  std::uint32_t threads;  // that share a block
};

std::size_t bytes_of(const Format& f) { return f.bits == 8 ? f.numel : (f.numel + 1) / 2; }
std::size_t blocks_of(const Format& f) { return (f.numel + f.block - 1) / f.block; }

int stored(const std::uint8_t* payload, std::size_t i, int bits) {
  if (bits == 8) return static_cast<std::int8_t>(payload[i]);
  const int half = payload[i / 2] >> (i % 2 * 4) & 15;
  return half >= 8 ? half - 16 : half;
}

void emulate_quantize(const Format& f, const Buffer& src, std::uint8_t* payload, float* scales) {
  for (std::size_t number = blocks_of(f); number-- > 0;) {
    const void* floats = src.data();
    const Input in = stretch_of(floats, payload, f.numel, f.block, f.bits, f.kind, number);
    std::uint32_t largest = 0;
    for (std::uint32_t thread = 0; thread < f.threads; ++thread) {
      largest = larger(largest, largest_of(in, f.kind, thread, f.threads));
    }
    scales[number] = scale_of(largest, f.bits);
    for (std::uint32_t thread = f.threads; thread-- > 0;) {
      quantize_part(in, f.kind, f.bits, scales[number], thread, f.threads);
    }
  }
}

void emulate_dequantize(const Format& f, const std::uint8_t* payload, const float* scales,
                        const Buffer& dst, bool accumulate) {
  for (std::size_t number = blocks_of(f); number-- > 0;) {
    const Output out = stretch_of(dst.data(), payload, f.numel, f.block, f.bits, f.kind, number);
    for (std::uint32_t thread = f.threads; thread-- > 0;) {
      dequantize_part(out, f.kind, f.bits, scales[number], accumulate, thread, f.threads);
    }
  }
}

void compare(const Format& f) {
  Buffer src(f.numel, f.kind, f.offset);
  src.fill(static_cast<std::uint32_t>(f.numel + f.block));
  const auto payload = std::make_unique<std::uint8_t[]>(bytes_of(f));
  const auto scales = std::make_unique<float[]>(blocks_of(f));
  for (std::size_t i = 0; i < bytes_of(f); ++i) payload[i] = 0xff;
  emulate_quantize(f, src, payload.get(), scales.get());
  const double most = f.bits == 8 ? 127 : 7;
  std::vector<float> exact;
  for (std::size_t number = 0; number < blocks_of(f); ++number) {
    const std::size_t begin = number * f.block;
    const std::size_t end = begin + f.block < f.numel ? begin + f.block : f.numel;
    double largest = 0;
    for (std::size_t i = begin; i < end; ++i) largest = std::fmax(largest, std::abs(src.get(i)));
    const double scale = scales[number];
    CHECK(scales[number] == static_cast<float>(largest / most));
    for (std::size_t i = begin; i < end; ++i) {
      const int q = stored(payload.get(), i, f.bits);
      CHECK(std::abs(q) <= most);
      CHECK(std::abs(q * scale - src.get(i)) <= scale * (0.5 + 0x1.0p-17));
      exact.push_back(static_cast<float>(q) * scales[number]);
    }
  }
  if (f.bits == 4 && f.numel % 2 == 1) CHECK(payload[f.numel / 2] >> 4 == 0);
  for (const bool accumulate : {false, true}) {
    Buffer dst(f.numel, f.kind, f.offset);
    dst.fill(5);
    for (std::size_t i = 0; i < f.numel; ++i) {
      if (accumulate) exact[i] = dst.get(i) + exact[i];
    }
    emulate_dequantize(f, payload.get(), scales.get(), dst, accumulate);
    for (std::size_t i = 0; i < f.numel; ++i) {
      CHECK(dst.get(i) == decode(encode(exact[i], f.kind), f.kind));
    }
  }
}

void test_half_a_step_is_the_most_that_is_lost() {
  for (const Kind kind : kKinds) {
    for (const int bits : {8, 4}) {
      for (const std::size_t block : {2, 3, 6, 64, 100, 300}) {
        if (bits == 4 && block % 2 == 1) continue;
        for (const std::size_t numel : {0, 1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 301, 1000}) {
          for (const std::size_t offset : {0, 1, 4}) {
            compare(Format{numel, block, bits, kind, offset, 32});
          }
        }
      }
      compare(Format{50001, 4096, bits, kind, 0, 256});
      compare(Format{50001, 4098, bits, kind, 2, 256});
    }
  }
}

void test_only_the_block_with_something_not_finite_is_lost() {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    const Format f{12, 4, 8, Kind::kFloat32, 0, 32};
    Buffer src(f.numel, f.kind, f.offset);
    src.fill(3);
    src.set(6, bad);
    std::uint8_t payload[12];
    float scales[3];
    emulate_quantize(f, src, payload, scales);
    CHECK(std::isfinite(scales[0]) && std::isnan(scales[1]) && std::isfinite(scales[2]));
    for (int i = 4; i < 8; ++i) CHECK(payload[i] == 0);
  }
}

void test_zeros_and_what_is_too_small_for_a_scale_become_zeros() {
  for (const float x : {0.0f, -0.0f, 1e-45f, 1.4e-36f}) {
    const Format f{3, 4, 8, Kind::kFloat32, 0, 32};
    Buffer src(f.numel, f.kind, f.offset);
    for (std::size_t i = 0; i < f.numel; ++i) src.set(i, x);
    std::uint8_t payload[3] = {1, 1, 1};
    float scales[1] = {1};
    emulate_quantize(f, src, payload, scales);
    CHECK(scales[0] == 0 && payload[0] == 0 && payload[1] == 0 && payload[2] == 0);
  }
}

void test_ties_go_to_the_even_neighbour() {
  const float x[] = {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -126.5f, 125.5f};
  const int q[] = {127, 0, 2, 2, 0, -2, -126, 126};
  for (int i = 0; i < 8; ++i) CHECK(quantized(x[i], 1.0f) == q[i]);
}

}  // namespace

int main() {
  test_half_a_step_is_the_most_that_is_lost();
  test_only_the_block_with_something_not_finite_is_lost();
  test_zeros_and_what_is_too_small_for_a_scale_become_zeros();
  test_ties_go_to_the_even_neighbour();
}
