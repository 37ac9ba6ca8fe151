// The dynamic map of 8-bit optimizers (Dettmers et al., arXiv:2110.02861), as
// ds_lightning.ops.blocks defines it: seven decades from 1e-7 to 1, decade i in 2^i bins, twice as
// many without a sign.
//
// [Note: a line per decade] Decade i of [0, 1] is stretched by a straight line to [2^i, 2^(i+1)),
// where bins are one apart; the way back takes exponent and fraction of a float for the decade and
// the place in it. Tables would be read element by element; this is comparisons, which become
// vector masks. Each product and each sum is rounded to fp32, everywhere.
#pragma once

namespace dsl {

constexpr int kDecades = 7;

struct DynamicMap {
  float powers[kDecades] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};  // ends of decades
  float slopes[kDecades] = {};
  float offsets[kDecades] = {};

  constexpr DynamicMap() {
    const double exact[kDecades] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    for (int i = 0; i < kDecades; ++i) {
      slopes[i] = static_cast<float>((1 << i) / (0.9 * exact[i]));
      offsets[i] = static_cast<float>((1 << i) * 0.8 / 0.9);
    }
  }
};

constexpr DynamicMap kDynamicMap;

// From here on 1 is nearer than the middle of the last bin of the unsigned map.
constexpr float kTop = 0.9982421875f;

}  // namespace dsl
