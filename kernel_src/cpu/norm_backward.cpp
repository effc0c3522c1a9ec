// CPU gradients of the norm family, of its inputs; ltx/params.h (NormBackwardParams) has the formula.
//
// All that multiplies a gradient is brought to one fp32 row, which is kept while consecutive rows share it. A row of h
// and of the gradients is brought to fp32 in scratch memory, and stays in the cache for the sums and the results.

#ifndef LTX_ISA

#include <algorithm>
#include <cmath>

#define LTX_ISA_FILE "cpu/norm_backward.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void norm_backward(const NormBackwardParams& params, const Context& context) {
  LTX_DISPATCH(norm_backward, params, context);
}

}  // namespace ltx

#else  // once per instruction set

#include "cpu/norm_gradient.h"

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

// value + table + offset as an fp32 row.
class VectorRow {
 public:
  VectorRow(const RowView& value, const RowView& table, float offset, Scratch& scratch)
      : value_(value), table_(table), offset_(offset), row_(scratch.take()), more_(scratch.take()) {}

  const float* row() const { return value_.data == nullptr ? nullptr : row_; }

  // Goes to a row of the op. True if row() holds something else then.
  bool move(const RowIndex& index, int64_t width) {
    const char *value = index.pointer(value_, 0), *table = index.pointer(table_, 0);
    if (value == nullptr || (value == last_value_ && table == last_table_)) return false;
    last_value_ = value;
    last_table_ = table;
    expand(row_, value, value_.dtype, value_.column_stride, width);
    if (table != nullptr) expand(more_, table, table_.dtype, table_.column_stride, width);
    for (int64_t c = 0; c < width; c += kLanes) {
      store(row_ + c, load(row_ + c) + (table == nullptr ? splat(offset_) : load(more_ + c) + offset_));
    }
    return true;
  }

 private:
  const RowView &value_, &table_;
  float offset_;
  float *row_, *more_;
  const char *last_value_ = nullptr, *last_table_ = nullptr;
};

// An fp32 row written in any dtype and stride; `copy` is one more row.
void write(const RowView& view, char* to, const float* row, float* copy, int64_t width) {
  if (view.column_stride == 1) return narrow(to, row, view.dtype, width);
  narrow(copy, row, view.dtype, width);
  scatter(to, view.dtype, view.column_stride, width, copy);
}

void norm_backward_rows(const NormBackwardParams& p, int64_t begin, int64_t end) {
  const int64_t width = p.rows.width;
  Scratch scratch(7 + 2 * 6, round_up(width, kSumLanes));
  float *t = scratch.take(), *h = scratch.take(), *more = scratch.take();
  float *factor = scratch.take(), *factor2 = scratch.take(), *to_branch = scratch.take(), *copy = scratch.take();
  const RowView none;
  const float offset = p.weight_offset;
  VectorRow weight(p.weight, none, offset, scratch), branch_weight(p.branch_weight, none, offset, scratch);
  VectorRow scale(p.scale.value, p.scale.table, 1.f, scratch), scale2(p.scale2.value, p.scale2.table, 1.f, scratch);
  VectorRow out_gate(p.out_gate.value, p.out_gate.table, 0.f, scratch);
  VectorRow gate(p.gate.value, p.gate.table, 0.f, scratch);
  // The product of vectors, of which some are absent.
  const auto combine = [&](float* product, std::initializer_list<const VectorRow*> vectors) {
    std::fill(product, product + round_up(width, kSumLanes), 1.f);
    for (const VectorRow* vector : vectors) multiply(product, vector->row(), width);
  };
  RowIndex index(p.rows, begin);
  const auto read = [&](float* row, const RowView& view) {
    expand(row, index.pointer(view, 0), p.dtype, view.column_stride, width);
  };
  for (int64_t row = begin; row < end; ++row, index.next()) {
    index.choose(p.index);
    bool moved = row == begin;
    for (VectorRow* vector : {&weight, &branch_weight, &scale, &scale2, &out_gate, &gate}) {
      moved = vector->move(index, width) || moved;
    }
    if (moved) {
      combine(factor, {&weight, &scale, &out_gate});
      combine(factor2, {&weight, &scale2});
      combine(to_branch, {&gate, &branch_weight});
    }
    read(t, p.grad);
    if (p.statistic != Statistic::kNone) {
      multiply(t, factor, width);
      if (p.grad2.data != nullptr) {
        read(more, p.grad2);
        for (int64_t c = 0; c < width; c += kLanes) store(t + c, load(t + c) + load(more + c) * load(factor2 + c));
      }
      read(h, p.input);
      if (p.statistic == Statistic::kLayer) {
        centre(h, width);
        centre(t, width);
      }
      apply_norm(t, h, width, p.eps);
      if (p.grad_residual.data != nullptr) {
        read(more, p.grad_residual);
        for (int64_t c = 0; c < width; c += kLanes) store(t + c, load(t + c) + load(more + c));
      }
      write(p.out, index.pointer(p.out, 0), t, copy, width);
    }
    if (p.residual_out.data == nullptr) continue;
    multiply(t, to_branch, width);
    if (p.norms_branch) {
      std::fill(t + width, t + round_up(width, kSumLanes), 0.f);
      read(h, p.branch);
      apply_norm(t, h, width, p.branch_eps);
    }
    write(p.residual_out, index.pointer(p.residual_out, 0), t, copy, width);
  }
}

void norm_backward(const NormBackwardParams& params, const Context& context) {
  struct Job {
    const NormBackwardParams& params;
    void operator()(int64_t begin, int64_t end) const { norm_backward_rows(params, begin, end); }
  };
  for_ranges(context, params.rows.count, params.rows.width, Job{params});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
