// Sums, and a maximum, over the threads that share a row. The order of the additions depends on the number of threads
// alone, which depends on the row's length and dtype alone: the same row always gives the same bits.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace ltx {

// Over `lanes` neighbouring lanes, a power of two up to 32; every lane gets the sum. Unrolled: a loop over the lanes
// there are costs more than the shuffles that it saves (H200, bf16, layernorm 131072x128: 1.03 x a copy against 1.09).
__device__ __forceinline__ float lane_sum(float x, int lanes) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, offset);
    if (offset < lanes) x += other;
  }
  return x;
}

// The largest over a warp, for every lane; NaN only where all are.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// kRows sums over the threads of a block, for blocks of at most 16 warps: a partial sum a warp and row.
template <int kRows>
struct ReduceScratch {
  float4 sums[kRows][4];
};

// A thread's summands of kRows rows (one or two) give their sums over `threads` neighbouring threads that own the rows:
// up to 32 lanes of a warp, or the whole block. No other sum of the same rows may use `scratch`, so that one barrier is
// enough. kWarps: more than one warp owns a row, whatever their number.
template <bool kWarps = false, int kRows>
__device__ __forceinline__ void block_reduce(float (&x)[kRows], int threads, ReduceScratch<kRows>& scratch) {
  static_assert(kRows == 1 || kRows == 2);
  if (!kWarps && threads <= 32) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = lane_sum(x[r], threads);
    return;
  }
  // Rows of more than a warp own the block; its x dimension counts their threads.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = threads / 32;
  // Two rows: after the first exchange the lower half of the warp adds up row 0 and the upper half row 1.
  const bool upper = kRows == 2 && lane >= 16;
  float sum = x[0];
  if constexpr (kRows == 2) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? x[0] : x[1], 16);
    sum = (upper ? x[1] : x[0]) + other;
  } else {
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
  }
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  float* const sums = &scratch.sums[0][0].x + (upper ? 16 : 0);
  if (lane % (kRows == 2 ? 16 : 32) == 0) sums[warp] = sum;
  // Zeros in the places up to the next multiple of four that belong to no warp.
  if (warp == 0 && lane % 16 >= warps && lane < 16 * kRows) sums[lane % 16] = 0.f;
  __syncthreads();
  // Every thread adds up the warps' sums itself: shorter than shuffles.
  const auto add = [](const float4& y) { return (y.x + y.y) + (y.z + y.w); };
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = add(scratch.sums[r][0]);
#pragma unroll 1
  for (int i = 1; 4 * i < warps; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] += add(scratch.sums[r][i]);
  }
}

// A block's first step in a cluster: the others may write into its shared memory from now on.
__device__ __forceinline__ void enter_cluster() {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().barrier_arrive();
#endif
}

// What the blocks of a cluster, at most 16, have of the row that they share: every block gets all of it.
// A kernel calls it at most once.
__device__ __forceinline__ void exchange(const float2& part, uint32_t blocks, float2 (&parts)[16]) {
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_wait();  // all blocks have entered
  if (threadIdx.x < blocks) *cluster.map_shared_rank(&parts[cluster.block_rank()], threadIdx.x) = part;
  cluster.sync();
#endif
}

// Over 16 neighbouring lanes.
__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ float cluster_sum(float sum, uint32_t blocks, float2 (&parts)[16]) {
  exchange({sum, 0.f}, blocks, parts);
  const uint32_t b = threadIdx.x % 16;
  return half_warp_sum(b < blocks ? parts[b].x : 0.f);
}

// The row's mean and the sum of the squared deviations from it. A block brings the sum of its part and the squared
// deviations from the part's mean; Chan's formula puts them together without cancellation. It takes one exchange, where
// mean and deviations in turn would take two (H200, bf16, layernorm 1x262144 8.0 us, 8.6 with two). Within a block two
// sums are faster (16128x2048 1.03 and 1.06 x a copy: h200-tuning.json). count(b): the elements of block b's part.
template <typename Count>
__device__ __forceinline__ float2 cluster_moments(float sum, float squares, float inverse_width, uint32_t blocks,
                                                  const Count& count, float2 (&parts)[16]) {
  const uint32_t b = threadIdx.x % 16;
  const float n = b < blocks ? count(b) : 0.f, inverse_n = 1.f / fmaxf(n, 1.f);
  exchange({sum, squares}, blocks, parts);
  const float2 part = b < blocks ? parts[b] : float2{0.f, 0.f};
  const float mean = __fmul_rn(half_warp_sum(part.x), inverse_width);
  const float deviation = __fsub_rn(__fmul_rn(part.x, inverse_n), mean);
  return {mean, half_warp_sum(fmaf(__fmul_rn(n, deviation), deviation, part.y))};
}

__device__ __forceinline__ float block_reduce(float x, int threads, ReduceScratch<1>& scratch) {
  float sums[1] = {x};
  block_reduce(sums, threads, scratch);
  return sums[0];
}

__device__ __forceinline__ float reciprocal_root(float sum, float inverse_width, float eps) {
  return rsqrtf(fmaf(sum, inverse_width, eps));
}

// The sum of a thread's own elements, as a tree: its error grows with the depth, not with the count.
template <int kCount>
__device__ __forceinline__ float tree_sum(const float (&x)[kCount]) {
  float y[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) y[i] = x[i];
#pragma unroll
  for (int step = kCount / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) y[i] += y[i + step];
  }
  return y[0];
}

// Sum of (h - mean)^2, or of h^2, over the pack's first `count` elements, as two chains: columns past the row's end
// count for nothing (they are zero, but mean need not be).
template <bool kCentred, int kWidth>
__device__ __forceinline__ float pack_squares(const float (&h)[kWidth], float mean, int64_t count) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float x = kCentred ? __fsub_rn(h[i], mean) : h[i];
    if (i < count) sum[i % 2] = fmaf(x, x, sum[i % 2]);
  }
  return sum[0] + sum[1];
}

}  // namespace ltx
