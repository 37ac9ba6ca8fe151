// The dynamic map of 8-bit optimizers (Dettmers et al., arXiv:2110.02861), as
// ds_lightning.ops.blocks defines it. Everything is computed in fp64 and rounded once, so all
// backends have the same bits.
#pragma once

namespace dsl {

constexpr int kDecades = 7;
constexpr double kPowers[kDecades] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};

// From here on 1 is nearer than the middle of the last bin of the unsigned map.
constexpr float kTop = 0.9982421875f;

// What codes stand for: of the magnitudes of the signed map, and of the unsigned one.
struct DynamicMap {
  float of_signed[128] = {};
  float of_unsigned[256] = {};
  // x slope + offset runs from 2^i to 2^(i+1) over decade i, which ends at `ends`.
  float slopes[kDecades] = {};
  float offsets[kDecades] = {};
  float ends[kDecades] = {};

  constexpr DynamicMap() {
    int code = 1;
    int unsigned_code = 1;
    for (int i = 0; i < kDecades; ++i) {
      const int bins = 1 << i;
      for (int k = 0; k < bins; ++k) {
        of_signed[code++] = static_cast<float>(kPowers[i] * (0.1 + 0.9 * (k + 0.5) / bins));
      }
      for (int k = 0; k < 2 * bins; ++k) {
        of_unsigned[unsigned_code++] =
            static_cast<float>(kPowers[i] * (0.1 + 0.9 * (k + 0.5) / (2 * bins)));
      }
      slopes[i] = static_cast<float>(bins / (0.9 * kPowers[i]));
      offsets[i] = static_cast<float>(bins * 0.8 / 0.9);
      ends[i] = static_cast<float>(kPowers[i]);
    }
    of_signed[127] = 1.0f;
    of_unsigned[255] = 1.0f;
  }
};

constexpr DynamicMap kDynamicMap;

}  // namespace dsl
