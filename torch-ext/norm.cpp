// The norm family: rmsnorm, layernorm, their residual and adaptive forms, the gated residual, and the gradients of all.
// Checks the tensors, fills NormParams or NormBackwardParams (kernel_src/ltx/params.h has the formulas) and calls
// ltx::norm or ltx::norm_backward of the backend.
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

struct NormArgs : NormInputs {
  Arg out, out2, residual_out;
  Rounding rounding = Rounding::kFp32;
  bool fresh_outputs = false;  // allocated by the caller of run(), so their shape and memory need no check
};

void run(NormArgs& a) {
  RowSpace space = row_space(a.input);
  NormParams p;
  p.rounding = a.rounding;
  add_inputs(space, p, a);
  const Arg* const outputs[] = {&a.out, &a.out2, &a.residual_out};
  for (const Arg* out : outputs) {
    if (!*out || a.fresh_outputs) continue;
    check_output(*out, a.input, a.input.size, a.input.dim);
    check_overlap(*out, a.input, true);
    check_overlap(*out, a.residual, true);
    for (const Arg* other :
         {&a.weight, &a.bias, &a.gate, &a.gate_table, &a.scale, &a.scale_table, &a.shift, &a.shift_table, &a.out_gate,
          &a.out_gate_table, &a.branch_weight, &a.scale2, &a.scale2_table, &a.shift2, &a.shift2_table, &a.index}) {
      check_overlap(*out, *other, false);
    }
    for (const Arg* const* other = outputs; *other != out; ++other) {
      if (**other) check_overlap(*out, **other, false);
    }
  }
  if (a.out) space.add(p.out, a.out);
  if (a.out2) space.add(p.out2, a.out2);
  if (a.residual_out) space.add(p.residual_out, a.residual_out);
  if (!space.finish(p.rows)) return;
  Launch launch(a.input);
  ltx::norm(p, launch.context());
}

Rounding check_norm_rounding(int64_t code) {
  return check_code("rounding", code, Rounding::kFp32, Rounding::kEagerWeight);
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
  a.rounding = check_norm_rounding(rounding);
  return a;
}

NormArgs adaln_args(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
                    const OptionalTensor& shift, const OptionalTensor& gate, const OptionalTensor& scale_table,
                    const OptionalTensor& shift_table, const OptionalTensor& gate_table, const OptionalTensor& index,
                    double eps, int64_t statistic, int64_t rounding) {
  NormArgs a = norm_args(input, weight, bias, eps, 0.0, statistic, rounding);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.out_gate = arg("gate", gate);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  a.out_gate_table = arg("gate_table", gate_table);
  a.index = arg("index", index);
  return a;
}

NormArgs residual_args(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                       const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& scale,
                       const OptionalTensor& shift, const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                       const OptionalTensor& shift_table, const OptionalTensor& index, double eps, double weight_offset,
                       int64_t statistic, int64_t rounding) {
  NormArgs a = norm_args(input, weight, bias, eps, weight_offset, statistic, rounding);
  a.residual = arg("residual", residual);
  a.gate = arg("gate", gate);
  a.scale = arg("scale", scale);
  a.shift = arg("shift", shift);
  a.gate_table = arg("gate_table", gate_table);
  a.scale_table = arg("scale_table", scale_table);
  a.shift_table = arg("shift_table", shift_table);
  a.index = arg("index", index);
  return a;
}

NormArgs gated_residual_args(const Tensor& input, const Tensor& residual, const Tensor& gate,
                             const OptionalTensor& gate_table, const OptionalTensor& index, int64_t rounding) {
  NormArgs a;
  a.input = arg("input", input);
  a.residual = arg("residual", residual);
  a.gate = arg("gate", gate);
  a.gate_table = arg("gate_table", gate_table);
  a.rounding = check_norm_rounding(rounding);
  a.index = arg("index", index);
  return a;
}

NormArgs norm_residual_args(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                            const OptionalTensor& gate, const OptionalTensor& gate_table, const OptionalTensor& index,
                            double eps, double weight_offset, int64_t rounding) {
  NormArgs a;
  a.input = arg("input", input);
  a.residual = arg("residual", residual);
  a.branch_weight = arg("weight", weight);
  a.gate = arg("gate", gate);
  a.gate_table = arg("gate_table", gate_table);
  a.norms_branch = true;
  a.branch_eps = eps;
  a.weight_offset = weight_offset;
  a.rounding = check_norm_rounding(rounding);
  a.index = arg("index", index);
  return a;
}

NormArgs norm_residual_norm_args(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                                 const OptionalTensor& weight1, const OptionalTensor& weight2,
                                 const OptionalTensor& scale, const OptionalTensor& shift,
                                 const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                                 const OptionalTensor& shift_table, const OptionalTensor& index, double eps1,
                                 double eps2, double weight_offset, int64_t rounding) {
  NormArgs a = residual_args(input, residual, gate, std::nullopt, std::nullopt, scale, shift, gate_table, scale_table,
                             shift_table, index, eps2, weight_offset, static_cast<int64_t>(Statistic::kRms), rounding);
  a.weight = arg("weight2", weight2);
  a.branch_weight = arg("weight1", weight1);
  a.norms_branch = true;
  a.branch_eps = eps1;
  return a;
}

// The second scale and shift of an op with two outputs.
void add_second(NormInputs& a, const Tensor& scale2, const OptionalTensor& shift2, const OptionalTensor& scale2_table,
                const OptionalTensor& shift2_table) {
  a.scale2 = arg("scale2", scale2);
  a.shift2 = arg("shift2", shift2);
  a.scale2_table = arg("scale2_table", scale2_table);
  a.shift2_table = arg("shift2_table", shift2_table);
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
                    const OptionalTensor& gate_table, const OptionalTensor& index, double eps, int64_t statistic,
                    int64_t rounding) {
  NormArgs a = adaln_args(input, weight, bias, scale, shift, gate, scale_table, shift_table, gate_table, index, eps,
                          statistic, rounding);
  a.out = mutable_arg("out", out);
  run(a);
}

Tensor adaln_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
                  const OptionalTensor& shift, const OptionalTensor& gate, const OptionalTensor& scale_table,
                  const OptionalTensor& shift_table, const OptionalTensor& gate_table, const OptionalTensor& index,
                  double eps, int64_t statistic, int64_t rounding) {
  NormArgs a = adaln_args(input, weight, bias, scale, shift, gate, scale_table, shift_table, gate_table, index, eps,
                          statistic, rounding);
  Tensor out = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.fresh_outputs = true;
  run(a);
  return out;
}

void residual_norm_out(const Tensor& out, const Tensor& residual_out, const Tensor& input, const Tensor& residual,
                       const OptionalTensor& gate, const OptionalTensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& gate_table,
                       const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                       const OptionalTensor& index, double eps, double weight_offset, int64_t statistic,
                       int64_t rounding) {
  NormArgs a = residual_args(input, residual, gate, weight, bias, scale, shift, gate_table, scale_table, shift_table,
                             index, eps, weight_offset, statistic, rounding);
  a.out = mutable_arg("out", out);
  a.residual_out = mutable_arg("residual_out", residual_out);
  run(a);
}

std::tuple<Tensor, Tensor> residual_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& scale, const OptionalTensor& shift,
                                         const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                                         const OptionalTensor& shift_table, const OptionalTensor& index, double eps,
                                         double weight_offset, int64_t statistic, int64_t rounding) {
  NormArgs a = residual_args(input, residual, gate, weight, bias, scale, shift, gate_table, scale_table, shift_table,
                             index, eps, weight_offset, statistic, rounding);
  Tensor out = empty_like_rows(a.input), residual_out = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.residual_out = arg("residual_out", residual_out);
  a.fresh_outputs = true;
  run(a);
  return {out, residual_out};
}

void gated_residual_out(const Tensor& out, const Tensor& input, const Tensor& residual, const Tensor& gate,
                        const OptionalTensor& gate_table, const OptionalTensor& index, int64_t rounding) {
  NormArgs a = gated_residual_args(input, residual, gate, gate_table, index, rounding);
  a.residual_out = mutable_arg("out", out);
  run(a);
}

Tensor gated_residual(const Tensor& input, const Tensor& residual, const Tensor& gate, const OptionalTensor& gate_table,
                      const OptionalTensor& index, int64_t rounding) {
  NormArgs a = gated_residual_args(input, residual, gate, gate_table, index, rounding);
  Tensor out = empty_like_rows(a.input);
  a.residual_out = arg("out", out);
  a.fresh_outputs = true;
  run(a);
  return out;
}

void norm_residual_out(const Tensor& out, const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                       const OptionalTensor& gate, const OptionalTensor& gate_table, const OptionalTensor& index,
                       double eps, double weight_offset, int64_t rounding) {
  NormArgs a = norm_residual_args(input, residual, weight, gate, gate_table, index, eps, weight_offset, rounding);
  a.residual_out = mutable_arg("out", out);
  run(a);
}

Tensor norm_residual(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                     const OptionalTensor& gate, const OptionalTensor& gate_table, const OptionalTensor& index,
                     double eps, double weight_offset, int64_t rounding) {
  NormArgs a = norm_residual_args(input, residual, weight, gate, gate_table, index, eps, weight_offset, rounding);
  Tensor out = empty_like_rows(a.input);
  a.residual_out = arg("out", out);
  a.fresh_outputs = true;
  run(a);
  return out;
}

void norm_residual_norm_out(const Tensor& out, const Tensor& residual_out, const Tensor& input, const Tensor& residual,
                            const OptionalTensor& gate, const OptionalTensor& weight1, const OptionalTensor& weight2,
                            const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& gate_table,
                            const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                            const OptionalTensor& index, double eps1, double eps2, double weight_offset,
                            int64_t rounding) {
  NormArgs a = norm_residual_norm_args(input, residual, gate, weight1, weight2, scale, shift, gate_table, scale_table,
                                       shift_table, index, eps1, eps2, weight_offset, rounding);
  a.out = mutable_arg("out", out);
  a.residual_out = mutable_arg("residual_out", residual_out);
  run(a);
}

std::tuple<Tensor, Tensor> norm_residual_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                                              const OptionalTensor& weight1, const OptionalTensor& weight2,
                                              const OptionalTensor& scale, const OptionalTensor& shift,
                                              const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                                              const OptionalTensor& shift_table, const OptionalTensor& index,
                                              double eps1, double eps2, double weight_offset, int64_t rounding) {
  NormArgs a = norm_residual_norm_args(input, residual, gate, weight1, weight2, scale, shift, gate_table, scale_table,
                                       shift_table, index, eps1, eps2, weight_offset, rounding);
  Tensor out = empty_like_rows(a.input), residual_out = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.residual_out = arg("residual_out", residual_out);
  a.fresh_outputs = true;
  run(a);
  return {out, residual_out};
}

void adaln_norm_pair_out(const Tensor& out, const Tensor& out2, const Tensor& input, const OptionalTensor& weight,
                         const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift,
                         const Tensor& scale2, const OptionalTensor& shift2, const OptionalTensor& scale_table,
                         const OptionalTensor& shift_table, const OptionalTensor& scale2_table,
                         const OptionalTensor& shift2_table, const OptionalTensor& index, double eps, int64_t statistic,
                         int64_t rounding) {
  NormArgs a = adaln_args(input, weight, bias, scale, shift, std::nullopt, scale_table, shift_table, std::nullopt,
                          index, eps, statistic, rounding);
  add_second(a, scale2, shift2, scale2_table, shift2_table);
  a.out = mutable_arg("out", out);
  a.out2 = mutable_arg("out2", out2);
  run(a);
}

std::tuple<Tensor, Tensor> adaln_norm_pair(const Tensor& input, const OptionalTensor& weight,
                                           const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift,
                                           const Tensor& scale2, const OptionalTensor& shift2,
                                           const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                                           const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
                                           const OptionalTensor& index, double eps, int64_t statistic,
                                           int64_t rounding) {
  NormArgs a = adaln_args(input, weight, bias, scale, shift, std::nullopt, scale_table, shift_table, std::nullopt,
                          index, eps, statistic, rounding);
  add_second(a, scale2, shift2, scale2_table, shift2_table);
  Tensor out = empty_like_rows(a.input), out2 = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.out2 = arg("out2", out2);
  a.fresh_outputs = true;
  run(a);
  return {out, out2};
}

void residual_norm_pair_out(const Tensor& out, const Tensor& out2, const Tensor& residual_out, const Tensor& input,
                            const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight,
                            const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift,
                            const Tensor& scale2, const OptionalTensor& shift2, const OptionalTensor& gate_table,
                            const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                            const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
                            const OptionalTensor& index, double eps, int64_t statistic, int64_t rounding) {
  NormArgs a = residual_args(input, residual, gate, weight, bias, scale, shift, gate_table, scale_table, shift_table,
                             index, eps, 0.0, statistic, rounding);
  add_second(a, scale2, shift2, scale2_table, shift2_table);
  a.out = mutable_arg("out", out);
  a.out2 = mutable_arg("out2", out2);
  a.residual_out = mutable_arg("residual_out", residual_out);
  run(a);
}

std::tuple<Tensor, Tensor, Tensor> residual_norm_pair(
    const Tensor& input, const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight,
    const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift, const Tensor& scale2,
    const OptionalTensor& shift2, const OptionalTensor& gate_table, const OptionalTensor& scale_table,
    const OptionalTensor& shift_table, const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
    const OptionalTensor& index, double eps, int64_t statistic, int64_t rounding) {
  NormArgs a = residual_args(input, residual, gate, weight, bias, scale, shift, gate_table, scale_table, shift_table,
                             index, eps, 0.0, statistic, rounding);
  add_second(a, scale2, shift2, scale2_table, shift2_table);
  Tensor out = empty_like_rows(a.input), out2 = empty_like_rows(a.input), residual_out = empty_like_rows(a.input);
  a.out = arg("out", out);
  a.out2 = arg("out2", out2);
  a.residual_out = arg("residual_out", residual_out);
  a.fresh_outputs = true;
  run(a);
  return {out, out2, residual_out};
}

// ---- Gradients

namespace {

// `input` is what the norm read: the op's input, or its residual_out.
struct BackwardArgs : NormInputs {
  Arg grad, grad2, grad_residual, branch;
};

void run_backward(const BackwardArgs& a, const Tensor* to_hidden, const Tensor* to_branch) {
  RowSpace space = row_space(a.input);
  NormBackwardParams p;
  add_inputs(space, p, a);
  add_like(space, p.grad, a.grad, a.input);
  add_like(space, p.grad2, a.grad2, a.input);
  add_like(space, p.grad_residual, a.grad_residual, a.input);
  add_like(space, p.branch, a.branch, a.input);
  Arg out, residual_out;
  if (to_hidden) space.add(p.out, out = arg("out", *to_hidden));
  if (to_branch) space.add(p.residual_out, residual_out = arg("out", *to_branch));
  if (!space.finish(p.rows)) return;
  Launch launch(a.input);
  ltx::norm_backward(p, launch.context());
}

BackwardArgs backward_args(const Tensor& grad, const Tensor& input, const OptionalTensor& grad2,
                           const OptionalTensor& grad_residual, const OptionalTensor& weight,
                           const OptionalTensor& scale, const OptionalTensor& scale2, const OptionalTensor& scale_table,
                           const OptionalTensor& scale2_table, const OptionalTensor& index, double eps,
                           double weight_offset, int64_t statistic) {
  BackwardArgs a;
  a.grad = arg("grad", grad);
  a.input = arg("input", input);
  a.grad2 = arg("grad2", grad2);
  a.grad_residual = arg("grad_residual", grad_residual);
  a.weight = arg("weight", weight);
  a.scale = arg("scale", scale);
  a.scale2 = arg("scale2", scale2);
  a.scale_table = arg("scale_table", scale_table);
  a.scale2_table = arg("scale2_table", scale2_table);
  a.index = arg("index", index);
  a.eps = eps;
  a.weight_offset = weight_offset;
  a.statistic = check_statistic(statistic);
  return a;
}

}  // namespace

Tensor norm_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& grad2,
                     const OptionalTensor& grad_residual, const OptionalTensor& weight, const OptionalTensor& scale,
                     const OptionalTensor& gate, const OptionalTensor& scale2, const OptionalTensor& scale_table,
                     const OptionalTensor& gate_table, const OptionalTensor& scale2_table, const OptionalTensor& index,
                     double eps, double weight_offset, int64_t statistic) {
  BackwardArgs a = backward_args(grad, input, grad2, grad_residual, weight, scale, scale2, scale_table, scale2_table,
                                 index, eps, weight_offset, statistic);
  a.out_gate = arg("gate", gate);
  a.out_gate_table = arg("gate_table", gate_table);
  const Tensor to_input = empty_like_rows(a.input);
  run_backward(a, &to_input, nullptr);
  return to_input;
}

std::tuple<Tensor, Tensor> residual_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& gate,
                                                  const OptionalTensor& grad2, const OptionalTensor& grad_residual,
                                                  const OptionalTensor& weight, const OptionalTensor& scale,
                                                  const OptionalTensor& scale2, const OptionalTensor& gate_table,
                                                  const OptionalTensor& scale_table, const OptionalTensor& scale2_table,
                                                  const OptionalTensor& index, double eps, double weight_offset,
                                                  int64_t statistic) {
  BackwardArgs a = backward_args(grad, input, grad2, grad_residual, weight, scale, scale2, scale_table, scale2_table,
                                 index, eps, weight_offset, statistic);
  a.gate = arg("gate", gate);
  a.gate_table = arg("gate_table", gate_table);
  const Tensor to_input = empty_like_rows(a.input), to_residual = empty_like_rows(a.input);
  run_backward(a, &to_residual, &to_input);
  return {to_input, to_residual};
}

Tensor gated_residual_backward(const Tensor& grad, const Tensor& gate, const OptionalTensor& gate_table,
                               const OptionalTensor& index) {
  BackwardArgs a;
  a.input = a.grad = arg("grad", grad);  // h has no part in it
  a.gate = arg("gate", gate);
  a.gate_table = arg("gate_table", gate_table);
  a.index = arg("index", index);
  const Tensor to_input = empty_like_rows(a.input);
  run_backward(a, nullptr, &to_input);
  return to_input;
}

std::tuple<Tensor, Tensor> norm_residual_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& branch,
                                                       const OptionalTensor& grad_residual, const OptionalTensor& gate,
                                                       const OptionalTensor& weight1, const OptionalTensor& weight2,
                                                       const OptionalTensor& scale, const OptionalTensor& gate_table,
                                                       const OptionalTensor& scale_table, const OptionalTensor& index,
                                                       double eps1, double eps2, double weight_offset) {
  BackwardArgs a =
      backward_args(grad, input, std::nullopt, grad_residual, std::nullopt, scale, std::nullopt, scale_table,
                    std::nullopt, index, eps2, weight_offset, static_cast<int64_t>(Statistic::kRms));
  a.branch = arg("branch", branch);
  a.gate = arg("gate", gate);
  a.gate_table = arg("gate_table", gate_table);
  a.branch_weight = arg("weight1", weight1);
  a.weight = arg("weight2", weight2);
  a.norms_branch = true;
  a.branch_eps = eps1;
  const Tensor to_input = empty_like_rows(a.input), to_residual = empty_like_rows(a.input);
  run_backward(a, &to_residual, &to_input);
  return {to_input, to_residual};
}

}  // namespace ltx::host
