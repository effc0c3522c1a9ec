// The norm family, one row kernel: rmsnorm, rmsnorm_residual, layernorm, adaln_rmsnorm, adaln_layernorm, adaln_zero,
// gated_residual, gated_residual_adaln_rmsnorm, gated_residual_adaln_layernorm.
//
//   h   = residual + input * gate
//   n   = h * rstd * (weight_offset + weight)            rstd = 1 / sqrt(mean(h^2) + eps)
//       = (h - mean) * rstd * weight + bias              rstd = 1 / sqrt(mean((h - mean)^2) + eps)
//   out = (n * (1 + scale) + shift) * out_gate           residual_out = h
//
// ltx/params.h (NormParams) says which operands may be absent and how modulation tables enter. Every input is read once
// and every output written once; the row stays in registers between the statistic and the output.
//
// A row belongs to `threads` neighbouring threads; thread t owns the 16-byte packs t, t + threads, t + 2 * threads, ...
// `geometry` picks the number from the row's length and dtype alone (never from the number of rows), so a row's bits
// depend on nothing else. Two kernels share that ownership, the order of the sums and the arithmetic:
//   norm_kernel          the row stays in registers and every access is a whole aligned pack. The main line.
//   norm_kernel_general  walks the row once a sum and once for the output, from cache after the first pass, for rows
//                        longer than the registers hold, strides, misaligned views, dtype mixes and eager rounding.
// Keeping everything unusual out of the first keeps its registers, its binary and its compile time small.
#include <array>
#include <type_traits>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// What surrounds the norm: nothing but weights; a modulation after it; a residual before it (and perhaps both).
enum class Fusion { kPlain, kModulate, kResidual };

// Operands that move in whole 16-byte packs, as bits.
enum Packed : uint32_t {
  kInput = 1u << 0,
  kResidualIn = 1u << 1,
  kWeight = 1u << 2,
  kBias = 1u << 3,
  kGate = 1u << 4,
  kGateTable = 1u << 5,
  kScale = 1u << 6,
  kScaleTable = 1u << 7,
  kShift = 1u << 8,
  kShiftTable = 1u << 9,
  kOutGate = 1u << 10,
  kOutGateTable = 1u << 11,
  kOut = 1u << 12,
  kResidualOut = 1u << 13,
};

// The arithmetic, shared by both kernels: `load` says which operands there are (has) and gives a pack of each as fp32
// (get). It is spelled out in intrinsics: left to contract as it likes, the compiler would give the kernels different
// bits.

template <Packed kValue, Packed kTable, typename Loader>
__device__ __forceinline__ DType modulator_dtype(const Loader& load) {
  const DType dtype = load.template dtype<kValue>();
  return load.template has<kTable>() ? promote(dtype, load.template dtype<kTable>()) : dtype;
}

// value + table.
template <Packed kValue, Packed kTable, typename Loader, int kWidth>
__device__ __forceinline__ void get_modulator(const Loader& load, float (&x)[kWidth]) {
  load.template get<kValue>(x);
  if (load.template has<kTable>()) {
    float table[kWidth];
    load.template get<kTable>(table);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = __fadd_rn(table[i], x[i]);
      if (load.eager()) x[i] = round_to(modulator_dtype<kValue, kTable>(load), x[i]);
    }
  }
}

// h = residual + input * gate; h comes in as the input.
template <typename T, typename Loader, int kWidth>
__device__ __forceinline__ void add_residual(const Loader& load, const float (&residual)[kWidth], float (&h)[kWidth]) {
  if (load.template has<kGate>()) {
    float gate[kWidth];
    get_modulator<kGate, kGateTable>(load, gate);
    if (load.eager()) {
      const DType dtype = promote(DTypeOf<T>::value, modulator_dtype<kGate, kGateTable>(load));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        h[i] = round_to<T>(__fadd_rn(residual[i], round_to(dtype, __fmul_rn(h[i], gate[i]))));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) h[i] = fmaf(h[i], gate[i], residual[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      h[i] = __fadd_rn(residual[i], h[i]);
      if (load.eager()) h[i] = round_to<T>(h[i]);
    }
  }
}

// n * weight + bias and the modulation, with one rounding at the end.
template <Statistic S, Fusion F, typename Loader, int kWidth>
__device__ __forceinline__ void finish(const Loader& load, float weight_offset, float (&n)[kWidth]) {
  float m[kWidth];
  const bool weighted = load.template has<kWeight>(), biased = S == Statistic::kLayer && load.template has<kBias>();
  if (weighted) {
    load.template get<kWeight>(m);
    if (S == Statistic::kRms && weight_offset != 0.f) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) m[i] = __fadd_rn(weight_offset, m[i]);
    }
  }
  if (biased) {
    float bias[kWidth];
    load.template get<kBias>(bias);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = weighted ? fmaf(n[i], m[i], bias[i]) : __fadd_rn(n[i], bias[i]);
  } else if (weighted) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = __fmul_rn(n[i], m[i]);
  }
  if constexpr (F != Fusion::kPlain) {
    const bool shifted = load.template has<kShift>();
    float shift[kWidth];
    if (shifted) get_modulator<kShift, kShiftTable>(load, shift);
    if (load.template has<kScale>()) {
      get_modulator<kScale, kScaleTable>(load, m);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float factor = __fadd_rn(1.f, m[i]);
        n[i] = shifted ? fmaf(n[i], factor, shift[i]) : __fmul_rn(n[i], factor);
      }
    } else if (shifted) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) n[i] = __fadd_rn(n[i], shift[i]);
    }
    if (load.template has<kOutGate>()) {
      get_modulator<kOutGate, kOutGateTable>(load, m);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) n[i] = __fmul_rn(n[i], m[i]);
    }
  }
}

// The same, rounding wherever the chain of torch ops would: `dtype` is that of its intermediate result.
template <typename T, Statistic S, typename Loader, int kWidth>
__device__ __forceinline__ void finish_eager(const Loader& load, float weight_offset, float (&n)[kWidth]) {
  DType dtype = DTypeOf<T>::value;
  float m[kWidth];
  // Llama's and diffusers' RMSNorm round before the weight; LayerNorm and Gemma's (1 + weight) after it.
  const bool round_before_weight = S == Statistic::kRms && weight_offset == 0.f;
  if (round_before_weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to<T>(n[i]);
  }
  if (load.template has<kWeight>()) {
    load.template get<kWeight>(m);
    if (round_before_weight) dtype = promote(dtype, load.template dtype<kWeight>());
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      n[i] = __fmul_rn(n[i], S == Statistic::kRms ? __fadd_rn(weight_offset, m[i]) : m[i]);
      if (round_before_weight) n[i] = round_to(dtype, n[i]);
    }
  }
  if (S == Statistic::kLayer && load.template has<kBias>()) {
    load.template get<kBias>(m);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = __fadd_rn(n[i], m[i]);
  }
  if (!round_before_weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to<T>(n[i]);
  }
  if (load.template has<kScale>()) {
    get_modulator<kScale, kScaleTable>(load, m);
    const DType scale_dtype = modulator_dtype<kScale, kScaleTable>(load);
    dtype = promote(dtype, scale_dtype);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      n[i] = round_to(dtype, __fmul_rn(n[i], round_to(scale_dtype, __fadd_rn(1.f, m[i]))));
    }
  }
  if (load.template has<kShift>()) {
    get_modulator<kShift, kShiftTable>(load, m);
    dtype = promote(dtype, modulator_dtype<kShift, kShiftTable>(load));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to(dtype, __fadd_rn(n[i], m[i]));
  }
  if (load.template has<kOutGate>()) {
    get_modulator<kOutGate, kOutGateTable>(load, m);
    dtype = promote(dtype, modulator_dtype<kOutGate, kOutGateTable>(load));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to(dtype, __fmul_rn(n[i], m[i]));
  }
}

// (h - mean) * rstd.
template <Statistic S, int kWidth>
__device__ __forceinline__ void normalise(const float (&h)[kWidth], float mean, float rstd, float (&n)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) n[i] = __fmul_rn(S == Statistic::kLayer ? __fsub_rn(h[i], mean) : h[i], rstd);
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

__device__ __forceinline__ float reciprocal_root(float sum, float inverse_width, float eps) {
  return rsqrtf(fmaf(sum, inverse_width, eps));
}

// ---- The main line. Its parameters are NormParams with at most two dimensions of rows, one of them the grid's, and
// byte strides of 32 bits: finding a row costs a few instructions, and a row of 2048 has time for about 400 in all.

struct PackedView {
  char* data;
  uint32_t inner, outer;  // strides in bytes
};

struct PackedParams {
  PackedView input, residual, gate, scale, shift, out_gate, out, residual_out;
  const char *weight, *bias, *gate_table, *scale_table, *shift_table, *out_gate_table;
  uint32_t rows;  // of the inner dimension
  int32_t width;
  float inverse_width, eps, weight_offset;
  uint32_t present;  // Packed bits
};

__device__ __forceinline__ char* row_of(const PackedView& view, uint32_t row) {
  return view.data + static_cast<uint64_t>(view.outer) * blockIdx.y + static_cast<uint64_t>(view.inner) * row;
}

// A pack of every vector and modulator of one dtype M that the output needs, fetched ahead of its use.
template <typename M, int kWidth>
struct Fetched {
  Pack<M, kWidth> weight, bias, scale, shift;
};

// The vectors and modulators of a row, all of dtype M; `offset` is the byte of the pack at hand. kAhead: weight, bias,
// scale and shift come from `fetched`, loaded while the sums are under way.
template <typename T, typename M, Statistic S, Fusion F, bool kAhead>
struct PackedLoader {
  static constexpr int kWidth = kPackWidth<T>;
  const PackedParams& p;
  const char *gate = nullptr, *scale = nullptr, *shift = nullptr, *out_gate = nullptr;
  uint32_t offset = 0;
  const Fetched<M, kWidth>* fetched = nullptr;

  __device__ __forceinline__ PackedLoader(const PackedParams& params, uint32_t row) : p(params) {
    if constexpr (F == Fusion::kResidual) gate = row_of(p.gate, row);
    if constexpr (F != Fusion::kPlain && S != Statistic::kNone) {
      scale = row_of(p.scale, row);
      shift = row_of(p.shift, row);
    }
    if constexpr (F == Fusion::kModulate) out_gate = row_of(p.out_gate, row);
  }

  template <Packed kBit>
  __device__ __forceinline__ bool has() const {
    if (F == Fusion::kResidual && (kBit == kOutGate || kBit == kOutGateTable)) return false;
    return p.present & kBit;
  }
  template <Packed kBit>
  __device__ __forceinline__ const char* data() const {
    return kBit == kWeight       ? p.weight
           : kBit == kBias       ? p.bias
           : kBit == kGate       ? gate
           : kBit == kGateTable  ? p.gate_table
           : kBit == kScale      ? scale
           : kBit == kScaleTable ? p.scale_table
           : kBit == kShift      ? shift
           : kBit == kShiftTable ? p.shift_table
           : kBit == kOutGate    ? out_gate
                                 : p.out_gate_table;
  }
  template <Packed kBit>
  __device__ __forceinline__ Pack<M, kWidth> pack() const {
    return load_pack<M, kWidth>(reinterpret_cast<const M*>(data<kBit>() + offset), 0, 1, 0, true);
  }
  __device__ __forceinline__ void fetch(Fetched<M, kWidth>& ahead) const {
    if constexpr (kAhead && S != Statistic::kNone) {
      if (has<kWeight>()) ahead.weight = pack<kWeight>();
      if (S == Statistic::kLayer && has<kBias>()) ahead.bias = pack<kBias>();
      if (F != Fusion::kPlain && has<kScale>()) ahead.scale = pack<kScale>();
      if (F != Fusion::kPlain && has<kShift>()) ahead.shift = pack<kShift>();
    }
  }
  template <Packed kBit>
  __device__ __forceinline__ void get(float (&x)[kWidth]) const {
    if constexpr (kAhead && kBit == kWeight) {
      unpack(fetched->weight, x);
    } else if constexpr (kAhead && kBit == kBias) {
      unpack(fetched->bias, x);
    } else if constexpr (kAhead && kBit == kScale) {
      unpack(fetched->scale, x);
    } else if constexpr (kAhead && kBit == kShift) {
      unpack(fetched->shift, x);
    } else {
      load_floats_as<M, kWidth>(data<kBit>() + offset, 0, 0, 1, 0, true, x);
    }
  }
  __device__ __forceinline__ constexpr bool eager() const { return false; }
  template <Packed kBit>
  __device__ __forceinline__ DType dtype() const {
    return DTypeOf<M>::value;
  }
};

// One pack of a row between its load and its use. The input keeps its dtype (half the registers of fp32); a sum with
// the residual is kept in fp32, since the norm works on the unrounded h.
template <typename T, typename M, Fusion F>
struct HeldPack {
  static constexpr int kWidth = kPackWidth<T>;
  Pack<T, kWidth> input;

  template <typename Loader>
  __device__ __forceinline__ void load(const char* input_row, const char*, const Loader&) {
    input = *reinterpret_cast<const Pack<T, kWidth>*>(input_row);
  }
  template <typename Loader>
  __device__ __forceinline__ void combine(const Loader&) {}
  __device__ __forceinline__ void get(float (&h)[kWidth]) const { unpack(input, h); }
};

template <typename T, typename M>
struct HeldPack<T, M, Fusion::kResidual> {
  static constexpr int kWidth = kPackWidth<T>;
  Pack<T, kWidth> input, residual;
  Pack<M, kWidth> gate;
  float sum[kWidth];

  // An fp32 gate beside 16-bit rows would take too many registers.
  static constexpr bool kHoldsGate = sizeof(M) == sizeof(T);

  // The gate of a pack, seen by add_residual.
  template <typename Loader>
  struct WithGate : Loader {
    const Pack<M, kWidth>& held;
    __device__ __forceinline__ WithGate(const Loader& load, const Pack<M, kWidth>& gate) : Loader(load), held(gate) {}
    template <Packed kBit>
    __device__ __forceinline__ void get(float (&x)[kWidth]) const {
      if constexpr (kHoldsGate && kBit == kGate) {
        unpack(held, x);
      } else {
        Loader::template get<kBit>(x);
      }
    }
  };

  template <typename Loader>
  __device__ __forceinline__ void load(const char* input_row, const char* residual_row, const Loader& load) {
    input = *reinterpret_cast<const Pack<T, kWidth>*>(input_row);
    residual = *reinterpret_cast<const Pack<T, kWidth>*>(residual_row);
    if constexpr (kHoldsGate) {
      if (load.template has<kGate>()) gate = load.template pack<kGate>();
    }
  }
  template <typename Loader>
  __device__ __forceinline__ void combine(const Loader& load) {
    float r[kWidth];
    unpack(residual, r);
    unpack(input, sum);
    add_residual<T>(WithGate<Loader>(load, gate), r, sum);
  }
  __device__ __forceinline__ void get(float (&h)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) h[i] = sum[i];
  }
};

constexpr int kMaxThreads = 512;  // of a row in registers: leaves 128 registers a thread

// block: x = the threads of a row, y = rows. grid: x = rows of the inner dimension, y = the outer dimension.
template <typename T, typename M, Statistic S, Fusion F, int kPacks>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_kernel(const __grid_constant__ PackedParams p) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[2][32];
  const int threads = static_cast<int>(blockDim.x);
  const uint32_t row_index = blockIdx.x * blockDim.y + threadIdx.y;
  // Rows past the last read row 0 and write nothing: every thread must reach every shuffle and barrier.
  const bool active = row_index < p.rows;
  const uint32_t row = active ? row_index : 0;
  const int first = static_cast<int>(threadIdx.x) * kWidth, step = threads * kWidth;
  const auto byte = [&](int k) { return static_cast<uint32_t>(first + k * step) * static_cast<uint32_t>(sizeof(T)); };

  const char* input = row_of(p.input, row);
  const char* residual = F == Fusion::kResidual ? row_of(p.residual, row) : nullptr;
  // Fetching ahead pays while it leaves registers for enough warps (H200, bf16, 2x2688x2048: adaln_rmsnorm 1.20 x a
  // copy against 1.34 without, gated_residual_adaln_rmsnorm 1.12 against 1.26; layernorm 8192x8192 loses, 1.22
  // against 1.05). fp32 vectors beside 16-bit rows take twice as many.
  constexpr bool kAhead = S == Statistic::kRms && sizeof(M) == sizeof(T);
  using Loader = PackedLoader<T, M, S, F, kAhead>;
  Loader load(p, row);
  Fetched<M, kWidth> fetched[kPacks];
  HeldPack<T, M, F> held[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    load.offset = byte(k) / sizeof(T) * sizeof(M);
    if (first + k * step < p.width) held[k].load(input + byte(k), residual + byte(k), load);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    load.offset = byte(k) / sizeof(T) * sizeof(M);
    if (first + k * step < p.width) load.fetch(fetched[k]);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    load.offset = byte(k) / sizeof(T) * sizeof(M);
    if (first + k * step < p.width) held[k].combine(load);
  }
  float mean = 0.f, rstd = 0.f, h[kWidth];
  if constexpr (S == Statistic::kLayer) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first + k * step < p.width) {
        held[k].get(h);
        sum += tree_sum(h);
      }
    }
    mean = row_sum(sum, threads, scratch[0]) * p.inverse_width;
  }
  if constexpr (S != Statistic::kNone) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first + k * step < p.width) {
        held[k].get(h);
        sum += pack_squares<S == Statistic::kLayer>(h, mean, kWidth);
      }
    }
    rstd = reciprocal_root(row_sum(sum, threads, scratch[1]), p.inverse_width, p.eps);
  }
  if (!active) return;
  char* const residual_out = F == Fusion::kResidual ? row_of(p.residual_out, row) : nullptr;
  char* const out = S != Statistic::kNone ? row_of(p.out, row) : nullptr;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (first + k * step < p.width) {
      held[k].get(h);
      if constexpr (F == Fusion::kResidual) {
        *reinterpret_cast<Pack<T, kWidth>*>(residual_out + byte(k)) = to_pack<T, kWidth>(h);
      }
      if constexpr (S != Statistic::kNone) {
        float n[kWidth];
        normalise<S>(h, mean, rstd, n);
        load.offset = byte(k) / sizeof(T) * sizeof(M);
        load.fetched = &fetched[k];
        finish<S, F>(load, p.weight_offset, n);
        *reinterpret_cast<Pack<T, kWidth>*>(out + byte(k)) = to_pack<T, kWidth>(n);
      }
    }
  }
}

// ---- Everything else

// Where the row begins in each operand that has rows, in elements.
struct RowStarts {
  int64_t input = 0, residual = 0, gate = 0, scale = 0, shift = 0, out_gate = 0, out = 0, residual_out = 0;

  __device__ __forceinline__ void add(const NormParams& p, int d, int64_t index) {
    input += index * p.input.stride[d];
    residual += index * p.residual.stride[d];
    gate += index * p.gate.value.stride[d];
    scale += index * p.scale.value.stride[d];
    shift += index * p.shift.value.stride[d];
    out_gate += index * p.out_gate.value.stride[d];
    out += index * p.out.stride[d];
    residual_out += index * p.residual_out.stride[d];
  }
};

template <typename T>
struct GeneralLoader {
  const NormParams& p;
  const RowStarts& start;
  uint32_t packed;
  int64_t column = 0;

  template <Packed kBit>
  __device__ __forceinline__ const RowView& view() const {
    return kBit == kWeight       ? p.weight
           : kBit == kBias       ? p.bias
           : kBit == kGate       ? p.gate.value
           : kBit == kGateTable  ? p.gate.table
           : kBit == kScale      ? p.scale.value
           : kBit == kScaleTable ? p.scale.table
           : kBit == kShift      ? p.shift.value
           : kBit == kShiftTable ? p.shift.table
           : kBit == kOutGate    ? p.out_gate.value
                                 : p.out_gate.table;
  }
  template <Packed kBit>
  __device__ __forceinline__ bool has() const {
    return view<kBit>().data != nullptr;
  }
  template <Packed kBit, int kWidth>
  __device__ __forceinline__ void get(float (&x)[kWidth]) const {
    const int64_t row = kBit == kGate      ? start.gate
                        : kBit == kScale   ? start.scale
                        : kBit == kShift   ? start.shift
                        : kBit == kOutGate ? start.out_gate
                                           : 0;
    const RowView& v = view<kBit>();
    load_floats<kWidth>(v.data, v.dtype, row, column, v.column_stride, p.rows.width, packed & kBit, x);
  }
  __device__ __forceinline__ bool eager() const { return p.rounding == Rounding::kEager; }
  template <Packed kBit>
  __device__ __forceinline__ DType dtype() const {
    return view<kBit>().dtype;
  }

  __device__ __forceinline__ void get_h(float (&h)[kPackWidth<T>]) const {
    constexpr int kWidth = kPackWidth<T>;
    unpack(load_pack<T, kWidth>(static_cast<const T*>(p.input.data) + start.input, column, p.input.column_stride,
                                p.rows.width, packed & kInput),
           h);
    if (p.residual.data) {
      float residual[kWidth];
      unpack(load_pack<T, kWidth>(static_cast<const T*>(p.residual.data) + start.residual, column,
                                  p.residual.column_stride, p.rows.width, packed & kResidualIn),
             residual);
      add_residual<T>(*this, residual, h);
    }
  }
};

// block and grid: as norm_kernel's, but x of the grid counts all rows. Without an output (gated_residual) only h is
// computed, whatever S.
template <typename T, Statistic S>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_kernel_general(const __grid_constant__ NormParams p, uint32_t packed, float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[2][32];
  const int threads = static_cast<int>(blockDim.x);
  const int64_t width = p.rows.width, first = static_cast<int64_t>(threadIdx.x) * kWidth;
  const int64_t step = static_cast<int64_t>(threads) * kWidth;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = row < p.rows.count;
  RowStarts start;
  walk_row(p.rows, active ? row : 0, [&](int d, int64_t index) { start.add(p, d, index); });
  GeneralLoader<T> load{p, start, packed};
  const bool normalises = p.out.data != nullptr;
  float mean = 0.f, rstd = 0.f, h[kWidth];
  // Outputs may lie in the inputs' memory: nothing is written before the last pass.
#pragma unroll 1
  for (int pass = S == Statistic::kLayer ? 0 : 1; normalises && pass < 2; ++pass) {
    float sum = 0.f;
#pragma unroll 1
    for (load.column = first; load.column < width; load.column += step) {
      load.get_h(h);
      sum += pass == 0 ? tree_sum(h) : pack_squares<S == Statistic::kLayer>(h, mean, width - load.column);
    }
    sum = row_sum(sum, threads, scratch[pass]);
    if (pass == 0) {
      mean = sum * inverse_width;
    } else {
      rstd = reciprocal_root(sum, inverse_width, p.eps);
    }
  }
  if (!active) return;
#pragma unroll 1
  for (load.column = first; load.column < width; load.column += step) {
    load.get_h(h);
    if (p.residual_out.data) {
      store_pack(static_cast<T*>(p.residual_out.data) + start.residual_out, load.column, p.residual_out.column_stride,
                 width, packed & kResidualOut, to_pack<T, kWidth>(h));
    }
    if (normalises) {
      float n[kWidth];
      normalise<S>(h, mean, rstd, n);
      if (load.eager()) {
        finish_eager<T, S>(load, p.weight_offset, n);
      } else {
        finish<S, Fusion::kResidual>(load, p.weight_offset, n);
      }
      store_pack(static_cast<T*>(p.out.data) + start.out, load.column, p.out.column_stride, width, packed & kOut,
                 to_pack<T, kWidth>(n));
    }
  }
}

// ---- Launch

// How a row is shared out: `threads` a row, `packs` a thread (0: more than the registers hold).
struct Geometry {
  int threads;
  int packs;
};

Geometry share(int64_t packs, int a_thread) {
  const int64_t threads = ceil_div(packs, a_thread);
  // Up to a warp, several rows share one.
  return {threads <= 32 ? next_power_of_two(threads) : static_cast<int>(ceil_div(threads, 32) * 32), a_thread};
}

Geometry geometry(int64_t width, int pack_width) {
  const int64_t packs = ceil_div(width, pack_width);
  if (const int a_thread = forced().norm_packs) {
    if (packs > a_thread * kMaxThreads) fail_forced("rows that fit", "norm_packs=" + std::to_string(a_thread));
    return share(packs, a_thread);
  }
  if (packs <= 32) return share(packs, 1);
  if (packs <= 64) return share(packs, 2);
  // Four packs a thread: four 16-byte loads of each input in flight, and the row's fixed costs spread over 32 columns.
  if (packs <= 4 * kMaxThreads) return share(packs, 4);
  return {kMaxThreads, 0};
}

// The operands of which every access may be a whole pack; `fast`: all of them, and nothing else stands against
// norm_kernel. `wide`: the vectors and modulators are fp32 beside 16-bit rows.
template <typename T>
uint32_t packed_operands(const NormParams& p, bool& fast, bool& wide) {
  uint32_t bits = 0;
  bool narrow = false;
  wide = false;
  fast = p.rounding == Rounding::kFp32;
  const auto set = [&](Packed bit, const RowView& view) {
    if (view.data == nullptr) return;
    const bool packed =
        is_packed(view.data, view.dtype, kPackWidth<T>, p.rows.width, view.column_stride, view.stride, p.rows.ndim);
    if (packed) bits |= bit;
    fast = fast && packed;
  };
  const auto set_vector = [&](Packed bit, const RowView& view) {
    if (view.data == nullptr) return;
    set(bit, view);
    if (view.dtype == DTypeOf<T>::value) {
      narrow = true;
    } else if (view.dtype == DType::kFloat32) {
      wide = true;
    } else {
      fast = false;
    }
  };
  set(kInput, p.input);
  set(kResidualIn, p.residual);
  set(kOut, p.out);
  set(kResidualOut, p.residual_out);
  set_vector(kWeight, p.weight);
  set_vector(kBias, p.bias);
  set_vector(kGate, p.gate.value);
  set_vector(kGateTable, p.gate.table);
  set_vector(kScale, p.scale.value);
  set_vector(kScaleTable, p.scale.table);
  set_vector(kShift, p.shift.value);
  set_vector(kShiftTable, p.shift.table);
  set_vector(kOutGate, p.out_gate.value);
  set_vector(kOutGateTable, p.out_gate.table);
  fast = fast && !(narrow && wide);
  return bits;
}

// NormParams as norm_kernel takes them. False where the rows are not at most two dimensions of 32-bit strides.
bool pack_params(const NormParams& p, PackedParams& q) {
  const Rows& rows = p.rows;
  if (rows.ndim > 2 || (rows.ndim == 2 && rows.size[0] > 65535)) return false;
  q.rows = static_cast<uint32_t>(rows.ndim == 2 ? rows.size[1] : rows.count);
  if (q.rows != (rows.ndim == 2 ? rows.size[1] : rows.count)) return false;
  bool fits = true;
  q.present = 0;
  const auto set = [&](PackedView& packed, const RowView& view, Packed bit) {
    const int64_t bytes = element_size(view.dtype);
    const int64_t inner = rows.ndim > 0 ? view.stride[rows.ndim - 1] * bytes : 0;
    const int64_t outer = rows.ndim == 2 ? view.stride[0] * bytes : 0;
    packed = {static_cast<char*>(view.data), static_cast<uint32_t>(inner), static_cast<uint32_t>(outer)};
    fits = fits && (!view.data || (packed.inner == inner && packed.outer == outer));
    if (view.data) q.present |= bit;
  };
  const auto set_vector = [&](const char*& data, const RowView& view, Packed bit) {
    data = static_cast<const char*>(view.data);
    if (data) q.present |= bit;
  };
  set(q.input, p.input, kInput);
  set(q.residual, p.residual, kResidualIn);
  set(q.gate, p.gate.value, kGate);
  set(q.scale, p.scale.value, kScale);
  set(q.shift, p.shift.value, kShift);
  set(q.out_gate, p.out_gate.value, kOutGate);
  set(q.out, p.out, kOut);
  set(q.residual_out, p.residual_out, kResidualOut);
  set_vector(q.weight, p.weight, kWeight);
  set_vector(q.bias, p.bias, kBias);
  set_vector(q.gate_table, p.gate.table, kGateTable);
  set_vector(q.scale_table, p.scale.table, kScaleTable);
  set_vector(q.shift_table, p.shift.table, kShiftTable);
  set_vector(q.out_gate_table, p.out_gate.table, kOutGateTable);
  q.width = static_cast<int32_t>(rows.width);
  q.inverse_width = 1.f / static_cast<float>(rows.width);
  q.eps = p.eps;
  q.weight_offset = p.weight_offset;
  return fits;
}

template <typename T, typename M, Statistic S, Fusion F>
void launch_packed(const PackedParams& p, const Geometry& g, dim3 grid, dim3 block, cudaStream_t stream) {
  if (g.packs == 1) {
    norm_kernel<T, M, S, F, 1><<<grid, block, 0, stream>>>(p);
  } else if (g.packs == 2) {
    norm_kernel<T, M, S, F, 2><<<grid, block, 0, stream>>>(p);
  } else {
    norm_kernel<T, M, S, F, 4><<<grid, block, 0, stream>>>(p);
  }
}

template <typename T, Statistic S, Fusion F>
void launch(const NormParams& p, const Context& context) {
  const Geometry g = geometry(p.rows.width, kPackWidth<T>);
  // Short rows share a block of four warps; a row of more than one warp has a block to itself.
  const dim3 block(static_cast<unsigned>(g.threads), g.threads > 32 ? 1u : static_cast<unsigned>(128 / g.threads));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  bool fast = false, wide = false;
  const uint32_t packed = packed_operands<T>(p, fast, wide);
  PackedParams q;
  if (takes_packed("norm", forced().norm, fast && g.packs > 0 && pack_params(p, q))) {
    const dim3 grid(grid_size(ceil_div(q.rows, block.y)), p.rows.ndim == 2 ? static_cast<unsigned>(p.rows.size[0]) : 1);
    if (wide) {
      launch_packed<T, float, S, F>(q, g, grid, block, stream);
    } else {
      launch_packed<T, T, S, F>(q, g, grid, block, stream);
    }
  } else {
    const unsigned grid = grid_size(ceil_div(p.rows.count, block.y));
    const float inverse_width = 1.f / static_cast<float>(p.rows.width);
    constexpr Statistic kGeneral = S == Statistic::kNone ? Statistic::kRms : S;
    const uint32_t as_packs = forced().norm == Kernel::kElements ? 0 : packed;
    norm_kernel_general<T, kGeneral><<<grid, block, 0, stream>>>(p, as_packs, inverse_width);
  }
  check_launch("norm");
}

template <typename T, Statistic S>
void dispatch_fusion(const NormParams& p, const Context& context) {
  if (p.residual.data) return launch<T, S, Fusion::kResidual>(p, context);
  if (p.scale.value.data || p.shift.value.data || p.out_gate.value.data) {
    return launch<T, S, Fusion::kModulate>(p, context);
  }
  return launch<T, S, Fusion::kPlain>(p, context);
}

}  // namespace

void norm(const NormParams& p, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](NormParams& q) {
      return std::array<RowView*, 8>{&q.input,      &q.residual,    &q.out,         &q.residual_out,
                                     &q.gate.value, &q.scale.value, &q.shift.value, &q.out_gate.value};
    };
    return for_each_slice(p, views, [&](const NormParams& q) { norm(q, context); });
  }
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.statistic == Statistic::kRms) return dispatch_fusion<T, Statistic::kRms>(p, context);
    if (p.statistic == Statistic::kLayer) return dispatch_fusion<T, Statistic::kLayer>(p, context);
    return launch<T, Statistic::kNone, Fusion::kResidual>(p, context);
  });
}

}  // namespace ltx
