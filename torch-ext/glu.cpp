// Gated and plain activations: glu (geglu, swiglu) and gelu. Checks the tensors, fills GluParams and calls ltx::glu.
#include "tensor_checks.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

struct GluArgs {
  Arg input, up, bias, out;
  bool gated = false, gate_first = true;
  Activation activation = Activation::kGelu;
  Rounding rounding = Rounding::kFp32;
  bool fresh_output = false;
};

// Columns of the output: half of a packed input.
int64_t output_width(const Arg& input, bool packed) {
  check_min_dim(input, 1);
  if (packed && input.last() % 2 != 0) {
    fail(input.name, "an even last dimension (gate and up packed)", "shape " + shape_text(input));
  }
  return packed ? input.last() / 2 : input.last();
}

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
  const bool packed = a.gated && !a.up;
  const int64_t width = output_width(a.input, packed);
  GluParams p;
  p.dtype = float_dtype(a.input);
  p.activation = a.activation;
  p.rounding = a.rounding;
  RowSpace space(a.input, width);
  space.add(p.gate, a.input);
  if (a.up) {
    check_same_device(a.up, a.input);
    check_same_dtype(a.up, a.input);
    check_shape(a.up, a.input.size, a.input.dim);
    space.add(p.up, a.up);
  } else if (packed) {
    space.add(p.up, a.input);
  }
  space.add_vector(p.bias, a.bias);
  if (!a.fresh_output) {
    std::vector<int64_t> size(a.input.size, a.input.size + a.input.dim);
    size.back() = width;
    check_output(a.out, a.input, size.data(), a.input.dim);
    check_overlap(a.out, a.input, !packed);
    check_overlap(a.out, a.up, true);
    check_overlap(a.out, a.bias, false);
  }
  space.add(p.out, a.out);
  if (!space.finish(p.rows)) return;
  if (packed) {
    // Both views start at the input; the second half begins `width` columns later.
    RowView& second = a.gate_first ? p.up : p.gate;
    const int64_t stride = a.input.stride[a.input.dim - 1];
    p.gate.column_stride = p.up.column_stride = stride;
    second.data = static_cast<char*>(second.data) + width * stride * element_size(a.input);
  }
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
  a.activation = check_code("activation", activation, Activation::kGelu, Activation::kSilu);
  a.rounding = check_rounding(rounding);
  return a;
}

GluArgs gelu_args(const Tensor& input, const OptionalTensor& bias, int64_t activation, int64_t rounding) {
  GluArgs a;
  a.input = arg("input", input);
  a.bias = arg("bias", bias);
  a.activation = check_code("activation", activation, Activation::kGelu, Activation::kSilu);
  a.rounding = check_rounding(rounding);
  return a;
}

Tensor run_fresh(GluArgs& a) {
  Tensor out = empty_rows(a.input, output_width(a.input, a.gated && !a.up));
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
