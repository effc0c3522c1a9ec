// Gated and plain activations: glu (geglu, swiglu), swiglu_clamped, gelu and gate_heads. Checks the tensors, fills
// GluParams and calls ltx::glu.
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

struct GluArgs : GluInputs {
  Arg out;
  Rounding rounding = Rounding::kFp32;
  bool fresh_output = false;
};

// One long row where nothing distinguishes rows: short rows then cost no more than long ones.
void flatten(GluParams& p) {
  const bool plain = !p.bias.data && p.rows.ndim <= 1 && p.gate_repeat == 1;
  for (const RowView* view : {&p.gate, &p.up, &p.out}) {
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
  part_halves(p, a, width);
  flatten(p);
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
  flatten(p);
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

}  // namespace

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
