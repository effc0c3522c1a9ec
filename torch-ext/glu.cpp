// Gated and plain activations: glu (geglu, swiglu), swiglu_clamped, gelu and gate_heads, and their gradients. Checks
// the tensors, fills GluParams or GluBackwardParams and calls ltx::glu or ltx::glu_backward.
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

struct GluArgs : GluInputs {
  Arg out;
  Rounding rounding = Rounding::kFp32;
  bool fresh_output = false;
};

// One long row where nothing distinguishes rows: short rows then cost no more than long ones. `views`: all that the
// call has.
void flatten(GluParams& p, std::initializer_list<const RowView*> views) {
  const bool plain = !p.bias.data && p.rows.ndim <= 1 && p.gate_repeat == 1;
  for (const RowView* view : views) {
    if (!plain || (view->data && (view->column_stride != 1 || (p.rows.ndim == 1 && view->stride[0] != p.rows.width)))) {
      return;
    }
  }
  p.rows.width *= p.rows.count;
  p.rows.count = 1;
  p.rows.ndim = 0;
}

void run(GluArgs& a) {
  const int64_t width = output_width(a);
  GluParams p;
  p.rounding = a.rounding;
  RowSpace space(a.input, width);
  add_inputs(space, p, a);
  if (!a.fresh_output) {
    std::vector<int64_t> size(a.input.size, a.input.size + a.input.dim);
    size.back() = width;
    check_output(a.out, a.input, size.data(), a.input.dim);
    check_overlap(a.out, a.input, !a.packed());
    check_overlap(a.out, a.up, true);
    check_overlap(a.out, a.bias, false);
  }
  space.add(p.out, a.out);
  if (!space.finish(p.rows)) return;
  part_halves(p.gate, p.up, a, a.input, width);
  flatten(p, {&p.gate, &p.up, &p.out});
  Launch launch(a.input);
  ltx::glu(p, launch.context());
}

GluArgs glu_args(const Tensor& input, const OptionalTensor& up, int64_t activation, bool gate_first, int64_t rounding) {
  GluArgs a;
  a.input = arg("input", input);
  a.up = arg("up", up);
  a.gated = true;
  a.gate_first = gate_first;
  a.activation = check_activation(activation);
  a.rounding = check_rounding(rounding);
  return a;
}

GluArgs gelu_args(const Tensor& input, const OptionalTensor& bias, int64_t activation, int64_t rounding) {
  GluArgs a;
  a.input = arg("input", input);
  a.bias = arg("bias", bias);
  a.activation = check_activation(activation);
  a.rounding = check_rounding(rounding);
  return a;
}

GluArgs clamped_args(const Tensor& input, const OptionalTensor& up, double alpha, double limit, bool interleaved,
                     int64_t rounding) {
  GluArgs a;
  a.input = arg("input", input);
  a.up = arg("up", up);
  a.gated = true;
  a.interleaved = interleaved;
  a.activation = Activation::kClampedSilu;
  a.rounding = check_rounding(rounding);
  if (!std::isfinite(alpha)) fail("alpha", "a finite number", text(alpha));
  if (!(limit >= 0)) fail("limit", "a number >= 0", text(limit));
  a.alpha = alpha;
  a.limit = limit;
  return a;
}

Tensor run_fresh(GluArgs& a) {
  Tensor out = empty_rows(a.input, output_width(a));
  a.out = arg("out", out);
  a.fresh_output = true;
  run(a);
  return out;
}

// ---- Gates of heads

struct GateArgs : HeadGateInputs {
  Arg out;
  Rounding rounding = Rounding::kFp32;
  bool fresh_output = false;
};

void run(GateArgs& a) {
  GluParams p;
  add_inputs(p, a);
  p.rounding = a.rounding;
  if (!a.fresh_output) {
    check_output(a.out, a.input, a.input.size, a.input.dim);
    check_overlap(a.out, a.input, true);
    check_overlap(a.out, a.logits, false);
  }
  if (a.input.numel() == 0) return;
  Reshaped input(a.input), out(a.out), logits(a.logits);
  const bool flat = has_flat_heads(a.input) && has_flat_heads(a.out);
  const Arg& rows = flat ? input.flatten() : input.get();
  RowSpace space(rows, rows.last());
  space.add(p.up, rows);
  space.add(p.gate, flat ? logits.get() : logits.unflatten(p.gate_repeat > 1 ? 1 : a.input.last()));
  space.add(p.out, flat ? out.flatten() : out.get());
  if (!space.finish(p.rows)) return;
  flatten(p, {&p.gate, &p.up, &p.out});
  Launch launch(a.input);
  ltx::glu(p, launch.context());
}

GateArgs gate_args(const Tensor& input, const Tensor& logits, double scale, int64_t rounding) {
  GateArgs a;
  a.input = arg("input", input);
  a.logits = arg("logits", logits);
  a.scale = scale;
  check_finite_scale(scale);
  a.rounding = check_rounding(rounding);
  return a;
}

// ---- Gradients

// The gradients of gate and up, [2, ...] like the input twice, or of a packed input, like the input.
Tensor run_backward(const Tensor& gradient, const GluInputs& a) {
  const Arg grad = arg("grad", gradient);
  const int64_t width = output_width(a);
  GluBackwardParams p;
  RowSpace space(a.input, width);
  add_inputs(space, p, a);
  std::vector<int64_t> size(a.input.size, a.input.size + a.input.dim);
  size.back() = width;
  check_same_device(grad, a.input);
  check_same_dtype(grad, a.input);
  check_shape(grad, size.data(), a.input.dim);
  space.add(p.grad, grad);
  const bool two = static_cast<bool>(a.up);
  Tensor out = empty_rows(a.input, a.input.last(), two ? 2 : 0);
  Arg first = arg("out", out), second = first;
  if (two) {
    first.dim -= 1;
    first.size += 1;
    first.stride += 1;
    second = first;
    second.data = static_cast<char*>(second.data) + second.numel() * element_size(second);
  }
  space.add(p.grad_gate, first);
  if (a.gated) space.add(p.grad_up, second);
  if (!space.finish(p.rows)) return out;
  part_halves(p.gate, p.up, a, a.input, width);
  if (!two) part_halves(p.grad_gate, p.grad_up, a, first, width);
  flatten(p, {&p.gate, &p.up, &p.grad, &p.grad_gate, &p.grad_up});
  Launch launch(a.input);
  ltx::glu_backward(p, launch.context());
  return out;
}

}  // namespace

Tensor glu_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& up, int64_t activation,
                    bool gate_first) {
  return run_backward(grad, glu_args(input, up, activation, gate_first, 0));
}

Tensor swiglu_clamped_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& up, double alpha,
                               double limit, bool interleaved) {
  return run_backward(grad, clamped_args(input, up, alpha, limit, interleaved, 0));
}

Tensor gelu_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& bias, int64_t activation) {
  return run_backward(grad, gelu_args(input, bias, activation, 0));
}

// The gradients of input and logits.
std::tuple<Tensor, Tensor> gate_heads_backward(const Tensor& gradient, const Tensor& input, const Tensor& logits,
                                               double scale) {
  const GateArgs a = gate_args(input, logits, scale, 0);
  const Arg grad = arg("grad", gradient);
  GluBackwardParams p;
  add_inputs(p, a);
  check_same_device(grad, a.input);
  check_same_dtype(grad, a.input);
  check_shape(grad, a.input.size, a.input.dim);
  Tensor to_input = empty_rows(a.input, a.input.last()), to_logits = empty_rows(a.logits, a.logits.last());
  if (a.input.numel() == 0) return {to_input, torch::stable::zero_(to_logits)};
  const Arg to_input_rows = arg("out", to_input);
  Reshaped logits_view(a.logits), to_logits_view(arg("out", to_logits));
  const int64_t columns = p.gate_repeat > 1 ? 1 : a.input.last();
  RowSpace space(a.input, a.input.last());
  space.add(p.up, a.input);
  space.add(p.grad, grad);
  space.add(p.grad_up, to_input_rows);
  const Arg logits_rows = logits_view.unflatten(columns), to_logits_rows = to_logits_view.unflatten(columns);
  space.add(p.gate, logits_rows);
  space.add(p.grad_gate, to_logits_rows);
  if (!space.finish(p.rows)) return {to_input, to_logits};
  flatten(p, {&p.gate, &p.up, &p.grad, &p.grad_gate, &p.grad_up});
  Launch launch(a.input);
  ltx::glu_backward(p, launch.context());
  return {to_input, to_logits};
}

void gate_heads_out(const Tensor& out, const Tensor& input, const Tensor& logits, double scale, int64_t rounding) {
  GateArgs a = gate_args(input, logits, scale, rounding);
  a.out = mutable_arg("out", out);
  run(a);
}

Tensor gate_heads(const Tensor& input, const Tensor& logits, double scale, int64_t rounding) {
  GateArgs a = gate_args(input, logits, scale, rounding);
  check_min_dim(a.input, 2);
  float_dtype(a.input);
  Tensor out = empty_rows(a.input, a.input.last());
  a.out = arg("out", out);
  a.fresh_output = true;
  run(a);
  return out;
}

void swiglu_clamped_out(const Tensor& out, const Tensor& input, const OptionalTensor& up, double alpha, double limit,
                        bool interleaved, int64_t rounding) {
  GluArgs a = clamped_args(input, up, alpha, limit, interleaved, rounding);
  a.out = mutable_arg("out", out);
  run(a);
}

Tensor swiglu_clamped(const Tensor& input, const OptionalTensor& up, double alpha, double limit, bool interleaved,
                      int64_t rounding) {
  GluArgs a = clamped_args(input, up, alpha, limit, interleaved, rounding);
  return run_fresh(a);
}

void glu_out(const Tensor& out, const Tensor& input, const OptionalTensor& up, int64_t activation, bool gate_first,
             int64_t rounding) {
  GluArgs a = glu_args(input, up, activation, gate_first, rounding);
  a.out = mutable_arg("out", out);
  run(a);
}

Tensor glu(const Tensor& input, const OptionalTensor& up, int64_t activation, bool gate_first, int64_t rounding) {
  GluArgs a = glu_args(input, up, activation, gate_first, rounding);
  return run_fresh(a);
}

void gelu_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, int64_t activation,
              int64_t rounding) {
  GluArgs a = gelu_args(input, bias, activation, rounding);
  a.out = mutable_arg("out", out);
  run(a);
}

Tensor gelu(const Tensor& input, const OptionalTensor& bias, int64_t activation, int64_t rounding) {
  GluArgs a = gelu_args(input, bias, activation, rounding);
  return run_fresh(a);
}

}  // namespace ltx::host
