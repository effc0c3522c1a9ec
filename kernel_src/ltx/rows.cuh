// From a row's number to its place in every operand.
#pragma once

#include <array>
#include <cstdint>

#include "ltx/params.h"

namespace ltx {

// Calls add(d, index) for every dimension of the row space that row number `row` has an index in. Contiguous rows (one
// dimension) divide nothing; more divide once a dimension, in 32 bits: see needs_split.
template <typename Add>
__device__ __forceinline__ void walk_row(const Rows& rows, int64_t row, const Add& add) {
  for (int d = rows.ndim - 1; d > 0; --d) {
    const uint32_t size = static_cast<uint32_t>(rows.size[d]);
    const uint32_t quotient = static_cast<uint32_t>(row) / size;
    add(d, static_cast<uint32_t>(row) - quotient * size);
    row = quotient;
  }
  if (rows.ndim > 0) add(0, row);
}

// The number at `address` of an index. If it names none of `rows` rows, 0 is returned, `named` is false, and the kernel
// stops as torch's do. It calls stop_unless_named after its last barrier: an earlier stop would cost code at the
// barriers.
__device__ __forceinline__ uint32_t read_index(const void* address, IndexType type, uint32_t rows, bool& named) {
  const uint32_t* const words = static_cast<const uint32_t*>(address);
  uint32_t row, high = 0;
  if (type == IndexType::kBool) {
    row = *static_cast<const uint8_t*>(address);
  } else {
    row = words[0];
    if (type == IndexType::kInt64) high = words[1];
  }
  named = row < rows && high == 0;
  return named ? row : 0;
}

__device__ __forceinline__ void stop_unless_named(bool named) {
  if (!named) __trap();
}

// Row numbers that have to be divided must fit 32 bits; a larger space is launched slice by slice of its first
// dimension.
inline bool needs_split(const Rows& rows) { return rows.ndim > 1 && rows.count > 0xffffffffll; }

// Calls op(q) for every index of the first dimension, q being `params` without it. `views(q)` lists q's row operands.
template <typename Params, typename Views, typename Op>
void for_each_slice(const Params& params, const Views& views, const Op& op) {
  for (int64_t i = 0; i < params.rows.size[0]; ++i) {
    Params q = params;
    Rows& rows = q.rows;
    rows.count /= rows.size[0];
    rows.ndim -= 1;
    for (int d = 0; d < rows.ndim; ++d) rows.size[d] = rows.size[d + 1];
    for (RowView* view : views(q)) {
      if (view->data == nullptr) continue;
      view->data = static_cast<char*>(view->data) + i * view->stride[0] * (view->dtype == DType::kFloat32 ? 4 : 2);
      for (int d = 0; d < rows.ndim; ++d) view->stride[d] = view->stride[d + 1];
    }
    op(q);
  }
}

// The same for the params of a norm, whose quantised results are contiguous.
template <typename Op>
void for_each_norm_slice(const NormParams& params, const Op& op) {
  const auto views = [](NormParams& q) {
    return std::array<RowView*, 11>{&q.input,        &q.residual,     &q.out,           &q.out2,
                                    &q.residual_out, &q.gate.value,   &q.scale.value,   &q.shift.value,
                                    &q.scale2.value, &q.shift2.value, &q.out_gate.value};
  };
  int64_t rows = 0, slices = 0;  // before this one
  for_each_slice(params, views, [&](NormParams& q) {
    for (QuantOutput* output : {&q.quantised, &q.quantised2}) {
      if (output->values == nullptr) continue;
      output->values += rows * q.rows.width;
      output->scales += rows;
    }
    if (q.index.data) {
      const int64_t offset = slices * q.index.stride[0] * index_size(q.index.type);
      q.index.data = static_cast<const char*>(q.index.data) + offset;
      for (int d = 0; d < q.rows.ndim; ++d) q.index.stride[d] = q.index.stride[d + 1];
    }
    rows += q.rows.count;
    ++slices;
    op(q);
  });
}

}  // namespace ltx
