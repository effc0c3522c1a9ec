// Softmax in units of log2.
#pragma once

namespace ltx {

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x, to 2 ulp; below 2^-126 zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a row without a key that counts, zero.
__device__ __forceinline__ float inverse_sum(float sum) { return sum == 0.f ? 0.f : __frcp_rn(sum); }

}  // namespace ltx
