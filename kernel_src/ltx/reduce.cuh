// Sums over the threads that share a row. The order of the additions depends on the number of threads alone, which
// depends on the row's length and dtype alone: the same row always gives the same bits.
#pragma once

namespace ltx {

// Over `lanes` neighbouring lanes, a power of two up to 32; every lane gets the sum.
__device__ __forceinline__ float lane_sum(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Over `threads` neighbouring threads that own one row: up to 32 lanes of a warp, or the whole block. `scratch` is a
// shared array of 32 that no other sum of the same row uses, so that one barrier is enough.
__device__ __forceinline__ float row_sum(float x, int threads, float* scratch) {
  if (threads <= 32) return lane_sum(x, threads);
  // A row of more than a warp owns the block, whose x dimension it is.
  x = lane_sum(x, 32);
  const int lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return lane_sum(lane < threads / 32 ? scratch[lane] : 0.f, 32);
}

// Two sums over the whole block (whole warps) behind one barrier.
__device__ __forceinline__ void row_sums(float (&x)[2], int threads, float (&scratch)[2][32]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = lane_sum(x[i], 32);
    if (lane == 0) scratch[i][threadIdx.x / 32] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) x[i] = lane_sum(lane < threads / 32 ? scratch[i][lane] : 0.f, 32);
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

}  // namespace ltx
