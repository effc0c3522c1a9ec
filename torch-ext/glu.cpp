// Gated and plain activations: glu (geglu, swiglu) and gelu. Checks the tensors, fills GluParams and calls ltx::glu.
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
  const bool plain = !p.bias.data && p.rows.ndim <= 1;
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

Tensor run_fresh(GluArgs& a) {
  Tensor out = empty_rows(a.input, output_width(a));
  a.out = arg("out", out);
  a.fresh_output = true;
  run(a);
  return out;
}

}  // namespace

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
