// Softmax in units of log2.
#pragma once

#include <cfloat>
#include <cmath>

namespace ltx {

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x, to 2 ulp; below 2^-126 zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// An addend of a score in units of log2. Finite numbers stay finite.
__device__ __forceinline__ float log2_addend(float x) {
  return isfinite(x) ? fminf(fmaxf(x * kLog2E, -FLT_MAX), FLT_MAX) : x;
}

// log(sum * 2^maximum), the natural logarithm; -infinity of a row without a key that counts.
__device__ __forceinline__ float log_sum(float maximum, float sum) {
  return sum == 0.f ? -INFINITY : (maximum + log2f(sum)) * 0.693147180559945309417f;
}

// Of a row without a key that counts, zero.
__device__ __forceinline__ float inverse_sum(float sum) { return sum == 0.f ? 0.f : __frcp_rn(sum); }

}  // namespace ltx
