// Rows quantised to fp8: the norm family (norm_quant, residual_norm_quant), the activations (glu_quant, gelu_quant) and
// gate_heads_quant.
// Checks the tensors, fills the params of the op that is quantised and calls ltx::norm_quant or ltx::glu_quant.
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

// The quantised rows, new: values in the input's shape with `width` columns, and one scale a row.
struct Quantised {
  Tensor values, scales;
};

Quantised empty_quantised(const Arg& input, int64_t width) {
  Arg values = input, scales = input;
  values.dtype = aoti_torch_dtype_float8_e4m3fn();
  scales.dtype = aoti_torch_dtype_float32();
  return {empty_rows(values, width), empty_rows(scales, 1)};
}

QuantOutput output_of(const Quantised& result, const Arg& static_scale) {
  QuantOutput output;
  output.values = static_cast<uint8_t*>(result.values.mutable_data_ptr());
  output.scales = static_cast<float*>(result.scales.mutable_data_ptr());
  output.static_scale = static_cast<const float*>(static_scale.data);
  return output;
}

void check_static_scale(const Arg& a, const Arg& input) {
  if (!a) return;
  check_same_device(a, input);
  if (a.dtype != aoti_torch_dtype_float32()) fail(a.name, "dtype float32", dtype_text(a.dtype));
  if (a.numel() != 1) fail(a.name, "one element", "shape " + shape_text(a));
}

// ---- Norms

struct NormArgs : NormInputs {
  Arg static_scale;
};

// `residual_out`: null without a residual; `second`: null without a second modulation.
Quantised run(const NormArgs& a, Tensor* residual_out, Quantised* second = nullptr);

// Rows without columns have the scale of rows of zeros.
void finish_empty(Quantised& result, const Arg& static_scale) {
  if (result.scales.numel() == 0) return;
  torch::stable::zero_(result.scales);
  NormArgs zeros;
  zeros.input = arg("input", result.scales);
  zeros.static_scale = static_scale;
  zeros.statistic = Statistic::kNone;
  result.scales = run(zeros, nullptr).scales;
}

Quantised run(const NormArgs& a, Tensor* residual_out, Quantised* second) {
  RowSpace space = row_space(a.input);
  NormParams p;
  add_inputs(space, p, a);
  check_static_scale(a.static_scale, a.input);
  Quantised result = empty_quantised(a.input, a.input.last());
  if (second) *second = empty_quantised(a.input, a.input.last());
  Arg residual_out_arg;
  if (residual_out) {
    *residual_out = empty_rows(a.input, a.input.last());
    residual_out_arg = arg("residual_out", *residual_out);
    space.add(p.residual_out, residual_out_arg);
  }
  if (space.finish(p.rows)) {
    Launch launch(a.input);
    p.quantised = output_of(result, a.static_scale);
    if (second) p.quantised2 = output_of(*second, a.static_scale);
    ltx::norm_quant(p, launch.context());
  } else {
    finish_empty(result, a.static_scale);
    if (second) finish_empty(*second, a.static_scale);
  }
  return result;
}

Statistic check_statistic(int64_t code, Statistic first = Statistic::kNone) {
  return check_code("statistic", code, first, Statistic::kLayer);
}

// The norm of an op with two modulations.
void add_pair(NormArgs& a, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
              const OptionalTensor& shift, const Tensor& scale2, const OptionalTensor& shift2,
              const OptionalTensor& scale_table, const OptionalTensor& shift_table, const OptionalTensor& scale2_table,
              const OptionalTensor& shift2_table, const OptionalTensor& static_scale, double eps, int64_t statistic) {
  a.weight = arg("weight", weight);
  a.bias = arg("bias", bias);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.scale2 = arg("scale2", scale2);
  a.shift2 = arg("shift2", shift2);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  a.scale2_table = arg("scale2_table", scale2_table);
  a.shift2_table = arg("shift2_table", shift2_table);
  a.static_scale = arg("static_scale", static_scale);
  a.eps = eps;
  a.statistic = check_statistic(statistic, Statistic::kRms);
}

// ---- Activations

struct GluArgs : GluInputs {
  Arg prefix, static_scale;
};

// Columns that stand before the result's in each row.
void add_prefix(RowSpace& space, GluParams& p, const Arg& prefix, const Arg& input) {
  if (!prefix) return;
  check_same_device(prefix, input);
  check_same_dtype(prefix, input);
  bool fits = prefix.dim == input.dim;
  for (int64_t d = 0; fits && d + 1 < input.dim; ++d) fits = prefix.size[d] == input.size[d];
  if (!fits) fail(prefix.name, "the leading sizes of input " + shape_text(input), "shape " + shape_text(prefix));
  p.prefix_width = prefix.last();
  if (p.prefix_width > 0) space.add(p.prefix, prefix);
}

Quantised run(const GluArgs& a) {
  const int64_t width = output_width(a);
  GluParams p;
  RowSpace space(a.input, width);
  add_inputs(space, p, a);
  add_prefix(space, p, a.prefix, a.input);
  check_static_scale(a.static_scale, a.input);
  if (width == 0 && p.prefix_width > 0) {  // rows of the prefix alone
    NormArgs alone;
    alone.input = a.prefix;
    alone.static_scale = a.static_scale;
    alone.statistic = Statistic::kNone;
    return run(alone, nullptr);
  }
  Quantised result = empty_quantised(a.input, p.prefix_width + width);
  if (!space.finish(p.rows)) {
    finish_empty(result, a.static_scale);
    return result;
  }
  part_halves(p.gate, p.up, a, a.input, width);
  Launch launch(a.input);
  ltx::glu_quant(p, output_of(result, a.static_scale), launch.context());
  return result;
}

// ---- Gates of heads

// The heads of a row lie side by side.
Quantised run(const HeadGateInputs& a, const Arg& static_scale) {
  GluParams p;
  add_inputs(p, a);
  check_static_scale(static_scale, a.input);
  Reshaped input(a.input);
  const Arg& rows = input.flatten();
  Quantised result = empty_quantised(rows, rows.last());
  RowSpace space(rows, rows.last());
  space.add(p.up, rows);
  space.add(p.gate, a.logits);
  if (!space.finish(p.rows)) {
    finish_empty(result, static_scale);
    return result;
  }
  Launch launch(a.input);
  ltx::glu_quant(p, output_of(result, static_scale), launch.context());
  return result;
}

}  // namespace

std::tuple<Tensor, Tensor> norm_quant(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                      const OptionalTensor& scale, const OptionalTensor& shift,
                                      const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                                      const OptionalTensor& static_scale, const OptionalTensor& index, double eps,
                                      double weight_offset, int64_t statistic) {
  NormArgs a;
  a.input = arg("input", input);
  a.index = arg("index", index);
  a.weight = arg("weight", weight);
  a.bias = arg("bias", bias);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  a.static_scale = arg("static_scale", static_scale);
  a.eps = eps;
  a.weight_offset = weight_offset;
  a.statistic = check_statistic(statistic);
  Quantised result = run(a, nullptr);
  return {result.values, result.scales};
}

std::tuple<Tensor, Tensor, Tensor> residual_norm_quant(const Tensor& input, const Tensor& residual,
                                                       const OptionalTensor& gate, const OptionalTensor& weight,
                                                       const OptionalTensor& bias, const OptionalTensor& scale,
                                                       const OptionalTensor& shift, const OptionalTensor& gate_table,
                                                       const OptionalTensor& scale_table,
                                                       const OptionalTensor& shift_table,
                                                       const OptionalTensor& static_scale, const OptionalTensor& index,
                                                       double eps, double weight_offset, int64_t statistic) {
  NormArgs a;
  a.input = arg("input", input);
  a.index = arg("index", index);
  a.residual = arg("residual", residual);
  a.gate = arg("gate", gate);
  a.weight = arg("weight", weight);
  a.bias = arg("bias", bias);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.gate_table = arg("gate_table", gate_table);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  a.static_scale = arg("static_scale", static_scale);
  a.eps = eps;
  a.weight_offset = weight_offset;
  a.statistic = check_statistic(statistic);
  Tensor residual_out;
  Quantised result = run(a, &residual_out);
  return {result.values, result.scales, residual_out};
}

std::tuple<Tensor, Tensor, Tensor> norm_residual_norm_quant(
    const Tensor& input, const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight1,
    const OptionalTensor& weight2, const OptionalTensor& scale, const OptionalTensor& shift,
    const OptionalTensor& gate_table, const OptionalTensor& scale_table, const OptionalTensor& shift_table,
    const OptionalTensor& static_scale, const OptionalTensor& index, double eps1, double eps2, double weight_offset) {
  NormArgs a;
  a.input = arg("input", input);
  a.index = arg("index", index);
  a.residual = arg("residual", residual);
  a.gate = arg("gate", gate);
  a.branch_weight = arg("weight1", weight1);
  a.weight = arg("weight2", weight2);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.gate_table = arg("gate_table", gate_table);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  a.static_scale = arg("static_scale", static_scale);
  a.norms_branch = true;
  a.branch_eps = eps1;
  a.eps = eps2;
  a.weight_offset = weight_offset;
  a.statistic = Statistic::kRms;
  Tensor residual_out;
  Quantised result = run(a, &residual_out);
  return {result.values, result.scales, residual_out};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> adaln_norm_pair_quant(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
    const OptionalTensor& shift, const Tensor& scale2, const OptionalTensor& shift2, const OptionalTensor& scale_table,
    const OptionalTensor& shift_table, const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
    const OptionalTensor& static_scale, const OptionalTensor& index, double eps, int64_t statistic) {
  NormArgs a;
  a.input = arg("input", input);
  a.index = arg("index", index);
  add_pair(a, weight, bias, scale, shift, scale2, shift2, scale_table, shift_table, scale2_table, shift2_table,
           static_scale, eps, statistic);
  Quantised second, first = run(a, nullptr, &second);
  return {first.values, first.scales, second.values, second.scales};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> residual_norm_pair_quant(
    const Tensor& input, const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight,
    const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift, const Tensor& scale2,
    const OptionalTensor& shift2, const OptionalTensor& gate_table, const OptionalTensor& scale_table,
    const OptionalTensor& shift_table, const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
    const OptionalTensor& static_scale, const OptionalTensor& index, double eps, int64_t statistic) {
  NormArgs a;
  a.input = arg("input", input);
  a.index = arg("index", index);
  a.residual = arg("residual", residual);
  a.gate = arg("gate", gate);
  a.gate_table = arg("gate_table", gate_table);
  add_pair(a, weight, bias, scale, shift, scale2, shift2, scale_table, shift_table, scale2_table, shift2_table,
           static_scale, eps, statistic);
  Tensor residual_out;
  Quantised second, first = run(a, &residual_out, &second);
  return {first.values, first.scales, second.values, second.scales, residual_out};
}

std::tuple<Tensor, Tensor> glu_quant(const Tensor& input, const OptionalTensor& up, const OptionalTensor& prefix,
                                     const OptionalTensor& static_scale, int64_t activation, bool gate_first) {
  GluArgs a;
  a.input = arg("input", input);
  a.up = arg("up", up);
  a.prefix = arg("prefix", prefix);
  a.static_scale = arg("static_scale", static_scale);
  a.gated = true;
  a.gate_first = gate_first;
  a.activation = check_activation(activation);
  Quantised result = run(a);
  return {result.values, result.scales};
}

std::tuple<Tensor, Tensor> gelu_quant(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& prefix,
                                      const OptionalTensor& static_scale, int64_t activation) {
  GluArgs a;
  a.input = arg("input", input);
  a.bias = arg("bias", bias);
  a.prefix = arg("prefix", prefix);
  a.static_scale = arg("static_scale", static_scale);
  a.activation = check_activation(activation);
  Quantised result = run(a);
  return {result.values, result.scales};
}

std::tuple<Tensor, Tensor> gate_heads_quant(const Tensor& input, const Tensor& logits,
                                            const OptionalTensor& static_scale, double scale) {
  check_finite_scale(scale);
  HeadGateInputs a;
  a.input = arg("input", input);
  a.logits = arg("logits", logits);
  a.scale = scale;
  check_min_dim(a.input, 2);
  Tensor side_by_side = input;
  if (!has_flat_heads(a.input)) {
    side_by_side = torch::stable::contiguous(input);
    a.input = arg("input", side_by_side);
  }
  Quantised result = run(a, arg("static_scale", static_scale));
  return {result.values, result.scales};
}

}  // namespace ltx::host
