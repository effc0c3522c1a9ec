// What several ops ask of their inputs, and the params that these make. The norms and GLUs (norm.cpp, glu.cpp) and
// their quantising forms (quant.cpp) differ in their outputs; rotary ops and attention (rope.cpp, attention.cpp) have
// heads.
#pragma once

#include <cmath>

#include "tensor_checks.h"

namespace ltx::host {

// Rows of all columns of an input.
inline RowSpace row_space(const Arg& input) {
  check_min_dim(input, 1);
  return RowSpace(input, input.last());
}

// An operand, or none, of the input's device, dtype and shape.
inline void add_like(RowSpace& space, RowView& view, const Arg& a, const Arg& input) {
  if (!a) return;
  check_same_device(a, input);
  check_same_dtype(a, input);
  check_shape(a, input.size, input.dim);
  space.add(view, a);
}

// ---- Norms

// Absent tensors are empty Args.
struct NormInputs {
  Arg input, residual, weight, bias;
  Arg gate, gate_table, scale, scale_table, shift, shift_table, out_gate, out_gate_table;
  Arg branch_weight, scale2, scale2_table, shift2, shift2_table;
  Arg index;  // names a row of each of gate, scale, shift, out_gate, scale2 and shift2
  double eps = 0.0, weight_offset = 0.0, branch_eps = 0.0;
  bool norms_branch = false;
  Statistic statistic = Statistic::kNone;
};

inline void add_modulator(RowSpace& space, Modulator& modulator, const Arg& value, const Arg& table, const Arg& index) {
  if (table && !value) {
    const std::string name = table.name;
    fail(table.name, name.substr(0, name.rfind("_table")) + " to be given too", "a table alone");
  }
  index ? space.add_rows(modulator.value, value) : space.add_broadcast(modulator.value, value);
  space.add_vector(modulator.table, table);
}

#ifndef CUDA_KERNEL
inline void check_numbers(const Arg& index, int64_t rows) {
  if (index.numel() == 0) return;
  std::vector<int64_t> at(index.dim);
  for (;;) {
    int64_t offset = 0;
    for (int64_t d = 0; d < index.dim; ++d) offset += at[d] * index.stride[d];
    const int64_t row = number_at(index.data, index_type(index), offset);
    if (row < 0 || row >= rows) fail(index.name, text("numbers from 0 to ", rows - 1), text(row));
    int64_t d = index.dim - 1;
    for (; d >= 0 && ++at[d] == index.size[d]; --d) at[d] = 0;
    if (d < 0) return;
  }
}
#endif

// All modulators have as many rows, and the index names no others. A GPU finds out where it reads the numbers.
inline void check_index(IndexView& index, const NormInputs& a) {
  const Arg* first = nullptr;
  for (const Arg* value : {&a.gate, &a.scale, &a.shift, &a.out_gate, &a.scale2, &a.shift2}) {
    if (!*value) continue;
    const int64_t rows = value->size[value->dim - 2];
    if (first && rows != first->size[first->dim - 2]) {
      fail(value->name, text(first->size[first->dim - 2], " rows, as ", first->name, " has"),
           "shape " + shape_text(*value));
    }
    if (!first) first = value;
    index.rows = static_cast<uint32_t>(std::min<int64_t>(rows, 0x7fffffff));  // no index names others
  }
  if (!first) index.data = nullptr;
#ifndef CUDA_KERNEL
  if (first) check_numbers(a.index, index.rows);
#endif
}

inline void add_inputs(RowSpace& space, NormParams& p, const NormInputs& a) {
  p.dtype = float_dtype(a.input);
  p.statistic = a.statistic;
  if (a.norms_branch) p.branch_eps = check_eps(a.branch_eps, a.statistic == Statistic::kNone ? "eps" : "eps1");
  p.eps = check_eps(a.eps, a.norms_branch ? "eps2" : "eps");
  p.norms_branch = a.norms_branch;
  p.weight_offset = static_cast<float>(a.weight_offset);
  space.add(p.input, a.input);
  if (a.index) space.add_index(p.index, a.index);
  add_like(space, p.residual, a.residual, a.input);
  add_modulator(space, p.gate, a.gate, a.gate_table, a.index);
  space.add_vector(p.branch_weight, a.branch_weight);
  space.add_vector(p.weight, a.weight);
  space.add_vector(p.bias, a.bias);
  add_modulator(space, p.scale, a.scale, a.scale_table, a.index);
  add_modulator(space, p.shift, a.shift, a.shift_table, a.index);
  add_modulator(space, p.out_gate, a.out_gate, a.out_gate_table, a.index);
  add_modulator(space, p.scale2, a.scale2, a.scale2_table, a.index);
  add_modulator(space, p.shift2, a.shift2, a.shift2_table, a.index);
  if (a.index) check_index(p.index, a);
}

// ---- Activations

struct GluInputs {
  Arg input, up, bias;
  bool gated = false, gate_first = true;
  bool interleaved = false;  // packed gate and up are neighbours, not halves
  Activation activation = Activation::kGelu;
  double alpha = 1.0, limit = 0.0;

  bool packed() const { return gated && !up; }  // the input holds gate and up
};

inline Activation check_activation(int64_t code) {
  return check_code("activation", code, Activation::kGelu, Activation::kSilu);
}

// Columns of the output: half of a packed input.
inline int64_t output_width(const GluInputs& a) {
  check_min_dim(a.input, 1);
  if (!a.packed()) return a.input.last();
  if (a.input.last() % 2 != 0) {
    fail(a.input.name, "an even last dimension (gate and up packed)", "shape " + shape_text(a.input));
  }
  return a.input.last() / 2;
}

inline void add_inputs(RowSpace& space, GluParams& p, const GluInputs& a) {
  p.dtype = float_dtype(a.input);
  p.activation = a.activation;
  p.alpha = static_cast<float>(a.alpha);
  p.limit = static_cast<float>(a.limit);
  space.add(p.gate, a.input);
  add_like(space, p.up, a.packed() ? a.input : a.up, a.input);
  space.add_vector(p.bias, a.bias);
}

// Call it when the space is finished. Both views of a packed tensor start at its beginning. This moves the second one
// by `width` columns, or by one column where they are interleaved.
inline void part_halves(RowView& gate, RowView& up, const GluInputs& a, const Arg& tensor, int64_t width) {
  if (!a.packed()) return;
  RowView& second = a.gate_first ? up : gate;
  const int64_t stride = tensor.stride[tensor.dim - 1];
  gate.column_stride = up.column_stride = a.interleaved ? 2 * stride : stride;
  second.data = static_cast<char*>(second.data) + (a.interleaved ? 1 : width) * stride * element_size(tensor);
}

// ---- Heads

// Where batch, sequence and heads are among a tensor's dimensions; -1: it has none of that kind (size 1).
struct HeadDims {
  int64_t batch = -1, sequence = -1, head = -1;
};

inline HeadStrides strides_of(const Arg& a, const HeadDims& dims) {
  const auto stride = [&](int64_t d) { return d < 0 || a.size[d] == 1 ? 0 : a.stride[d]; };
  return {stride(dims.batch), stride(dims.sequence), stride(dims.head), a.last() == 1 ? 0 : a.stride[a.dim - 1]};
}

// ---- Gates of heads

struct HeadGateInputs {
  Arg input, logits;
  double scale = 1.0;
};

inline void check_finite_scale(double scale) {
  if (!std::isfinite(scale)) fail("scale", "a finite number", text(scale));
}

// Everything but the views: each op walks the rows in its own way.
inline void add_inputs(GluParams& p, const HeadGateInputs& a) {
  check_min_dim(a.input, 2);
  p.dtype = float_dtype(a.input);
  p.activation = Activation::kSigmoid;
  p.scale = static_cast<float>(a.scale);
  const int64_t leading = a.input.dim - 2, heads = a.input.size[leading], width = a.input.last();
  check_same_device(a.logits, a.input);
  check_same_dtype(a.logits, a.input);
  bool fits = a.logits.dim == leading + 1;
  for (int64_t d = 0; fits && d < leading; ++d) fits = a.logits.size[d] == a.input.size[d];
  const bool per_head = fits && a.logits.last() == heads;
  if (!fits || !(per_head || a.logits.last() == heads * width)) {
    std::vector<int64_t> size(a.input.size, a.input.size + leading + 1);
    std::vector<int64_t> flat = size;
    flat.back() = heads * width;
    fail(a.logits.name,
         text("shape ", shape_text(size.data(), leading + 1), " (one per head) or ",
              shape_text(flat.data(), leading + 1), " (one per column)"),
         shape_text(a.logits));
  }
  p.gate_repeat = per_head ? width : 1;
}

// A tensor with other sizes and strides.
struct Reshaped {
  std::vector<int64_t> size, stride;
  Arg a;

  explicit Reshaped(const Arg& from)
      : size(from.size, from.size + from.dim), stride(from.stride, from.stride + from.dim), a(from) {}
  const Arg& get() {
    a.dim = static_cast<int64_t>(size.size());
    a.size = size.data();
    a.stride = stride.data();
    return a;
  }
  // [..., h, D] as [..., h * D].
  const Arg& flatten() {
    if (size.back() != 1) stride[stride.size() - 2] = stride.back();
    size[size.size() - 2] *= size.back();
    size.pop_back();
    stride.pop_back();
    return get();
  }
  // [..., h] as [..., h, 1], [..., h * D] as [..., h, D].
  const Arg& unflatten(int64_t width) {
    const int64_t step = stride.back();
    size.back() /= width;
    stride.back() = step * width;
    size.push_back(width);
    stride.push_back(step);
    return get();
  }
};

inline bool has_flat_heads(const Arg& a) {
  const int64_t d = a.dim;
  return a.size[d - 2] == 1 || a.size[d - 1] == 1 || a.stride[d - 2] == a.size[d - 1] * a.stride[d - 1];
}

}  // namespace ltx::host
