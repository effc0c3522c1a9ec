// What the CPU kernels share and no instruction set touches: parallel ranges, row offsets, scratch memory, dtypes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "ltx/params.h"

namespace ltx {
namespace cpu {

// Elements below which a second thread costs more than it saves: torch's own grain for elementwise work.
constexpr int64_t kGrainElements = 32768;

// Calls job(begin, end) over ranges that cover [0, units); a range has at least kGrainElements elements, so that a
// small input runs on the calling thread.
template <class Job>
inline void for_ranges(const Context& context, int64_t units, int64_t elements_per_unit, const Job& job) {
  const int64_t grain = elements_per_unit >= kGrainElements ? 1 : kGrainElements / elements_per_unit;
  if (context.parallel_for == nullptr || units <= grain) {
    if (units > 0) job(int64_t{0}, units);
    return;
  }
  const auto call = [](int64_t begin, int64_t end, void* state) { (*static_cast<const Job*>(state))(begin, end); };
  context.parallel_for(0, units, grain, call, const_cast<Job*>(&job));
}

inline size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// torch.promote_types.
inline DType promote(DType a, DType b) { return a == b ? a : DType::kFloat32; }

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The multi-index of a row, stepped from row to row without dividing.
class RowIndex {
 public:
  RowIndex(const Rows& rows, int64_t row) : rows_(rows) {
    for (int d = rows.ndim - 1; d >= 0; --d) {
      index_[d] = row % rows.size[d];
      row /= rows.size[d];
    }
  }

  // Rows from this one on that differ in the last index only; in a view they are row_step(view) bytes apart.
  int64_t run() const { return rows_.ndim == 0 ? 1 : rows_.size[rows_.ndim - 1] - index_[rows_.ndim - 1]; }
  int64_t row_step(const RowView& view) const {
    return rows_.ndim == 0 ? 0 : view.stride[rows_.ndim - 1] * static_cast<int64_t>(size_of(view.dtype));
  }

  // Moves on by `count` rows, at most to the end of the run.
  void next(int64_t count = 1) {
    for (int d = rows_.ndim - 1; d >= 0; --d) {
      index_[d] += count;
      if (index_[d] < rows_.size[d]) return;
      index_[d] = 0;
      count = 1;
    }
  }

  // Reads from the index which row of the indexed operands this row uses.
  void choose(const IndexView& index) {
    if (index.data != nullptr) chosen_ = number_at(pointer(index), index.type, 0);
  }

  // This row's number in an index.
  const void* pointer(const IndexView& index) const {
    if (index.data == nullptr) return nullptr;
    int64_t offset = 0;
    for (int d = 0; d < rows_.ndim; ++d) offset += index_[d] * index.stride[d];
    return static_cast<const char*>(index.data) + offset * index_size(index.type);
  }

  // Element `column` of this row in a view; null where the operand is absent.
  char* pointer(const RowView& view, int64_t column) const {
    if (view.data == nullptr) return nullptr;
    int64_t offset = column * view.column_stride;
    for (int d = 0; d < rows_.ndim; ++d) offset += index_[d] * view.stride[d];
    offset += chosen_ * view.index_stride;
    return static_cast<char*>(view.data) + offset * static_cast<int64_t>(size_of(view.dtype));
  }

 private:
  const Rows& rows_;
  int64_t index_[kMaxDims] = {};
  int64_t chosen_ = 0;
};

// Uninitialised fp32 rows of `width` floats, each on a cache line of its own: a vector never straddles two.
class Scratch {
 public:
  Scratch(int rows, int64_t width)
      : width_(round_up(width, kLine)), data_(new float[static_cast<size_t>(rows * width_ + kLine)]) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(data_.get());
    next_ = data_.get() + (kLine - address / sizeof(float) % kLine) % kLine;
  }

  float* take() {
    float* row = next_;
    next_ += width_;
    return row;
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(float);
  int64_t width_;
  std::unique_ptr<float[]> data_;
  float* next_;
};

}  // namespace cpu
}  // namespace ltx
