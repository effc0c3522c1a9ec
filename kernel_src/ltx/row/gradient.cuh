// The gradient of a norm, in a pack of a row: norm_backward.cu and rope_backward.cu.
#pragma once

#include <cstdint>

#include "ltx/params.h"
#include "ltx/reduce.cuh"

namespace ltx {

// The sum of a * b over a pack, as two chains.
template <int kWidth>
__device__ __forceinline__ float pack_product(const float (&a)[kWidth], const float (&b)[kWidth], int64_t count) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (i < count) sum[i % 2] = fmaf(a[i], b[i], sum[i % 2]);
  }
  return sum[0] + sum[1];
}

// t = grad * factor.
template <int kWidth>
__device__ __forceinline__ void multiply(const float (&factor)[kWidth], float (&t)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) t[i] = __fmul_rn(t[i], factor[i]);
}
// t + grad2 * factor2.
template <int kWidth>
__device__ __forceinline__ void add_product(const float (&grad2)[kWidth], const float (&factor)[kWidth],
                                            float (&t)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) t[i] = fmaf(grad2[i], factor[i], t[i]);
}

// What a row's sums give: norm' is (t - mean_t - (h - mean) * slope) * rstd.
struct RowNorm {
  float mean = 0.f, mean_t = 0.f, rstd = 0.f, slope = 0.f;

  // `squares`: the sum of (h - mean)^2. `products`: that of (t - mean_t) * (h - mean).
  __device__ __forceinline__ void set(float squares, float products, float inverse_width, float eps) {
    rstd = reciprocal_root(squares, inverse_width, eps);
    slope = __fmul_rn(__fmul_rn(rstd, __fmul_rn(products, inverse_width)), rstd);  // rstd^2 alone may overflow
  }
  template <Statistic S, int kWidth>
  __device__ __forceinline__ void centre(float (&h)[kWidth], float (&t)[kWidth]) const {
    if constexpr (S == Statistic::kLayer) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        h[i] = __fsub_rn(h[i], mean);
        t[i] = __fsub_rn(t[i], mean_t);
      }
    }
  }
  // t becomes norm'; h and t are centred.
  template <int kWidth>
  __device__ __forceinline__ void apply(const float (&h)[kWidth], float (&t)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) t[i] = __fmul_rn(fmaf(-slope, h[i], t[i]), rstd);
  }
  template <int kWidth>
  __device__ __forceinline__ void apply(const float (&h)[kWidth], const float (&addend)[kWidth],
                                        float (&t)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) t[i] = fmaf(fmaf(-slope, h[i], t[i]), rstd, addend[i]);
  }
};

}  // namespace ltx
