// Rows quantised to fp8: plain rows and RMS norms (rows_quant, which norm_quant.cu calls) and activations (glu_quant).
//
//   scale  = max(amax(|y|) / 448, 2^-120), or one number for all rows
//   values = e4m3(y * (1 / scale))              y: the op's fp32 result (norm.cu and glu.cu have the formulas)
//
// A norm with neither residual nor shift finds amax(|h * weight|) beside its sum and multiplies with rstd afterwards.
//
// 16-bit rows are read once (2 bytes an element, and as many for a residual or an up) and written once (1 byte, and 2
// for the residual stream); y stays in registers while the row finds its largest magnitude.
//
// The kernels share the ownership of packs, the order of a row's sum and the arithmetic:
//   norm_quant_kernel, glu_quant_kernel  hold a row in registers and read each of its bytes once; a block ends with its
//                        row.
//   modulate_quant_kernel  does so for the modulated norm of known lengths.
//   norm_quant_kernel_held  serves the other norms with a modulation if all rows of a block have the same vectors. A
//                        block computes factor and addend once, holds them in shared memory and takes one row after
//                        the other, loading the next row while it works on one. The vectors are there after 3.3 us
//                        (H200, adaln_rmsnorm 2x8064x2048), and memory serves some multiprocessors faster, so that
//                        blocks with equal shares of the rows end after 22 to 32 us. modulate_quant_kernel is faster
//                        for any number of rows: 29.3 and 32.6 us, 1x64x2048 5.3 and 5.9.
//   *_kernel_general     take rows that are too long, strided or misaligned, element by element: once for the norm's
//                        sum, once for the magnitude and once for the values, from cache after the first time.
// How many threads share a row depends on its length and dtype, and on the op, alone.
//
// A row of 2048 bf16 that becomes fp8 leaves a multiprocessor of an H200 about 1500 issue slots, 190 a pack: 100 more
// cost 10 % over a copy. Unpacking a vector takes 8 of them, and rows of other blocks push the vectors out of the first
// cache. Hence the vectors that a model's block passes have kernels of their own, with few steps between them and a
// row. Rows that are wide, or have little done to them, wait for memory: a block prefetches a later block's rows into
// the L2 cache. Only the held kernel's barrier has a number that is known at run time: for such a barrier ptxas
// reserves all sixteen, and four blocks would fill a multiprocessor (gated_residual_adaln_rmsnorm 2x8064x2048, blocks
// of 128: 1.26 x a copy with such barriers, 1.03 without).
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

template <int kWidth>
__device__ __forceinline__ float pack_squares(const float (&h)[kWidth]) {
  return ltx::pack_squares<false>(h, 0.f, kWidth);
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

template <typename T, Activation kActivation, int kWidth>
__device__ __forceinline__ void activate(float (&x)[kWidth]) {
  each(x, [](float v) {
    if constexpr (kActivation == Activation::kGeluTanh && sizeof(T) < 4) return gelu_by_tanh(v);
    return ltx::activate<T, kActivation, kActivation != Activation::kSilu>(v);
  });
}
template <typename T, int kWidth>
__device__ __forceinline__ void activate(Activation activation, float (&x)[kWidth]) {
  if (activation == Activation::kSilu) return activate<T, Activation::kSilu>(x);
  if (activation == Activation::kGeluTanh) return activate<T, Activation::kGeluTanh>(x);
  activate<T, Activation::kGelu>(x);
}

// Keeps a row's numbers from being unpacked a second time, which costs more than their registers.
template <int kPacks, int kWidth>
__device__ __forceinline__ void keep(float (&y)[kPacks][kWidth]) {
#pragma unroll
  for (int k = 0; k < kPacks; ++k)
    each(y[k], [](float v) {
      asm volatile("" : "+f"(v));
      return v;
    });
}
// Keeps a row as it lies in memory, to be unpacked a second time: half the registers.
template <typename T, int kPacks, int kWidth>
__device__ __forceinline__ void keep(Pack<T, kWidth> (&packs)[kPacks]) {
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (auto& word : packs[k].word) asm volatile("" : "+r"(word));
  }
}

// block: x = the threads of a row, y = rows.

// Over some lanes, and over a warp.
struct Sum {
  __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
  __device__ __forceinline__ float lanes(float x, int count) const {  // unrolled, as lane_sum, it spills
    for (int offset = count / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  }
  __device__ __forceinline__ float warp(float x) const { return lanes(x, 32); }
};
struct Magnitude {
  __device__ __forceinline__ float operator()(float x, float y) const { return larger_magnitude(x, y); }
  __device__ __forceinline__ float lanes(float x, int count) const { return lane_magnitude(x, count); }
  __device__ __forceinline__ float warp(float x) const { return warp_magnitude(x); }
};

// The threads of a row: as many as a block has in x, or kWarps warps, which are a block.
template <int kWarps>
struct Group {
  static_assert(kWarps > 1);
  static __device__ __forceinline__ int threads() { return kWarps * 32; }
  static __device__ __forceinline__ int number() { return 0; }
};
template <>
struct Group<0> {
  static __device__ __forceinline__ int threads() { return blockDim.x; }
  static __device__ __forceinline__ int number() { return threadIdx.y; }
};

// For each of a thread's kRows rows: one partial result a warp, and zeros up to the next multiple of four. A row has at
// most 16 warps, or 32 where kMany says so. A block has at most eight groups of rows.
constexpr int kPartials = 32;
template <int kRows>
struct alignas(16) PartialResults {
  float number[kRows][kPartials];
};

// A reduction over the threads of a row takes two steps with a barrier of the block in between: each warp stores its
// partial result, then every thread combines them all. The first step alone reduces a row of one warp. kWhole: rows
// have whole warps.
template <bool kWhole, int kWarps = 0, int kRows, typename Op>
__device__ __forceinline__ void store_partials(float (&x)[kRows], PartialResults<kRows>& partials, const Op& op) {
  using G = Group<kWarps>;
  const int threads = G::threads(), warps = threads / 32, fours = (warps + 3) / 4, mine = G::number() * fours * 4;
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = kWhole ? op.warp(x[r]) : op.lanes(x[r], min(threads, 32));
  if (threads <= 32) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (threadIdx.x % 32 == 0) partials.number[r][mine + threadIdx.x / 32] = x[r];
    if (threadIdx.x >= warps && threadIdx.x < fours * 4) partials.number[r][mine + threadIdx.x] = 0.f;
  }
}
template <bool kMany, typename Op>
__device__ __forceinline__ float combine_partials(const float4* all, int fours, const Op& op) {
  const auto both = [&](const float4& a, const float4& b) {
    return make_float4(op(a.x, b.x), op(a.y, b.y), op(a.z, b.z), op(a.w, b.w));
  };
  float4 a = all[0];
  if (fours == 1) return op(op(op(a.x, a.y), a.z), a.w);
  float4 b = all[1];
  if (fours > 2) {
    a = both(a, all[2]);
    if (fours > 3) b = both(b, all[3]);
    if constexpr (kMany) {
      for (int i = 4; i < fours; ++i) a = both(a, all[i]);
    }
  }
  a = both(a, b);
  return op(op(a.x, a.z), op(a.y, a.w));
}
template <int kWarps = 0, bool kMany = false, int kRows, typename Op>
__device__ __forceinline__ void combine_partials(float (&x)[kRows], const PartialResults<kRows>& partials,
                                                 const Op& op) {
  using G = Group<kWarps>;
  const int threads = G::threads(), fours = (threads / 32 + 3) / 4, mine = G::number() * fours * 4;
  if (threads <= 32) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    x[r] = combine_partials<kMany>(reinterpret_cast<const float4*>(&partials.number[r][mine]), fours, op);
}
// Both steps. No other reduction may use `partials`. kMany: a row may have more than 16 warps.
template <bool kWhole, int kWarps = 0, bool kMany = false, int kRows, typename Op>
__device__ __forceinline__ void block_reduce(float (&x)[kRows], PartialResults<kRows>& partials, const Op& op) {
  store_partials<kWhole, kWarps>(x, partials, op);
  if (Group<kWarps>::threads() > 32) __syncthreads();
  combine_partials<kWarps, kMany>(x, partials, op);
}
template <bool kWhole, int kWarps = 0, bool kMany = false, typename Op>
__device__ __forceinline__ float block_reduce(float x, PartialResults<1>& partials, const Op& op) {
  float one[1] = {x};
  block_reduce<kWhole, kWarps, kMany>(one, partials, op);
  return one[0];
}

// A warp owns 32 * kPacks neighbouring packs of a row, and a lane those 32 apart, from number first_pack on. Rows of
// less than a warp have one pack a thread.
constexpr int kPackStep = 32;
// A block has at least kBlock threads: several short rows share one. H200, of a copy's time, blocks of 128 and 256:
// gated_residual 2x2688x2048 1.04, 1.06; quantize_rows 2x8064x2048 1.05, 1.04; gated_residual_adaln_rmsnorm 2x8064x2048
// 1.03, 1.04.
constexpr int kBlock = 128, kMaxThreads = 512;
// Rows with a prefix are long. glu_register_threads leaves registers for as many threads on every architecture, and the
// largest of a row does not depend on the order in which it is found.
constexpr int kMaxPrefixThreads = 896, kPrefixPacks = 4;

__device__ __forceinline__ int first_pack(int packs) {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / 32 * 32 * packs + thread % 32;
}

// ---- In registers. Rows have at most two dimensions; the outer one is the grid's y.

struct RowPointer {
  char* data;
  int64_t inner, outer;  // strides in bytes

  __device__ __forceinline__ char* at(uint32_t row) const { return data + outer * blockIdx.y + inner * row; }
};

// A thread's kPacks packs of kRows neighbouring rows, and of the rows that are `stride` further on. kShort: several
// rows share a warp, and each thread has kPacks packs of its row, which lie as many packs apart as the row has threads.
template <typename T, int kPacks, int kOperands, int kRows = 1, bool kShort = false>
struct RowShare {
  static constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  uint32_t rows, row, stride;
  int first;
  bool inside[kPacks];
  const char* source[kOperands];
  uint8_t* values;
  float* scales;

  __device__ __forceinline__ RowShare(uint32_t row_count, int width, const RowPointer (&operands)[kOperands],
                                      const QuantOutput& output)
      : rows(row_count),
        row((blockIdx.x * blockDim.y + threadIdx.y) * kRows),
        stride(gridDim.x * blockDim.y * kRows),
        first((kShort ? static_cast<int>(threadIdx.x) : first_pack(kPacks)) * kWidth) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) inside[k] = column(k) < width;
#pragma unroll
    for (int i = 0; i < kOperands; ++i) source[i] = operands[i].at(row) + first * sizeof(T);
    const int64_t number = static_cast<int64_t>(blockIdx.y) * rows + row;
    values = output.values + number * width + first;
    scales = output.scales + number;
  }
  // The thread's columns lie `shift` further on than its number says, and end before `end`.
  __device__ __forceinline__ RowShare(uint32_t row_count, int width, const RowPointer (&operands)[kOperands],
                                      const QuantOutput& output, int shift, int end)
      : RowShare(row_count, width, operands, output) {
    first += shift;
    const int left = end - first;  // comparing column(k) with `end` takes one register more, and would spill
#pragma unroll
    for (int k = 0; k < kPacks; ++k) inside[k] = k * step() * kWidth < left;
#pragma unroll
    for (int i = 0; i < kOperands; ++i) source[i] += shift * static_cast<int>(sizeof(T));
    values += shift;
  }
  static __device__ __forceinline__ int step() { return kShort ? static_cast<int>(blockDim.x) : kPackStep; }
  __device__ __forceinline__ int column(int k) const { return first + k * step() * kWidth; }
  __device__ __forceinline__ bool active(int r = 0) const { return row + r < rows; }
  // A thread's packs of what is at `from`, its first one.
  template <typename Q>
  __device__ __forceinline__ Q* pack(Q* from, int k) const {
    return from + k * step();
  }

  // The packs of kRows rows from row number `at` on, whose data `source` points to: zeros past a row's end and past the
  // last row.
  template <bool kPasses>
  __device__ __forceinline__ void load(uint32_t at, const RowPointer (&operands)[kOperands],
                                       P (&packs)[kRows][kOperands][kPacks]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kOperands; ++i) {
        const P* const from = reinterpret_cast<const P*>(source[i] + r * operands[i].inner);
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          packs[r][i][k] = P{};
          if (at + r < rows && inside[k]) packs[r][i][k] = load_row_pack<kPasses>(pack(from, k));
        }
      }
    }
  }
  template <bool kPasses>
  __device__ __forceinline__ void load(const RowPointer (&operands)[kOperands],
                                       P (&packs)[kRows][kOperands][kPacks]) const {
    load<kPasses>(row, operands, packs);
  }
  // Brings the rows that lie `ahead` rows further on into the L2 cache.
  template <int kCount>
  __device__ __forceinline__ void prefetch_later(const RowPointer (&operands)[kCount], uint32_t ahead,
                                                 int width) const {
    const uint32_t later = row + threadIdx.x + ahead;
    if (ahead == 0 || threadIdx.x >= kRows || later >= rows) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      prefetch(operands[i].at(later), static_cast<uint32_t>(width) * static_cast<uint32_t>(sizeof(T)));
    }
  }
  __device__ __forceinline__ void load_next(const RowPointer (&operands)[kOperands],
                                            P (&packs)[kRows][kOperands][kPacks]) {
#pragma unroll
    for (int i = 0; i < kOperands; ++i) source[i] += operands[i].inner * stride;
    load<false>(row + stride, operands, packs);
  }
  __device__ __forceinline__ void advance(int width) {
    row += stride;
    values += static_cast<int64_t>(stride) * width;
    scales += stride;
  }

  __device__ __forceinline__ void write(int r, const float (&y)[kPacks][kWidth], const QuantScale& by,
                                        int width) const {
    if (threadIdx.x == 0) scales[r] = by.scale;
    auto* const to = reinterpret_cast<E4m3Pack<kWidth>*>(values + r * width);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (inside[k]) *pack(to, k) = E4m3Pack<kWidth>(y[k], by.inverse);
    }
  }
};

// value + table, of any dtypes.
struct RowModulator {
  RowPointer value;
  const char* table;
  DType value_dtype, table_dtype;

  // The elements that have dtype T, on their way ahead of get.
  template <typename T, int kWidth>
  __device__ __forceinline__ void fetch(uint32_t row, int column, Pack<T, kWidth>& pack) const {
    if (value.data && value_dtype == DTypeOf<T>::value) {
      pack = load_pack<T, kWidth>(reinterpret_cast<const T*>(value.at(row)), column, 1, 0, true);
    }
  }
  template <typename T, int kWidth>
  __device__ __forceinline__ void fetch_table(int column, Pack<T, kWidth>& pack) const {
    if (table && table_dtype == DTypeOf<T>::value) {
      pack = load_pack<T, kWidth>(reinterpret_cast<const T*>(table), column, 1, 0, true);
    }
  }

  // kWidth elements of a row's modulator; `absent` where there is none. What was fetched, or null.
  template <typename T, int kWidth>
  __device__ __forceinline__ void get(uint32_t row, int column, float absent, const Pack<T, kWidth>* fetched,
                                      const Pack<T, kWidth>* fetched_table, float (&m)[kWidth]) const {
    each(m, [&](float) { return absent; });
    if (!value.data) return;
    if (fetched && value_dtype == DTypeOf<T>::value) {
      unpack(*fetched, m);
    } else {
      load_floats<kWidth>(value.at(row), value_dtype, 0, column, 1, 0, true, m);
    }
    if (table) {
      float t[kWidth];
      if (fetched_table && table_dtype == DTypeOf<T>::value) {
        unpack(*fetched_table, t);
      } else {
        load_floats<kWidth>(table, table_dtype, 0, column, 1, 0, true, t);
      }
      add(m, t);
    }
  }
};

// Packs of a modulator that are on their way.
template <typename T>
struct Fetched {
  Pack<T, kPackWidth<T>> value, table;
};

// As NormParams. operands: input, and the residual where there is one.
template <int kOperands>
struct NormRowParams {
  RowPointer operands[kOperands], residual_out;
  RowModulator weight, gate, scale, shift;
  QuantOutput output;
  uint32_t rows;   // of the inner dimension
  uint32_t ahead;  // rows that prefetch_later looks ahead
  int32_t width;
  float inverse_width, eps, weight_offset;

  // y = h * rstd * factor + addend, of what was fetched, or null.
  template <typename T, int kWidth>
  __device__ __forceinline__ void get_factors(uint32_t row, int column, const Pack<T, kWidth>* fetched_weight,
                                              const Pack<T, kWidth>* fetched_scale,
                                              const Pack<T, kWidth>* fetched_scale_table,
                                              const Pack<T, kWidth>* fetched_shift,
                                              const Pack<T, kWidth>* fetched_shift_table, float (&factor)[kWidth],
                                              float (&addend)[kWidth]) const {
    constexpr const Pack<T, kWidth>* kNone = nullptr;
    float m[kWidth];
    weight.get(row, column, 1.f, fetched_weight, kNone, factor);
    scale.get(row, column, 0.f, fetched_scale, fetched_scale_table, m);
    shift.get(row, column, -0.f, fetched_shift, fetched_shift_table, addend);  // x + -0 is x, for every x
    if (weight_offset != 0.f) each(factor, [&](float w) { return __fadd_rn(weight_offset, w); });
    each(m, [](float x) { return __fadd_rn(1.f, x); });
    multiply(factor, m);
  }
};

// What is done to a row before it is quantised: nothing, or a gated residual; a norm with a weight, or with everything;
// a residual and a norm with a weight, or with everything.
enum class Fusion { kRows, kResidual, kPlain, kModulate, kAdd, kGated };
constexpr bool has_residual(Fusion f) { return f == Fusion::kResidual || f == Fusion::kAdd || f == Fusion::kGated; }
constexpr bool has_gate(Fusion f) { return f == Fusion::kResidual || f == Fusion::kGated; }
constexpr bool has_modulation(Fusion f) { return f == Fusion::kModulate || f == Fusion::kGated; }
constexpr bool has_norm(Fusion f) { return f != Fusion::kRows && f != Fusion::kResidual; }

// The vectors of a norm_quant_kernel. kAny: each may be absent, vary, or have another dtype than the rows. kKnown and
// kTables: a model's block passes exactly these (a weight, or gate, scale and shift; kTables: each with a table), all
// in the rows' dtype and the same for all rows of a block.
enum class Vectors { kAny, kKnown, kTables };

// Rows of a thread, which share its vectors: two where there are many vectors. H200, of a copy's time with one row and
// with two, gated_residual_adaln_rmsnorm 2x8064x2048 1.03, 1.05; with tables 1.17, 1.08.
constexpr int rows_at_once(Fusion f, Vectors v) { return f == Fusion::kGated && v == Vectors::kTables ? 2 : 1; }

// Threads of a multiprocessor that bound a thread's registers. H200, gated_residual_adaln_rmsnorm 2x8064x4096, of a
// copy's time: 1.12 with 65 registers, which let three blocks run, 1.02 with 64.
constexpr int register_threads(Fusion f, Vectors v) {
  if (v == Vectors::kAny || rows_at_once(f, v) == 2) return kMaxThreads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return kMaxThreads;  // whose code takes more registers
#else
  return 1024;
#endif
}

template <typename T, Fusion F, Vectors V, int kPacks, bool kShort = false>
__global__ void __launch_bounds__(register_threads(F, V), 1)
    norm_quant_kernel(const __grid_constant__ NormRowParams<has_residual(F) + 1> p) {
  constexpr int kWidth = kPackWidth<T>, kRows = rows_at_once(F, V);
  constexpr bool kResidual = has_residual(F), kTables = V == Vectors::kTables, kWhole = kPacks > 1 && !kShort;
  using P = Pack<T, kWidth>;
  constexpr const P* kNone = nullptr;
  constexpr bool kGateAhead = kPacks < 4;  // or Blackwell spills
  // H200, of a copy's time, without and with: rmsnorm_residual 8192x8192 1.04, 1.01; gated_residual 2x8064x4096 1.02,
  // 1.00; but rmsnorm 16128x2048 1.02, 1.06, and gated_residual_adaln_rmsnorm 2x2688x2048 1.06, 1.09.
  constexpr bool kPrefetches =
      F == Fusion::kRows || F == Fusion::kAdd || (F == Fusion::kResidual && V != Vectors::kAny);
  __shared__ PartialResults<kRows> sums, magnitudes;
  RowShare<T, kPacks, kResidual + 1, kRows, kShort> share(p.rows, p.width, p.operands, p.output);
  P packs[kRows][kResidual + 1][kPacks];
  // H200, of a copy's time, passing the first cache and not: rmsnorm 16128x2048 1.11, 1.20 (with two barriers); but
  // rmsnorm_residual 16384x4096 1.08, 1.01. Short rows 131072x128 1.15, 1.18.
  share.template load<F == Fusion::kPlain || kShort>(p.operands, packs);
  if constexpr (kWhole && kPrefetches) share.prefetch_later(p.operands, p.ahead, p.width);
  const uint32_t row = share.active() ? share.row : 0;
  P weight[kPacks];
  Fetched<T> gate[kPacks], scale[kPacks], shift[kPacks];
  const auto fetch = [&](const RowModulator& from, int k, Fetched<T>& to) {
    to = {};
    if (!share.inside[k]) return;
    to.value = *share.pack(reinterpret_cast<const P*>(from.value.at(0)) + share.first / kWidth, k);
    if (kTables) to.table = *share.pack(reinterpret_cast<const P*>(from.table) + share.first / kWidth, k);
  };
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if constexpr (V == Vectors::kAny) {
      if (!share.inside[k]) continue;
      if constexpr (has_gate(F) && kGateAhead) p.gate.fetch(row, share.column(k), gate[k].value);
      if constexpr (has_modulation(F)) p.scale.fetch(row, share.column(k), scale[k].value);
      if constexpr (has_modulation(F)) p.shift.fetch(row, share.column(k), shift[k].value);
    } else {
      if constexpr (has_gate(F)) fetch(p.gate, k, gate[k]);
      if constexpr (has_modulation(F)) fetch(p.scale, k, scale[k]);
      if constexpr (has_modulation(F)) fetch(p.shift, k, shift[k]);
      if constexpr (has_norm(F) && !has_modulation(F)) {
        Fetched<T> fetched;
        fetch(p.weight, k, fetched);
        weight[k] = fetched.value;
      }
    }
  }
  const auto sum_of = [](const Fetched<T>& fetched, float (&m)[kWidth]) {
    unpack(fetched.value, m);
    if constexpr (kTables) {
      float table[kWidth];
      unpack(fetched.table, table);
      add(m, table);
    }
  };

  float y[kRows][kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float g[kWidth];
    if constexpr (has_gate(F)) {
      if constexpr (V != Vectors::kAny) {
        sum_of(gate[k], g);
      } else {
        each(g, [](float) { return 0.f; });
        const P* const fetched = kGateAhead ? &gate[k].value : kNone;
        if (share.inside[k]) p.gate.get(row, share.column(k), 1.f, fetched, kNone, g);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack(packs[r][0][k], y[r][k]);
      if constexpr (kResidual) {
        float x[kWidth];
        unpack(packs[r][kResidual][k], x);
        if constexpr (has_gate(F)) {
          multiply_add(y[r][k], g, x);
        } else {
          add(y[r][k], x);
        }
        if (share.active(r) && share.inside[k]) {
          *share.pack(reinterpret_cast<P*>(p.residual_out.at(share.row + r)) + share.first / kWidth, k) =
              to_pack<T, kWidth>(y[r][k]);
        }
      }
    }
  }
  const auto get_factors = [&](int k, float (&factor)[kWidth], float (&addend)[kWidth]) {
    if constexpr (V == Vectors::kAny) {
      p.get_factors(row, share.column(k), kNone, &scale[k].value, kNone, &shift[k].value, kNone, factor, addend);
    } else if constexpr (has_modulation(F)) {
      sum_of(scale[k], factor);
      sum_of(shift[k], addend);
      each(factor, [](float x) { return __fadd_rn(1.f, x); });
    } else {
      unpack(weight[k], factor);
      if (p.weight_offset != 0.f) each(factor, [&](float w) { return __fadd_rn(p.weight_offset, w); });
    }
  };
  // y = h * before * factor + addend; afterwards both scale and values are multiplied with `after`.
  float before[kRows], after[kRows], sum[kRows] = {}, most[kRows];
  const auto find_rstd = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      after[r] = 1.f;
      before[r] = reciprocal_root(sum[r], p.inverse_width, p.eps);
      if (kResidual || (F == Fusion::kModulate && p.shift.value.data)) continue;
      after[r] = before[r];
      before[r] = 1.f;
    }
  };
  if constexpr (has_norm(F)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float squares[kPacks];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) squares[k] = pack_squares(y[r][k]);
      if constexpr (kShort) {
        sum[r] = tree_sum(squares);  // as threads with a pack each would have it
      } else {
#pragma unroll
        for (int k = 0; k < kPacks; ++k) sum[r] += squares[k];
      }
    }
    if constexpr (F != Fusion::kPlain) {
      block_reduce<kWhole>(sum, sums, Sum());
      find_rstd();
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float factor[kWidth], addend[kWidth];
      if (V == Vectors::kAny && !share.inside[k]) continue;
      get_factors(k, factor, addend);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if constexpr (F != Fusion::kPlain) each(y[r][k], [&](float h) { return __fmul_rn(h, before[r]); });
        if constexpr (has_modulation(F)) {
          multiply_add(y[r][k], factor, addend);
        } else {
          multiply(y[r][k], factor);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) most[r] = magnitude(y[r]);
  if constexpr (F == Fusion::kPlain) {
    store_partials<kWhole>(sum, sums, Sum());
    store_partials<kWhole>(most, magnitudes, Magnitude());
    if (blockDim.x > 32) __syncthreads();
    combine_partials(sum, sums, Sum());
    combine_partials(most, magnitudes, Magnitude());
    find_rstd();
  } else {
    block_reduce<kWhole>(most, magnitudes, Magnitude());
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    QuantScale by = p.output.static_scale ? fixed_scale(p.output.static_scale)
                                          : quant_scale(has_norm(F) ? most[r] * after[r] : most[r]);
    if constexpr (has_norm(F) && !kResidual) {
      if (fold(after[r], by)) {
#pragma unroll
        for (int k = 0; k < kPacks; ++k) each(y[r][k], [&](float z) { return __fmul_rn(z, after[r]); });
      }
    }
    if (share.active(r)) share.write(r, y[r], by, p.width);
  }
}

// ---- In registers, a row a block, of a length that is known: kWarps warps, four whole packs a thread.

// Threads of a multiprocessor that bound a thread's registers: 72 of these, which hold the row and both vectors. H200,
// adaln_rmsnorm, of a copy's time, 640, 768, 896 and 960: 2x8064x2048 1.04, 1.02, 1.02, 1.23; 2x2688x2048 1.12, 1.08,
// 1.05, 1.21. With half of the vectors loaded after the sum, 2x8064x2048 1.08.
constexpr int modulate_threads([[maybe_unused]] int warps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  return 768;  // more would spill
#else
  return warps == 5 ? 768 : 896;
#endif
}

// The modulated norm of 16-bit rows, with vectors of their dtype that are the same for all rows of a batch.
template <typename T, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, modulate_threads(kWarps) / (kWarps * 32))
    modulate_quant_kernel(const __grid_constant__ NormRowParams<1> p) {
  constexpr int kPacks = 4, kWidth = kPackWidth<T>, kColumns = kWarps * 32 * kPacks * kWidth;
  using P = Pack<T, kWidth>;
  __shared__ PartialResults<1> sums, magnitudes;
  const uint32_t row = blockIdx.x;
  const int first = first_pack(kPacks);
  const auto pack = [&](const char* from, int k) { return reinterpret_cast<const P*>(from) + first + k * kPackStep; };
  P packs[kPacks], scale[kPacks], shift[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) packs[k] = load_row_pack<true>(pack(p.operands[0].at(row), k));
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    scale[k] = *pack(p.scale.value.at(0), k);
    shift[k] = *pack(p.shift.value.at(0), k);
  }
  const uint32_t later = row + p.ahead;
  if (threadIdx.x == 0 && p.ahead != 0 && later < p.rows) prefetch(p.operands[0].at(later), kColumns * sizeof(T));
  // The vectors of later batches, for which all multiprocessors would wait at once. H200, adaln_rmsnorm 2x8064x2048, of
  // a copy's time, without and with: 1.13, 1.03; 32x512x2048 1.24, 1.03.
  if (row < 8 && blockIdx.y == 0 && threadIdx.x > 0 && threadIdx.x < gridDim.y) {
    prefetch(p.scale.value.data + p.scale.value.outer * threadIdx.x, kColumns * sizeof(T));
    prefetch(p.shift.value.data + p.shift.value.outer * threadIdx.x, kColumns * sizeof(T));
  }
  float y[kPacks][kWidth], sum = 0.f;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    unpack(packs[k], y[k]);
    sum += pack_squares(y[k]);
  }
  keep(packs);
  sum = block_reduce<true, kWarps>(sum, sums, Sum());
  const float rstd = reciprocal_root(sum, p.inverse_width, p.eps);
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float factor[kWidth], addend[kWidth];
    unpack(scale[k], factor);
    unpack(shift[k], addend);
    each(factor, [](float x) { return __fadd_rn(1.f, x); });
    unpack(packs[k], y[k]);
    each(y[k], [&](float h) { return __fmul_rn(h, rstd); });
    multiply_add(y[k], factor, addend);
  }
  const float most = block_reduce<true, kWarps>(magnitude(y), magnitudes, Magnitude());
  const QuantScale by = p.output.static_scale ? fixed_scale(p.output.static_scale) : quant_scale(most);
  const int64_t number = static_cast<int64_t>(blockIdx.y) * p.rows + row;
  if (threadIdx.x == 0) p.output.scales[number] = by.scale;
  auto* const values = reinterpret_cast<E4m3Pack<kWidth>*>(p.output.values + number * kColumns) + first;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) values[k * kPackStep] = E4m3Pack<kWidth>(y[k], by.inverse);
}

// ---- In registers, one row after the other: blocks stay, with the next row on its way while one is worked on.

// Rows work on their own; those of more than a warp meet at a barrier of their own.
__device__ __forceinline__ void row_barrier() {
  asm volatile("bar.sync %0, %1;" : : "r"(threadIdx.y), "r"(blockDim.x) : "memory");
}

// Partial results in two sets, which consecutive rows use in turns, so that a reduction needs one barrier. The sets
// begin as zeros.
struct RowReduction {
  float* own;
  const float4* all;
  int fours;

  __device__ __forceinline__ explicit RowReduction(float (&partials)[2][kPartials]) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    for (int i = thread; i < 2 * kPartials; i += threads) partials[0][i] = 0.f;
    fours = (blockDim.x / 32 + 3) / 4;
    float* const mine = partials[0] + threadIdx.y * fours * 4 % kPartials;
    own = mine + threadIdx.x / 32;
    all = reinterpret_cast<const float4*>(mine);
  }
  // Gives the bits of block_reduce.
  template <int kPacks, typename Op>
  __device__ __forceinline__ float reduce(float x, int turn, const Op& op) const {
    x = kPacks > 1 ? op.warp(x) : op.lanes(x, min(blockDim.x, 32));
    if (kPacks == 1 && blockDim.x <= 32) return x;
    if (threadIdx.x % 32 == 0) own[turn * kPartials] = x;
    row_barrier();
    return combine_partials<false>(all + turn * (kPartials / 4), fours, op);
  }
};

constexpr int held_count(Fusion f) { return f == Fusion::kGated ? 3 : 2; }

// The vectors that all rows of a block share, as fp32 in shared memory: factor, addend and gate. They lie as a warp
// reads them: 32 lanes' first fours of a pack, then their second ones, the next vector, the next pack.
extern __shared__ float4 held_vectors[];

template <int kFours, int kCount, int kPacks>
struct SharedVectors {
  float4* data;

  // `pack`: index of the first pack; get(k) reads pack + 32 k.
  __device__ __forceinline__ explicit SharedVectors(int pack)
      : data(held_vectors + pack / 32 * 32 * kCount * kFours + pack % 32) {}
  __device__ __forceinline__ void set(int vector, const float (&x)[kFours * 4]) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      data[(vector * kFours + i) * 32] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }
  __device__ __forceinline__ void get(int k, int vector, float (&x)[kFours * 4]) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 four = data[((k * kCount + vector) * kFours + i) * 32];
      x[4 * i] = four.x;
      x[4 * i + 1] = four.y;
      x[4 * i + 2] = four.z;
      x[4 * i + 3] = four.w;
    }
  }
};

// Threads of a block of norm_quant_kernel_held, which takes several rows.
constexpr int kHeldBlock = 256;
// Threads of a multiprocessor for which the kernel gets its registers, and its grid. H200, of a copy's time:
// adaln_rmsnorm 2x8064x2048 1.16 with 512 and with 768 threads; gated_residual_adaln_rmsnorm 2x8064x2048 1.07 with
// 512, 1.14 with 768.
constexpr int held_threads(Fusion f, int packs) { return f == Fusion::kModulate ? 768 : packs == 4 ? 512 : 640; }

// The most threads of a block, which bound the registers: other architectures would spill at more.
constexpr int held_bound(Fusion f, int packs) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  return kMaxThreads;
#else
  return held_threads(f, packs);
#endif
}

template <typename T, Fusion F, int kPacks>
__global__ void __launch_bounds__(held_bound(F, kPacks), 1)
    norm_quant_kernel_held(const __grid_constant__ NormRowParams<has_residual(F) + 1> p) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kResidual = has_residual(F);
  using P = Pack<T, kWidth>;
  using Vectors = SharedVectors<kWidth / 4, held_count(F), kPacks>;
  constexpr int kFactor = 0, kAddend = 1, kGate = 2;
  __shared__ __align__(16) float sums[2][kPartials], magnitudes[2][kPartials];
  RowShare<T, kPacks, kResidual + 1> share(p.rows, p.width, p.operands, p.output);
  P packs[1][kResidual + 1][kPacks];
  share.template load<false>(p.operands, packs);
  const RowReduction sum_reduction(sums), magnitude_reduction(magnitudes);
  const int threads = blockDim.x * blockDim.y;
  const int held = kPacks == 1 ? blockDim.x : (blockDim.x / 32) * 32 * kPacks;
#pragma unroll 1
  for (int pack = threadIdx.y * blockDim.x + threadIdx.x; pack < held; pack += threads) {
    const Vectors to(pack);
    const int column = pack * kWidth;
    float factor[kWidth] = {}, addend[kWidth] = {}, gate[kWidth] = {};
    if (column < p.width) {
      Fetched<T> weight, scale, shift, gates;
      p.weight.fetch(0, column, weight.value);
      p.scale.fetch(0, column, scale.value);
      p.scale.fetch_table(column, scale.table);
      p.shift.fetch(0, column, shift.value);
      p.shift.fetch_table(column, shift.table);
      if constexpr (F == Fusion::kGated) {
        p.gate.fetch(0, column, gates.value);
        p.gate.fetch_table(column, gates.table);
        p.gate.get(0, column, 1.f, &gates.value, &gates.table, gate);
      }
      p.get_factors(0, column, &weight.value, &scale.value, &scale.table, &shift.value, &shift.table, factor, addend);
    }
    to.set(kFactor, factor);
    to.set(kAddend, addend);
    if constexpr (F == Fusion::kGated) to.set(kGate, gate);
  }
  const Vectors vectors(first_pack(kPacks));
  char* residual_out = kResidual ? p.residual_out.at(share.row) + share.first * sizeof(T) : nullptr;
  __syncthreads();
  int turn = 0;
  // Rows of whole warps end on their own.
  const auto more = [&] { return share.row - (kPacks == 1 ? threadIdx.y : 0) < share.rows; };
#pragma unroll 1
  for (; more(); turn ^= 1) {
    float y[kPacks][kWidth];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      unpack(packs[0][0][k], y[k]);
      if constexpr (kResidual) {
        float x[kWidth];
        unpack(packs[0][kResidual][k], x);
        float gate[kWidth];
        vectors.get(k, kGate, gate);
        multiply_add(y[k], gate, x);
      }
    }
    keep(y);
    share.load_next(p.operands, packs);
    if constexpr (kResidual) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (share.inside[k] && (kPacks > 1 || share.active())) {
          reinterpret_cast<P*>(residual_out)[k * kPackStep] = to_pack<T, kWidth>(y[k]);
        }
      }
      residual_out += p.residual_out.inner * share.stride;
    }
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) sum += pack_squares(y[k]);
    sum = sum_reduction.reduce<kPacks>(sum, turn, Sum());
    const float rstd = reciprocal_root(sum, p.inverse_width, p.eps);
    const bool plain = !kResidual && !p.shift.value.data;
    const float before = plain ? 1.f : rstd, after = plain ? rstd : 1.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float factor[kWidth], addend[kWidth];
      vectors.get(k, kFactor, factor);
      each(y[k], [&](float h) { return __fmul_rn(h, before); });
      vectors.get(k, kAddend, addend);
      multiply_add(y[k], factor, addend);
    }
    QuantScale by;
    if (p.output.static_scale) {
      by = fixed_scale(p.output.static_scale);
    } else {
      by = quant_scale(magnitude_reduction.reduce<kPacks>(magnitude(y), turn, Magnitude()) * after);
    }
    if (!kResidual && fold(after, by)) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) each(y[k], [&](float z) { return __fmul_rn(z, after); });
    }
    if (kPacks > 1 || share.active()) share.write(0, y, by, p.width);
    share.advance(p.width);
  }
}

// operands: the gate, and what it multiplies (not for gelu). width: of the whole row. The first prefix_threads threads
// own the prefix, and the others the columns behind it, so that a warp has columns of one kind.
template <int kOperands>
struct GluRowParams {
  RowPointer operands[kOperands];
  RowPointer prefix;
  RowModulator bias;
  QuantOutput output;
  uint32_t rows, ahead;
  int32_t width, prefix_width, prefix_threads;
  Activation activation;
};

// Threads of a multiprocessor that bound a thread's registers: more blocks wait for memory at once. H200, of a copy's
// time, with 1024 and with 512: gelu 16128x8192 1.04, 1.13; swiglu 4096x14336, 896 and 512: 1.04, 1.31.
constexpr int glu_register_threads(bool gated) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 896;  // more would spill
#else
  return gated ? 896 : 1024;
#endif
}

// kActivation: of gelu. Rows with an `up` choose at run time: without a branch behind the loads, ptxas puts the last of
// them after the first one's use (H200, swiglu 5376x8192, of a copy's time: 1.09, with the branch 1.04). kPrefix: rows
// begin with columns that stay as they are, and have no bias, whose code would take registers that they do not have.
template <typename T, bool kGated, Activation kActivation, int kPacks, bool kPrefix = false>
__global__ void __launch_bounds__(glu_register_threads(kGated), 1)
    glu_quant_kernel(const __grid_constant__ GluRowParams<kGated + 1> p) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ PartialResults<1> magnitudes;
  const int prefix_width = kPrefix ? p.prefix_width : 0, prefix_threads = kPrefix ? p.prefix_threads : 0;
  const bool in_prefix = kPrefix && static_cast<int>(threadIdx.x) < prefix_threads;
  RowPointer operands[kGated + 1];  // of the thread's columns, by their number in the whole row
#pragma unroll
  for (int i = 0; i <= kGated; ++i) {
    operands[i] = in_prefix ? p.prefix : p.operands[i];
    if (!in_prefix) operands[i].data -= prefix_width * static_cast<int>(sizeof(T));
  }
  const int shift = in_prefix ? 0 : prefix_width - prefix_threads * kPacks * kWidth;
  using Share = RowShare<T, kPacks, kGated + 1>;
  const Share share = kPrefix ? Share(p.rows, p.width, operands, p.output, shift, in_prefix ? prefix_width : p.width)
                              : Share(p.rows, p.width, operands, p.output);
  Pack<T, kWidth> packs[1][kGated + 1][kPacks];
  // H200, of a copy's time, passing the first cache and not: gelu 5376x8192 1.05, 1.08; swiglu 16128x8192 1.03, 0.99.
  share.template load<!kGated>(operands, packs);
  // H200, of a copy's time, without and with: gelu 4096x14336 1.15, 1.04; but swiglu 16128x8192 0.99, 1.03.
  if constexpr (!kGated && kPacks > 1) {
    share.prefetch_later(p.operands, p.ahead, p.width - prefix_width);
    if constexpr (kPrefix) share.prefetch_later({p.prefix}, p.ahead, prefix_width);
  }
  float y[kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) unpack(packs[0][0][k], y[k]);
  if (!kGated && !kPrefix && p.bias.value.data) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      constexpr const Pack<T, kWidth>* kNone = nullptr;
      float bias[kWidth];
      if (!share.inside[k]) continue;
      p.bias.get(0, share.column(k), 0.f, kNone, kNone, bias);
      add(y[k], bias);
    }
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (in_prefix) break;
    if constexpr (kGated) {
      float up[kWidth];
      activate<T>(p.activation, y[k]);
      unpack(packs[0][kGated][k], up);
      multiply(y[k], up);
    } else {
      activate<T, kActivation>(y[k]);
    }
  }
  const float most = block_reduce<(kPacks > 1), 0, kPrefix>(magnitude(y), magnitudes, Magnitude());
  const QuantScale by = p.output.static_scale ? fixed_scale(p.output.static_scale) : quant_scale(most);
  if (share.active()) share.write(0, y, by, p.width);
}

// ---- Everything else. block: as above; grid: x counts all rows.

// Calls at(column) for the thread's packs of a row of any length: of each stretch of threads * packs packs, the same as
// in registers.
template <typename T, typename At>
__device__ __forceinline__ void for_packs(int64_t width, int packs, const At& at) {
  const int64_t stretch = static_cast<int64_t>(blockDim.x) * packs * kPackWidth<T>;
#pragma unroll 1
  for (int64_t start = first_pack(packs) * kPackWidth<T>; start < width; start += stretch) {
    const int64_t end = min(width, start + packs * kPackStep * kPackWidth<T>);
#pragma unroll 1
    for (int64_t column = start; column < end; column += kPackStep * kPackWidth<T>) at(column);
  }
}

// Writes the row that get(column, y) gives, zero past its end, times `after`.
template <typename T, typename Get>
__device__ __forceinline__ void quantise_general(int64_t row, bool active, int64_t width, int packs,
                                                 const QuantOutput& output, float after, PartialResults<1>& partials,
                                                 const Get& get) {
  constexpr int kWidth = kPackWidth<T>;
  float y[kWidth], most = 0.f;
  if (!output.static_scale) {
    for_packs<T>(width, packs, [&](int64_t column) {
      get(column, y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) most = larger_magnitude(most, y[i]);
    });
    most = block_reduce<false>(most, partials, Magnitude());
  }
  if (!active) return;
  QuantScale by = output.static_scale ? fixed_scale(output.static_scale) : quant_scale(most * after);
  const bool unfolded = fold(after, by);
  if (threadIdx.x == 0) output.scales[row] = by.scale;
  for_packs<T>(width, packs, [&](int64_t column) {
    get(column, y);
    if (unfolded) each(y, [&](float z) { return __fmul_rn(z, after); });
    const E4m3Pack<kWidth> pack(y, by.inverse);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i < width) output.values[row * width + column + i] = pack.byte(i);
    }
  });
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_quant_kernel_general(const __grid_constant__ NormParams p, int packs, float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ PartialResults<1> sums, magnitudes;
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
  const bool plain = !p.residual.data && !p.shift.value.data;
  const float rstd = normalises ? reciprocal_root(block_reduce<false>(sum, sums, Sum()), inverse_width, p.eps) : 1.f;
  const float after = plain ? rstd : 1.f;
  const auto get_y = [&](int64_t column, float (&y)[kWidth]) {
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
    if (!plain) each(y, [&](float h) { return __fmul_rn(h, rstd); });
    multiply_add(y, factor, addend);
  };
  quantise_general<T>(number, active, width, packs, p.quantised, after, magnitudes, get_y);
}

constexpr int kGeneralThreads = 256;
template <typename T, bool kPrefix>
__global__ void __launch_bounds__(kGeneralThreads, 1)
    glu_quant_kernel_general(const __grid_constant__ GluParams p, const __grid_constant__ QuantOutput output,
                             int packs) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ PartialResults<1> magnitudes;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const int64_t begin = kPrefix ? p.prefix_width : 0;
  const bool active = number < p.rows.count;
  int64_t gate = 0, up = 0, prefix = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    gate += i * p.gate.stride[d];
    up += i * p.up.stride[d];
    if constexpr (kPrefix) prefix += i * p.prefix.stride[d];
  });
  // Zeros before the first column, as behind the last one.
  const auto get = [&](const RowView& view, int64_t row, int64_t column, float (&x)[kWidth]) {
    if constexpr (kPrefix) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        float one[1];
        const int64_t at = max(column + i, int64_t{0});
        load_floats<1>(view.data, view.dtype, row, at, view.column_stride, width, false, one);
        x[i] = column + i >= 0 ? one[0] : 0.f;
      }
    } else {
      load_floats<kWidth>(view.data, view.dtype, row, column, view.column_stride, width, false, x);
    }
  };
  const auto get_y = [&](int64_t column, float (&y)[kWidth]) {
    float other[kWidth];
    get(p.gate, gate, column - begin, y);
    if (p.bias.data) {
      get(p.bias, 0, column - begin, other);
      add(y, other);
    }
    activate<T>(p.activation, y);
    if (p.up.data) {
      get(p.up, up, column - begin, other);
      multiply(y, other);
    }
    if (kPrefix && column < begin) {
      load_floats<kWidth>(p.prefix.data, p.prefix.dtype, prefix, column, p.prefix.column_stride, begin, false, other);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y[i] = column + i < begin ? other[i] : y[i];
    }
  };
  quantise_general<T>(number, active, begin + width, packs, output, 1.f, magnitudes, get_y);
}

// ---- Launch

// `threads` share a row and own `packs` packs each.
struct Geometry {
  int threads;
  int packs;
};

// Four packs a thread spread the fixed costs of a row; with a residual, two leave registers for more warps. Rows of
// less than a warp: one, or two where there is no sum, whose bits depend on how the row is shared out. H200, us, four
// and two: 2x8064x2048 quantize_rows 28.6 and 33.8, adaln_rmsnorm 33.2 and 35.3, gated_residual 65.1 and 61.3,
// gated_residual_adaln_rmsnorm 65.7 and 65.0; 16128x8192 gelu 104 and 135, swiglu 158 and 166. 131072x128
// quantize_rows 1.18 x a copy with four, 1.10 with two.
constexpr int kShortPacks = 2;
// Of a norm with a weight, whose thread adds up its packs as threads of a pack each would, to the bit. H200, rmsnorm
// 131072x128, of a copy's time, one, two and four: 1.42, 1.08, 1.13.
constexpr int kShortNormPacks = 2;
// `most`: the threads that a row may have.
Geometry geometry(int64_t packs, int a_thread, int most) {
  if (const int wanted = forced().quant_packs) {
    if (packs > wanted * most) fail_forced("rows that fit", "quant_packs=" + std::to_string(wanted));
    a_thread = wanted;
  }
  const int64_t threads = ceil_div(packs, a_thread);
  if (a_thread == 1 && threads <= 32) return {next_power_of_two(threads), 1};  // several rows a warp
  return {static_cast<int>(std::min<int64_t>(ceil_div(threads, 32) * 32, most)), a_thread};
}
Geometry geometry_of_rows(int64_t packs, Fusion fusion) {
  if (fusion == Fusion::kRows && packs <= 32 && !forced().quant_packs) {
    return {next_power_of_two(ceil_div(packs, kShortPacks)), kShortPacks};
  }
  const bool two = packs <= 64 || (has_residual(fusion) && packs <= 2 * kMaxThreads);
  return geometry(packs, packs <= 32 ? 1 : two ? 2 : 4, kMaxThreads);
}
Geometry geometry_of_glu(int64_t packs, bool prefix) {
  if (prefix) return geometry(packs, kPrefixPacks, kMaxPrefixThreads);
  return geometry(packs, packs <= 32 ? 1 : packs <= 64 ? 2 : 4, kMaxThreads);
}

// Shared memory of a multiprocessor, how much of it a block may have, and what it has without asking; kReserved of it
// are the system's and the block's other arrays.
int64_t shared_memory(int device) { return device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(device); }
int64_t shared_memory_of_block(int device) { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(device); }
constexpr int64_t kReserved = 2 << 10, kUnasked = (48 << 10) - kReserved;

// How far ahead a block prefetches, for each multiprocessor: half of what its blocks have under way. H200, gelu
// 5376x8192, of a copy's time, 16, 32, 64 and 128 KiB: 1.04, 1.03, 1.04, 1.13; without 1.07.
constexpr int64_t kAheadBytes = 32 << 10;

// A launch of rows of `width` columns.
template <typename T>
struct Launch {
  Geometry shape;
  bool in_registers;
  int device;
  cudaStream_t stream;
  dim3 block, grid;

  Launch(int64_t width, const Geometry& shape, const Context& context)
      : shape(shape),
        in_registers(width <= static_cast<int64_t>(shape.threads) * shape.packs * kPackWidth<T>),
        device(context.device),
        stream(static_cast<cudaStream_t>(context.stream)) {}

  bool is_short() const { return shape.packs > 1 && shape.threads < 32; }

  // How many rows ahead a block prefetches.
  uint32_t ahead(int64_t width, int operands, int64_t bytes = kAheadBytes) const {
    return rows_ahead(bytes, width * static_cast<int64_t>(sizeof(T)) * operands, device);
  }

  // Gives every group of `group` rows its part of a block.
  void share(int64_t rows, int64_t outer, int group = 1) {
    block = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(std::max(1, kBlock / shape.threads)));
    grid = dim3(grid_size(ceil_div(rows, static_cast<int64_t>(block.y) * group)), static_cast<unsigned>(outer));
  }
  // The same in blocks that hold `held` bytes, no more of them than `threads` of a multiprocessor and its memory allow.
  // False where a block does not get as much.
  bool share_held(int64_t rows, int64_t outer, int threads, int64_t held) {
    if (held + kReserved > shared_memory_of_block(device)) return false;
    block = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(std::max(1, kHeldBlock / shape.threads)));
    const int64_t at_once =
        std::min<int64_t>(threads / static_cast<int>(block.x * block.y), shared_memory(device) / (held + kReserved));
    const int64_t running = std::max<int64_t>(1, multiprocessors(device) * at_once / outer);
    grid = dim3(grid_size(std::min(ceil_div(rows, block.y), running)), static_cast<unsigned>(outer));
    return true;
  }
  // Of shared memory for `count` vectors.
  int64_t held_bytes(int count) const {
    const int64_t packs = shape.packs == 1 ? ceil_div(shape.threads, 32) * 32 : shape.threads * shape.packs;
    return packs * kPackWidth<T> * 4 * count;
  }

  template <typename Params>
  void run(void (*kernel)(Params), const Params& p, int64_t held = 0) const {
    if (held > kUnasked) {  // rare: vectors of wide rows
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(held));
    }
    kernel<<<grid, block, static_cast<size_t>(held), stream>>>(p);
  }
};

// Calls run(std::integral_constant<int, packs>).
template <typename Run>
void with_packs(int packs, const Run& run) {
  if (packs == 1) return run(std::integral_constant<int, 1>());
  if (packs == 2) return run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 4>());
}

// Takes the operands of a kernel for whole packs; fits() is false as soon as one is not made of whole packs.
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

  RowPointer row(const RowView& view) { return row(view, rows_.width); }
  RowPointer row(const RowView& view, int64_t width) {
    fits_ = fits_ && (!view.data || is_packed(view.data, view.dtype, kPackWidth<T>, width, view.column_stride,
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

// kKnown or kTables where exactly the fusion's vectors are there, have the rows' dtype and are the same for all rows;
// else kAny.
template <typename T, int kOperands>
Vectors vectors_of(const NormRowParams<kOperands>& p, Fusion fusion) {
  const RowModulator* const all[] = {&p.weight, &p.gate, &p.scale, &p.shift};
  const bool wanted[] = {has_norm(fusion) && !has_modulation(fusion), has_gate(fusion), has_modulation(fusion),
                         has_modulation(fusion)};
  int tables = 0, vectors = 0;
  for (int i = 0; i < 4; ++i) {
    const RowModulator& m = *all[i];
    if ((m.value.data != nullptr) != wanted[i]) return Vectors::kAny;
    if (!wanted[i]) continue;
    if (m.value_dtype != DTypeOf<T>::value || m.value.inner != 0) return Vectors::kAny;
    if (m.table && m.table_dtype != DTypeOf<T>::value) return Vectors::kAny;
    vectors += 1;
    tables += m.table != nullptr;
  }
  return tables == 0 ? Vectors::kKnown : tables == vectors ? Vectors::kTables : Vectors::kAny;
}

template <typename T, Fusion F, Vectors V, int kPacks, bool kShort = false>
void launch_rows(const NormRowParams<has_residual(F) + 1>& p, int64_t outer, Launch<T>& launch) {
  launch.share(p.rows, outer, rows_at_once(F, V));
  launch.run(norm_quant_kernel<T, F, V, kPacks, kShort>, p);
}

// How far ahead modulate_quant_kernel prefetches, for each multiprocessor. H200, adaln_rmsnorm, of a copy's time, none,
// 16, 24, 32 and 48 KiB: 2x8064x4096 1.06, 1.03, 1.03, 1.03, 1.04; 1x8190x5120 1.16, 1.09, 1.07, 1.07, 1.08.
constexpr int64_t kModulateAheadBytes = 24 << 10;

// modulate_quant_kernel: false where these rows have none.
template <typename T>
bool launch_modulate(NormRowParams<1> p, int64_t outer, Launch<T>& launch) {
  if constexpr (sizeof(T) == 2) {
    const int threads = launch.shape.threads;
    if (vectors_of<T>(p, Fusion::kModulate) != Vectors::kKnown || launch.shape.packs != 4) return false;
    if (p.width != threads * 4 * kPackWidth<T>) return false;
    p.ahead = launch.ahead(p.width, 1, kModulateAheadBytes);
    launch.block = dim3(static_cast<unsigned>(threads));
    launch.grid = dim3(p.rows, static_cast<unsigned>(outer));
    const auto run = [&](auto warps) {
      if (threads != warps * 32) return false;
      launch.run(modulate_quant_kernel<T, warps>, p);
      return true;
    };
    return run(std::integral_constant<int, 2>()) || run(std::integral_constant<int, 3>()) ||
           run(std::integral_constant<int, 4>()) || run(std::integral_constant<int, 5>()) ||
           run(std::integral_constant<int, 8>());
  }
  return false;
}

// The kernels for the vectors that a model's block passes: false where these have none.
template <typename T, bool kResidual, bool kNorm>
bool launch_known(const NormRowParams<kResidual + 1>& p, int64_t outer, Launch<T>& launch) {
  constexpr Vectors kKnown = Vectors::kKnown;
  const int packs = launch.shape.packs;
  if constexpr (!kResidual && kNorm) {
    const int threads = launch.shape.threads;
    const bool is_short = packs == 1 && threads >= 2 * kShortNormPacks && threads <= 32;
    if (is_short && vectors_of<T>(p, Fusion::kPlain) == kKnown) {
      launch.shape = {threads / kShortNormPacks, kShortNormPacks};
      launch_rows<T, Fusion::kPlain, kKnown, kShortNormPacks, true>(p, outer, launch);
      return true;
    }
  }
  if (launch.shape.threads < 32) return false;
  if constexpr (!kResidual && kNorm) {
    if (launch_modulate<T>(p, outer, launch)) return true;
    if (vectors_of<T>(p, Fusion::kPlain) != kKnown) return false;
    if (packs == 2) launch_rows<T, Fusion::kPlain, kKnown, 2>(p, outer, launch);
    if (packs == 4) launch_rows<T, Fusion::kPlain, kKnown, 4>(p, outer, launch);
    return packs > 1;
  } else if constexpr (kResidual) {
    if (packs != 2) return false;
    if constexpr (kNorm) {
      if (vectors_of<T>(p, Fusion::kAdd) == kKnown) {
        launch_rows<T, Fusion::kAdd, kKnown, 2>(p, outer, launch);
        return true;
      }
    }
    constexpr Fusion kFull = kNorm ? Fusion::kGated : Fusion::kResidual;
    const Vectors vectors = vectors_of<T>(p, kFull);
    if (vectors == kKnown) launch_rows<T, kFull, kKnown, 2>(p, outer, launch);
    if (vectors == Vectors::kTables) launch_rows<T, kFull, Vectors::kTables, 2>(p, outer, launch);
    return vectors != Vectors::kAny;
  }
  return false;
}

// The kernels for whole packs. `same`: no vector varies from row to row.
template <typename T, bool kResidual, bool kNorm>
void launch_packed(const NormRowParams<kResidual + 1>& p, int64_t outer, bool same, Launch<T>& launch) {
  if (launch_known<T, kResidual, kNorm>(p, outer, launch)) return;
  const int packs = launch.shape.packs;
  if constexpr (kNorm) {
    constexpr Fusion kFull = kResidual ? Fusion::kGated : Fusion::kModulate;
    const int64_t held = launch.held_bytes(held_count(kFull));
    if (same && launch.share_held(p.rows, outer, held_threads(kFull, packs), held)) {
      return with_packs(
          packs, [&](auto count) { launch.run(norm_quant_kernel_held<T, kFull, decltype(count)::value>, p, held); });
    }
    with_packs(packs,
               [&](auto count) { launch_rows<T, kFull, Vectors::kAny, decltype(count)::value>(p, outer, launch); });
  } else if constexpr (kResidual) {
    with_packs(packs, [&](auto count) {
      launch_rows<T, Fusion::kResidual, Vectors::kAny, decltype(count)::value>(p, outer, launch);
    });
  } else if (launch.is_short()) {
    launch_rows<T, Fusion::kRows, Vectors::kAny, kShortPacks, true>(p, outer, launch);
  } else {
    with_packs(packs, [&](auto count) {
      launch_rows<T, Fusion::kRows, Vectors::kAny, decltype(count)::value>(p, outer, launch);
    });
  }
}

template <typename T, bool kResidual, bool kNorm>
void launch_norm(const NormParams& p, RowOperands<T>& operands, Launch<T>& launch) {
  NormRowParams<kResidual + 1> q;
  q.operands[0] = operands.row(p.input);
  if constexpr (kResidual) q.operands[1] = operands.row(p.residual);
  q.residual_out = operands.row(p.residual_out);
  q.weight = operands.modulator(p.weight, RowView());
  q.gate = operands.modulator(p.gate.value, p.gate.table);
  q.scale = operands.modulator(p.scale.value, p.scale.table);
  q.shift = operands.modulator(p.shift.value, p.shift.table);
  q.output = p.quantised;
  q.rows = static_cast<uint32_t>(operands.inner());
  q.ahead = launch.ahead(p.rows.width, kResidual + 1);
  q.width = static_cast<int32_t>(p.rows.width);
  q.inverse_width = 1.f / static_cast<float>(p.rows.width);
  q.eps = p.eps;
  q.weight_offset = p.weight.data ? p.weight_offset : 0.f;
  const int64_t outer = operands.outer();
  // fp32 models have no fp8 layers, but fp32 weights are quantised: their rows alone.
  constexpr bool kPacked = sizeof(T) == 2 || (!kResidual && !kNorm);
  if (!takes_packed("quant", forced().quant, kPacked && launch.in_registers && operands.fits())) {
    if (launch.is_short()) launch.shape = {launch.shape.threads * launch.shape.packs, 1};
    launch.share(p.rows.count, 1);
    norm_quant_kernel_general<T>
        <<<launch.grid, launch.block, 0, launch.stream>>>(p, launch.shape.packs, q.inverse_width);
  } else if constexpr (kPacked) {
    launch_packed<T, kResidual, kNorm>(q, outer, !operands.varying(), launch);
  }
  check_launch("norm_quant");
}

template <typename T>
void rows_quant(const NormParams& p, const Context& context) {
  const bool normalises = p.statistic == Statistic::kRms;
  const Fusion fusion = p.residual.data ? (normalises ? Fusion::kGated : Fusion::kResidual)
                        : normalises    ? Fusion::kModulate
                                        : Fusion::kRows;
  const int64_t packs = ceil_div(p.rows.width, kPackWidth<T>);
  Launch<T> launch(p.rows.width, geometry_of_rows(packs, fusion), context);
  RowOperands<T> operands(p.rows);
  if (p.residual.data) {
    return normalises ? launch_norm<T, true, true>(p, operands, launch)
                      : launch_norm<T, true, false>(p, operands, launch);
  }
  normalises ? launch_norm<T, false, true>(p, operands, launch) : launch_norm<T, false, false>(p, operands, launch);
}

// How many columns the threads of a prefix can own, which are whole warps.
template <typename T>
int64_t prefix_columns(int64_t prefix_width) {
  constexpr int64_t kWarpColumns = 32 * kPrefixPacks * kPackWidth<T>;
  return ceil_div(prefix_width, kWarpColumns) * kWarpColumns;
}

template <typename T, bool kGated>
void launch_glu(const GluParams& p, const QuantOutput& output, RowOperands<T>& operands, Launch<T>& launch) {
  const bool prefix = p.prefix_width > 0;
  const int64_t width = p.prefix_width + p.rows.width;
  GluRowParams<kGated + 1> q;
  q.operands[0] = operands.row(p.gate);
  if constexpr (kGated) q.operands[1] = operands.row(p.up);
  q.prefix = operands.row(p.prefix, p.prefix_width);
  q.bias = operands.modulator(p.bias, RowView());
  q.activation = p.activation;
  q.output = output;
  q.rows = static_cast<uint32_t>(operands.inner());
  q.ahead = launch.ahead(width, kGated + 1);
  q.width = static_cast<int32_t>(width);
  q.prefix_width = static_cast<int32_t>(p.prefix_width);
  q.prefix_threads = static_cast<int32_t>(prefix_columns<T>(p.prefix_width) / (kPrefixPacks * kPackWidth<T>));
  // No op asks for SiLU without a product, and fp32 models have no fp8 layers. Blocks with a prefix are in bfloat16,
  // and their GELU is the tanh form.
  constexpr bool kHasPrefix = std::is_same_v<T, __nv_bfloat16>;
  const bool known = sizeof(T) == 2 && (kGated || p.activation != Activation::kSilu) &&
                     (!prefix || (kHasPrefix && launch.shape.packs == kPrefixPacks && !p.bias.data &&
                                  (kGated || p.activation == Activation::kGeluTanh)));
  if (takes_packed("quant", forced().quant, known && launch.in_registers && operands.fits())) {
    if constexpr (sizeof(T) == 2) {
      launch.share(q.rows, operands.outer());
      with_packs(launch.shape.packs, [&](auto count) {
        constexpr int kPacks = decltype(count)::value;
        const auto run = [&](auto activation) {
          constexpr Activation kActivation = decltype(activation)::value;
          if constexpr (kHasPrefix && kPacks == kPrefixPacks && (kGated || kActivation == Activation::kGeluTanh)) {
            if (prefix) return launch.run(glu_quant_kernel<T, kGated, kActivation, kPacks, true>, q);
          }
          launch.run(glu_quant_kernel<T, kGated, kActivation, kPacks>, q);
        };
        if constexpr (!kGated) {
          if (p.activation == Activation::kGeluTanh) {
            return run(std::integral_constant<Activation, Activation::kGeluTanh>());
          }
        }
        run(std::integral_constant<Activation, Activation::kGelu>());
      });
    }
  } else {
    // No sum depends on the number of threads.
    launch.shape.threads = std::min(launch.shape.threads, kGeneralThreads);
    launch.share(p.rows.count, 1);
    const auto kernel = prefix ? glu_quant_kernel_general<T, true> : glu_quant_kernel_general<T, false>;
    kernel<<<launch.grid, launch.block, 0, launch.stream>>>(p, output, launch.shape.packs);
  }
  check_launch("glu_quant");
}

template <typename T>
void glu_quant(const GluParams& p, const QuantOutput& output, const Context& context) {
  const int64_t width = prefix_columns<T>(p.prefix_width) + p.rows.width;
  Launch<T> launch(width, geometry_of_glu(ceil_div(width, kPackWidth<T>), p.prefix_width > 0), context);
  RowOperands<T> operands(p.rows);
  p.up.data ? launch_glu<T, true>(p, output, operands, launch) : launch_glu<T, false>(p, output, operands, launch);
}

}  // namespace

void rows_quant(const NormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) { rows_quant<decltype(zero)>(p, context); });
}

void glu_quant(const GluParams& p, const QuantOutput& output, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](GluParams& q) { return std::array<RowView*, 3>{&q.gate, &q.up, &q.prefix}; };
    QuantOutput slice = output;
    return for_each_slice(p, views, [&](const GluParams& q) {
      glu_quant(q, slice, context);
      slice.values += q.rows.count * (q.prefix_width + q.rows.width);
      slice.scales += q.rows.count;
    });
  }
  dispatch(p.dtype, [&](auto zero) { glu_quant<decltype(zero)>(p, output, context); });
}

}  // namespace ltx
