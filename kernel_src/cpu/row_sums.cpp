// Sums over rows on the CPU; ltx/row_sums.h has the formula.
//
// A thread adds up the rows of a part in scratch memory. The parts of a group are added up at the end, in their order.

#ifndef LTX_ISA

#include "ltx/row_sums.h"

#include <algorithm>
#include <cmath>

#define LTX_ISA_FILE "cpu/row_sums.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void row_sums(const RowSumsParams& params, const Context& context) { LTX_DISPATCH(row_sums, params, context); }

}  // namespace ltx

#else  // once per instruction set

#include "cpu/norm_gradient.h"

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

// Units are parts, counted through all groups.
void part_sums(const RowSumsParams& p, int64_t parts, int64_t begin, int64_t end) {
  const int64_t width = p.rows.width, padded = round_up(width, kSumLanes);
  const int64_t group_rows = p.rows.count / p.groups, part_rows = row_sums_part(p);
  Scratch scratch(4, padded);
  float *grad = scratch.take(), *x = scratch.take(), *products = scratch.take(), *sums = scratch.take();
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t offset = unit % parts * part_rows, count = std::min(part_rows, group_rows - offset);
    RowIndex index(p.rows, unit / parts * group_rows + offset);
    std::fill(products, products + padded, 0.f);
    std::fill(sums, sums + padded, 0.f);
    for (int64_t row = 0; row < count; ++row, index.next()) {
      expand(grad, index.pointer(p.grad, 0), p.grad.dtype, p.grad.column_stride, width);
      expand(x, index.pointer(p.input, 0), p.input.dtype, p.input.column_stride, width);
      if (p.statistic == Statistic::kLayer) centre(x, width);
      const float rstd = p.statistic == Statistic::kNone ? 1.f : rms_rstd(x, width, p.eps);
      for (int64_t c = 0; c < width; c += kLanes) {
        const F g = load(grad + c);
        store(products + c, load(products + c) + g * (load(x + c) * rstd));
        store(sums + c, load(sums + c) + g);
      }
    }
    std::copy(products, products + width, p.workspace + unit * width);
    std::copy(sums, sums + width, p.workspace + (p.groups * parts + unit) * width);
  }
}

// Units are groups of the products, then of the gradient.
void whole_sums(const RowSumsParams& p, int64_t parts, int64_t begin, int64_t end) {
  const int64_t width = p.rows.width;
  for (int64_t unit = begin; unit < end; ++unit) {
    float* const out = unit < p.groups ? p.products + unit * width : p.sums + (unit - p.groups) * width;
    const float* part = p.workspace + unit * parts * width;
    std::copy(part, part + width, out);
    for (int64_t i = 1; i < parts; ++i) {
      part += width;
      for (int64_t c = 0; c < width; ++c) out[c] += part[c];
    }
  }
}

void row_sums(const RowSumsParams& params, const Context& context) {
  struct Job {
    const RowSumsParams& params;
    int64_t parts;
    void (*sum)(const RowSumsParams&, int64_t, int64_t, int64_t);
    void operator()(int64_t begin, int64_t end) const { sum(params, parts, begin, end); }
  };
  const int64_t parts = row_sums_parts(params), width = params.rows.width;
  for_ranges(context, params.groups * parts, row_sums_part(params) * width, Job{params, parts, part_sums});
  for_ranges(context, 2 * params.groups, parts * width, Job{params, parts, whole_sums});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
