// Quantised results of the norm kernels: the largest magnitude of a row, then its scale and its values.
#pragma once

#include <cstdint>

#include "ltx/fp8.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/row/operands.cuh"

namespace ltx {

// The largest magnitudes of kRows rows over the `threads` that own them, as block_reduce adds: at most 32 lanes of a
// warp, or the whole block. kWhole: no row has a part of a warp. kWarps: as block_reduce's. No other reduction may use
// `scratch`.
template <bool kWhole, bool kWarps = false, int kRows>
__device__ __forceinline__ void block_magnitudes(float (&x)[kRows], int threads, ReduceScratch<kRows>& scratch) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = kWhole ? warp_magnitude(x[r]) : lane_magnitude(x[r], min(threads, 32));
  if (!kWarps && threads <= 32) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = threads / 32;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float* const found = &scratch.sums[r][0].x;
    if (lane == 0) found[warp] = x[r];
    if (warp == 0 && lane >= warps && lane < 16) found[lane] = 0.f;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = 0.f;
#pragma unroll 1
  for (int i = 0; 4 * i < warps; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 y = scratch.sums[r][i];
      x[r] = larger_magnitude(x[r], larger_magnitude(larger_magnitude(y.x, y.y), larger_magnitude(y.z, y.w)));
    }
  }
}

// The sums of kRows rows, as block_reduce adds them, and their largest magnitudes, with one barrier.
template <bool kWhole, int kRows>
__device__ __forceinline__ void block_reduce_both(float (&sum)[kRows], float (&most)[kRows], int threads,
                                                  ReduceScratch<kRows> (&scratch)[2]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sum[r] = lane_sum(sum[r], kWhole ? 32 : min(threads, 32));
    most[r] = kWhole ? warp_magnitude(most[r]) : lane_magnitude(most[r], min(threads, 32));
  }
  if (threads <= 32) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = threads / 32;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float *const sums = &scratch[0].sums[r][0].x, *const found = &scratch[1].sums[r][0].x;
    if (lane == 0) {
      sums[warp] = sum[r];
      found[warp] = most[r];
    }
    if (warp == 0 && lane >= warps && lane < 16) sums[lane] = found[lane] = 0.f;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r] = most[r] = 0.f;
#pragma unroll 1
  for (int i = 0; 4 * i < warps; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 x = scratch[0].sums[r][i], y = scratch[1].sums[r][i];
      sum[r] += (x.x + x.y) + (x.z + x.w);
      most[r] = larger_magnitude(most[r], larger_magnitude(larger_magnitude(y.x, y.y), larger_magnitude(y.z, y.w)));
    }
  }
}

// The scale of a row whose largest magnitude is `most`, or the one for all rows.
__device__ __forceinline__ QuantScale row_scale(const float* static_scale, float most) {
  return static_scale ? fixed_scale(static_scale) : quant_scale(most);
}

// Writes a thread's packs of row number `row`, which begin at `values`, `step` bytes apart, and the row's scale.
template <int kPacks, int kWidth>
__device__ __forceinline__ void store_quantised(const float (&y)[kPacks][kWidth], const bool (&inside)[kPacks],
                                                const QuantScale& by, char* values, int step, float* scale) {
  if (threadIdx.x == 0) *scale = by.scale;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (inside[k]) *reinterpret_cast<E4m3Pack<kWidth>*>(values + k * step) = E4m3Pack<kWidth>(y[k], by.inverse);
  }
}

}  // namespace ltx
