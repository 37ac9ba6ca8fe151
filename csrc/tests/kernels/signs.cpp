// The kernels of sign packing, byte by byte, against one sign after the other.
#include "../../cuda/signs.h"

#include "check.h"

using namespace dsl::cuda;

namespace {

constexpr float kSpecial[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-45f, -1e-45f};

void pack_and_unpack(std::size_t numel, Kind kind, std::size_t offset) {
  Buffer src(numel, kind, offset);
  src.fill(static_cast<std::uint32_t>(numel + offset));
  for (std::size_t i = 0; i < 7 && i * 5 < numel; ++i) src.set(i * 5, kSpecial[i]);
  const std::size_t bytes = bytes_of_signs(numel);
  const auto packed = std::make_unique<std::uint8_t[]>(bytes);
  const bool quads = fits_quads(src.data(), kind);
  CHECK(quads == (offset % 4 == 0));
  for (std::size_t byte = bytes; byte-- > 0;) {
    packed[byte] = 0xff;
    pack_byte(src.data(), packed.get(), numel, kind, quads, byte);
  }
  for (std::size_t i = 0; i < 8 * bytes; ++i) {
    const bool bit = packed[i / 8] >> (i % 8) & 1;
    CHECK(bit == (i < numel && src.get(i) >= 0.0f));
  }
  for (const bool accumulate : {false, true}) {
    Buffer dst(numel, kind, offset);
    dst.fill(7);
    std::vector<float> expected;
    for (std::size_t i = 0; i < numel; ++i) {
      const float value = src.get(i) >= 0.0f ? 0.3f : -0.3f;
      expected.push_back(decode(encode(accumulate ? dst.get(i) + value : value, kind), kind));
    }
    for (std::size_t byte = bytes; byte-- > 0;) {
      unpack_byte(packed.get(), dst.data(), numel, 0.3f, kind, accumulate, quads, byte);
    }
    for (std::size_t i = 0; i < numel; ++i) CHECK(dst.get(i) == expected[i]);
  }
}

}  // namespace

int main() {
  for (const Kind kind : kKinds) {
    for (std::size_t numel = 0; numel < 40; ++numel) {
      for (std::size_t offset = 0; offset < 5; ++offset) pack_and_unpack(numel, kind, offset);
    }
    pack_and_unpack(100003, kind, 0);
  }
}
