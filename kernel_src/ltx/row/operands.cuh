// The operands of the norm kernels, as the kernel for whole packs takes them.
#pragma once

#include <cstdint>

#include "ltx/params.h"
#include "ltx/vec.cuh"

namespace ltx {

// One bit for each operand. First those with a value for every element, then the vectors.
enum Operand : uint32_t {
  kInput = 1u << 0,
  kResidualIn = 1u << 1,
  kOut = 1u << 2,
  kResidualOut = 1u << 3,
  kWeight = 1u << 4,
  kBias = 1u << 5,
  kGate = 1u << 6,
  kGateTable = 1u << 7,
  kScale = 1u << 8,
  kScaleTable = 1u << 9,
  kShift = 1u << 10,
  kShiftTable = 1u << 11,
  kOutGate = 1u << 12,
  kOutGateTable = 1u << 13,
  kBranchWeight = 1u << 14,
  kScale2 = 1u << 15,
  kScaleTable2 = 1u << 16,
  kShift2 = 1u << 17,
  kShiftTable2 = 1u << 18,
  kOut2 = 1u << 19,
  kIndexed = 1u << 30,  // no operand: each modulator is a table, and an index says which of its rows belongs to a token
  kVarying = 1u << 31,  // no operand: some vector changes from row to row of the inner dimension
};

// Stands in place of a set of vectors where the call has none.
constexpr uint32_t kNoVectors = kInput;
constexpr uint32_t kElementOperands = kInput | kResidualIn | kOut | kResidualOut | kOut2;
constexpr int kVectors = 12;  // at most, in one call
// Those of the vectors in `present` that come before `bit`.
constexpr uint32_t vectors_before(uint32_t present, Operand bit) { return present & (bit - kWeight); }
constexpr int count_bits(uint32_t bits) { return bits ? 1 + count_bits(bits & (bits - 1)) : 0; }
// How many vectors a set has.
constexpr int count_vectors(uint32_t known) { return count_bits(known & ~kIndexed); }

struct CompactView {
  char* data;
  uint32_t inner, outer;  // strides in bytes
};

// NormParams with at most two dimensions of rows, one of them the grid's, and byte strides of 32 bits: finding a row
// costs a few instructions, and a row of 2048 has time for about 900 in all.
//
// The fields are in the order in which rows need them: a block waits for the lines of constant memory that hold them,
// and the first 48 bytes share one (H200, bf16, of a copy's time with the first vector after the outputs and beside
// the input: layernorm 4096x4096 1.08, 1.05; adaln_rmsnorm 512x2048 1.09, 1.08; rmsnorm_residual 1024x2048 1.01, 1.00:
// h200-tuning.json).
struct CompactParams {
  uint32_t rows;  // of the inner dimension
  int32_t width;
  float inverse_width, eps;
  CompactView input, second;  // the residual or, without one, the first vector
  CompactView out, residual_out;
  float weight_offset;
  uint32_t blocks;             // that share a row
  uint32_t present;            // Operand bits
  uint32_t ahead;              // how many rows ahead a block prefetches; 0: none
  CompactView more[kVectors];  // the other vectors, without gaps
  CompactView out2;
  float branch_eps;
  float *scales, *scales2;  // of quantised results; `out` and `out2` are then their values
  const float* static_scale;
  CompactView index;  // of kIndexed; the inner stride of a modulator then leads from one row of its set to the next
  IndexType index_type;
  uint32_t index_rows;
};

// kFlat: the rows are one dimension.
template <bool kFlat>
__device__ __forceinline__ char* row_of(const CompactView& view, uint32_t row) {
  if constexpr (kFlat) return view.data + static_cast<uint64_t>(view.inner) * row;
  return view.data + static_cast<uint64_t>(view.outer) * blockIdx.y + static_cast<uint64_t>(view.inner) * row;
}

// Calls op(bit, view) for every vector, in the order of the bits.
template <typename Op>
void for_each_vector(const NormParams& p, const Op& op) {
  op(kWeight, p.weight);
  op(kBias, p.bias);
  op(kGate, p.gate.value);
  op(kGateTable, p.gate.table);
  op(kScale, p.scale.value);
  op(kScaleTable, p.scale.table);
  op(kShift, p.shift.value);
  op(kShiftTable, p.shift.table);
  op(kOutGate, p.out_gate.value);
  op(kOutGateTable, p.out_gate.table);
  op(kBranchWeight, p.branch_weight);
  op(kScale2, p.scale2.value);
  op(kScaleTable2, p.scale2.table);
  op(kShift2, p.shift2.value);
  op(kShiftTable2, p.shift2.table);
}

// The vectors that belong to a model, and not to its input.
constexpr uint32_t kParameters = kWeight | kBias | kGateTable | kScaleTable | kShiftTable | kOutGateTable |
                                 kBranchWeight | kScaleTable2 | kShiftTable2;

// The dtypes of a call's vectors, as the row kernel takes them.
enum class VectorTypes {
  kRows,            // the rows'
  kFp32,            // fp32 beside 16-bit rows
  kFp32Parameters,  // fp32 for the parameters, the rows' for the others
};

// The operands that can be read in whole packs. `fast`: all of them can, and norm_kernel can take the call.
template <typename T>
uint32_t whole_pack_operands(const NormParams& p, bool& fast, VectorTypes& types) {
  uint32_t bits = 0, narrow = 0, wide = 0;  // `narrow`: the vectors of the rows' dtype
  fast = p.rounding == Rounding::kFp32;
  const auto set = [&](Operand bit, const RowView& view) {
    if (view.data == nullptr) return;
    const auto moves_whole_packs = [&](const int64_t* strides, int count) {
      return is_packed(view.data, view.dtype, kPackWidth<T>, p.rows.width, view.column_stride, strides, count);
    };
    const bool packed = moves_whole_packs(view.stride, p.rows.ndim) && moves_whole_packs(&view.index_stride, 1);
    if (packed) bits |= bit;
    fast = fast && packed;
  };
  set(kInput, p.input);
  set(kResidualIn, p.residual);
  set(kOut, p.out);
  set(kOut2, p.out2);
  set(kResidualOut, p.residual_out);
  for_each_vector(p, [&](Operand bit, const RowView& view) {
    if (view.data == nullptr) return;
    set(bit, view);
    if (view.dtype == DTypeOf<T>::value) {
      narrow |= bit;
    } else if (view.dtype == DType::kFloat32) {
      wide |= bit;
    } else {
      fast = false;
    }
  });
  if (p.quantised.values) fast = fast && p.rows.width % kPackWidth<T> == 0;
  types = !wide ? VectorTypes::kRows : !narrow ? VectorTypes::kFp32 : VectorTypes::kFp32Parameters;
  fast = fast && !(types == VectorTypes::kFp32Parameters && ((narrow & kParameters) || (wide & ~kParameters)));
  return bits;
}

// NormParams as norm_kernel takes them. False where the rows are not at most two dimensions of 32-bit strides.
inline bool compact_params(const NormParams& p, CompactParams& q) {
  const Rows& rows = p.rows;
  const int64_t inner = rows.ndim == 2 ? rows.size[1] : rows.count;
  // Rows are counted in 32 bits, and the last block counts on past the last.
  if (rows.ndim > 2 || (rows.ndim == 2 && rows.size[0] > 65535) || inner > 0x7fffffff) return false;
  q.rows = static_cast<uint32_t>(inner);
  bool fits = true;
  q.present = 0;
  const auto place = [&](CompactView& view, void* data, int64_t inner_bytes, int64_t outer_bytes, Operand bit) {
    view = {static_cast<char*>(data), static_cast<uint32_t>(inner_bytes), static_cast<uint32_t>(outer_bytes)};
    fits = fits && view.inner == inner_bytes && view.outer == outer_bytes;
    q.present |= bit;
  };
  const auto place_strided = [&](CompactView& view, void* data, const int64_t* strides, int64_t bytes, Operand bit) {
    place(view, data, rows.ndim > 0 ? strides[rows.ndim - 1] * bytes : 0, rows.ndim == 2 ? strides[0] * bytes : 0, bit);
  };
  const auto set = [&](CompactView& compact, const RowView& view, Operand bit) {
    if (view.data) place_strided(compact, view.data, view.stride, element_size(view.dtype), bit);
  };
  set(q.input, p.input, kInput);
  set(q.second, p.residual, kResidualIn);
  set(q.out, p.out, kOut);
  set(q.out2, p.out2, kOut2);
  set(q.residual_out, p.residual_out, kResidualOut);
  if (p.quantised.values) place(q.out, p.quantised.values, rows.width, rows.width * inner, kOut);
  if (p.quantised2.values) place(q.out2, p.quantised2.values, rows.width, rows.width * inner, kOut2);
  q.scales = p.quantised.scales;
  q.scales2 = p.quantised2.scales;
  q.static_scale = p.quantised.static_scale;
  int views = p.residual.data ? 1 : 0;  // after the input
  for_each_vector(p, [&](Operand bit, const RowView& view) {
    if (!view.data) return;
    CompactView& compact = views == 0 ? q.second : q.more[views - 1];
    ++views;
    set(compact, view, bit);
    if (compact.inner != 0) q.present |= kVarying;
    if (view.index_stride != 0)
      place(compact, view.data, view.index_stride * element_size(view.dtype), compact.outer, bit);
  });
  if (p.index.data) {
    place_strided(q.index, const_cast<void*>(p.index.data), p.index.stride, index_size(p.index.type), kIndexed);
    q.index_type = p.index.type;
    q.index_rows = p.index.rows;
  }
  q.width = static_cast<int32_t>(rows.width);
  q.inverse_width = 1.f / static_cast<float>(rows.width);
  q.eps = p.eps;
  q.branch_eps = p.branch_eps;
  q.weight_offset = p.weight_offset;
  return fits;
}

}  // namespace ltx
