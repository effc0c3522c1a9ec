// Rows quantised to fp8: plain rows and rows of a gated residual (rows_quant, which norm_quant.cu calls), activations
// and gated heads (glu_quant). norm_quant.cu has the norms.
//
//   scale  = max(amax(|y|) / 448, 2^-120), or one number for all rows
//   values = e4m3(y * (1 / scale))              y: the op's fp32 result (norm.cu and glu.cu have the formulas)
//
// 16-bit rows are read once (2 bytes an element, and as many for a residual or an up) and written once (1 byte, and 2
// for the residual stream); y stays in registers while the row finds its largest magnitude.
//
//   rows_quant_kernel, glu_quant_kernel, head_gates_quant_kernel  hold a row in registers and read each of its bytes
//                        once; a block ends with its row.
//   *_kernel_general     take rows that are too long, strided or misaligned, element by element: once for the magnitude
//                        and once for the values, from cache after the first time.
//
// A row of 2048 bf16 that becomes fp8 leaves a multiprocessor of an H200 about 1500 issue slots, 190 a pack: 100 more
// cost 10 % over a copy. Unpacking a vector takes 8 of them. Hence the vectors that a model's block passes have kernels
// of their own. Rows that are wide, or have little done to them, wait for memory: a block prefetches a later block's
// rows into the L2 cache.
#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

#include "ltx/activation.cuh"
#include "ltx/force.cuh"
#include "ltx/fp8.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// ---- Shared by all kernels

// x = addend + x.
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

// Floats of scratch memory: a row has its warps' largest magnitudes, and zeros up to a multiple of four.
constexpr int kWarpMagnitudes = 32;

// The largest magnitude of a row, which belongs to the block's threads in x. kWhole: rows have whole warps.
template <bool kWhole>
__device__ __forceinline__ float row_magnitude(float x, float4 (&scratch)[kWarpMagnitudes / 4]) {
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int warps = threads / 32, fours = (warps + 3) / 4, first = static_cast<int>(threadIdx.y) * fours;
  x = kWhole ? warp_magnitude(x) : lane_magnitude(x, min(threads, 32));
  if (threads <= 32) return x;
  float* const own = &scratch[first].x;
  if (thread % 32 == 0) own[thread / 32] = x;
  if (thread >= warps && thread < fours * 4) own[thread] = 0.f;
  __syncthreads();
  x = 0.f;
#pragma unroll 1
  for (int i = 0; i < fours; ++i) {
    const float4 y = scratch[first + i];
    x = larger_magnitude(x, larger_magnitude(larger_magnitude(y.x, y.y), larger_magnitude(y.z, y.w)));
  }
  return x;
}

// A warp owns 32 * kPacks neighbouring packs of a row, and a lane those 32 apart, from number first_pack on. Rows of
// less than a warp have one pack a thread.
constexpr int kPackStep = 32;
// A block has at least kBlock threads: several short rows share one. H200, of a copy's time, blocks of 128 and 256:
// gated_residual 2x2688x2048 1.04, 1.06; quantize_rows 2x8064x2048 1.05, 1.04.
constexpr int kBlock = 128, kMaxThreads = 512;
// Rows of an activation may be longer, and rows with a prefix always are. glu_register_threads leaves registers for as
// many threads on every architecture, and the largest of a row does not depend on the order in which it is found.
constexpr int kMaxGluThreads = 896, kPrefixPacks = 4;

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

// A thread's kPacks packs of a row. kShort: several rows share a warp, and each thread has kPacks packs of its row,
// which lie as many packs apart as the row has threads.
template <typename T, int kPacks, int kOperands, bool kShort = false>
struct RowShare {
  static constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  uint32_t rows, row;
  int first;
  bool inside[kPacks];
  const char* source[kOperands];
  uint8_t* values;
  float* scales;

  __device__ __forceinline__ RowShare(uint32_t row_count, int width, const RowPointer (&operands)[kOperands],
                                      const QuantOutput& output)
      : rows(row_count),
        row(blockIdx.x * blockDim.y + threadIdx.y),
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
  __device__ __forceinline__ bool active() const { return row < rows; }
  // A thread's packs of what is at `from`, its first one.
  template <typename Q>
  __device__ __forceinline__ Q* pack(Q* from, int k) const {
    return from + k * step();
  }

  // The row's packs: zeros past its end, and for rows past the last.
  template <bool kPasses>
  __device__ __forceinline__ void load(P (&packs)[kOperands][kPacks]) const {
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      const P* const from = reinterpret_cast<const P*>(source[i]);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        packs[i][k] = P{};
        if (active() && inside[k]) packs[i][k] = load_row_pack<kPasses>(pack(from, k));
      }
    }
  }
  // Brings the row that lies `ahead` rows further on into the L2 cache.
  template <int kCount>
  __device__ __forceinline__ void prefetch_later(const RowPointer (&operands)[kCount], uint32_t ahead,
                                                 int width) const {
    const uint32_t later = row + ahead;
    if (ahead == 0 || threadIdx.x > 0 || later >= rows) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      prefetch(operands[i].at(later), static_cast<uint32_t>(width) * static_cast<uint32_t>(sizeof(T)));
    }
  }

  __device__ __forceinline__ void write(const float (&y)[kPacks][kWidth], const QuantScale& by) const {
    if (threadIdx.x == 0) *scales = by.scale;
    auto* const to = reinterpret_cast<E4m3Pack<kWidth>*>(values);
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

  // Loads the elements before get, if they have dtype T.
  template <typename T, int kWidth>
  __device__ __forceinline__ void fetch(uint32_t row, int column, Pack<T, kWidth>& pack) const {
    if (value.data && value_dtype == DTypeOf<T>::value) {
      pack = load_pack<T, kWidth>(reinterpret_cast<const T*>(value.at(row)), column, 1, 0, true);
    }
  }

  // kWidth elements of a row's modulator; `absent` where there is none. `fetched`: what fetch gave, or null.
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

// operands: input, and the residual where there is one.
template <int kOperands>
struct RowsParams {
  RowPointer operands[kOperands], residual_out;
  RowModulator gate;
  QuantOutput output;
  uint32_t rows;   // of the inner dimension
  uint32_t ahead;  // rows that prefetch_later looks ahead
  int32_t width;
};

// The gate of a residual. kAny: it may be absent, vary, or have another dtype than the rows. kKnown and kTables: a
// model's block passes it, in the rows' dtype and the same for all rows of a block; kTables: with a table.
enum class Gate { kAny, kKnown, kTables };

// Threads of a multiprocessor that bound a thread's registers: more blocks wait for memory at once.
constexpr int register_threads(Gate gate) {
  if (gate == Gate::kAny) return kMaxThreads;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return kMaxThreads;  // whose code takes more registers
#else
  return 1024;
#endif
}

template <typename T, bool kResidual, Gate G, int kPacks, bool kShort = false>
__global__ void __launch_bounds__(register_threads(G), 1)
    rows_quant_kernel(const __grid_constant__ RowsParams<kResidual + 1> p) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kWhole = kPacks > 1 && !kShort;
  using P = Pack<T, kWidth>;
  constexpr bool kGateAhead = kPacks < 4;  // or Blackwell spills
  // H200, gated_residual 2x8064x4096, of a copy's time, without and with: 1.02, 1.00.
  constexpr bool kPrefetches = !kResidual || G != Gate::kAny;
  __shared__ float4 magnitudes[kWarpMagnitudes / 4];
  RowShare<T, kPacks, kResidual + 1, kShort> share(p.rows, p.width, p.operands, p.output);
  P packs[kResidual + 1][kPacks];
  // H200, of a copy's time, passing the first cache and not: short rows 131072x128 1.15, 1.18.
  share.template load<kShort>(packs);
  if constexpr (kWhole && kPrefetches) share.prefetch_later(p.operands, p.ahead, p.width);
  const uint32_t row = share.active() ? share.row : 0;
  P gate[kPacks], table[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    gate[k] = table[k] = P{};
    if (!kResidual || !share.inside[k]) continue;
    if constexpr (G == Gate::kAny) {
      if constexpr (kGateAhead) p.gate.fetch(row, share.column(k), gate[k]);
    } else {
      const int first = share.first / kWidth;
      gate[k] = *share.pack(reinterpret_cast<const P*>(p.gate.value.at(0)) + first, k);
      if (G == Gate::kTables) table[k] = *share.pack(reinterpret_cast<const P*>(p.gate.table) + first, k);
    }
  }
  float y[kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    unpack(packs[0][k], y[k]);
    if constexpr (kResidual) {
      float x[kWidth], g[kWidth];
      if constexpr (G == Gate::kAny) {
        each(g, [](float) { return 0.f; });
        if (share.inside[k]) p.gate.get(row, share.column(k), 1.f, kGateAhead ? &gate[k] : nullptr, g);
      } else {
        unpack(gate[k], g);
        if constexpr (G == Gate::kTables) {
          unpack(table[k], x);
          add(g, x);
        }
      }
      unpack(packs[kResidual][k], x);
      multiply_add(y[k], g, x);
      if (share.active() && share.inside[k]) {
        *share.pack(reinterpret_cast<P*>(p.residual_out.at(share.row)) + share.first / kWidth, k) =
            to_pack<T, kWidth>(y[k]);
      }
    }
  }
  const float most = row_magnitude<kWhole>(magnitude(y), magnitudes);
  const QuantScale by = p.output.static_scale ? fixed_scale(p.output.static_scale) : quant_scale(most);
  if (share.active()) share.write(y, by);
}

// operands: the gate, and what it multiplies (not for gelu). width: of the whole row. The first prefix_threads threads
// own the prefix, and the others the columns after it, so that a warp has columns of one kind.
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

// kActivation: of gelu. Rows with an `up` choose at run time: without a branch after the loads, ptxas puts the last of
// them after the first one's use (H200, swiglu 5376x8192, of a copy's time: 1.09, with the branch 1.04). kPrefix: rows
// begin with columns that stay as they are, and have no bias, whose code would take registers that they do not have.
template <typename T, bool kGated, Activation kActivation, int kPacks, bool kPrefix = false>
__global__ void __launch_bounds__(glu_register_threads(kGated), 1)
    glu_quant_kernel(const __grid_constant__ GluRowParams<kGated + 1> p) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float4 magnitudes[kWarpMagnitudes / 4];
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
  Pack<T, kWidth> packs[kGated + 1][kPacks];
  // H200, of a copy's time, passing the first cache and not: gelu 5376x8192 1.05, 1.08; swiglu 16128x8192 1.03, 0.99.
  share.template load<!kGated>(packs);
  // H200, of a copy's time, without and with: gelu 4096x14336 1.15, 1.04; but swiglu 16128x8192 0.99, 1.03.
  if constexpr (!kGated && kPacks > 1) {
    share.prefetch_later(p.operands, p.ahead, p.width - prefix_width);
    if constexpr (kPrefix) share.prefetch_later({p.prefix}, p.ahead, prefix_width);
  }
  float y[kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) unpack(packs[0][k], y[k]);
  if (!kGated && !kPrefix && p.bias.value.data) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      constexpr const Pack<T, kWidth>* kNone = nullptr;
      float bias[kWidth];
      if (!share.inside[k]) continue;
      p.bias.get(0, share.column(k), 0.f, kNone, bias);
      add(y[k], bias);
    }
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (in_prefix) break;
    if constexpr (kGated) {
      float up[kWidth];
      activate<T>(p.activation, y[k]);
      unpack(packs[kGated][k], up);
      multiply(y[k], up);
    } else {
      activate<T, kActivation>(y[k]);
    }
  }
  const float most = row_magnitude<(kPacks > 1)>(magnitude(y), magnitudes);
  const QuantScale by = p.output.static_scale ? fixed_scale(p.output.static_scale) : quant_scale(most);
  if (share.active()) share.write(y, by);
}

// operands: what the gates multiply and, where each column has a gate of its own, the logits. `logits`: of a gate for
// each head, which has 2^head_shift columns, whole packs.
template <bool kByColumn>
struct HeadGatesParams {
  RowPointer operands[kByColumn + 1];
  RowPointer logits;
  QuantOutput output;
  float scale;
  uint32_t rows, ahead;
  int32_t width, head_shift;
};

template <typename T>
__device__ __forceinline__ float head_gate(float scale, float logit) {
  return __fmul_rn(scale, sigmoid<T>(logit));
}

template <typename T, bool kByColumn, int kPacks>
__global__ void __launch_bounds__(glu_register_threads(kByColumn), 1)
    head_gates_quant_kernel(const __grid_constant__ HeadGatesParams<kByColumn> p) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float4 magnitudes[kWarpMagnitudes / 4];
  const RowShare<T, kPacks, kByColumn + 1> share(p.rows, p.width, p.operands, p.output);
  Pack<T, kWidth> packs[kByColumn + 1][kPacks];
  share.template load<!kByColumn>(packs);
  const T* const logits = reinterpret_cast<const T*>(p.logits.at(share.active() ? share.row : 0));
  T logit[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if constexpr (!kByColumn) logit[k] = logits[share.inside[k] ? share.column(k) >> p.head_shift : 0];
  }
  if constexpr (kPacks > 1) share.prefetch_later(p.operands, p.ahead, p.width);
  float y[kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float gate[kWidth];
    if constexpr (kByColumn) {
      unpack(packs[1][k], gate);
      each(gate, [&](float v) { return head_gate<T>(p.scale, v); });
    } else {
      const float one = head_gate<T>(p.scale, to_float(logit[k]));
      each(gate, [&](float) { return one; });
    }
    unpack(packs[0][k], y[k]);
    if (share.inside[k]) multiply(y[k], gate);
  }
  const float most = row_magnitude<(kPacks > 1)>(magnitude(y), magnitudes);
  const QuantScale by = p.output.static_scale ? fixed_scale(p.output.static_scale) : quant_scale(most);
  if (share.active()) share.write(y, by);
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

// Writes the row that get(column, y) gives, zero past its end; also(column, y) does the rest with it. One body finds
// the largest magnitude and then writes, for half the machine code.
template <typename T, typename Get, typename Also>
__device__ __forceinline__ void quantise_general(int64_t row, bool active, int64_t width, int packs,
                                                 const QuantOutput& output, const Get& get, const Also& also) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float4 magnitudes[kWarpMagnitudes / 4];
  float most = 0.f;
  QuantScale by{};
#pragma unroll 1
  for (int turn = output.static_scale ? 1 : 0; turn < 2; ++turn) {
    const bool writes = turn == 1;
    if (writes) {
      if (!output.static_scale) most = row_magnitude<false>(most, magnitudes);
      if (!active) return;
      by = output.static_scale ? fixed_scale(output.static_scale) : quant_scale(most);
      if (threadIdx.x == 0) output.scales[row] = by.scale;
    }
    for_packs<T>(width, packs, [&](int64_t column) {
      float y[kWidth];
      get(column, y);
      if (!writes) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) most = larger_magnitude(most, y[i]);
        return;
      }
      also(column, y);
      const E4m3Pack<kWidth> pack(y, by.inverse);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i < width) output.values[row * width + column + i] = pack.byte(i);
      }
    });
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    rows_quant_kernel_general(const __grid_constant__ NormParams p, int packs) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const bool active = number < p.rows.count;
  int64_t input = 0, residual = 0, residual_out = 0, gate = 0, index = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    input += i * p.input.stride[d];
    residual += i * p.residual.stride[d];
    residual_out += i * p.residual_out.stride[d];
    gate += i * p.gate.value.stride[d];
    index += i * p.index.stride[d];
  });
  bool named = true;
  if (p.index.data) {
    const char* const data = static_cast<const char*>(p.index.data) + index * index_size(p.index.type);
    gate += read_index(data, p.index.type, p.index.rows, named) * p.gate.value.index_stride;
  }
  const auto get = [&](const RowView& view, int64_t row, int64_t column, float (&x)[kWidth]) {
    load_floats<kWidth>(view.data, view.dtype, row, column, view.column_stride, width, false, x);
  };
  const auto get_h = [&](int64_t column, float (&h)[kWidth]) {
    get(p.input, input, column, h);
    if (p.residual.data) {
      float r[kWidth], g[kWidth];
      get(p.residual, residual, column, r);
      if (!p.gate.value.data) return add(h, r);
      get(p.gate.value, gate, column, g);
      if (p.gate.table.data) {
        float table[kWidth];
        get(p.gate.table, 0, column, table);
        add(g, table);
      }
      multiply_add(h, g, r);
    }
  };
  quantise_general<T>(number, active, width, packs, p.quantised, get_h, [&](int64_t column, const float (&h)[kWidth]) {
    if (!p.residual_out.data) return;
    store_pack(static_cast<T*>(p.residual_out.data) + residual_out, column, p.residual_out.column_stride, width, false,
               to_pack<T, kWidth>(h));
  });
  stop_unless_named(named);
}

constexpr int kGeneralThreads = 256;
template <typename T, bool kPrefix>
__global__ void __launch_bounds__(kGeneralThreads, 1)
    glu_quant_kernel_general(const __grid_constant__ GluParams p, const __grid_constant__ QuantOutput output,
                             int packs) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const int64_t begin = kPrefix ? p.prefix_width : 0;
  const bool active = number < p.rows.count;
  int64_t gate = 0, up = 0, prefix = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    gate += i * p.gate.stride[d];
    up += i * p.up.stride[d];
    if constexpr (kPrefix) prefix += i * p.prefix.stride[d];
  });
  // Zeros before the first column, as after the last one.
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
  quantise_general<T>(number, active, begin + width, packs, output, get_y, [](int64_t, const float (&)[kWidth]) {});
}

template <typename T>
__global__ void __launch_bounds__(kGeneralThreads, 1)
    head_gates_quant_kernel_general(const __grid_constant__ GluParams p, const __grid_constant__ QuantOutput output,
                                    int packs) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, width = p.rows.width;
  const bool active = number < p.rows.count;
  int64_t gate = 0, up = 0;
  walk_row(p.rows, active ? number : 0, [&](int d, int64_t i) {
    gate += i * p.gate.stride[d];
    up += i * p.up.stride[d];
  });
  const T* const logits = static_cast<const T*>(p.gate.data) + gate;
  const auto get_y = [&](int64_t column, float (&y)[kWidth]) {
    unpack(load_pack<T, kWidth>(static_cast<const T*>(p.up.data) + up, column, p.up.column_stride, width, false), y);
    int64_t head = column / p.gate_repeat, next = (head + 1) * p.gate_repeat;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (column + i == next) {
        ++head;
        next += p.gate_repeat;
      }
      if (column + i < width)
        y[i] = __fmul_rn(head_gate<T>(p.scale, to_float(logits[head * p.gate.column_stride])), y[i]);
    }
  };
  quantise_general<T>(number, active, width, packs, output, get_y, [](int64_t, const float (&)[kWidth]) {});
}

// ---- Launch

// `threads` share a row and own `packs` packs each.
struct Geometry {
  int threads;
  int packs;
};

// Four packs a thread spread the fixed costs of a row; with a residual, two leave registers for more warps. Rows of
// less than a warp without a residual: two. H200, us, four and two: 2x8064x2048 quantize_rows 28.6 and 33.8,
// gated_residual 65.1 and 61.3; 16128x8192 gelu 104 and 135, swiglu 158 and 166. 131072x128 quantize_rows 1.18 x a copy
// with four, 1.10 with two.
constexpr int kShortPacks = 2;

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
Geometry geometry_of_rows(int64_t packs, bool residual) {
  if (!residual && packs <= 32 && !forced().quant_packs) {
    return {next_power_of_two(ceil_div(packs, kShortPacks)), kShortPacks};
  }
  const bool two = packs <= 64 || (residual && packs <= 2 * kMaxThreads);
  return geometry(packs, packs <= 32 ? 1 : two ? 2 : 4, kMaxThreads);
}
Geometry geometry_of_glu(int64_t packs, bool prefix) {
  const int a_thread = prefix ? kPrefixPacks : packs <= 32 ? 1 : packs <= 64 ? 2 : 4;
  return geometry(packs, a_thread, kMaxGluThreads);
}

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
  uint32_t ahead(int64_t width, int operands) const {
    return rows_ahead(kAheadBytes, width * static_cast<int64_t>(sizeof(T)) * operands, device);
  }

  void share(int64_t rows, int64_t outer) {
    block = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(std::max(1, kBlock / shape.threads)));
    grid = dim3(grid_size(ceil_div(rows, static_cast<int64_t>(block.y))), static_cast<unsigned>(outer));
  }

  template <typename Params>
  void run(void (*kernel)(Params), const Params& p) const {
    kernel<<<grid, block, 0, stream>>>(p);
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
  int64_t inner() const { return inner_; }
  int64_t outer() const { return rows_.ndim == 2 ? rows_.size[0] : 1; }

  RowPointer row(const RowView& view) { return row(view, rows_.width); }
  RowPointer row(const RowView& view, int64_t width) {
    fits_ = fits_ && (!view.data || is_packed(view.data, view.dtype, kPackWidth<T>, width, view.column_stride,
                                              view.stride, rows_.ndim));
    return pointer(view);
  }
  // For a view that is not read in packs.
  RowPointer pointer(const RowView& view) const {
    const int64_t bytes = element_size(view.dtype);
    return {static_cast<char*>(view.data), rows_.ndim > 0 ? view.stride[rows_.ndim - 1] * bytes : 0,
            rows_.ndim == 2 ? view.stride[0] * bytes : 0};
  }
  RowModulator modulator(const RowView& value, const RowView& table) {
    return {row(value), row(table).data, value.dtype, table.dtype};
  }

 private:
  const Rows& rows_;
  int64_t inner_;
  bool fits_;
};

// kKnown or kTables where there is a gate that has the rows' dtype and is the same for all rows; else kAny.
template <typename T>
Gate gate_of(const RowModulator& gate) {
  if (!gate.value.data || gate.value_dtype != DTypeOf<T>::value || gate.value.inner != 0) return Gate::kAny;
  if (!gate.table) return Gate::kKnown;
  return gate.table_dtype == DTypeOf<T>::value ? Gate::kTables : Gate::kAny;
}

template <typename T, bool kResidual>
void launch_rows(const NormParams& p, const Context& context) {
  Launch<T> launch(p.rows.width, geometry_of_rows(ceil_div(p.rows.width, kPackWidth<T>), kResidual), context);
  RowOperands<T> operands(p.rows);
  RowsParams<kResidual + 1> q;
  q.operands[0] = operands.row(p.input);
  if constexpr (kResidual) q.operands[1] = operands.row(p.residual);
  q.residual_out = operands.row(p.residual_out);
  q.gate = operands.modulator(p.gate.value, p.gate.table);
  q.output = p.quantised;
  q.rows = static_cast<uint32_t>(operands.inner());
  q.ahead = launch.ahead(p.rows.width, kResidual + 1);
  q.width = static_cast<int32_t>(p.rows.width);
  // fp32 models have no fp8 layers, but fp32 weights are quantised: their rows alone.
  constexpr bool kPacked = sizeof(T) == 2 || !kResidual;
  if (!takes_packed("quant", forced().quant, kPacked && launch.in_registers && operands.fits() && !p.index.data)) {
    if (launch.is_short()) launch.shape = {launch.shape.threads * launch.shape.packs, 1};
    launch.share(p.rows.count, 1);
    rows_quant_kernel_general<T><<<launch.grid, launch.block, 0, launch.stream>>>(p, launch.shape.packs);
  } else if constexpr (kPacked) {
    launch.share(q.rows, operands.outer());
    const Gate gate = gate_of<T>(q.gate);
    if (launch.is_short()) {
      if constexpr (!kResidual) launch.run(rows_quant_kernel<T, false, Gate::kAny, kShortPacks, true>, q);
    } else if (kResidual && gate != Gate::kAny && launch.shape.packs == 2) {
      if constexpr (kResidual) {
        launch.run(gate == Gate::kKnown ? rows_quant_kernel<T, true, Gate::kKnown, 2>
                                        : rows_quant_kernel<T, true, Gate::kTables, 2>,
                   q);
      }
    } else {
      with_packs(launch.shape.packs, [&](auto count) {
        launch.run(rows_quant_kernel<T, kResidual, Gate::kAny, decltype(count)::value>, q);
      });
    }
  }
  check_launch("rows_quant");
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

template <typename T, bool kByColumn>
void launch_head_gates(const GluParams& p, const QuantOutput& output, const Context& context) {
  Launch<T> launch(p.rows.width, geometry_of_glu(ceil_div(p.rows.width, kPackWidth<T>), false), context);
  RowOperands<T> operands(p.rows);
  HeadGatesParams<kByColumn> q;
  q.operands[0] = operands.row(p.up);
  if constexpr (kByColumn) q.operands[1] = operands.row(p.gate);
  q.logits = operands.pointer(p.gate);
  q.output = output;
  q.scale = p.scale;
  q.rows = static_cast<uint32_t>(operands.inner());
  q.ahead = launch.ahead(p.rows.width, kByColumn + 1);
  q.width = static_cast<int32_t>(p.rows.width);
  q.head_shift = 0;
  while (int64_t{1} << q.head_shift < p.gate_repeat) ++q.head_shift;
  const bool whole_packs = int64_t{1} << q.head_shift == p.gate_repeat && p.gate_repeat % kPackWidth<T> == 0;
  const bool fits = (kByColumn || (whole_packs && p.gate.column_stride == 1)) && launch.in_registers && operands.fits();
  if (takes_packed("quant", forced().quant, sizeof(T) == 2 && fits)) {
    if constexpr (sizeof(T) == 2) {
      launch.share(q.rows, operands.outer());
      with_packs(launch.shape.packs,
                 [&](auto count) { launch.run(head_gates_quant_kernel<T, kByColumn, decltype(count)::value>, q); });
    }
  } else {
    launch.shape.threads = std::min(launch.shape.threads, kGeneralThreads);
    launch.share(p.rows.count, 1);
    const auto kernel = head_gates_quant_kernel_general<T>;
    kernel<<<launch.grid, launch.block, 0, launch.stream>>>(p, output, launch.shape.packs);
  }
  check_launch("gate_heads_quant");
}

template <typename T>
void glu_quant(const GluParams& p, const QuantOutput& output, const Context& context) {
  if (p.activation == Activation::kSigmoid) {
    return p.gate_repeat == 1 ? launch_head_gates<T, true>(p, output, context)
                              : launch_head_gates<T, false>(p, output, context);
  }
  const int64_t width = prefix_columns<T>(p.prefix_width) + p.rows.width;
  Launch<T> launch(width, geometry_of_glu(ceil_div(width, kPackWidth<T>), p.prefix_width > 0), context);
  RowOperands<T> operands(p.rows);
  p.up.data ? launch_glu<T, true>(p, output, operands, launch) : launch_glu<T, false>(p, output, operands, launch);
}

}  // namespace

void rows_quant(const NormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.residual.data ? launch_rows<T, true>(p, context) : launch_rows<T, false>(p, context);
  });
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
