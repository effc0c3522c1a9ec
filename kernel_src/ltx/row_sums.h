// What torch-ext/row_sums.cpp hands to kernel_src/row_sums.cu and kernel_src/cpu/row_sums.cpp.
#pragma once

#include "ltx/params.h"

namespace ltx {

// Sums over the rows of each of `groups` groups, which are rows.count / groups rows in a line, in fp32:
//   products = sum(grad * n)    sums = sum(grad)      n = input (kNone), or the norm of the input without a weight
// products and sums are contiguous, [groups, width]. The kernels add up a group in parts. The workspace holds the two
// sums of each part.
struct RowSumsParams {
  Rows rows;
  int64_t groups = 1;
  Statistic statistic = Statistic::kNone;
  float eps = 0.f;
  RowView grad, input;
  float *products = nullptr, *sums = nullptr;
  float* workspace = nullptr;  // of row_sums_workspace() numbers
};

// On CUDA a thread owns kRowSumsColumns columns, and a block at most kRowSumsMostColumns: wider rows lie in tiles.
constexpr int64_t kRowSumsColumns = 8, kRowSumsMostColumns = 8192;
constexpr int64_t kRowSumsThreads = 512;  // of a block, where a row has no more

// Threads that own a row of a tile: a power of two within a warp, or whole warps.
constexpr int64_t row_sums_team(int64_t width) {
  const int64_t tiles = (width + kRowSumsMostColumns - 1) / kRowSumsMostColumns;
  const int64_t threads = (width + tiles * kRowSumsColumns - 1) / (tiles * kRowSumsColumns);
  int64_t team = 1;
  while (team < threads && team < 32) team *= 2;
  return threads <= 32 ? team : (threads + 31) / 32 * 32;
}

// Rows of a part. Each of the 132 multiprocessors of an H200 gets one block, or two where rows are short, and a thread
// adds up at most 128 rows. The shape of a group alone decides, so that the same shape gives the same bits.
constexpr int64_t row_sums_part(const RowSumsParams& p) {
  const int64_t rows = p.rows.count / p.groups, team = row_sums_team(p.rows.width);
  const int64_t at_once = team < kRowSumsThreads ? kRowSumsThreads / team : 1,
                parts = team > kRowSumsThreads ? 132 : 264;
  const int64_t least = at_once > 4 ? 4 * at_once : 16, most = 128 * at_once, wanted = (rows + parts - 1) / parts;
  return wanted < least ? least : wanted < most ? wanted : most;
}
constexpr int64_t row_sums_parts(const RowSumsParams& p) {
  return (p.rows.count / p.groups + row_sums_part(p) - 1) / row_sums_part(p);
}
constexpr int64_t row_sums_workspace(const RowSumsParams& p) { return 2 * p.groups * row_sums_parts(p) * p.rows.width; }

void row_sums(const RowSumsParams& params, const Context& context);

}  // namespace ltx
