// weight_only_linear: a linear layer whose weight alone is in fp8, for few rows.
//
//   out[r, c] = scales[c] * sum_k input[r, k] * weight[c, k] + bias[c]         summed in fp32, rounded once
//
// The modulation of a block is such a layer: it reads one row for each sample, and its product is a reading of the
// weight, 1 byte an element. From three rows on the conversions are the limit. A warp sums kChannels channels of up to
// kRows rows. Each lane reads 16 neighbouring values of every channel at a time, which hides the latency, and converts
// them once for all rows.
//
// A lane adds its products in the order of k, and the lanes meet in one order: a row has the same bits in any batch.
#include <cstdint>

#include "ltx/launch.cuh"
#include "ltx/vec.cuh"
#include "ltx/weight_only.cuh"

namespace ltx {
namespace {

constexpr int kValues = 16;   // of a channel that a lane reads at once
constexpr int kChannels = 4;  // of a warp
constexpr int kWarps = 8;     // of a block
constexpr int kLanes = 32;

// Two e4m3 values, the first in the lower byte.
__device__ __forceinline__ float2 from_e4m3_pair(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
#else
  // As half precision, whose exponent has a bias of 15 in the place of 7; 0x7f is NaN.
  float2 out;
  const uint32_t bytes[2] = {pair & 0xffu, pair >> 8 & 0xffu};
  float* value = &out.x;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint16_t bits = static_cast<uint16_t>((bytes[i] & 0x80u) << 8 | (bytes[i] & 0x7fu) << 7);
    value[i] =
        (bytes[i] & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : __half2float(__ushort_as_half(bits)) * 256.f;
  }
  return out;
#endif
}

// sum += the 16 products of one read.
__device__ __forceinline__ void add_products(const float (&values)[kValues], const float (&x)[kValues], float& sum) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum = fmaf(values[i], x[i], sum);
}

template <typename T>
__device__ __forceinline__ void load(const T* row, float (&x)[kValues]) {
  constexpr int kWidth = kPackWidth<T>;
#pragma unroll
  for (int first = 0; first < kValues; first += kWidth) {
    const uint4 pack = *reinterpret_cast<const uint4*>(row + first);
    const T* elements = reinterpret_cast<const T*>(&pack);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[first + i] = to_float(elements[i]);
  }
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kWarps* kLanes)
    weight_only_kernel(const T* input, const uint8_t* weight, const float* scales, const T* bias, T* out, int64_t rows,
                       int64_t width, int64_t channels) {
  const int lane = threadIdx.x % kLanes;
  const int64_t first_channel = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes) * kChannels;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  if (first_channel >= channels) return;
  // What lies past the last channel or row is read from the last one, and not written.
  const uint8_t* channel[kChannels];
  const T* row[kRows];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) channel[c] = weight + min(first_channel + c, channels - 1) * width;
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = input + min(first_row + r, rows - 1) * width;
  float sum[kRows][kChannels] = {};
  constexpr int kAtOnce = sizeof(T) == 4 ? 1 : 2;  // reads: two of fp32 rows do not fit into the registers of 10.0
#pragma unroll kAtOnce
  for (int64_t k = lane * kValues; k < width; k += kLanes * kValues) {
    uint4 read[kChannels];
    float x[kRows][kValues];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) read[c] = __ldg(reinterpret_cast<const uint4*>(channel[c] + k));
#pragma unroll
    for (int r = 0; r < kRows; ++r) load(row[r] + k, x[r]);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const uint32_t word[4] = {read[c].x, read[c].y, read[c].z, read[c].w};
      float values[kValues];
#pragma unroll
      for (int i = 0; i < kValues; i += 2) {
        const float2 pair = from_e4m3_pair(word[i / 4] >> i % 4 * 8 & 0xffffu);
        values[i] = pair.x;
        values[i + 1] = pair.y;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) add_products(values, x[r], sum[r][c]);
    }
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        sum[r][c] = __fadd_rn(sum[r][c], __shfl_xor_sync(0xffffffffu, sum[r][c], offset));
      }
      const int64_t to = first_channel + c;
      if (lane == 0 && to < channels && first_row + r < rows) {
        const float y = __fmul_rn(sum[r][c], scales[to]);
        out[(first_row + r) * channels + to] = from_float<T>(bias == nullptr ? y : __fadd_rn(y, to_float(bias[to])));
      }
    }
  }
}

template <typename T, int kRows>
void launch(const WeightOnlyParams& p, cudaStream_t stream) {
  const dim3 grid(grid_size(ceil_div(p.channels, kWarps * kChannels)), static_cast<unsigned>(ceil_div(p.rows, kRows)));
  weight_only_kernel<T, kRows><<<grid, kWarps * kLanes, 0, stream>>>(
      static_cast<const T*>(p.input), static_cast<const uint8_t*>(p.weight), p.scales, static_cast<const T*>(p.bias),
      static_cast<T*>(p.out), p.rows, p.width, p.channels);
}

}  // namespace

void weight_only_linear(const WeightOnlyParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.rows == 1) return launch<T, 1>(p, stream);
    if (p.rows == 2) return launch<T, 2>(p, stream);
    launch<T, 4>(p, stream);
  });
  check_launch("weight_only_linear");
}

}  // namespace ltx
