// Rows quantised to fp8: norm_quant (rmsnorm, adaln_rmsnorm, gated_residual, gated_residual_adaln_rmsnorm,
// rmsnorm_residual, plain rows) and glu_quant (geglu, swiglu, gelu).
//
//   scale  = max(amax(|y|) / 448, 2^-120), or one number for all rows
//   values = e4m3(y * (1 / scale))              y: the op's fp32 result (norm.cu and glu.cu have the formulas)
//
// 16-bit rows are read once (2 bytes an element, and as many for a residual or an up) and written once (1 byte, and 2
// for the residual stream); y stays in registers while the row finds its largest magnitude.
//
// Three kinds of kernel, that share the ownership of packs, the order of a row's sum and the arithmetic:
//   *_kernel, not kHeld  a row in registers, each of its bytes read once; blocks come and go.
//   *_kernel, kHeld      norms whose vectors are the same for all rows of a block: it computes factor and addend of a
//                        row once, holds them in shared memory, and takes one row after the other, the next one being
//                        on its way while one is worked on. H200, adaln_rmsnorm 2x8064x2048: 33 us, without 42.
//   *_kernel_general     rows that are too long, strided or misaligned: element by element, for the norm's sum, for the
//                        magnitude and for the values, from cache after the first time.
// How many threads share a row depends on its length and dtype, and on the op, alone.
#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

#include "ltx/activation.cuh"
#include "ltx/force.cuh"
#include "ltx/fp8.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// ---- Shared by all kernels

// Sum of squares of a pack, as two chains.
template <int kWidth>
__device__ __forceinline__ float pack_squares(const float (&h)[kWidth]) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i % 2] = fmaf(h[i], h[i], sum[i % 2]);
  return sum[0] + sum[1];
}

// x = addend + x, and alike.
template <int kWidth>
__device__ __forceinline__ void add(float (&x)[kWidth], const float (&addend)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = __fadd_rn(addend[i], x[i]);
}

template <int kWidth>
__device__ __forceinline__ void multiply(float (&x)[kWidth], const float (&factor)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = __fmul_rn(x[i], factor[i]);
}

template <int kWidth>
__device__ __forceinline__ void multiply_add(float (&x)[kWidth], const float (&factor)[kWidth],
                                             const float (&addend)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = fmaf(x[i], factor[i], addend[i]);
}

template <int kWidth, typename Op>
__device__ __forceinline__ void each(float (&x)[kWidth], const Op& op) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = op(x[i]);
}

template <typename T, int kWidth>
__device__ __forceinline__ void activate(Activation activation, float (&x)[kWidth]) {
  if (activation == Activation::kSilu) {
    each(x, [](float v) { return ltx::activate<T, Activation::kSilu, false>(v); });
  } else if (activation == Activation::kGeluTanh) {
    each(x, [](float v) { return sizeof(T) == 4 ? ltx::activate<T, Activation::kGeluTanh>(v) : gelu_by_tanh(v); });
  } else {
    each(x, [](float v) { return ltx::activate<T, Activation::kGelu>(v); });
  }
}

template <int kWidth>
__device__ __forceinline__ float pack_magnitude(float most, const float (&y)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) most = larger_magnitude(most, y[i]);
  return most;
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

// block: x = the threads of a row, y = rows, which work on their own; rows of more than a warp meet at a barrier of
// their own.
__device__ __forceinline__ void row_barrier() {
  asm volatile("bar.sync %0, %1;" : : "r"(threadIdx.y), "r"(blockDim.x) : "memory");
}

// The sum or the largest magnitude over the threads of a row. No other reduction of the same row may use `scratch`, one
// number a warp, so that one barrier is enough.
struct Sum {
  __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
  __device__ __forceinline__ float lanes(float x, int count) const {  // unrolled, as lane_sum, it spills
    for (int offset = count / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  }
};
struct Magnitude {
  __device__ __forceinline__ float operator()(float x, float y) const { return larger_magnitude(x, y); }
  __device__ __forceinline__ float lanes(float x, int count) const { return lane_magnitude(x, count); }
};

template <typename Op>
__device__ __forceinline__ float row_reduce(float x, float* scratch, const Op& op) {
  const int threads = static_cast<int>(blockDim.x);
  if (threads <= 32) return op.lanes(x, threads);
  x = op.lanes(x, 32);
  const int lane = threadIdx.x % 32, warps = threads / 32;
  scratch += threadIdx.y * warps;
  if (lane == 0) scratch[threadIdx.x / 32] = x;
  row_barrier();
  if (warps > 4) return op.lanes(lane < warps ? scratch[lane] : 0.f, 32);
  // A few warps: every thread takes their numbers itself, which is shorter than shuffles.
  float all = scratch[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    if (i < warps) all = op(all, scratch[i]);
  }
  return all;
}

// Which packs of a row are a thread's: a warp owns 32 * kPacks neighbouring ones, a lane those 32 apart, beginning with
// number first_pack. Rows of less than a warp have one pack a thread.
constexpr int kPackStep = 32;
// Threads of a block: several rows, that hold vectors together or at least start together, or one long row.
// H200, us of 2x8064x2048, blocks of 64, 128 and 256: quantize_rows 47, 35, 29.
constexpr int kBlock = 256, kMaxThreads = 512;
constexpr int kWarps = kMaxThreads / 32;

__device__ __forceinline__ int first_pack(int packs) {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / 32 * 32 * packs + thread % 32;
}

// ---- In registers. Rows have at most two dimensions, of which the outer one is the grid's y.

struct RowPointer {
  char* data;
  int64_t inner, outer;  // strides in bytes

  __device__ __forceinline__ char* at(uint32_t row) const { return data + outer * blockIdx.y + inner * row; }
};

// A thread's kPacks packs of a row, and of the rows that are `stride` further on.
template <typename T, int kPacks, int kOperands>
struct RowShare {
  static constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  uint32_t rows, row, stride;
  int first;
  bool inside[kPacks];
  const char* source[kOperands];
  int64_t number;  // of the row in the whole op

  __device__ __forceinline__ RowShare(uint32_t row_count, int width, const RowPointer (&operands)[kOperands])
      : rows(row_count),
        row(blockIdx.x * blockDim.y + threadIdx.y),
        stride(gridDim.x * blockDim.y),
        first(first_pack(kPacks) * kWidth) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) inside[k] = column(k) < width;
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      source[i] = operands[i].at(row) + first * sizeof(T);
    }
    number = static_cast<int64_t>(blockIdx.y) * rows + row;
  }
  __device__ __forceinline__ int column(int k) const { return first + k * kPackStep * kWidth; }
  __device__ __forceinline__ bool active() const { return row < rows; }
  // The rows of a block end together: every thread must reach every shuffle.
  __device__ __forceinline__ bool more() const { return row - threadIdx.y < rows; }

  // The packs of the row (or of the one after it, when `source` has gone on already): zeros past its end and past the
  // last row.
  __device__ __forceinline__ void load(uint32_t at, P (&packs)[kOperands][kPacks]) const {
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        packs[i][k] = P{};
        if (at < rows && inside[k]) packs[i][k] = reinterpret_cast<const P*>(source[i])[k * kPackStep];
      }
    }
  }
  __device__ __forceinline__ void load(P (&packs)[kOperands][kPacks]) const { load(row, packs); }
  __device__ __forceinline__ void load_next(const RowPointer (&operands)[kOperands], P (&packs)[kOperands][kPacks]) {
#pragma unroll
    for (int i = 0; i < kOperands; ++i) source[i] += operands[i].inner * stride;
    load(row + stride, packs);
  }
  __device__ __forceinline__ void advance() {
    row += stride;
    number += stride;
  }

  __device__ __forceinline__ void quantise(const float (&y)[kPacks][kWidth], const QuantOutput& output, int width,
                                           float* scratch) const {
    float most = 0.f;
    if (!output.static_scale) most = row_reduce(magnitude(y), scratch, Magnitude());
    if (!active()) return;
    const float scale = quant_scale(most, output.static_scale);
    const float inverse = __frcp_rn(scale);
    if (threadIdx.x == 0) output.scales[number] = scale;
    uint8_t* values = output.values + number * width + first;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (inside[k]) reinterpret_cast<E4m3Pack<kWidth>*>(values)[k * kPackStep] = E4m3Pack<kWidth>(y[k], inverse);
    }
  }
};

// value + table, of any dtypes.
struct RowModulator {
  RowPointer value;
  const char* table;
  DType value_dtype, table_dtype;

  // The value's elements, on their way ahead of get, if they have dtype T.
  template <typename T, int kWidth>
  __device__ __forceinline__ void fetch(uint32_t row, int column, Pack<T, kWidth>& pack) const {
    if (value.data && value_dtype == DTypeOf<T>::value) {
      pack = load_pack<T, kWidth>(reinterpret_cast<const T*>(value.at(row)), column, 1, 0, true);
    }
  }

  // kWidth elements of a row's modulator; `absent` where there is none. `fetched`: what fetch was given, or null.
  template <typename T, int kWidth>
  __device__ __forceinline__ void get(uint32_t row, int column, float absent, const Pack<T, kWidth>* fetched,
                                      float (&m)[kWidth]) const {
    each(m, [&](float) { return absent; });
    if (!value.data) return;
    if (fetched && value_dtype == DTypeOf<T>::value) {
      unpack(*fetched, m);
    } else {
      load_floats<kWidth>(value.at(row), value_dtype, 0, column, 1, 0, true, m);
    }
    if (table) {
      float t[kWidth];
      load_floats<kWidth>(table, table_dtype, 0, column, 1, 0, true, t);
      add(m, t);
    }
  }
};

// As NormParams. operands: input, and the residual where there is one.
template <int kOperands>
struct NormRowParams {
  RowPointer operands[kOperands], residual_out;
  RowModulator weight, gate, scale, shift;
  QuantOutput output;
  uint32_t rows;  // of the inner dimension
  int32_t width;
  float inverse_width, eps, weight_offset;

  // y = h * rstd * factor + addend. `fetched`: scale and shift, or null.
  template <typename T, int kWidth>
  __device__ __forceinline__ void get_factors(uint32_t row, int column, const Pack<T, kWidth>* fetched_scale,
                                              const Pack<T, kWidth>* fetched_shift, float (&factor)[kWidth],
                                              float (&addend)[kWidth]) const {
    constexpr const Pack<T, kWidth>* kNone = nullptr;
    float m[kWidth];
    weight.get(row, column, 1.f, kNone, factor);
    scale.get(row, column, 0.f, fetched_scale, m);
    shift.get(row, column, -0.f, fetched_shift, addend);  // x + -0 is x, for every x
    if (weight_offset != 0.f) each(factor, [&](float w) { return __fadd_rn(weight_offset, w); });
    each(m, [](float x) { return __fadd_rn(1.f, x); });
    multiply(factor, m);
  }
};

// Vectors of fp32 in shared memory, in fours: the first fours of all packs, then the second ones, so that the lanes of
// a warp read neighbours.
extern __shared__ float4 held_vectors[];

template <int kWidth>
__device__ __forceinline__ void hold(int vector, int packs, int pack, const float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {
    held_vectors[(vector * (kWidth / 4) + i) * packs + pack] =
        make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
}
template <int kWidth>
__device__ __forceinline__ void get_held(int vector, int packs, int pack, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth / 4; ++i) {
    const float4 four = held_vectors[(vector * (kWidth / 4) + i) * packs + pack];
    x[4 * i] = four.x;
    x[4 * i + 1] = four.y;
    x[4 * i + 2] = four.z;
    x[4 * i + 3] = four.w;
  }
}

// Threads of a multiprocessor for which a kernel that holds vectors gets its registers, and its grid.
// H200, us of 2x8064x2048: adaln_rmsnorm 34.6 (512), 33.2 (768), 44.5 (1024, spills); gated_residual_adaln_rmsnorm
// 64.9 (512), 72 (640).
constexpr int held_threads(bool residual) { return residual ? 512 : 768; }

// The most threads of a block, which bound the registers. Other architectures than Hopper would spill at 768.
template <bool kResidual, bool kHeld>
constexpr int norm_bound() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  return kMaxThreads;
#else
  return kHeld ? held_threads(kResidual) : kMaxThreads;
#endif
}

// kHeld: the vectors are the same for all rows of a block, which holds them in shared memory.
template <typename T, bool kResidual, bool kNorm, bool kHeld, int kPacks>
__global__ void __launch_bounds__(norm_bound<kResidual, kHeld>(), 1)
    norm_quant_kernel(const __grid_constant__ NormRowParams<kResidual + 1> p) {
  constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  __shared__ float scratch[2][2][kWarps];
  RowShare<T, kPacks, kResidual + 1> share(p.rows, p.width, p.operands);
  P packs[kResidual + 1][kPacks];
  share.load(packs);
  const int width_packs = p.width / kWidth;
  const bool gated = kResidual && p.gate.value.data, shifted = kNorm && p.shift.value.data;
  // Where held: the factor, the gate and the addend, as far as there are any.
  const int held_gate = kNorm, held_addend = held_gate + gated;
  // Where not: the packs of scale, shift and gate.
  constexpr int kFetched = kHeld ? 0 : kPacks;
  P scale[kFetched + 1], shift[kFetched + 1], gate[kFetched + 1];
  if constexpr (kHeld) {
    constexpr const P* kNone = nullptr;
    const int threads = blockDim.x * blockDim.y;
    for (int pack = threadIdx.y * blockDim.x + threadIdx.x; pack < width_packs; pack += threads) {
      float factor[kWidth], addend[kWidth];
      if constexpr (kNorm) {
        p.get_factors(0, pack * kWidth, kNone, kNone, factor, addend);
        hold(0, width_packs, pack, factor);
        if (shifted) hold(held_addend, width_packs, pack, addend);
      }
      if (gated) {
        p.gate.get(0, pack * kWidth, 1.f, kNone, factor);
        hold(held_gate, width_packs, pack, factor);
      }
    }
  } else {
    const uint32_t row = share.active() ? share.row : 0;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!share.inside[k]) continue;
      if constexpr (kResidual) p.gate.fetch(row, share.column(k), gate[k]);
      if constexpr (kNorm) p.scale.fetch(row, share.column(k), scale[k]);
      if constexpr (kNorm) p.shift.fetch(row, share.column(k), shift[k]);
    }
  }
  char* residual_out = kResidual ? p.residual_out.at(share.row) + share.first * sizeof(T) : nullptr;
  if constexpr (kHeld) __syncthreads();
#pragma unroll 1
  for (int parity = 0; share.more(); parity ^= 1) {
    const uint32_t vector_row = share.active() ? share.row : 0;
    const int first = share.first / kWidth;
    float y[kPacks][kWidth];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      unpack(packs[0][k], y[k]);
      if constexpr (kResidual) {
        float x[kWidth], g[kWidth];
        unpack(packs[1][k], x);
        if (!share.inside[k]) continue;
        if (gated) {
          if constexpr (kHeld) {
            get_held(held_gate, width_packs, first + k * kPackStep, g);
          } else {
            p.gate.get(vector_row, share.column(k), 1.f, &gate[k], g);
          }
          multiply_add(y[k], g, x);
        } else {
          add(y[k], x);
        }
      }
    }
    // The next row is on its way while this one is worked on.
    if constexpr (kHeld) share.load_next(p.operands, packs);
    if constexpr (kResidual) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (share.active() && share.inside[k]) {
          reinterpret_cast<Pack<T, kWidth>*>(residual_out)[k * kPackStep] = to_pack<T, kWidth>(y[k]);
        }
      }
      residual_out += p.residual_out.inner * share.stride;
    }
    if constexpr (kNorm) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) sum += pack_squares(y[k]);
      sum = row_reduce(sum, scratch[parity][0], Sum());
      const float rstd = reciprocal_root(sum, p.inverse_width, p.eps);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!share.inside[k]) continue;
        float factor[kWidth], addend[kWidth];
        if constexpr (kHeld) {
          get_held(0, width_packs, first + k * kPackStep, factor);
          if (shifted) get_held(held_addend, width_packs, first + k * kPackStep, addend);
        } else {
          p.get_factors(vector_row, share.column(k), &scale[k], &shift[k], factor, addend);
        }
        each(y[k], [&](float h) { return __fmul_rn(h, rstd); });
        if (shifted) {
          multiply_add(y[k], factor, addend);
        } else {
          multiply(y[k], factor);
        }
      }
    }
    share.quantise(y, p.output, p.width, scratch[parity][1]);
    if constexpr (!kHeld) return;
    share.advance();
  }
}

// operands: the gate, and what it multiplies (not for gelu).
template <int kOperands>
struct GluRowParams {
  RowPointer operands[kOperands];
  RowModulator bias;
  QuantOutput output;
  uint32_t rows;
  int32_t width;
  Activation activation;
};

template <typename T, bool kGated, int kPacks>
__global__ void __launch_bounds__(kMaxThreads, 1) glu_quant_kernel(const __grid_constant__ GluRowParams<kGated + 1> p) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[kWarps];
  RowShare<T, kPacks, kGated + 1> share(p.rows, p.width, p.operands);
  Pack<T, kWidth> packs[kGated + 1][kPacks];
  share.load(packs);
  float y[kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float other[kWidth];
    unpack(packs[0][k], y[k]);
    if (!kGated && p.bias.value.data && share.inside[k]) {
      constexpr const Pack<T, kWidth>* kNone = nullptr;
      p.bias.get(0, share.column(k), 0.f, kNone, other);
      add(y[k], other);
    }
    activate<T>(p.activation, y[k]);
    if constexpr (kGated) {
      unpack(packs[1][k], other);
      multiply(y[k], other);
    }
  }
  share.quantise(y, p.output, p.width, scratch);
}

// ---- Everything else. block: as above; grid: x counts all rows.

// Calls at(column) for the thread's packs of a row of any length: of each stretch of threads * packs packs, the same as
// in registers.
template <typename T, typename At>
__device__ __forceinline__ void for_packs(int64_t width, int packs, const At& at) {
  const int64_t stretch = static_cast<int64_t>(blockDim.x) * packs * kPackWidth<T>;
#pragma unroll 1
  for (int64_t start = first_pack(packs) * kPackWidth<T>; start < width; start += stretch) {
#pragma unroll 1
    for (int k = 0; k < packs; ++k) {
      const int64_t column = start + k * kPackStep * kPackWidth<T>;
      if (column < width) at(column);
    }
  }
}

// Writes the row that get(column, y) gives, zero past its end.
template <typename T, typename Get>
__device__ __forceinline__ void quantise_general(int64_t row, bool active, int64_t width, int packs,
                                                 const QuantOutput& output, float* scratch, const Get& get) {
  constexpr int kWidth = kPackWidth<T>;
  float y[kWidth], most = 0.f;
  if (!output.static_scale) {
    for_packs<T>(width, packs, [&](int64_t column) {
      get(column, y);
      most = pack_magnitude(most, y);
    });
    most = row_reduce(most, scratch, Magnitude());
  }
  if (!active) return;
  const float scale = quant_scale(most, output.static_scale);
  const float inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) output.scales[row] = scale;
  uint8_t* values = output.values + row * width;
  for_packs<T>(width, packs, [&](int64_t column) {
    get(column, y);
    const E4m3Pack<kWidth> pack(y, inverse);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i < width) values[column + i] = pack.byte(i);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_quant_kernel_general(const __grid_constant__ NormParams p, const __grid_constant__ QuantOutput output,
                              int packs, float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[2][kWarps];
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const bool active = number < p.rows.count;
  int64_t input = 0, residual = 0, residual_out = 0, gate = 0, scale = 0, shift = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    input += i * p.input.stride[d];
    residual += i * p.residual.stride[d];
    residual_out += i * p.residual_out.stride[d];
    gate += i * p.gate.value.stride[d];
    scale += i * p.scale.value.stride[d];
    shift += i * p.shift.value.stride[d];
  });
  const auto get = [&](const RowView& view, int64_t row, int64_t column, float (&x)[kWidth]) {
    load_floats<kWidth>(view.data, view.dtype, row, column, view.column_stride, width, false, x);
  };
  const auto get_modulator = [&](const Modulator& modulator, int64_t row, int64_t column, float (&m)[kWidth]) {
    get(modulator.value, row, column, m);
    if (modulator.table.data) {
      float table[kWidth];
      get(modulator.table, 0, column, table);
      add(m, table);
    }
  };
  const auto get_h = [&](int64_t column, float (&h)[kWidth]) {
    get(p.input, input, column, h);
    if (p.residual.data) {
      float r[kWidth], g[kWidth];
      get(p.residual, residual, column, r);
      if (p.gate.value.data) {
        get_modulator(p.gate, gate, column, g);
        multiply_add(h, g, r);
      } else {
        add(h, r);
      }
    }
  };
  const bool normalises = p.statistic == Statistic::kRms;
  float sum = 0.f;
  if (normalises || p.residual_out.data) {
    for_packs<T>(width, packs, [&](int64_t column) {
      float h[kWidth];
      get_h(column, h);
      sum += pack_squares(h);
      if (active && p.residual_out.data) {
        store_pack(static_cast<T*>(p.residual_out.data) + residual_out, column, p.residual_out.column_stride, width,
                   false, to_pack<T, kWidth>(h));
      }
    });
  }
  float rstd = 1.f;
  if (normalises) {
    rstd = reciprocal_root(row_reduce(sum, scratch[0], Sum()), inverse_width, p.eps);
  }
  quantise_general<T>(number, active, width, packs, output, scratch[1], [&](int64_t column, float (&y)[kWidth]) {
    get_h(column, y);
    if (!normalises) return;
    float factor[kWidth], addend[kWidth], m[kWidth];
    each(factor, [](float) { return 1.f; });
    each(addend, [](float) { return -0.f; });
    if (p.weight.data) {
      get(p.weight, 0, column, factor);
      if (p.weight_offset != 0.f) each(factor, [&](float w) { return __fadd_rn(p.weight_offset, w); });
    }
    if (p.scale.value.data) {
      get_modulator(p.scale, scale, column, m);
      each(m, [](float x) { return __fadd_rn(1.f, x); });
      multiply(factor, m);
    }
    if (p.shift.value.data) get_modulator(p.shift, shift, column, addend);
    each(y, [&](float h) { return __fmul_rn(h, rstd); });
    multiply_add(y, factor, addend);
  });
}

template <typename T>
__global__ void __launch_bounds__(kBlock, 1)
    glu_quant_kernel_general(const __grid_constant__ GluParams p, const __grid_constant__ QuantOutput output,
                             int packs) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[kWarps];
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const bool active = number < p.rows.count;
  int64_t gate = 0, up = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    gate += i * p.gate.stride[d];
    up += i * p.up.stride[d];
  });
  const auto get = [&](const RowView& view, int64_t row, int64_t column, float (&x)[kWidth]) {
    load_floats<kWidth>(view.data, view.dtype, row, column, view.column_stride, width, false, x);
  };
  quantise_general<T>(number, active, width, packs, output, scratch, [&](int64_t column, float (&y)[kWidth]) {
    float other[kWidth];
    get(p.gate, gate, column, y);
    if (p.bias.data) {
      get(p.bias, 0, column, other);
      add(y, other);
    }
    activate<T>(p.activation, y);
    if (p.up.data) {
      get(p.up, up, column, other);
      multiply(y, other);
    }
  });
}

// ---- Launch

// How a row is shared out: `threads` a row, `packs` a thread.
struct Geometry {
  int threads;
  int packs;
};

// Four packs a thread spread the fixed costs of a row; with a residual, two leave registers for more warps.
// H200, us, four and two: 2x8064x2048 quantize_rows 28.6 and 33.8, adaln_rmsnorm 33.2 and 35.3, gated_residual 65.1 and
// 61.3, gated_residual_adaln_rmsnorm 65.7 and 65.0; 16128x8192 gelu 104 and 135, swiglu 158 and 166.
Geometry geometry(int64_t width, int pack_width, bool residual) {
  const int64_t packs = ceil_div(width, pack_width);
  int a_thread = packs <= 32 ? 1 : packs <= 64 || (residual && packs <= 2 * kMaxThreads) ? 2 : 4;
  if (const int wanted = forced().quant_packs) {
    if (packs > wanted * kMaxThreads) fail_forced("rows that fit", "quant_packs=" + std::to_string(wanted));
    a_thread = wanted;
  }
  const int64_t threads = ceil_div(packs, a_thread);
  if (a_thread == 1 && threads <= 32) return {next_power_of_two(threads), 1};  // several rows a warp
  return {static_cast<int>(std::min<int64_t>(ceil_div(threads, 32) * 32, kMaxThreads)), a_thread};
}

// A launch of rows of `width` columns.
template <typename T>
struct Launch {
  Geometry shape;
  bool in_registers;
  int device;
  cudaStream_t stream;
  dim3 block, grid;

  Launch(int64_t width, bool residual, const Context& context)
      : shape(geometry(width, kPackWidth<T>, residual)),
        in_registers(width <= static_cast<int64_t>(shape.threads) * shape.packs * kPackWidth<T>),
        device(context.device),
        stream(static_cast<cudaStream_t>(context.stream)) {}

  // Gives every row its part of a block; with `at_once`, in no more blocks than these threads of a multiprocessor.
  void share(int64_t rows, int64_t outer, int at_once = 0) {
    block = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(std::max(1, kBlock / shape.threads)));
    int64_t blocks = ceil_div(rows, block.y);
    if (at_once > 0) {
      const int64_t running = multiprocessors(device) * (at_once / static_cast<int64_t>(block.x * block.y));
      blocks = std::min(blocks, std::max<int64_t>(1, running / outer));
    }
    grid = dim3(grid_size(blocks), static_cast<unsigned>(outer));
  }
};

// Calls run(std::integral_constant<int, packs>).
template <typename Run>
void with_packs(int packs, const Run& run) {
  if (packs == 1) return run(std::integral_constant<int, 1>());
  if (packs == 2) return run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 4>());
}

constexpr int64_t kHeldBytes = 47 << 10;  // what a kernel gets without asking, less its other arrays

// Takes operands for a *_kernel; `fits` until one of them does not.
template <typename T>
class RowOperands {
 public:
  explicit RowOperands(const Rows& rows) : rows_(rows) {
    inner_ = rows.ndim == 2 ? rows.size[1] : rows.count;
    fits_ = rows.ndim <= 2 && (rows.ndim < 2 || rows.size[0] <= 65535) && inner_ <= 0x7fffffffll;
  }

  bool fits() const { return fits_; }
  bool varying() const { return varying_; }
  int64_t inner() const { return inner_; }
  int64_t outer() const { return rows_.ndim == 2 ? rows_.size[0] : 1; }

  RowPointer row(const RowView& view) {
    fits_ = fits_ && (!view.data || is_packed(view.data, view.dtype, kPackWidth<T>, rows_.width, view.column_stride,
                                              view.stride, rows_.ndim));
    const int64_t bytes = element_size(view.dtype);
    return {static_cast<char*>(view.data), rows_.ndim > 0 ? view.stride[rows_.ndim - 1] * bytes : 0,
            rows_.ndim == 2 ? view.stride[0] * bytes : 0};
  }
  RowModulator modulator(const RowView& value, const RowView& table) {
    const RowModulator modulator{row(value), row(table).data, value.dtype, table.dtype};
    varying_ = varying_ || modulator.value.inner != 0;
    return modulator;
  }

 private:
  const Rows& rows_;
  int64_t inner_;
  bool fits_, varying_ = false;
};

template <typename T, bool kResidual, bool kNorm, bool kHeld>
void launch_norm(const NormRowParams<kResidual + 1>& p, int64_t outer, int64_t held, Launch<T>& launch) {
  launch.share(p.rows, outer, kHeld ? held_threads(kResidual) : 0);
  with_packs(launch.shape.packs, [&](auto packs) {
    norm_quant_kernel<T, kResidual, kNorm, kHeld, decltype(packs)::value>
        <<<launch.grid, launch.block, static_cast<size_t>(held), launch.stream>>>(p);
  });
}

template <typename T, bool kResidual, bool kNorm>
void launch_norm(const NormParams& p, const QuantOutput& output, RowOperands<T>& operands, Launch<T>& launch) {
  NormRowParams<kResidual + 1> q;
  q.operands[0] = operands.row(p.input);
  if constexpr (kResidual) q.operands[1] = operands.row(p.residual);
  q.residual_out = operands.row(p.residual_out);
  q.weight = operands.modulator(p.weight, RowView());
  q.gate = operands.modulator(p.gate.value, p.gate.table);
  q.scale = operands.modulator(p.scale.value, p.scale.table);
  q.shift = operands.modulator(p.shift.value, p.shift.table);
  q.output = output;
  q.rows = static_cast<uint32_t>(operands.inner());
  q.width = static_cast<int32_t>(p.rows.width);
  q.inverse_width = 1.f / static_cast<float>(p.rows.width);
  q.eps = p.eps;
  q.weight_offset = p.weight.data ? p.weight_offset : 0.f;
  const int vectors = 1 + (p.gate.value.data != nullptr) + (p.shift.value.data != nullptr);
  const int64_t held = vectors * p.rows.width * 4;
  if (takes_packed("quant", forced().quant, launch.in_registers && operands.fits())) {
    if constexpr (kNorm) {
      if (!operands.varying() && held <= kHeldBytes) {
        launch_norm<T, kResidual, kNorm, true>(q, operands.outer(), held, launch);
        return check_launch("norm_quant");
      }
    }
    launch_norm<T, kResidual, kNorm, false>(q, operands.outer(), 0, launch);
  } else {
    launch.share(p.rows.count, 1);
    norm_quant_kernel_general<T>
        <<<launch.grid, launch.block, 0, launch.stream>>>(p, output, launch.shape.packs, q.inverse_width);
  }
  check_launch("norm_quant");
}

template <typename T>
void norm_quant(const NormParams& p, const QuantOutput& output, const Context& context) {
  Launch<T> launch(p.rows.width, p.residual.data != nullptr, context);
  RowOperands<T> operands(p.rows);
  const bool normalises = p.statistic == Statistic::kRms;
  if (p.residual.data) {
    return normalises ? launch_norm<T, true, true>(p, output, operands, launch)
                      : launch_norm<T, true, false>(p, output, operands, launch);
  }
  normalises ? launch_norm<T, false, true>(p, output, operands, launch)
             : launch_norm<T, false, false>(p, output, operands, launch);
}

template <typename T, bool kGated>
void launch_glu(const GluParams& p, const QuantOutput& output, RowOperands<T>& operands, Launch<T>& launch) {
  GluRowParams<kGated + 1> q;
  q.operands[0] = operands.row(p.gate);
  if constexpr (kGated) q.operands[1] = operands.row(p.up);
  q.bias = operands.modulator(p.bias, RowView());
  q.output = output;
  q.rows = static_cast<uint32_t>(operands.inner());
  q.width = static_cast<int32_t>(p.rows.width);
  q.activation = p.activation;
  if (takes_packed("quant", forced().quant, launch.in_registers && operands.fits())) {
    launch.share(q.rows, operands.outer());
    with_packs(launch.shape.packs, [&](auto packs) {
      glu_quant_kernel<T, kGated, decltype(packs)::value><<<launch.grid, launch.block, 0, launch.stream>>>(q);
    });
  } else {
    // No sum depends on the number of threads.
    launch.shape.threads = std::min(launch.shape.threads, kBlock);
    launch.share(p.rows.count, 1);
    glu_quant_kernel_general<T><<<launch.grid, launch.block, 0, launch.stream>>>(p, output, launch.shape.packs);
  }
  check_launch("glu_quant");
}

template <typename T>
void glu_quant(const GluParams& p, const QuantOutput& output, const Context& context) {
  Launch<T> launch(p.rows.width, false, context);
  RowOperands<T> operands(p.rows);
  p.up.data ? launch_glu<T, true>(p, output, operands, launch) : launch_glu<T, false>(p, output, operands, launch);
}

// The slices of for_each_slice, with the part of the output that each writes.
template <typename Params, typename Views, typename Op>
void for_each_output_slice(const Params& params, const QuantOutput& output, const Views& views, const Op& op) {
  QuantOutput slice = output;
  for_each_slice(params, views, [&](const Params& q) {
    op(q, slice);
    slice.values += q.rows.count * q.rows.width;
    slice.scales += q.rows.count;
  });
}

}  // namespace

void norm_quant(const NormParams& p, const QuantOutput& output, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](NormParams& q) {
      return std::array<RowView*, 6>{&q.input,      &q.residual,    &q.residual_out,
                                     &q.gate.value, &q.scale.value, &q.shift.value};
    };
    return for_each_output_slice(p, output, views,
                                 [&](const NormParams& q, const QuantOutput& slice) { norm_quant(q, slice, context); });
  }
  dispatch(p.dtype, [&](auto zero) { norm_quant<decltype(zero)>(p, output, context); });
}

void glu_quant(const GluParams& p, const QuantOutput& output, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](GluParams& q) { return std::array<RowView*, 2>{&q.gate, &q.up}; };
    return for_each_output_slice(p, output, views,
                                 [&](const GluParams& q, const QuantOutput& slice) { glu_quant(q, slice, context); });
  }
  dispatch(p.dtype, [&](auto zero) { glu_quant<decltype(zero)>(p, output, context); });
}

}  // namespace ltx
