// The rotary family: apply_rotary, apply_rotary_qk, qk_norm_rope (tables given) and rope (angles computed). Checks the
// tensors, reads every table form that models use as [batch, sequence, head, column] strides, fills RotaryParams
// (kernel_src/ltx/params.h has the formula) and calls ltx::rotary of the backend. Their gradients fill
// RotaryBackwardParams (kernel_src/ltx/rotary_backward.h) and call ltx::rotary_backward.
#include <algorithm>
#include <limits>

#include "ltx/rotary_backward.h"
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

int64_t size_of(const Arg& a, int64_t dim) { return dim < 0 ? 1 : a.size[dim]; }

// Dimensions before the sequence are the batch (and, in [B, H, S, D], the heads), those after it the heads.
HeadDims head_dims(const Arg& a, int64_t sequence_dim) {
  if (a.dim < 2 || a.dim > 4) fail(a.name, "2, 3 or 4 dimensions", "shape " + shape_text(a));
  const int64_t s = sequence_dim < 0 ? sequence_dim + a.dim : sequence_dim;
  if (s < 0 || s > a.dim - 2 || (a.dim == 4 && s == 0)) {
    fail("sequence_dim",
         a.dim == 4   ? "1 or 2 (of 4 dimensions)"
         : a.dim == 3 ? "0 or 1 (of 3 dimensions)"
                      : "0 (of 2 dimensions)",
         text(sequence_dim));
  }
  if (a.dim == 2) return {-1, 0, -1};
  if (a.dim == 3) return s == 1 ? HeadDims{0, 1, -1} : HeadDims{-1, 0, 1};
  return s == 1 ? HeadDims{0, 1, 2} : HeadDims{0, 2, 1};
}

struct Operand {
  Arg input, output, weight, bias, cos, sin;
  HeadDims dims;
  double eps = 0.0;
};

struct RotaryArgs {
  Operand operand[2];
  int operands = 1;
  int64_t rotary_dim = 0;
  bool interleaved = true;
  QkNorm norm = QkNorm::kNone;
  Statistic statistic = Statistic::kRms;
  double weight_offset = 0.0;
  bool cast_before_weight = false;
  Rounding rounding = Rounding::kFp32;
  bool fresh_outputs = false;
};

// How a table is read: the rotated width, one entry per pair or per element, and whether each head has its own.
struct TableForm {
  int64_t rotary_dim = 0;
  bool half_width = false;
  bool whole_width = false;
};

TableForm table_form(const Arg& table, int64_t head_dim, int64_t heads, int64_t rotary_dim) {
  const int64_t width = table.last();
  const bool may_be_whole = heads > 1 && table.dim < 4;
  if (rotary_dim != 0) {
    if (rotary_dim < 0 || rotary_dim % 2 != 0 || rotary_dim > head_dim) {
      fail("rotary_dim", text("an even number up to ", head_dim), text(rotary_dim));
    }
    if (width == rotary_dim) return {rotary_dim, false, false};
    if (2 * width == rotary_dim) return {rotary_dim, true, false};
    if (may_be_whole && rotary_dim == head_dim && width == heads * head_dim) return {rotary_dim, false, true};
    if (may_be_whole && rotary_dim == head_dim && 2 * width == heads * head_dim) return {rotary_dim, true, true};
    fail(table.name, text("a last dimension of ", rotary_dim, " or ", rotary_dim / 2, " (rotary_dim or half of it)"),
         "shape " + shape_text(table));
  }
  if (width == head_dim) return {head_dim, false, false};
  if (2 * width == head_dim) return {head_dim, true, false};
  if (may_be_whole && width == heads * head_dim) return {head_dim, false, true};
  if (may_be_whole && 2 * width == heads * head_dim) return {head_dim, true, true};
  if (width < head_dim && width % 2 == 0 && width > 0) return {width, false, false};
  std::string expected = text("a last dimension of ", head_dim, " or ", head_dim / 2);
  if (may_be_whole) expected += text(", ", heads * head_dim, " or ", heads * head_dim / 2, " (own angles per head)");
  fail(table.name, text(expected, ", or an even one below ", head_dim, " (partial rotary)"),
       "shape " + shape_text(table));
}

// Reads a table as [batch, sequence, head, column]. `rows` is the sequence length it must have: the longer one where
// query and key share a table.
HeadStrides table_strides(const Arg& table, const TableForm& form, int64_t batch, int64_t rows, int64_t heads,
                          int64_t head_dim) {
  HeadDims dims;
  if (table.dim == 2) {
    dims = {-1, 0, -1};
  } else if (table.dim == 3) {
    dims = {0, 1, -1};
  } else if (table.dim == 4) {
    // [B, H, S, W] unless only the second dimension can be the sequence.
    const bool heads_first = table.size[2] == rows || table.size[1] != rows;
    dims = heads_first ? HeadDims{0, 2, 1} : HeadDims{0, 1, 2};
  } else {
    fail(table.name, "2, 3 or 4 dimensions", "shape " + shape_text(table));
  }
  const auto fits = [&](int64_t d, int64_t size) { return d < 0 || table.size[d] == 1 || table.size[d] == size; };
  if (!fits(dims.batch, batch) || !fits(dims.sequence, rows) || !fits(dims.head, heads)) {
    const std::string width = std::to_string(table.last());
    const std::string b = std::to_string(batch), s = std::to_string(rows), h = std::to_string(heads);
    fail(table.name,
         text("shape [", s, ", ", width, "], [", b, ", ", s, ", ", width, "], [", b, ", ", h, ", ", s, ", ", width,
              "] or [", b, ", ", s, ", ", h, ", ", width, "] (any leading size may be 1)"),
         shape_text(table));
  }
  HeadStrides strides = strides_of(table, dims);
  if (form.whole_width) strides.head = strides.column * (form.half_width ? head_dim / 2 : head_dim);
  return strides;
}

// A norm's weight or bias.
void check_vector(const Arg& vector, const Arg& input, int64_t width, const void*& data, DType& dtype,
                  int64_t& stride) {
  if (!vector) return;
  check_same_device(vector, input);
  dtype = float_dtype(vector);
  check_shape(vector, {width});
  data = vector.data;
  stride = vector.last() == 1 ? 0 : vector.stride[0];
}

// Everything about the inputs but their tables.
void check_inputs(RotaryArgs& a, RotaryParams& p) {
  const Arg& query = a.operand[0].input;
  p.operands = a.operands;
  p.dtype = float_dtype(query);
  p.interleaved = a.interleaved;
  p.norm = a.norm;
  p.statistic = a.statistic;
  p.rounding = a.rounding;
  p.cast_before_weight = a.cast_before_weight;
  p.weight_offset = static_cast<float>(a.weight_offset);
  const bool layer = a.statistic == Statistic::kLayer;
  if (layer && a.cast_before_weight) fail("cast_before_weight", "False with a layer norm", "True");
  p.batch = size_of(query, a.operand[0].dims.batch);
  p.head_dim = query.last();
  if (p.head_dim % 2 != 0) fail(query.name, "an even last dimension", "shape " + shape_text(query));
  for (int i = 0; i < a.operands; ++i) {
    const Operand& o = a.operand[i];
    RotaryOperand& r = p.operand[i];
    if (i > 0) {
      check_same_device(o.input, query);
      check_same_dtype(o.input, query);
      check_dim(o.input, query.dim);
      if (o.input.last() != p.head_dim || size_of(o.input, o.dims.batch) != p.batch) {
        fail(o.input.name, text("the batch size and last dimension of ", query.name, " ", shape_text(query)),
             "shape " + shape_text(o.input));
      }
    }
    r.input = o.input.data;
    r.input_stride = strides_of(o.input, o.dims);
    r.sequence = size_of(o.input, o.dims.sequence);
    r.heads = size_of(o.input, o.dims.head);
    r.eps = check_eps(o.eps, i == 0 ? "eps" : "key_eps");
    const int64_t width = a.norm == QkNorm::kAcrossHeads ? r.heads * p.head_dim : p.head_dim;
    check_vector(o.weight, o.input, width, r.weight, r.weight_dtype, r.weight_stride);
    if (o.bias && !layer) fail(o.bias.name, "None with an rms norm", "a tensor");
    check_vector(o.bias, o.input, width, r.bias, r.bias_dtype, r.bias_stride);
  }
}

void check_tables(RotaryArgs& a, RotaryParams& p, bool shared) {
  TableForm first;
  for (int i = 0; i < a.operands; ++i) {
    const Operand& o = a.operand[i];
    RotaryOperand& r = p.operand[i];
    check_same_device(o.cos, o.input);
    check_same_device(o.sin, o.input);
    const DType dtype = float_dtype(o.cos);
    if (dtype != DType::kFloat32 && dtype != p.dtype) {
      fail(o.cos.name, text("dtype float32 or ", dtype_text(o.input.dtype), " (that of ", o.input.name, ")"),
           dtype_text(o.cos.dtype));
    }
    check_same_dtype(o.sin, i == 0 ? o.cos : a.operand[0].cos);
    check_same_dtype(o.cos, a.operand[0].cos);
    check_shape(o.sin, o.cos.size, o.cos.dim);
    check_min_dim(o.cos, 2);
    p.table_dtype = dtype;
    const TableForm form = table_form(o.cos, p.head_dim, r.heads, a.rotary_dim);
    if (i == 0) first = form;
    if (form.rotary_dim != first.rotary_dim || form.half_width != first.half_width) {
      fail(o.cos.name, text("a table of the same kind as ", a.operand[0].cos.name, " ", shape_text(a.operand[0].cos)),
           "shape " + shape_text(o.cos));
    }
    const int64_t rows =
        shared && a.operands == 2 ? std::max(p.operand[0].sequence, p.operand[1].sequence) : r.sequence;
    r.cos = o.cos.data;
    r.sin = o.sin.data;
    r.cos_stride = table_strides(o.cos, form, p.batch, rows, r.heads, p.head_dim);
    r.sin_stride = table_strides(o.sin, form, p.batch, rows, r.heads, p.head_dim);
  }
  p.rotary_dim = first.rotary_dim;
  p.half_width_table = first.half_width;
}

void check_outputs(RotaryArgs& a, RotaryParams& p) {
  for (int i = 0; i < a.operands; ++i) {
    const Operand& o = a.operand[i];
    p.operand[i].output = o.output.data;
    p.operand[i].output_stride = strides_of(o.output, o.dims);
    if (a.fresh_outputs) continue;
    check_output(o.output, o.input, o.input.size, o.input.dim);
    for (int j = 0; j < a.operands; ++j) {
      check_overlap(o.output, a.operand[j].input, i == j);
      check_overlap(o.output, a.operand[j].weight, false);
      check_overlap(o.output, a.operand[j].bias, false);
      check_overlap(o.output, a.operand[j].cos, false);
      check_overlap(o.output, a.operand[j].sin, false);
      if (j < i) check_overlap(o.output, a.operand[j].output, false);
    }
  }
}

void launch(const RotaryArgs& a, const RotaryParams& p, const RotaryAngles* angles) {
  bool empty = p.batch == 0 || p.head_dim == 0;
  int64_t tokens = 0;
  for (int i = 0; i < p.operands; ++i) tokens += p.operand[i].sequence * p.operand[i].heads;
  if (empty || tokens == 0) return;
  Launch where(a.operand[0].input);
  ltx::rotary(p, angles, where.context());
}

void run_with_tables(RotaryArgs& a, bool shared) {
  RotaryParams p;
  check_inputs(a, p);
  check_tables(a, p, shared);
  check_outputs(a, p);
  launch(a, p, nullptr);
}

// A new tensor in the memory order of `input` (torch's preserve_format).
Tensor empty_in_order(const Tensor& input, const Arg& a) {
  bool contiguous = true;
  int64_t step = 1;
  for (int64_t d = a.dim - 1; contiguous && d >= 0; --d) {
    contiguous = a.stride[d] == step && a.size[d] > 0;
    step *= a.size[d];
  }
  if (contiguous) return empty_strided(a.size, a.stride, a.dim, a);
  try {
    return torch::stable::empty_like(input);
  } catch (const std::runtime_error&) {
    fail_memory(a.size, a.dim, a);
  }
}

Tensor set_fresh_output(Operand& operand, const char* name, const Tensor& input) {
  Tensor out = empty_in_order(input, operand.input);
  operand.output = arg(name, out);
  return out;
}

// ---- Tables given

RotaryArgs single_args(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t sequence_dim,
                       int64_t rotary_dim, bool interleaved, int64_t rounding) {
  RotaryArgs a;
  a.operand[0].input = arg("input", input);
  a.operand[0].dims = head_dims(a.operand[0].input, sequence_dim);
  a.operand[0].cos = arg("cos", cos);
  a.operand[0].sin = arg("sin", sin);
  a.rotary_dim = rotary_dim;
  a.interleaved = interleaved;
  a.rounding = check_rounding(rounding);
  return a;
}

RotaryArgs pair_args(const Tensor& query, const Tensor& key, int64_t sequence_dim, int64_t rotary_dim, bool interleaved,
                     int64_t rounding) {
  RotaryArgs a;
  a.operands = 2;
  a.operand[0].input = arg("query", query);
  a.operand[1].input = arg("key", key);
  a.operand[0].dims = head_dims(a.operand[0].input, sequence_dim);
  a.operand[1].dims = head_dims(a.operand[1].input, sequence_dim);
  a.rotary_dim = rotary_dim;
  a.interleaved = interleaved;
  a.rounding = check_rounding(rounding);
  return a;
}

void set_tables(RotaryArgs& a, const Tensor& cos, const Tensor& sin) {
  for (Operand& o : a.operand) {
    o.cos = arg("cos", cos);
    o.sin = arg("sin", sin);
  }
}

RotaryArgs qk_norm_args(const Tensor& query, const Tensor& key, const OptionalTensor& query_weight,
                        const OptionalTensor& key_weight, const OptionalTensor& query_bias,
                        const OptionalTensor& key_bias, const Tensor& cos, const Tensor& sin,
                        const OptionalTensor& key_cos, const OptionalTensor& key_sin, double eps, double key_eps,
                        double weight_offset, int64_t statistic, bool across_heads, bool cast_before_weight,
                        int64_t rotary_dim, bool interleaved, int64_t rounding) {
  check_dim(arg("query", query), 4);
  RotaryArgs a = pair_args(query, key, 1, rotary_dim, interleaved, rounding);
  a.statistic = check_code("statistic", statistic, Statistic::kRms, Statistic::kLayer);
  a.operand[0].weight = arg("query_weight", query_weight);
  a.operand[1].weight = arg("key_weight", key_weight);
  a.operand[0].bias = arg("query_bias", query_bias);
  a.operand[1].bias = arg("key_bias", key_bias);
  a.operand[0].eps = eps;
  a.operand[1].eps = key_eps;
  a.weight_offset = weight_offset;
  a.cast_before_weight = cast_before_weight;
  set_tables(a, cos, sin);
  if (key_cos || key_sin) {
    if (!key_cos || !key_sin) fail(key_cos ? "key_sin" : "key_cos", "both key_cos and key_sin, or neither", "None");
    a.operand[1].cos = arg("key_cos", key_cos);
    a.operand[1].sin = arg("key_sin", key_sin);
  }
  a.norm = across_heads ? QkNorm::kAcrossHeads : QkNorm::kPerHead;
  return a;
}

// ---- Angles computed

struct RopeArgs {
  RotaryArgs rotary;
  Arg positions;
  std::vector<int64_t> grid, axis_dims;
  std::vector<double> theta;
};

RopeArgs rope_args(const Tensor& query, const Tensor& key, const OptionalTensor& positions, std::vector<int64_t> grid,
                   std::vector<int64_t> axis_dims, std::vector<double> theta, bool interleaved) {
  check_dim(arg("query", query), 4);
  RopeArgs a;
  a.rotary = pair_args(query, key, 1, 0, interleaved, static_cast<int64_t>(Rounding::kFp32));
  a.positions = arg("positions", positions);
  a.grid = std::move(grid);
  a.axis_dims = std::move(axis_dims);
  a.theta = std::move(theta);
  return a;
}

// The frequencies of the last call on this thread: the 64 pow() of a head cost more than the rest of the call.
const RotaryAngles& angles_for(const std::vector<int64_t>& axis_dims, const std::vector<double>& theta) {
  thread_local std::vector<int64_t> last_dims;
  thread_local std::vector<double> last_theta;
  thread_local RotaryAngles angles;
  if (axis_dims != last_dims || theta != last_theta) {
    int32_t pair = 0;
    for (size_t axis = 0; axis < axis_dims.size(); ++axis) {
      const double dim = static_cast<double>(axis_dims[axis]);
      for (int64_t j = 0; j < axis_dims[axis] / 2; ++j) {
        angles.inverse_frequency[pair++] = static_cast<float>(1.0 / std::pow(theta[axis], 2.0 * j / dim));
      }
      angles.axis_end[axis + 3 - axis_dims.size()] = pair;
    }
    if (axis_dims.size() == 1) angles.axis_end[0] = angles.axis_end[1] = 0;  // rope_1d: only the fastest axis turns
    last_dims = axis_dims;
    last_theta = theta;
  }
  return angles;
}

void run_rope(RopeArgs& a) {
  RotaryParams p;
  check_inputs(a.rotary, p);
  const size_t axes = a.grid.size();
  if (!(axes == 1 || axes == 3) || a.axis_dims.size() != axes || a.theta.size() != axes) {
    fail("grid", "1 or 3 axes, with as many rope_dims and theta_base", text(axes));
  }
  int64_t tokens = 1, dims = 0;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (size_t axis = 0; axis < axes; ++axis) {
    constexpr const char* kSizes[] = {"num_frames", "height", "width"};
    if (axes == 3 && a.grid[axis] < 0) fail(kSizes[axis], "a number >= 0", text(a.grid[axis]));
    if (a.axis_dims[axis] < 0 || a.axis_dims[axis] % 2 != 0) {
      fail("rope_dims", "even numbers >= 0", shape_text(a.axis_dims.data(), static_cast<int64_t>(axes)));
    }
    if (!(a.theta[axis] > 0) || std::isinf(a.theta[axis])) {
      fail("theta_base", "finite numbers > 0", text(a.theta[axis]));
    }
    const int64_t size = a.grid[axis], part = a.axis_dims[axis];
    tokens = size > 0 && tokens > kMost / size ? kMost : tokens * size;  // no tensor is that large
    dims = dims > kMost - part ? kMost : dims + part;
  }
  if (dims != p.head_dim) {
    fail("rope_dims", text("a sum of ", p.head_dim, " (the last dimension of query)"),
         shape_text(a.axis_dims.data(), static_cast<int64_t>(axes)));
  }
  if (p.head_dim > 2 * kMaxPairs) {
    fail("query", text("a last dimension of at most ", 2 * kMaxPairs),
         "shape " + shape_text(a.rotary.operand[0].input));
  }
  for (int i = 0; axes == 3 && i < 2; ++i) {
    if (p.operand[i].sequence != tokens) {
      fail(a.rotary.operand[i].input.name,
           text("a sequence of ", a.grid[0], " * ", a.grid[1], " * ", a.grid[2], " = ", tokens,
                " (num_frames * height * width)"),
           "shape " + shape_text(a.rotary.operand[i].input));
    }
  }
  RotaryAngles angles = angles_for(a.axis_dims, a.theta);
  for (size_t axis = 0; axis < axes; ++axis) angles.grid[3 - axes + axis] = a.grid[axis];
  if (axes == 1) angles.grid[2] = std::max(p.operand[0].sequence, p.operand[1].sequence);  // positions count on
  if (a.positions) {
    const Arg& positions = a.positions;
    if (axes != 1) fail("positions", "None with a 3-D grid", "a tensor");
    check_same_device(positions, a.rotary.operand[0].input);
    if (positions.dtype == aoti_torch_dtype_int64()) {
      angles.position_type = PositionType::kInt64;
    } else if (positions.dtype == aoti_torch_dtype_int32()) {
      angles.position_type = PositionType::kInt32;
    } else if (positions.dtype == aoti_torch_dtype_float32()) {
      angles.position_type = PositionType::kFloat32;
    } else {
      fail("positions", "dtype int64, int32 or float32", dtype_text(positions.dtype));
    }
    const int64_t rows = p.operand[0].sequence;
    if (p.operand[1].sequence != rows) {
      fail("key",
           text("the sequence length of query ", shape_text(a.rotary.operand[0].input), " (positions are shared)"),
           "shape " + shape_text(a.rotary.operand[1].input));
    }
    const bool per_batch = positions.dim == 2;
    if (!(positions.dim == 1 && positions.size[0] == rows) &&
        !(per_batch && positions.size[1] == rows && (positions.size[0] == p.batch || positions.size[0] == 1))) {
      fail("positions", text("shape [", rows, "] or [", p.batch, ", ", rows, "]"), shape_text(positions));
    }
    angles.positions = positions.data;
    angles.position_stride_batch = per_batch && positions.size[0] != 1 ? positions.stride[0] : 0;
    angles.position_stride_sequence = positions.stride[positions.dim - 1];
  }
  p.rotary_dim = p.head_dim;
  p.table_dtype = DType::kFloat32;
  check_outputs(a.rotary, p);
  for (const Operand& o : a.rotary.operand) {
    if (!a.rotary.fresh_outputs) check_overlap(o.output, a.positions, false);
  }
  launch(a.rotary, p, &angles);
}

}  // namespace

void apply_rotary_out(const Tensor& out, const Tensor& input, const Tensor& cos, const Tensor& sin,
                      int64_t sequence_dim, int64_t rotary_dim, bool interleaved, int64_t rounding) {
  RotaryArgs a = single_args(input, cos, sin, sequence_dim, rotary_dim, interleaved, rounding);
  a.operand[0].output = mutable_arg("out", out);
  run_with_tables(a, false);
}

Tensor apply_rotary(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t sequence_dim, int64_t rotary_dim,
                    bool interleaved, int64_t rounding) {
  RotaryArgs a = single_args(input, cos, sin, sequence_dim, rotary_dim, interleaved, rounding);
  Tensor out = set_fresh_output(a.operand[0], "out", input);
  a.fresh_outputs = true;
  run_with_tables(a, false);
  return out;
}

void apply_rotary_qk_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query, const Tensor& key,
                         const Tensor& cos, const Tensor& sin, int64_t sequence_dim, int64_t rotary_dim,
                         bool interleaved, int64_t rounding) {
  RotaryArgs a = pair_args(query, key, sequence_dim, rotary_dim, interleaved, rounding);
  set_tables(a, cos, sin);
  a.operand[0].output = mutable_arg("out[0]", query_out);
  a.operand[1].output = mutable_arg("out[1]", key_out);
  run_with_tables(a, true);
}

std::tuple<Tensor, Tensor> apply_rotary_qk(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin,
                                           int64_t sequence_dim, int64_t rotary_dim, bool interleaved,
                                           int64_t rounding) {
  RotaryArgs a = pair_args(query, key, sequence_dim, rotary_dim, interleaved, rounding);
  set_tables(a, cos, sin);
  Tensor query_out = set_fresh_output(a.operand[0], "out[0]", query);
  Tensor key_out = set_fresh_output(a.operand[1], "out[1]", key);
  a.fresh_outputs = true;
  run_with_tables(a, true);
  return {query_out, key_out};
}

void qk_norm_rope_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query, const Tensor& key,
                      const OptionalTensor& query_weight, const OptionalTensor& key_weight,
                      const OptionalTensor& query_bias, const OptionalTensor& key_bias, const Tensor& cos,
                      const Tensor& sin, const OptionalTensor& key_cos, const OptionalTensor& key_sin, double eps,
                      double key_eps, double weight_offset, int64_t statistic, bool across_heads,
                      bool cast_before_weight, int64_t rotary_dim, bool interleaved, int64_t rounding) {
  RotaryArgs a =
      qk_norm_args(query, key, query_weight, key_weight, query_bias, key_bias, cos, sin, key_cos, key_sin, eps, key_eps,
                   weight_offset, statistic, across_heads, cast_before_weight, rotary_dim, interleaved, rounding);
  a.operand[0].output = mutable_arg("out[0]", query_out);
  a.operand[1].output = mutable_arg("out[1]", key_out);
  run_with_tables(a, !key_cos);
}

std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& query, const Tensor& key, const OptionalTensor& query_weight,
                                        const OptionalTensor& key_weight, const OptionalTensor& query_bias,
                                        const OptionalTensor& key_bias, const Tensor& cos, const Tensor& sin,
                                        const OptionalTensor& key_cos, const OptionalTensor& key_sin, double eps,
                                        double key_eps, double weight_offset, int64_t statistic, bool across_heads,
                                        bool cast_before_weight, int64_t rotary_dim, bool interleaved,
                                        int64_t rounding) {
  RotaryArgs a =
      qk_norm_args(query, key, query_weight, key_weight, query_bias, key_bias, cos, sin, key_cos, key_sin, eps, key_eps,
                   weight_offset, statistic, across_heads, cast_before_weight, rotary_dim, interleaved, rounding);
  Tensor query_out = set_fresh_output(a.operand[0], "out[0]", query);
  Tensor key_out = set_fresh_output(a.operand[1], "out[1]", key);
  a.fresh_outputs = true;
  run_with_tables(a, !key_cos);
  return {query_out, key_out};
}

void rope_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query, const Tensor& key,
              const OptionalTensor& positions, std::vector<int64_t> grid, std::vector<int64_t> axis_dims,
              std::vector<double> theta, bool interleaved) {
  RopeArgs a = rope_args(query, key, positions, std::move(grid), std::move(axis_dims), std::move(theta), interleaved);
  a.rotary.operand[0].output = mutable_arg("out[0]", query_out);
  a.rotary.operand[1].output = mutable_arg("out[1]", key_out);
  run_rope(a);
}

std::tuple<Tensor, Tensor> rope(const Tensor& query, const Tensor& key, const OptionalTensor& positions,
                                std::vector<int64_t> grid, std::vector<int64_t> axis_dims, std::vector<double> theta,
                                bool interleaved) {
  RopeArgs a = rope_args(query, key, positions, std::move(grid), std::move(axis_dims), std::move(theta), interleaved);
  Tensor query_out = set_fresh_output(a.rotary.operand[0], "out[0]", query);
  Tensor key_out = set_fresh_output(a.rotary.operand[1], "out[1]", key);
  a.rotary.fresh_outputs = true;
  run_rope(a);
  return {query_out, key_out};
}

// ---- Gradients

namespace {

// The gradients of the operands, given those of the results. `shared`: query and key have one table.
void run_backward(RotaryArgs& a, const Arg* grads, bool shared) {
  RotaryBackwardParams p;
  a.fresh_outputs = true;
  check_inputs(a, p);
  check_tables(a, p, shared);
  check_outputs(a, p);
  for (int i = 0; i < a.operands; ++i) {
    const Arg &grad = grads[i], &input = a.operand[i].input;
    check_same_device(grad, input);
    check_same_dtype(grad, input);
    check_shape(grad, input.size, input.dim);
    p.grad[i] = grad.data;
    p.grad_stride[i] = strides_of(grad, a.operand[i].dims);
  }
  int64_t tokens = 0;
  for (int i = 0; i < p.operands; ++i) tokens += p.operand[i].sequence * p.operand[i].heads;
  if (p.batch == 0 || p.head_dim == 0 || tokens == 0) return;
  Launch where(a.operand[0].input);
  ltx::rotary_backward(p, where.context());
}

}  // namespace

Tensor apply_rotary_backward(const Tensor& grad, const Tensor& cos, const Tensor& sin, int64_t sequence_dim,
                             int64_t rotary_dim, bool interleaved) {
  RotaryArgs a = single_args(grad, cos, sin, sequence_dim, rotary_dim, interleaved, 0);
  const Arg grads[] = {a.operand[0].input};
  Tensor out = set_fresh_output(a.operand[0], "out", grad);
  run_backward(a, grads, false);
  return out;
}

std::tuple<Tensor, Tensor> apply_rotary_qk_backward(const Tensor& grad_query, const Tensor& grad_key, const Tensor& cos,
                                                    const Tensor& sin, int64_t sequence_dim, int64_t rotary_dim,
                                                    bool interleaved) {
  RotaryArgs a = pair_args(grad_query, grad_key, sequence_dim, rotary_dim, interleaved, 0);
  set_tables(a, cos, sin);
  const Arg grads[] = {a.operand[0].input, a.operand[1].input};
  Tensor to_query = set_fresh_output(a.operand[0], "out[0]", grad_query);
  Tensor to_key = set_fresh_output(a.operand[1], "out[1]", grad_key);
  run_backward(a, grads, true);
  return {to_query, to_key};
}

std::tuple<Tensor, Tensor> qk_norm_rope_backward(const Tensor& grad_query, const Tensor& grad_key, const Tensor& query,
                                                 const Tensor& key, const OptionalTensor& query_weight,
                                                 const OptionalTensor& key_weight, const Tensor& cos, const Tensor& sin,
                                                 const OptionalTensor& key_cos, const OptionalTensor& key_sin,
                                                 double eps, double key_eps, double weight_offset, int64_t statistic,
                                                 bool across_heads, int64_t rotary_dim, bool interleaved) {
  RotaryArgs a =
      qk_norm_args(query, key, query_weight, key_weight, std::nullopt, std::nullopt, cos, sin, key_cos, key_sin, eps,
                   key_eps, weight_offset, statistic, across_heads, false, rotary_dim, interleaved, 0);
  const Arg grads[] = {arg("grad_query", grad_query), arg("grad_key", grad_key)};
  Tensor to_query = set_fresh_output(a.operand[0], "out[0]", query);
  Tensor to_key = set_fresh_output(a.operand[1], "out[1]", key);
  run_backward(a, grads, !key_cos);
  return {to_query, to_key};
}

}  // namespace ltx::host
