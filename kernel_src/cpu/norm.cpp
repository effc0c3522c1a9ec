// CPU norms: every op of the norm and AdaLN families is one pass over rows (ltx/params.h has the formula).
//
//   h   = residual + input * gate          1. read the row, keep h as fp32, write residual_out, sum h or h^2
//   n   = norm(h) * weight + bias          2. LayerNorm only: sum (h - mean)^2 over the kept row
//   out = (n * (1 + scale) + shift) * gate 3. from the kept row to the output
//
// A row is read once from memory and written once; h lives in a scratch row that stays in the L1 or L2 cache. All other
// operands are brought to fp32 rows first (table added, 1 + scale formed) and kept while consecutive rows share them,
// so that the loops know two dtypes only: the row's and fp32. Eager rounding is written as eager code is, one sweep per
// step, but over the scratch row. gated_residual has no statistic, keeps nothing, and is cut into column blocks.

#ifndef LTX_ISA

#include <algorithm>
#include <cmath>

#define LTX_ISA_FILE "cpu/norm.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void norm(const NormParams& params, const Context& context) { LTX_DISPATCH(norm, params, context); }

}  // namespace ltx

#else  // once per instruction set

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

// Columns handled at once where there is no statistic.
constexpr int64_t kBlockColumns = 8192;

// One row, or one column block of it: contiguous storage of the input's dtype, and fp32 rows. Absent operands are null.
struct RowData {
  int64_t width;
  const void *input, *residual;
  void *out, *residual_out;
  float* hidden;
  const float *gate, *weight, *bias, *scale, *shift, *out_gate;
};

template <class T>
LTX_INLINE F hidden_at(const RowData& row, int64_t c) {
  F h = load_upto(static_cast<const T*>(row.input) + c, row.width - c);
  if (const float* gate = varying(row.gate)) h = h * load(gate + c);
  if (const void* residual = varying(row.residual)) {
    h = load_upto(static_cast<const T*>(residual) + c, row.width - c) + h;
  }
  return h;
}

template <class T, bool kSquare>
struct HiddenTerm {
  RowData row;  // a copy: behind a reference every store would force its fields to be read again
  LTX_INLINE F operator()(int64_t c) const {
    const F h = hidden_at<T>(row, c);
    store(row.hidden + c, h);
    if (void* out = varying(row.residual_out)) store_upto(static_cast<T*>(out) + c, h, row.width - c);
    return kSquare ? h * h : h;
  }
};

// Step 1. Returns the sum of h (kLayer) or h^2 (kRms).
template <class T>
float read_row(RowData row, Statistic statistic) {
  if (statistic == Statistic::kRms) return sum_row(row.width, HiddenTerm<T, true>{row});
  if (statistic == Statistic::kLayer) return sum_row(row.width, HiddenTerm<T, false>{row});
  for (int64_t c = 0; c < row.width; c += kLanes) {
    store_upto(static_cast<T*>(row.residual_out) + c, hidden_at<T>(row, c), row.width - c);
  }
  return 0.f;
}

struct KeptTerm {
  const float* hidden;
  LTX_INLINE F operator()(int64_t c) const { return load(hidden + c); }
};

struct SquareTerm {
  const float* hidden;
  float mean;
  LTX_INLINE F operator()(int64_t c) const {
    const F deviation = load(hidden + c) - mean;
    return deviation * deviation;
  }
};

// Step 2.
float variance_about(const RowData& row, float mean) {
  // The padding must not count: what equals the mean deviates by exactly zero.
  for (int64_t c = row.width; c < round_up(row.width, kSumLanes); ++c) row.hidden[c] = mean;
  return sum_row(row.width, SquareTerm{row.hidden, mean}) / static_cast<float>(row.width);
}

// Step 3. mean is zero for kRms.
template <class T>
void write_row(RowData row, float mean, float rstd) {
  for (int64_t c = 0; c < row.width; c += kLanes) {
    F n = (load(row.hidden + c) - mean) * rstd;
    if (const float* weight = varying(row.weight)) n = n * load(weight + c);
    if (const float* bias = varying(row.bias)) n = n + load(bias + c);
    if (const float* scale = varying(row.scale)) n = n * load(scale + c);
    if (const float* shift = varying(row.shift)) n = n + load(shift + c);
    if (const float* out_gate = varying(row.out_gate)) n = n * load(out_gate + c);
    store_upto(static_cast<T*>(row.out) + c, n, row.width - c);
  }
}

float read_row(const RowData& row, DType dtype, Statistic statistic) {
  if (dtype == DType::kFloat32) return read_row<float>(row, statistic);
  return dtype == DType::kFloat16 ? read_row<Half>(row, statistic) : read_row<BFloat>(row, statistic);
}

void write_row(const RowData& row, DType dtype, float mean, float rstd) {
  if (dtype == DType::kFloat32) return write_row<float>(row, mean, rstd);
  return dtype == DType::kFloat16 ? write_row<Half>(row, mean, rstd) : write_row<BFloat>(row, mean, rstd);
}

void norm_row(const NormParams& p, const RowData& row) {
  float mean = 0.f;
  float variance = read_row(row, p.dtype, p.statistic) / static_cast<float>(row.width);
  if (p.statistic == Statistic::kNone) return;
  if (p.statistic == Statistic::kLayer) {
    mean = variance;
    variance = variance_about(row, mean);
  }
  write_row(row, p.dtype, mean, 1.f / std::sqrt(variance + p.eps));
}

// Eager steps over an fp32 row: the result of each is rounded to `dtype` (fp32: not at all).
template <class T>
void add_rounded(float* row, const float* addend, int64_t width) {
  for (int64_t c = 0; c < width; c += kLanes) store(row + c, round_to<T>(load(row + c) + load(addend + c)));
}

void add_rounded(float* row, const float* addend, DType dtype, int64_t width) {
  if (dtype == DType::kFloat32) return add_rounded<float>(row, addend, width);
  return dtype == DType::kFloat16 ? add_rounded<Half>(row, addend, width) : add_rounded<BFloat>(row, addend, width);
}

template <class T>
void multiply_rounded(float* row, const float* factor, int64_t width) {
  for (int64_t c = 0; c < width; c += kLanes) store(row + c, round_to<T>(load(row + c) * load(factor + c)));
}

void multiply_rounded(float* row, const float* factor, DType dtype, int64_t width) {
  if (dtype == DType::kFloat32) return multiply_rounded<float>(row, factor, width);
  return dtype == DType::kFloat16 ? multiply_rounded<Half>(row, factor, width)
                                  : multiply_rounded<BFloat>(row, factor, width);
}

// row = (row - mean) * rstd
template <class T>
void normalise_rounded(float* row, float mean, float rstd, int64_t width) {
  for (int64_t c = 0; c < width; c += kLanes) store(row + c, round_to<T>((load(row + c) - mean) * rstd));
}

void normalise_rounded(float* row, float mean, float rstd, DType dtype, int64_t width) {
  if (dtype == DType::kFloat32) return normalise_rounded<float>(row, mean, rstd, width);
  return dtype == DType::kFloat16 ? normalise_rounded<Half>(row, mean, rstd, width)
                                  : normalise_rounded<BFloat>(row, mean, rstd, width);
}

// The dtypes of the modulators: table + value has the promoted one.
struct ModulatorTypes {
  DType gate, scale, shift, out_gate;
};

// `spare` is one more fp32 row.
void norm_row_eager(const NormParams& p, const ModulatorTypes& types, const RowData& row, float* spare) {
  float* n = row.hidden;
  const int64_t width = row.width;
  DType dtype = p.dtype;
  expand(n, row.input, p.dtype, 1, width);
  if (row.gate != nullptr) {
    dtype = promote(dtype, types.gate);
    multiply_rounded(n, row.gate, dtype, width);
  }
  if (row.residual != nullptr) {
    dtype = promote(p.dtype, dtype);
    expand(spare, row.residual, p.dtype, 1, width);
    add_rounded(n, spare, dtype, width);
  }
  if (dtype != p.dtype) normalise_rounded(n, 0.f, 1.f, p.dtype, width);
  if (row.residual_out != nullptr) narrow(row.residual_out, n, p.dtype, width);
  if (p.statistic == Statistic::kNone) return;

  dtype = p.dtype;
  if (p.statistic == Statistic::kLayer) {
    // torch's own layer norm: fp32 inside.
    const float mean = sum_row(width, KeptTerm{n}) / static_cast<float>(width);
    normalise_rounded(n, mean, 1.f / std::sqrt(variance_about(row, mean) + p.eps), DType::kFloat32, width);
    if (row.weight != nullptr) multiply_rounded(n, row.weight, DType::kFloat32, width);
    if (row.bias != nullptr) add_rounded(n, row.bias, DType::kFloat32, width);
    normalise_rounded(n, 0.f, 1.f, dtype, width);
  } else {
    const float rstd = 1.f / std::sqrt(variance_about(row, 0.f) + p.eps);
    // Gemma multiplies by 1 + weight in fp32; the others round first, then multiply.
    const bool weight_in_fp32 = row.weight != nullptr && p.weight_offset != 0.f;
    normalise_rounded(n, 0.f, rstd, weight_in_fp32 ? DType::kFloat32 : dtype, width);
    if (row.weight != nullptr) {
      if (!weight_in_fp32) dtype = promote(dtype, p.weight.dtype);
      multiply_rounded(n, row.weight, dtype, width);
    }
  }
  if (row.scale != nullptr) {
    dtype = promote(dtype, types.scale);
    multiply_rounded(n, row.scale, dtype, width);
  }
  if (row.shift != nullptr) {
    dtype = promote(dtype, types.shift);
    add_rounded(n, row.shift, dtype, width);
  }
  if (row.out_gate != nullptr) {
    dtype = promote(dtype, types.out_gate);
    multiply_rounded(n, row.out_gate, dtype, width);
  }
  narrow(row.out, n, p.dtype, width);
}

// A row of the input's dtype, made contiguous where its columns are not.
class RowStorage {
 public:
  RowStorage(const RowView& view, Scratch& scratch) : view_(view) {
    if (scratch_rows(view) != 0) buffer_ = scratch.take();
  }

  static int scratch_rows(const RowView& view) { return view.data != nullptr && view.column_stride != 1; }

  void move(const RowIndex& index, int64_t column) { start_ = index.pointer(view_, column); }

  const void* read(int64_t width) const {
    if (buffer_ == nullptr) return start_;
    gather(buffer_, start_, view_.dtype, view_.column_stride, width);
    return buffer_;
  }

  // Where to write, and what to call when that is done.
  void* target() const { return buffer_ == nullptr ? static_cast<void*>(start_) : buffer_; }
  void finish(int64_t width) const {
    if (buffer_ != nullptr) scatter(start_, view_.dtype, view_.column_stride, width, buffer_);
  }

 private:
  const RowView& view_;
  char* start_ = nullptr;
  float* buffer_ = nullptr;
};

// An operand of any dtype as an fp32 row: weight, bias, or value + table of a modulator, with `offset` added.
class OperandRow {
 public:
  OperandRow(const RowView& value, const RowView* table, float offset, bool eager, Scratch& scratch)
      : value_(value), table_(table), offset_(offset), eager_(eager) {
    if (value.data == nullptr) return;
    row_ = scratch.take();
    if (table != nullptr && table->data != nullptr) table_row_ = scratch.take();
    dtype_ = table_row_ == nullptr ? value.dtype : promote(value.dtype, table->dtype);
  }

  static int scratch_rows(const RowView& view) { return view.data != nullptr; }
  static int scratch_rows(const Modulator& modulator) {
    return scratch_rows(modulator.value) + scratch_rows(modulator.table);
  }

  const float* row() const { return row_; }
  DType dtype() const { return dtype_; }

  void move(const RowIndex& index, int64_t column, int64_t width) {
    if (row_ == nullptr) return;
    const char* value = index.pointer(value_, column);
    const char* table = table_row_ == nullptr ? nullptr : index.pointer(*table_, column);
    if (value == last_value_ && table == last_table_ && width == last_width_) return;
    last_width_ = width;
    last_value_ = value;
    last_table_ = table;
    expand(row_, value, value_.dtype, value_.column_stride, width);
    if (table_row_ != nullptr) {
      expand(table_row_, table, table_->dtype, table_->column_stride, width);
      add_rounded(row_, table_row_, eager_ ? dtype_ : DType::kFloat32, width);
    }
    if (offset_ == 0.f) return;
    for (int64_t c = 0; c < width; c += kLanes) {
      const F sum = offset_ + load(row_ + c);
      store(row_ + c, eager_ ? round_to(dtype_, sum) : sum);
    }
  }

 private:
  const RowView& value_;
  const RowView* table_;
  float offset_;
  bool eager_;
  DType dtype_ = DType::kFloat32;
  float* row_ = nullptr;
  float* table_row_ = nullptr;
  int64_t last_width_ = 0;
  const char* last_value_ = nullptr;
  const char* last_table_ = nullptr;
};

// Units are rows, or blocks of kBlockColumns columns of a row where there is no statistic.
void norm_units(const NormParams& p, int64_t blocks, int64_t begin, int64_t end) {
  const int64_t unit_width = blocks == 1 ? p.rows.width : kBlockColumns;
  const bool eager = p.rounding == Rounding::kEager;
  const int scratch_rows = 2 + RowStorage::scratch_rows(p.input) + RowStorage::scratch_rows(p.residual) +
                           RowStorage::scratch_rows(p.out) + RowStorage::scratch_rows(p.residual_out) +
                           OperandRow::scratch_rows(p.weight) + OperandRow::scratch_rows(p.bias) +
                           OperandRow::scratch_rows(p.gate) + OperandRow::scratch_rows(p.scale) +
                           OperandRow::scratch_rows(p.shift) + OperandRow::scratch_rows(p.out_gate);
  Scratch scratch(scratch_rows, round_up(unit_width, kSumLanes));
  RowStorage input(p.input, scratch), residual(p.residual, scratch);
  RowStorage out(p.out, scratch), residual_out(p.residual_out, scratch);
  OperandRow weight(p.weight, nullptr, p.weight_offset, false, scratch), bias(p.bias, nullptr, 0.f, false, scratch);
  OperandRow gate(p.gate.value, &p.gate.table, 0.f, eager, scratch);
  OperandRow scale(p.scale.value, &p.scale.table, 1.f, eager, scratch);
  OperandRow shift(p.shift.value, &p.shift.table, 0.f, eager, scratch);
  OperandRow out_gate(p.out_gate.value, &p.out_gate.table, 0.f, eager, scratch);
  const ModulatorTypes types = {gate.dtype(), scale.dtype(), shift.dtype(), out_gate.dtype()};

  RowData row = {};
  row.hidden = scratch.take();
  float* spare = scratch.take();
  row.gate = gate.row();
  row.weight = weight.row();
  row.bias = bias.row();
  row.scale = scale.row();
  row.shift = shift.row();
  row.out_gate = out_gate.row();

  RowIndex index(p.rows, begin / blocks);
  int64_t block = begin % blocks;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t column = block * unit_width;
    const int64_t width = std::min(unit_width, p.rows.width - column);
    for (RowStorage* storage : {&input, &residual, &out, &residual_out}) storage->move(index, column);
    for (OperandRow* operand : {&gate, &weight, &bias, &scale, &shift, &out_gate}) operand->move(index, column, width);
    row.width = width;
    row.input = input.read(width);
    row.residual = residual.read(width);
    row.out = out.target();
    row.residual_out = residual_out.target();
    if (eager) {
      norm_row_eager(p, types, row, spare);
    } else {
      norm_row(p, row);
    }
    out.finish(width);
    residual_out.finish(width);
    if (++block == blocks) {
      block = 0;
      index.next();
    }
  }
}

void norm(const NormParams& params, const Context& context) {
  const bool in_blocks = params.statistic == Statistic::kNone && params.rows.width > kBlockColumns;
  const int64_t blocks = in_blocks ? (params.rows.width + kBlockColumns - 1) / kBlockColumns : 1;
  struct Job {
    const NormParams& params;
    int64_t blocks;
    void operator()(int64_t begin, int64_t end) const { norm_units(params, blocks, begin, end); }
  };
  for_ranges(context, params.rows.count * blocks, in_blocks ? kBlockColumns : params.rows.width, Job{params, blocks});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
