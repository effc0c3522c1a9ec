// The norm family: rmsnorm, layernorm, their residual and adaptive forms, and the gated residual. Checks the tensors,
// fills NormParams (kernel_src/ltx/params.h has the formula) and calls ltx::norm of the backend.
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

struct NormArgs : NormInputs {
  Arg out, residual_out;
  Rounding rounding = Rounding::kFp32;
  bool fresh_outputs = false;  // allocated by the caller of run(), so their shape and memory need no check
};

void run(NormArgs& a) {
  RowSpace space = row_space(a.input);
  NormParams p;
  p.rounding = a.rounding;
  add_inputs(space, p, a);
  Arg* const outputs[] = {&a.out, &a.residual_out};
  for (Arg* out : outputs) {
    if (!*out || a.fresh_outputs) continue;
    check_output(*out, a.input, a.input.size, a.input.dim);
    check_overlap(*out, a.input, true);
    check_overlap(*out, a.residual, true);
    for (const Arg* other : {&a.weight, &a.bias, &a.gate, &a.gate_table, &a.scale, &a.scale_table, &a.shift,
                             &a.shift_table, &a.out_gate, &a.out_gate_table}) {
      check_overlap(*out, *other, false);
    }
  }
  if (a.out && a.residual_out && !a.fresh_outputs) check_overlap(a.residual_out, a.out, false);
  if (a.out) space.add(p.out, a.out);
  if (a.residual_out) space.add(p.residual_out, a.residual_out);
  if (!space.finish(p.rows)) return;
  Launch launch(a.input);
  ltx::norm(p, launch.context());
}

Statistic check_statistic(int64_t code) { return check_code("statistic", code, Statistic::kRms, Statistic::kLayer); }

Tensor empty_like_rows(const Arg& a) {
  check_min_dim(a, 1);
  return empty_rows(a, a.last());
}

NormArgs norm_args(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                   double weight_offset, int64_t statistic, int64_t rounding) {
  NormArgs a;
  a.input = arg("input", input);
  a.weight = arg("weight", weight);
  a.bias = arg("bias", bias);
  a.eps = eps;
  a.weight_offset = weight_offset;
  a.statistic = check_statistic(statistic);
  a.rounding = check_rounding(rounding);
  return a;
}

NormArgs adaln_args(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
                    const OptionalTensor& shift, const OptionalTensor& gate, const OptionalTensor& scale_table,
                    const OptionalTensor& shift_table, const OptionalTensor& gate_table, double eps, int64_t statistic,
                    int64_t rounding) {
  NormArgs a = norm_args(input, weight, bias, eps, 0.0, statistic, rounding);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.out_gate = arg("gate", gate);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  a.out_gate_table = arg("gate_table", gate_table);
  return a;
}

NormArgs residual_args(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                       const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& scale,
                       const OptionalTensor& shift, const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                       const OptionalTensor& shift_table, double eps, double weight_offset, int64_t statistic,
                       int64_t rounding) {
  NormArgs a = norm_args(input, weight, bias, eps, weight_offset, statistic, rounding);
  a.residual = arg("residual", residual);
  a.gate = arg("gate", gate);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.gate_table = arg("gate_table", gate_table);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  return a;
}

NormArgs gated_residual_args(const Tensor& input, const Tensor& residual, const Tensor& gate,
                             const OptionalTensor& gate_table, int64_t rounding) {
  NormArgs a;
  a.input = arg("input", input);
  a.residual = arg("residual", residual);
  a.gate = arg("gate", gate);
  a.gate_table = arg("gate_table", gate_table);
  a.rounding = check_rounding(rounding);
  return a;
}

}  // namespace

void norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
              double eps, double weight_offset, int64_t statistic, int64_t rounding) {
  NormArgs a = norm_args(input, weight, bias, eps, weight_offset, statistic, rounding);
  a.out = mutable_arg("out", out);
  run(a);
}

Tensor norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
            double weight_offset, int64_t statistic, int64_t rounding) {
  NormArgs a = norm_args(input, weight, bias, eps, weight_offset, statistic, rounding);
  Tensor out = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.fresh_outputs = true;
  run(a);
  return out;
}

void adaln_norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                    const Tensor& scale, const OptionalTensor& shift, const OptionalTensor& gate,
                    const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                    const OptionalTensor& gate_table, double eps, int64_t statistic, int64_t rounding) {
  NormArgs a = adaln_args(input, weight, bias, scale, shift, gate, scale_table, shift_table, gate_table, eps, statistic,
                          rounding);
  a.out = mutable_arg("out", out);
  run(a);
}

Tensor adaln_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
                  const OptionalTensor& shift, const OptionalTensor& gate, const OptionalTensor& scale_table,
                  const OptionalTensor& shift_table, const OptionalTensor& gate_table, double eps, int64_t statistic,
                  int64_t rounding) {
  NormArgs a = adaln_args(input, weight, bias, scale, shift, gate, scale_table, shift_table, gate_table, eps, statistic,
                          rounding);
  Tensor out = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.fresh_outputs = true;
  run(a);
  return out;
}

void residual_norm_out(const Tensor& out, const Tensor& residual_out, const Tensor& input, const Tensor& residual,
                       const OptionalTensor& gate, const OptionalTensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& gate_table,
                       const OptionalTensor& scale_table, const OptionalTensor& shift_table, double eps,
                       double weight_offset, int64_t statistic, int64_t rounding) {
  NormArgs a = residual_args(input, residual, gate, weight, bias, scale, shift, gate_table, scale_table, shift_table,
                             eps, weight_offset, statistic, rounding);
  a.out = mutable_arg("out", out);
  a.residual_out = mutable_arg("residual_out", residual_out);
  run(a);
}

std::tuple<Tensor, Tensor> residual_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& scale, const OptionalTensor& shift,
                                         const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                                         const OptionalTensor& shift_table, double eps, double weight_offset,
                                         int64_t statistic, int64_t rounding) {
  NormArgs a = residual_args(input, residual, gate, weight, bias, scale, shift, gate_table, scale_table, shift_table,
                             eps, weight_offset, statistic, rounding);
  Tensor out = empty_like_rows(a.input), residual_out = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.residual_out = arg("residual_out", residual_out);
  a.fresh_outputs = true;
  run(a);
  return {out, residual_out};
}

void gated_residual_out(const Tensor& out, const Tensor& input, const Tensor& residual, const Tensor& gate,
                        const OptionalTensor& gate_table, int64_t rounding) {
  NormArgs a = gated_residual_args(input, residual, gate, gate_table, rounding);
  a.residual_out = mutable_arg("out", out);
  run(a);
}

Tensor gated_residual(const Tensor& input, const Tensor& residual, const Tensor& gate, const OptionalTensor& gate_table,
                      int64_t rounding) {
  NormArgs a = gated_residual_args(input, residual, gate, gate_table, rounding);
  Tensor out = empty_like_rows(a.input);
  a.residual_out = arg("out", out);
  a.fresh_outputs = true;
  run(a);
  return out;
}

}  // namespace ltx::host
