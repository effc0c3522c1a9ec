// The vectors of the norm kernels (weights, modulations, gates and their tables) and the arithmetic with them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/row/geometry.cuh"
#include "ltx/row/operands.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {

// The arithmetic of all norm kernels. `load` says which operands there are (has) and gives a pack of each as fp32
// (get). It is spelled out in intrinsics: left to contract as it likes, the compiler would give the kernels different
// bits.

template <Operand kValue, Operand kTable, typename Loader>
__device__ __forceinline__ DType modulator_dtype(const Loader& load) {
  const DType dtype = load.template dtype<kValue>();
  return load.template has<kTable>() ? promote(dtype, load.template dtype<kTable>()) : dtype;
}

// value + table.
template <Operand kValue, Operand kTable, typename Loader, int kWidth>
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

template <typename Loader, int kWidth>
__device__ __forceinline__ void get_gate(const Loader& load, float (&gate)[kWidth]) {
  if (load.template has<kGate>()) {
    get_modulator<kGate, kGateTable>(load, gate);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gate[i] = 1.f;
  }
}

// h = residual + input * gate; h comes in as the input. `input_dtype`: the input's dtype in an eager chain.
template <typename T, typename Loader, int kWidth>
__device__ __forceinline__ void add_residual(const Loader& load, const float (&residual)[kWidth], float (&h)[kWidth],
                                             DType input_dtype = DTypeOf<T>::value) {
  if (load.template has<kGate>()) {
    float gate[kWidth];
    get_modulator<kGate, kGateTable>(load, gate);
    if (load.eager()) {
      const DType dtype = promote(input_dtype, modulator_dtype<kGate, kGateTable>(load));
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

// gate * (weight_offset + branch_weight): what multiplies the normalised branch.
template <typename Loader, int kWidth>
__device__ __forceinline__ void weigh_gate(const Loader& load, float weight_offset, float (&gate)[kWidth]) {
  if (!load.template has<kBranchWeight>()) return;
  float weight[kWidth];
  load.template get<kBranchWeight>(weight);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (weight_offset != 0.f) weight[i] = __fadd_rn(weight_offset, weight[i]);
    gate[i] = __fmul_rn(gate[i], weight[i]);
  }
}

// Weight, bias and modulation multiplied out, so that they cost a row one FMA an element: out = n * factor + addend.
// Where the vectors are known at compile time, nothing is multiplied with one or added to zero. kSecond: the second
// scale and shift in place of the first.
template <Statistic S, Fusion F, bool kSecond = false, typename Loader, int kWidth>
__device__ __forceinline__ void get_factors(const Loader& load, float weight_offset, float (&factor)[kWidth],
                                            float (&addend)[kWidth]) {
  bool scaled = load.template has<kWeight>();
  if (scaled) {
    load.template get<kWeight>(factor);
    if (S == Statistic::kRms && weight_offset != 0.f) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) factor[i] = __fadd_rn(weight_offset, factor[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factor[i] = 1.f;
  }
  bool adds = S == Statistic::kLayer && load.template has<kBias>();
  if (adds) {
    load.template get<kBias>(addend);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) addend[i] = -0.f;  // x + -0 is x, for every x
  }
  if constexpr (traits(F).modulates) {
    constexpr Operand kS = kSecond ? kScale2 : kScale, kSTable = kSecond ? kScaleTable2 : kScaleTable;
    constexpr Operand kT = kSecond ? kShift2 : kShift, kTTable = kSecond ? kShiftTable2 : kShiftTable;
    float m[kWidth];
    const auto multiply = [&] {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        factor[i] = Loader::knows() && !scaled ? m[i] : __fmul_rn(factor[i], m[i]);
        if (adds) addend[i] = __fmul_rn(addend[i], m[i]);
      }
      scaled = true;
    };
    if (load.template has<kS>()) {
      get_modulator<kS, kSTable>(load, m);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) m[i] = __fadd_rn(1.f, m[i]);
      multiply();
    }
    if (load.template has<kT>()) {
      get_modulator<kT, kTTable>(load, m);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) addend[i] = Loader::knows() && !adds ? m[i] : __fadd_rn(addend[i], m[i]);
      adds = true;
    }
    if (load.template has<kOutGate>()) {
      get_modulator<kOutGate, kOutGateTable>(load, m);
      multiply();
    }
  }
}

// n * weight (+ bias), rounded as a chain of torch ops rounds it; gives the dtype of the result. Llama's and diffusers'
// RMSNorm round before the weight; torch.nn.RMSNorm, LayerNorm and Gemma's (1 + weight) after it.
template <typename T, Statistic S, Operand kBit, typename Loader, int kWidth>
__device__ __forceinline__ DType weigh_eager(const Loader& load, float weight_offset, float (&n)[kWidth]) {
  DType dtype = DTypeOf<T>::value;
  float m[kWidth];
  const bool round_before_weight = S == Statistic::kRms && weight_offset == 0.f && !load.weighs_unrounded();
  if (round_before_weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to<T>(n[i]);
  }
  if (load.template has<kBit>()) {
    load.template get<kBit>(m);
    if (round_before_weight) dtype = promote(dtype, load.template dtype<kBit>());
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
  return dtype;
}

// Weight, bias and modulation, rounding wherever the chain of torch ops rounds. `dtype`: of the intermediate result.
template <typename T, Statistic S, typename Loader, int kWidth>
__device__ __forceinline__ void finish_eager(const Loader& load, float weight_offset, float (&n)[kWidth]) {
  float m[kWidth];
  DType dtype = weigh_eager<T, S, kWeight>(load, weight_offset, n);
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
__device__ __forceinline__ void normalise(float mean, float rstd, float (&h)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) h[i] = __fmul_rn(S == Statistic::kLayer ? __fsub_rn(h[i], mean) : h[i], rstd);
}

template <bool kAdds, int kWidth>
__device__ __forceinline__ void apply_factors(const float (&factor)[kWidth], const float (&addend)[kWidth],
                                              float (&n)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) n[i] = kAdds ? fmaf(n[i], factor[i], addend[i]) : __fmul_rn(n[i], factor[i]);
}

// In place of a dtype of vectors: fp32 for parameters, the rows' for the others.
struct Fp32Parameters {};

// kPacks packs, a step apart, of the vectors of a row, of dtype M or as Fp32Parameters says; `k` is the pack at hand.
// kKnown: which vectors the call has, where this is known at compile time; they are then the same for all rows, or with
// kIndexed the row number `row` of their sets. kAhead: see loaded_ahead.
template <typename T, typename M, Statistic S, Fusion F, uint32_t kKnown, int kPacks, uint32_t kAhead,
          bool kFlat = false>
struct Vectors {
  static constexpr int kWidth = kPackWidth<T>;
  static constexpr bool kFp32Parameters = std::is_same_v<M, Fp32Parameters>;
  template <uint32_t kBit>
  using TypeOf = std::conditional_t<!kFp32Parameters, M, std::conditional_t<(kBit & kParameters) != 0, float, T>>;
  using Held = Elements<TypeOf<0>, kWidth>;
  static_assert(!kFp32Parameters || (kAhead & kParameters) == 0);
  const CompactParams& p;
  uint32_t row;
  int column, step;
  int k = 0;
  Held held[kPacks][kVectors];

  __device__ __forceinline__ Vectors(const CompactParams& params, uint32_t row_index, int first_column, int column_step)
      : p(params), row(row_index), column(first_column), step(column_step) {}

  template <Operand kBit>
  __device__ __forceinline__ bool has() const {
    constexpr bool kPossible = kBit == kWeight                       ? S != Statistic::kNone
                               : kBit == kBias                       ? S == Statistic::kLayer
                               : kBit == kGate || kBit == kGateTable ? traits(F).gates
                               : kBit == kOutGate || kBit == kOutGateTable
                                   ? F == Fusion::kModulate || F == Fusion::kBackward
                               : kBit == kBranchWeight ? traits(F).norms_branch
                               : kBit >= kScale2       ? traits(F).modulates_twice
                                                       : traits(F).modulates && S != Statistic::kNone;
    return kKnown ? kKnown & kBit : kPossible && (p.present & kBit);
  }
  template <Operand kBit>
  __device__ __forceinline__ const CompactView& view() const {
    constexpr int kKnownPlace = count_bits(vectors_before(kKnown, kBit));
    const int place = (kKnown ? kKnownPlace : __popc(vectors_before(p.present, kBit))) + traits(F).reads_residual;
    return place == 0 ? p.second : p.more[place - 1];
  }
  template <Operand kBit>
  __device__ __forceinline__ const TypeOf<kBit>* start() const {
    return reinterpret_cast<const TypeOf<kBit>*>(
               row_of<kFlat>(view<kBit>(), kKnown && !(kKnown & kIndexed) ? 0 : row)) +
           column;
  }
  // Brings the modulation of every batch (blockIdx.y) into the L2 cache, a batch a thread.
  template <Operand kBit>
  __device__ __forceinline__ void prefetch_batch() const {
    if constexpr (kKnown & kBit) {
      const CompactView& from = view<kBit>();
      prefetch(from.data + static_cast<uint64_t>(from.outer) * threadIdx.x,
               static_cast<uint32_t>(p.width) * static_cast<uint32_t>(sizeof(TypeOf<kBit>)));
    }
  }
  __device__ __forceinline__ void prefetch_batches() const {
    if (threadIdx.x >= gridDim.y) return;
    prefetch_batch<kGate>();
    prefetch_batch<kScale>();
    prefetch_batch<kShift>();
  }
  template <Operand kBit>
  __device__ __forceinline__ void load_ahead(const bool (&inside)[kPacks]) {
    if constexpr (kAhead & kBit) {
      if (!has<kBit>()) return;
      const auto* const data = start<kBit>();
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (inside[i]) held[i][count_bits(vectors_before(kAhead, kBit))].load(data, i * step);
      }
    }
  }
  __device__ __forceinline__ void load_ahead(const bool (&inside)[kPacks]) {
    load_ahead<kGate>(inside);
    load_ahead<kGateTable>(inside);
    load_ahead<kWeight>(inside);
    load_ahead<kBias>(inside);
    load_ahead<kScale>(inside);
    load_ahead<kScaleTable>(inside);
    load_ahead<kShift>(inside);
    load_ahead<kShiftTable>(inside);
    load_ahead<kOutGate>(inside);
    load_ahead<kOutGateTable>(inside);
    load_ahead<kBranchWeight>(inside);
    load_ahead<kScale2>(inside);
    load_ahead<kScaleTable2>(inside);
    load_ahead<kShift2>(inside);
    load_ahead<kShiftTable2>(inside);
  }
  template <Operand kBit>
  __device__ __forceinline__ void get(float (&x)[kWidth]) const {
    if constexpr (kAhead & kBit) {
      held[k][count_bits(vectors_before(kAhead, kBit))].get(x);
    } else {
      Elements<TypeOf<kBit>, kWidth> now;
      now.load(start<kBit>(), k * step);
      now.get(x);
    }
  }
  __device__ __forceinline__ constexpr bool eager() const { return false; }
  __device__ __forceinline__ constexpr bool weighs_unrounded() const { return false; }
  static __device__ __forceinline__ constexpr bool knows() { return kKnown != 0; }
  template <Operand kBit>
  __device__ __forceinline__ DType dtype() const {
    return DTypeOf<TypeOf<kBit>>::value;
  }
};

// Where the row begins in each operand that has rows, in elements.
struct RowStarts {
  int64_t input = 0, residual = 0, gate = 0, scale = 0, shift = 0, out_gate = 0, out = 0, residual_out = 0;
  int64_t scale2 = 0, shift2 = 0, out2 = 0;
  int64_t index = 0;
  bool named = true;  // by the index

  __device__ __forceinline__ void add(const NormParams& p, int d, int64_t index) {
    input += index * p.input.stride[d];
    residual += index * p.residual.stride[d];
    gate += index * p.gate.value.stride[d];
    scale += index * p.scale.value.stride[d];
    shift += index * p.shift.value.stride[d];
    out_gate += index * p.out_gate.value.stride[d];
    out += index * p.out.stride[d];
    residual_out += index * p.residual_out.stride[d];
    scale2 += index * p.scale2.value.stride[d];
    shift2 += index * p.shift2.value.stride[d];
    out2 += index * p.out2.stride[d];
    this->index += index * p.index.stride[d];
  }
  // Goes to the rows of modulation that the index names.
  __device__ __forceinline__ void choose(const NormParams& p) {
    if (!p.index.data) return;
    const char* const data = static_cast<const char*>(p.index.data) + index * index_size(p.index.type);
    const int64_t row = read_index(data, p.index.type, p.index.rows, named);
    gate += row * p.gate.value.index_stride;
    scale += row * p.scale.value.index_stride;
    shift += row * p.shift.value.index_stride;
    out_gate += row * p.out_gate.value.index_stride;
    scale2 += row * p.scale2.value.index_stride;
    shift2 += row * p.shift2.value.index_stride;
  }
};

// Packs of any operand, wherever its elements lie. kMore: the input may be normalised on its own, and `second` gives
// the second scale and shift in place of the first.
template <typename T, bool kMore>
struct GeneralLoader {
  const NormParams& p;
  const RowStarts& start;
  uint32_t packed;
  int64_t column = 0;
  float branch_rstd = 1.f;
  bool second = false;

  template <Operand kBit>
  __device__ __forceinline__ const RowView& view() const {
    return kBit == kWeight         ? p.weight
           : kBit == kBias         ? p.bias
           : kBit == kGate         ? p.gate.value
           : kBit == kGateTable    ? p.gate.table
           : kBit == kScale        ? (takes_second() ? p.scale2.value : p.scale.value)
           : kBit == kScaleTable   ? (takes_second() ? p.scale2.table : p.scale.table)
           : kBit == kShift        ? (takes_second() ? p.shift2.value : p.shift.value)
           : kBit == kShiftTable   ? (takes_second() ? p.shift2.table : p.shift.table)
           : kBit == kOutGate      ? p.out_gate.value
           : kBit == kOutGateTable ? p.out_gate.table
                                   : p.branch_weight;
  }
  __device__ __forceinline__ bool takes_second() const { return kMore && second; }
  // The bit of the operand that kBit stands for now.
  template <Operand kBit>
  __device__ __forceinline__ uint32_t bit() const {
    constexpr Operand kTwin = kBit == kScale        ? kScale2
                              : kBit == kScaleTable ? kScaleTable2
                              : kBit == kShift      ? kShift2
                              : kBit == kShiftTable ? kShiftTable2
                                                    : kBit;
    return takes_second() ? kTwin : kBit;
  }
  template <Operand kBit>
  __device__ __forceinline__ bool has() const {
    return view<kBit>().data != nullptr;
  }
  template <Operand kBit, int kWidth>
  __device__ __forceinline__ void get(float (&x)[kWidth]) const {
    const int64_t row = kBit == kGate      ? start.gate
                        : kBit == kScale   ? (takes_second() ? start.scale2 : start.scale)
                        : kBit == kShift   ? (takes_second() ? start.shift2 : start.shift)
                        : kBit == kOutGate ? start.out_gate
                                           : 0;
    const RowView& v = view<kBit>();
    load_floats<kWidth>(v.data, v.dtype, row, column, v.column_stride, p.rows.width, packed & bit<kBit>(), x);
  }
  __device__ __forceinline__ bool eager() const { return p.rounding != Rounding::kFp32; }
  __device__ __forceinline__ bool weighs_unrounded() const { return p.rounding == Rounding::kEagerWeight; }
  static __device__ __forceinline__ constexpr bool knows() { return false; }
  template <Operand kBit>
  __device__ __forceinline__ DType dtype() const {
    return view<kBit>().dtype;
  }

  __device__ __forceinline__ void get_input(float (&x)[kPackWidth<T>]) const {
    constexpr int kWidth = kPackWidth<T>;
    unpack(load_pack<T, kWidth>(static_cast<const T*>(p.input.data) + start.input, column, p.input.column_stride,
                                p.rows.width, packed & kInput),
           x);
  }
  __device__ __forceinline__ void get_residual(float (&x)[kPackWidth<T>]) const {
    constexpr int kWidth = kPackWidth<T>;
    unpack(load_pack<T, kWidth>(static_cast<const T*>(p.residual.data) + start.residual, column,
                                p.residual.column_stride, p.rows.width, packed & kResidualIn),
           x);
  }
  __device__ __forceinline__ void get_h(float (&h)[kPackWidth<T>]) const {
    constexpr int kWidth = kPackWidth<T>;
    get_input(h);
    if (kMore && p.norms_branch) return add_branch(h);
    if (p.residual.data) {
      float residual[kWidth];
      get_residual(residual);
      add_residual<T>(*this, residual, h);
    }
  }
  // h = residual + input * branch_rstd * (weight_offset + branch_weight) * gate
  __device__ __forceinline__ void add_branch(float (&h)[kPackWidth<T>]) const {
    constexpr int kWidth = kPackWidth<T>;
    float residual[kWidth];
    get_residual(residual);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) h[i] = __fmul_rn(h[i], branch_rstd);
    if (eager()) {
      const DType dtype = weigh_eager<T, Statistic::kRms, kBranchWeight>(*this, p.weight_offset, h);
      return add_residual<T>(*this, residual, h, dtype);
    }
    float gate[kWidth];
    get_gate(*this, gate);
    weigh_gate(*this, p.weight_offset, gate);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) h[i] = fmaf(h[i], gate[i], residual[i]);
  }
};

}  // namespace ltx
