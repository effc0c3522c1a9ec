// Quantising a row to fp8 (params.h, QuantOutput): the row's largest magnitude, its scale, and e4m3 values in packs.
#pragma once

#include "ltx/activation.cuh"
#include "ltx/params.h"
#include "ltx/vec.cuh"

namespace ltx {

// The larger of `most` and |x|; NaN if either is.
__device__ __forceinline__ float larger_magnitude(float most, float x) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(most), "f"(fabsf(x)));
  return most;
#else
  // As integers magnitudes keep their order, and NaNs are above them all.
  return __uint_as_float(max(__float_as_uint(most), __float_as_uint(fabsf(x))));
#endif
}

// The largest magnitude of a thread's packs, in chains side by side.
template <int kPacks, int kWidth>
__device__ __forceinline__ float magnitude(const float (&y)[kPacks][kWidth]) {
  float most[4] = {};
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) most[i % 4] = larger_magnitude(most[i % 4], y[k][i]);
  }
  return larger_magnitude(larger_magnitude(most[0], most[1]), larger_magnitude(most[2], most[3]));
}

// Over `lanes` neighbouring lanes, as lane_sum.
__device__ __forceinline__ float lane_magnitude(float most, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    most = larger_magnitude(most, __shfl_xor_sync(0xffffffffu, most, offset));
  }
  return most;
}

// Over a warp. Not to be called under a condition: ptxas 13.0 may guard the instruction with another predicate.
__device__ __forceinline__ float warp_magnitude(float most) {
#if __CUDA_ARCH__ >= 800
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(most)));
#else
  return lane_magnitude(most, 32);
#endif
}

// A scale and what values are multiplied by: its reciprocal.
struct QuantScale {
  float scale, inverse;
};

// One for all rows.
__device__ __forceinline__ QuantScale fixed_scale(const float* static_scale) {
  const float scale = *static_scale < kMinScale ? kMinScale : *static_scale;  // a NaN stays
  return {scale, __frcp_rn(scale)};
}

// Multiplies the inverse with `after`, a factor that the row's numbers still lack. Returns true, with no change, if the
// product is not finite, as in rows near zero.
__device__ __forceinline__ bool fold(float after, QuantScale& by) {
  const float inverse = by.inverse * after;
  const bool finite = inverse < __uint_as_float(0x7f800000u);
  if (finite) by.inverse = inverse;
  return !finite;
}

// Of a row whose largest magnitude is `most`.
__device__ __forceinline__ QuantScale quant_scale(float most) {
  // most / 448 and 1 / scale as IEEE rounds them, without the branches for what a scale cannot be: the quotient is
  // right for every magnitude from 2^-120 on (all were tried), the reciprocal is the compiler's own short way.
  constexpr float kInverseMax = 1.f / kE4m3Max;
  const float quotient = most * kInverseMax;
  float scale = fmaf(fmaf(quotient, -kE4m3Max, most), kInverseMax, quotient);
  scale = scale < kMinScale ? kMinScale : scale;
  const float inverse = fast_reciprocal(scale);
  // Infinity would leave NaN.
  if (most == __uint_as_float(0x7f800000u)) return {most, 0.f};
  return {scale, fmaf(inverse, fmaf(scale, -inverse, 1.f), inverse)};
}

#if __CUDA_ARCH__ < 890
// For GPUs without the conversion: its bits.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
  const uint32_t magnitude = __float_as_uint(fabsf(x));
  if (magnitude > 0x7f800000u) return 0x7fu;
  const uint32_t finite = min(magnitude, __float_as_uint(kE4m3Max));
  // Denormals, below 2^-6, go through an addition whose ulp is theirs, 2^-9.
  const uint32_t value = finite < __float_as_uint(0x1p-6f)
                             ? __float_as_uint(__fadd_rn(__uint_as_float(finite), 0x1p14f)) - __float_as_uint(0x1p14f)
                             : ((finite + 0x7ffffu + ((finite >> 20) & 1u)) >> 20) - (120u << 3);
  return value | ((__float_as_uint(x) >> 24) & 0x80u);
}
#endif

// Two values as 16 bits, the first in the lower half.
__device__ __forceinline__ uint32_t to_e4m3_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return to_e4m3(first) | to_e4m3(second) << 8;
#endif
}

// y * inverse as kWidth (4 or 8) bytes.
template <int kWidth>
struct alignas(kWidth) E4m3Pack {
  uint32_t word[kWidth / 4];

  __device__ __forceinline__ E4m3Pack(const float (&y)[kWidth], float inverse) {
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const uint32_t low = to_e4m3_pair(__fmul_rn(y[i], inverse), __fmul_rn(y[i + 1], inverse));
      const uint32_t high = to_e4m3_pair(__fmul_rn(y[i + 2], inverse), __fmul_rn(y[i + 3], inverse));
      word[i / 4] = low | high << 16;
    }
  }
  __device__ __forceinline__ uint8_t byte(int i) const { return static_cast<uint8_t>(word[i / 4] >> (i % 4 * 8)); }
};

}  // namespace ltx
