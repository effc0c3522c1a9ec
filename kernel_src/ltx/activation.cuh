// Activations of one number: gelu, its tanh form, silu, sigmoid.
//
//   gelu(x)      = x / 2 * (1 + erf(x / sqrt(2)))
//   gelu_tanh(x) = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)     the same as x / 2 * (1 + tanh(u))
//   silu(x)      = x * sigmoid(x)
#pragma once

#include <cuda_runtime.h>

#include "ltx/params.h"

namespace ltx {

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rows of fp32 take expf, erfcf and an IEEE division, on the side where nothing overflows or cancels. 16-bit rows take
// the special function unit: a memory-bound kernel has no time for more, and ex2.approx is off by less than 2^-16 for
// the arguments that leave a normal result, rcp.approx by 2^-23, far below half an ulp of fp16.

// What times_sigmoid takes the exponent in: 16-bit rows take 2^x.
template <typename T>
constexpr float kExponentUnit = sizeof(T) == 4 ? 1.f : -1.4426950408889634f;

// x * sigmoid(x * t / kExponentUnit<T>). kTiny: keeps results below 2^-126 * |x|, which 16-bit rows can hold.
template <typename T, bool kTiny>
__device__ __forceinline__ float times_sigmoid(float x, float t) {
  const float z = x * t;
  if constexpr (sizeof(T) == 4) {
    const float power = expf(-fabsf(z));
    const float y = x / (1.f + power);
    return z < 0.f ? y * power : y;
  } else {
    const float power = fast_exp2(z);
    // The sixteenths keep the reciprocal of 1 + exp(88) normal.
    if constexpr (kTiny) return x * 0.0625f * fast_reciprocal(fmaf(power, 0.0625f, 0.0625f));
    return x * fast_reciprocal(1.f + power);
  }
}

template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) {
    const float power = expf(-fabsf(x));
    const float y = 1.f / (1.f + power);
    return x < 0.f ? y * power : y;
  } else {
    return fast_reciprocal(1.f + fast_exp2(x * kExponentUnit<T>));
  }
}

// The normal distribution function of 16-bit rows: erfc(-x / sqrt(2)) / 2. `power` is exp(-x^2 / 2).
__device__ __forceinline__ float fast_normal_cdf(float x, float power) {
  // erfc(a / sqrt(2)) / 2 = power * p(t), t = 1 / (1 + 0.38 a), for a >= 0: a minimax fit of this project, with a
  // relative error below 3.6e-5 up to a = 13.3, where the exponential ends.
  const float t = fast_reciprocal(fmaf(fabsf(x), 0.38f, 1.f));
  float p = fmaf(t, -0.0899286883f, 0.188877274f);
  p = fmaf(t, p, 0.0919790904f);
  p = fmaf(t, p, 0.157829677f);
  p = fmaf(t, p, 0.151225118f);
  const float tail = t * p * power;
  return x < 0.f ? tail : 1.f - tail;
}

// x / 2 * erfc(-x / sqrt(2)), which keeps its relative precision where 1 + erf cancels.
template <typename T>
__device__ __forceinline__ float gelu_erf(float x) {
  if constexpr (sizeof(T) == 4) return 0.5f * x * erfcf(x * -0.70710678118654752f);
  return x * fast_normal_cdf(x, fast_exp2(x * x * -0.72134752044448170f));
}

// tanh-GELU by the hardware's tanh, to |x| * 2^-12: one special function where times_sigmoid takes two, for results
// that are about to lose as much to quantisation.
__device__ __forceinline__ float gelu_by_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x * fmaf(x * x, 0.035677408136300144f, 0.79788456080286541f)));
  return fmaf(0.5f * x, y, 0.5f * x);
}

template <typename T, Activation A, bool kTiny = true>
__device__ __forceinline__ float activate(float x) {
  constexpr float kUnit = kExponentUnit<T>;
  if constexpr (A == Activation::kSilu) return times_sigmoid<T, kTiny>(x, kUnit);
  if constexpr (A == Activation::kGelu) return gelu_erf<T>(x);
  // 2u = 2 sqrt(2 / pi) (x + 0.044715 x^3)
  return times_sigmoid<T, kTiny>(x, fmaf(x * x, 0.071354816272600289f * kUnit, 1.5957691216057308f * kUnit));
}

}  // namespace ltx
