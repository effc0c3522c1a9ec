// What torch-ext/row_sums.cpp hands to kernel_src/row_sums.cu and kernel_src/cpu/row_sums.cpp.
#pragma once

#include "ltx/params.h"

namespace ltx {

// Sums over the rows of each of `groups` groups, which are rows.count / groups rows in a line, in fp32:
//   products = sum(grad * n)    sums = sum(grad)      n = input (kNone), or the norm of the input without a weight
// products and sums are contiguous, [groups, width]. The kernels add up a group in parts. The workspace holds the two
// sums of each part. Where n is a norm, CUDA also keeps the mean and rstd of each row there.
struct RowSumsParams {
  Rows rows;
  int64_t groups = 1;
  Statistic statistic = Statistic::kNone;
  float eps = 0.f;
  RowView grad, input;
  float *products = nullptr, *sums = nullptr;
  float* workspace = nullptr;  // of row_sums_workspace() numbers
};

// Rows of a part: more where rows are short. The width alone decides, so that the same shape gives the same bits.
constexpr int64_t row_sums_part(const RowSumsParams& p) {
  const int64_t width = p.rows.width;
  return width >= 256 ? 64 : width >= 128 ? 128 : width >= 64 ? 256 : 512;
}
constexpr int64_t row_sums_parts(const RowSumsParams& p) {
  return (p.rows.count / p.groups + row_sums_part(p) - 1) / row_sums_part(p);
}
constexpr int64_t row_sums_workspace(const RowSumsParams& p) {
  return 2 * (p.groups * row_sums_parts(p) * p.rows.width + (p.statistic == Statistic::kNone ? 0 : p.rows.count));
}

void row_sums(const RowSumsParams& params, const Context& context);

}  // namespace ltx
