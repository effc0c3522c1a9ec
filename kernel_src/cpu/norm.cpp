// CPU norms: every op of the norm and AdaLN families is one pass over rows (ltx/params.h has the formula).
//
//   b   = input * rstd * weight                where the branch is normalised: one sweep more before the first
//   h   = residual + b * gate                  first sweep: write residual_out, keep h as fp32, sum h or h^2
//   n   = norm(h) * weight + bias              second, LayerNorm only: sum (h - mean)^2
//   out = (n * (1 + scale) + shift) * out_gate last: n * factor + addend
//
// A row is read once from memory and written once: later sweeps find it, or the scratch row with h, in the L1 or L2
// cache. All other operands are brought to fp32 rows first (table added, 1 + scale formed, multiplied out to one factor
// and one addend) and kept while consecutive rows share them, so that the loops know two dtypes only: the row's and
// fp32. Eager rounding multiplies nothing out and is written as eager code is, one sweep per step, but over the scratch
// row (measured: a quarter faster than one sweep that looks up each step's dtype). gated_residual has no statistic,
// keeps nothing, and is cut into column blocks.

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

// Consecutive rows, or one column block of a row: contiguous storage of the input's dtype, a step (in bytes) apart, and
// fp32 rows that all of them share. Absent operands are null.
struct RowData {
  int64_t width;
  const char *input, *residual;
  char *out, *out2, *residual_out;
  int64_t input_step, residual_step, out_step, out2_step, residual_out_step;
  float* hidden;
  float branch_rstd;  // of a branch that is normalised on its own
  const float *gate, *branch_weight, *weight, *bias, *scale, *shift, *out_gate, *scale2, *shift2;
  // All that multiplies the branch, and all that multiplies and is added after the normalisation, in one row each.
  const float *branch_factor, *factor, *addend, *factor2, *addend2;

  LTX_INLINE void next() {
    input += input_step;
    out += out_step;
    residual += residual == nullptr ? 0 : residual_step;
    residual_out += residual_out == nullptr ? 0 : residual_out_step;
    out2 += out2 == nullptr ? 0 : out2_step;
  }
};

template <class T>
LTX_INLINE F load_row(const char* row, int64_t c, int64_t width) {
  return load_upto(reinterpret_cast<const T*>(row) + c, width - c);
}

template <class T>
LTX_INLINE void store_row(char* row, int64_t c, int64_t width, F x) {
  store_upto(reinterpret_cast<T*>(row) + c, x, width - c);
}

template <class T, bool kBranch>
LTX_INLINE F compute_hidden(const RowData& row, int64_t c) {
  F h = load_row<T>(row.input, c, row.width);
  if (kBranch) h = h * row.branch_rstd;
  if (const float* factor = varying(kBranch ? row.branch_factor : row.gate)) h = h * load(factor + c);
  if (const char* residual = varying(row.residual)) h = load_row<T>(residual, c, row.width) + h;
  return h;
}

// The first sweep, where h is not the input itself.
template <class T, bool kSquare, bool kBranch>
struct KeepTerm {
  RowData row;  // a copy, here and below: with a reference, each store would force a reload of all its fields
  LTX_INLINE F operator()(int64_t c) const {
    const F h = compute_hidden<T, kBranch>(row, c);
    store(row.hidden + c, h);
    if (char* out = varying(row.residual_out)) store_row<T>(out, c, row.width, h);
    return kSquare ? h * h : h;
  }
};

// h again, from where it is.
template <class T, bool kKept>
LTX_INLINE F hidden_at(const RowData& row, int64_t c) {
  return kKept ? load(row.hidden + c) : load_row<T>(row.input, c, row.width);
}

template <class T, bool kKept, bool kSquare>
struct HiddenTerm {
  RowData row;
  float mean;
  LTX_INLINE F operator()(int64_t c) const {
    F h = hidden_at<T, kKept>(row, c);
    if (!kSquare) return h;
    h = h - mean;
    if (row.width - c < kLanes) h = first_lanes(h, row.width - c);
    return h * h;
  }
};

template <class T, bool kKept>
LTX_INLINE void write_row(RowData row, float mean, float rstd) {
  for (int64_t c = 0; c < row.width; c += kLanes) {
    const F normalised = (hidden_at<T, kKept>(row, c) - mean) * rstd;
    F n = normalised;
    if (const float* factor = varying(row.factor)) n = n * load(factor + c);
    if (const float* addend = varying(row.addend)) n = n + load(addend + c);
    store_row<T>(row.out, c, row.width, n);
    if (char* out2 = varying(row.out2)) {
      n = normalised;
      if (const float* factor = varying(row.factor2)) n = n * load(factor + c);
      if (const float* addend = varying(row.addend2)) n = n + load(addend + c);
      store_row<T>(out2, c, row.width, n);
    }
  }
}

template <class T>
LTX_INLINE float branch_rstd(const RowData& row, float eps) {
  const float sum = sum_row(row.width, HiddenTerm<T, false, true>{row, 0.f});
  return 1.f / std::sqrt(sum / static_cast<float>(row.width) + eps);
}

template <class T, bool kKept, bool kLayer, bool kBranch = false>
__attribute__((noinline)) void norm_rows(RowData row, int64_t count, float eps, float branch_eps = 0.f) {
  const float width = static_cast<float>(row.width);
  for (; count > 0; --count, row.next()) {
    float mean = 0.f, variance = 0.f;
    if (kBranch) row.branch_rstd = branch_rstd<T>(row, branch_eps);
    if (kKept) {
      variance = sum_row(row.width, KeepTerm<T, !kLayer, kBranch>{row}) / width;
    } else {
      variance = sum_row(row.width, HiddenTerm<T, kKept, !kLayer>{row, 0.f}) / width;
    }
    if (kLayer) {
      mean = variance;
      variance = sum_row(row.width, HiddenTerm<T, kKept, true>{row, mean}) / width;
    }
    write_row<T, kKept>(row, mean, 1.f / std::sqrt(variance + eps));
  }
}

template <class T, bool kBranch>
void add_rows(RowData row, int64_t count, float branch_eps) {
  for (; count > 0; --count, row.next()) {
    if (kBranch) row.branch_rstd = branch_rstd<T>(row, branch_eps);
    for (int64_t c = 0; c < row.width; c += kLanes) {
      store_row<T>(row.residual_out, c, row.width, compute_hidden<T, kBranch>(row, c));
    }
  }
}

template <class T>
void run_rows(const NormParams& p, const RowData& row, int64_t count) {
  const bool kept = row.gate != nullptr || row.residual != nullptr || row.residual_out != nullptr;
  switch (p.statistic) {
    case Statistic::kNone:
      return p.norms_branch ? add_rows<T, true>(row, count, p.branch_eps) : add_rows<T, false>(row, count, 0.f);
    case Statistic::kRms:
      if (p.norms_branch) return norm_rows<T, true, false, true>(row, count, p.eps, p.branch_eps);
      return kept ? norm_rows<T, true, false>(row, count, p.eps) : norm_rows<T, false, false>(row, count, p.eps);
    case Statistic::kLayer:
      return kept ? norm_rows<T, true, true>(row, count, p.eps) : norm_rows<T, false, true>(row, count, p.eps);
  }
}

void run_rows(const NormParams& p, const RowData& row, int64_t count) {
  switch (p.dtype) {
    case DType::kFloat32:
      return run_rows<float>(p, row, count);
    case DType::kFloat16:
      return run_rows<Half>(p, row, count);
    case DType::kBFloat16:
      return run_rows<BFloat>(p, row, count);
  }
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
  DType gate, scale, shift, out_gate, scale2, shift2;
};

float rstd_about(const RowData& row, float mean, float eps) {
  const float sum = sum_row(row.width, HiddenTerm<float, true, true>{row, mean});
  return 1.f / std::sqrt(sum / static_cast<float>(row.width) + eps);
}

// The row in row.hidden, normalised by its root mean square and multiplied with a weight; gives the dtype of the
// result. Gemma multiplies by 1 + weight in fp32, and kEagerWeight asks for it; the others round first, then multiply.
DType rms_eager(const NormParams& p, const RowData& row, float eps, const float* weight, DType weight_dtype) {
  const bool weight_in_fp32 = weight != nullptr && (p.weight_offset != 0.f || p.rounding == Rounding::kEagerWeight);
  DType dtype = p.dtype;
  normalise_rounded(row.hidden, 0.f, rstd_about(row, 0.f, eps), weight_in_fp32 ? DType::kFloat32 : dtype, row.width);
  if (weight == nullptr) return dtype;
  if (!weight_in_fp32) dtype = promote(dtype, weight_dtype);
  multiply_rounded(row.hidden, weight, dtype, row.width);
  return dtype;
}

// n * scale + shift, written to `out`; n has the dtype `dtype`.
void modulate_eager(const NormParams& p, float* n, DType dtype, const float* scale, DType scale_dtype,
                    const float* shift, DType shift_dtype, const float* out_gate, DType out_gate_dtype, char* out,
                    int64_t width) {
  if (scale != nullptr) {
    dtype = promote(dtype, scale_dtype);
    multiply_rounded(n, scale, dtype, width);
  }
  if (shift != nullptr) {
    dtype = promote(dtype, shift_dtype);
    add_rounded(n, shift, dtype, width);
  }
  if (out_gate != nullptr) multiply_rounded(n, out_gate, promote(dtype, out_gate_dtype), width);
  narrow(out, n, p.dtype, width);
}

// `spare` is one more fp32 row.
void norm_row_eager(const NormParams& p, const ModulatorTypes& types, const RowData& row, float* spare) {
  float* n = row.hidden;
  const int64_t width = row.width;
  DType dtype = p.dtype;
  expand(n, row.input, p.dtype, 1, width);
  if (p.norms_branch) dtype = rms_eager(p, row, p.branch_eps, row.branch_weight, p.branch_weight.dtype);
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
    const float mean = sum_row(width, HiddenTerm<float, true, false>{row, 0.f}) / static_cast<float>(width);
    normalise_rounded(n, mean, rstd_about(row, mean, p.eps), DType::kFloat32, width);
    if (row.weight != nullptr) multiply_rounded(n, row.weight, DType::kFloat32, width);
    if (row.bias != nullptr) add_rounded(n, row.bias, DType::kFloat32, width);
    normalise_rounded(n, 0.f, 1.f, dtype, width);
  } else {
    dtype = rms_eager(p, row, p.eps, row.weight, p.weight.dtype);
  }
  if (row.out2 != nullptr) {
    std::copy(n, n + width, spare);
    modulate_eager(p, spare, dtype, row.scale2, types.scale2, row.shift2, types.shift2, nullptr, dtype, row.out2,
                   width);
  }
  modulate_eager(p, n, dtype, row.scale, types.scale, row.shift, types.shift, row.out_gate, types.out_gate, row.out,
                 width);
}

void norm_rows_eager(const NormParams& p, const ModulatorTypes& types, RowData row, int64_t count, float* spare) {
  for (; count > 0; --count, row.next()) norm_row_eager(p, types, row, spare);
}

// Rows of the input's dtype, made contiguous where their columns are not.
class RowStorage {
 public:
  RowStorage(const RowView& view, Scratch& scratch) : view_(view) {
    if (scratch_rows(view) != 0) buffer_ = reinterpret_cast<char*>(scratch.take());
  }

  static int scratch_rows(const RowView& view) { return view.data != nullptr && view.column_stride != 1; }

  bool in_place() const { return buffer_ == nullptr; }

  void move(const RowIndex& index, int64_t column) { start_ = index.pointer(view_, column); }

  const char* read(int64_t width) const {
    if (in_place()) return start_;
    gather(buffer_, start_, view_.dtype, view_.column_stride, width);
    return buffer_;
  }

  // Where to write, and what to call when that is done.
  char* target() const { return in_place() ? start_ : buffer_; }
  void finish(int64_t width) const {
    if (!in_place()) scatter(start_, view_.dtype, view_.column_stride, width, buffer_);
  }

 private:
  const RowView& view_;
  char* start_ = nullptr;
  char* buffer_ = nullptr;
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

  // Whether the rows of a run share it.
  bool shared(const RowIndex& index) const {
    return row_ == nullptr || (index.row_step(value_) == 0 && value_.index_stride == 0 &&
                               (table_row_ == nullptr || index.row_step(*table_) == 0));
  }

  // Goes to columns [column, column + width) of a row. True if row() holds something else now.
  bool move(const RowIndex& index, int64_t column, int64_t width) {
    if (row_ == nullptr) return false;
    const char* value = index.pointer(value_, column);
    const char* table = table_row_ == nullptr ? nullptr : index.pointer(*table_, column);
    if (value == last_value_ && table == last_table_ && width == last_width_) return false;
    last_width_ = width;
    last_value_ = value;
    last_table_ = table;
    expand(row_, value, value_.dtype, value_.column_stride, width);
    if (table_row_ != nullptr) {
      expand(table_row_, table, table_->dtype, table_->column_stride, width);
      add_rounded(row_, table_row_, eager_ ? dtype_ : DType::kFloat32, width);
    }
    if (offset_ == 0.f) return true;
    for (int64_t c = 0; c < width; c += kLanes) {
      const F sum = offset_ + load(row_ + c);
      store(row_ + c, eager_ ? round_to(dtype_, sum) : sum);
    }
    return true;
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

// factor = weight * scale * out_gate and addend = (bias * scale + shift) * out_gate, scale being 1 + scale already, and
// branch_factor = gate * branch_weight. A product or sum of one operand is that operand's row; the others go to `rows`.
void combine_operands(RowData& row, float* const rows[5]) {
  const int64_t width = row.width;
  const auto product = [width](const float* a, const float* b, float* target) -> const float* {
    if (a == nullptr || b == nullptr) return a == nullptr ? b : a;
    // This includes the rows' padding of zeros, because sums go over whole groups of lanes.
    for (int64_t c = 0; c < round_up(width, kSumLanes); c += kLanes) store(target + c, load(a + c) * load(b + c));
    return target;
  };
  const auto combine = [&](const float* scale, const float* shift, const float* out_gate, float* const* targets,
                           const float*& factor, const float*& addend) {
    factor = product(product(row.weight, scale, targets[0]), out_gate, targets[0]);
    addend = row.bias == nullptr ? nullptr : product(row.bias, scale, targets[1]);
    if (addend != nullptr && shift != nullptr) {
      for (int64_t c = 0; c < width; c += kLanes) store(targets[1] + c, load(addend + c) + load(shift + c));
      addend = targets[1];
    } else if (shift != nullptr) {
      addend = shift;
    }
    if (addend != nullptr) addend = product(addend, out_gate, targets[1]);
  };
  combine(row.scale, row.shift, row.out_gate, rows, row.factor, row.addend);
  combine(row.scale2, row.shift2, nullptr, rows + 2, row.factor2, row.addend2);
  row.branch_factor = product(row.gate, row.branch_weight, rows[4]);
}

// Whether the loops of rounding "fp32" do eager code's operations: nothing rounds between the steps of an fp32 row, and
// there is nothing to multiply out.
bool eager_is_plain(const NormParams& p) {
  const auto present = [](const RowView& view) { return view.data != nullptr ? 1 : 0; };
  const int scale = present(p.scale.value), out_gate = present(p.out_gate.value);
  const int addends = present(p.bias) + present(p.shift.value);
  if (p.norms_branch || p.out2.data != nullptr) return false;
  return p.dtype == DType::kFloat32 && present(p.weight) + scale + out_gate <= 1 && addends <= 1 &&
         !(present(p.bias) && scale) && !(addends && out_gate);
}

// Units are rows, or blocks of kBlockColumns columns of a row where there is no statistic.
void norm_units(const NormParams& p, int64_t blocks, int64_t begin, int64_t end) {
  const int64_t unit_width = blocks == 1 ? p.rows.width : kBlockColumns;
  const bool eager = p.rounding != Rounding::kFp32;
  const bool plain = eager_is_plain(p);
  const int scratch_rows = 6 + RowStorage::scratch_rows(p.out2) + OperandRow::scratch_rows(p.branch_weight) +
                           OperandRow::scratch_rows(p.scale2) + OperandRow::scratch_rows(p.shift2) +
                           RowStorage::scratch_rows(p.input) + RowStorage::scratch_rows(p.residual) +
                           RowStorage::scratch_rows(p.out) + RowStorage::scratch_rows(p.residual_out) +
                           OperandRow::scratch_rows(p.weight) + OperandRow::scratch_rows(p.bias) +
                           OperandRow::scratch_rows(p.gate) + OperandRow::scratch_rows(p.scale) +
                           OperandRow::scratch_rows(p.shift) + OperandRow::scratch_rows(p.out_gate);
  Scratch scratch(scratch_rows, round_up(unit_width, kSumLanes));
  RowStorage input(p.input, scratch), residual(p.residual, scratch);
  RowStorage out(p.out, scratch), out2(p.out2, scratch), residual_out(p.residual_out, scratch);
  OperandRow weight(p.weight, nullptr, p.weight_offset, false, scratch), bias(p.bias, nullptr, 0.f, false, scratch);
  OperandRow branch_weight(p.branch_weight, nullptr, p.weight_offset, false, scratch);
  OperandRow scale2(p.scale2.value, &p.scale2.table, 1.f, eager, scratch);
  OperandRow shift2(p.shift2.value, &p.shift2.table, 0.f, eager, scratch);
  OperandRow gate(p.gate.value, &p.gate.table, 0.f, eager, scratch);
  OperandRow scale(p.scale.value, &p.scale.table, 1.f, eager, scratch);
  OperandRow shift(p.shift.value, &p.shift.table, 0.f, eager, scratch);
  OperandRow out_gate(p.out_gate.value, &p.out_gate.table, 0.f, eager, scratch);
  const ModulatorTypes types = {gate.dtype(),     scale.dtype(),  shift.dtype(),
                                out_gate.dtype(), scale2.dtype(), shift2.dtype()};

  RowIndex index(p.rows, begin / blocks);
  RowData row = {};
  row.hidden = scratch.take();
  float* const spare[5] = {scratch.take(), scratch.take(), scratch.take(), scratch.take(), scratch.take()};
  row.branch_rstd = 1.f;
  row.branch_weight = branch_weight.row();
  row.scale2 = scale2.row();
  row.shift2 = shift2.row();
  row.gate = gate.row();
  row.weight = weight.row();
  row.bias = bias.row();
  row.scale = scale.row();
  row.shift = shift.row();
  row.out_gate = out_gate.row();
  row.input_step = index.row_step(p.input);
  row.residual_step = index.row_step(p.residual);
  row.out_step = index.row_step(p.out);
  row.out2_step = index.row_step(p.out2);
  row.residual_out_step = index.row_step(p.residual_out);
  OperandRow* const operands[] = {&gate, &weight, &bias, &scale, &shift, &out_gate, &branch_weight, &scale2, &shift2};
  RowStorage* const storages[] = {&input, &residual, &out, &out2, &residual_out};
  // Rows can be handed on together if they share their operands and lie where they are used.
  bool together = blocks == 1;
  for (const OperandRow* operand : operands) together = together && operand->shared(index);
  for (const RowStorage* storage : storages) together = together && storage->in_place();

  int64_t block = begin % blocks;
  for (int64_t unit = begin; unit < end;) {
    const int64_t column = block * unit_width;
    const int64_t width = std::min(unit_width, p.rows.width - column);
    const int64_t count = together ? std::min(index.run(), end - unit) : 1;
    index.choose(p.index);
    for (RowStorage* storage : storages) storage->move(index, column);
    bool moved = unit == begin;
    for (OperandRow* operand : operands) moved = operand->move(index, column, width) || moved;
    row.width = width;
    row.input = input.read(width);
    row.residual = residual.read(width);
    row.out = out.target();
    row.out2 = out2.target();
    row.residual_out = residual_out.target();
    if (eager && !plain) {
      norm_rows_eager(p, types, row, count, spare[0]);
    } else {
      if (moved) combine_operands(row, spare);
      run_rows(p, row, count);
    }
    out.finish(width);
    out2.finish(width);
    residual_out.finish(width);
    unit += count;
    if (++block == blocks) {
      block = 0;
      index.next(count);
    }
  }
}

void norm(const NormParams& params, const Context& context) {
  const bool in_blocks =
      params.statistic == Statistic::kNone && !params.norms_branch && params.rows.width > kBlockColumns;
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
