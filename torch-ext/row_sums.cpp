// Sums over rows. The gradients of what rows share follow from them (_row_sums.py). This file checks the tensors, fills
// RowSumsParams and calls ltx::row_sums of the backend.
#include "ltx/row_sums.h"

#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {

std::tuple<Tensor, Tensor> row_sums(const Tensor& grad, const Tensor& input, double eps, int64_t statistic) {
  const Arg grads = arg("grad", grad), inputs = arg("input", input);
  if (grads.dim != 3) fail("grad", "shape [groups, rows, H]", shape_text(grads));
  check_same_device(inputs, grads);
  check_shape(inputs, {grads.size[0], grads.size[1], grads.size[2]});
  RowSumsParams p;
  p.statistic = check_code("statistic", statistic, Statistic::kNone, Statistic::kLayer);
  p.eps = check_eps(eps);
  p.groups = grads.size[0];
  RowSpace space(grads, grads.last());
  space.add(p.grad, grads);
  space.add(p.input, inputs);

  Arg as = grads;
  as.dtype = aoti_torch_dtype_float32();
  const int64_t size[] = {p.groups, grads.last()}, stride[] = {grads.last(), 1}, step = 1;
  Tensor products = empty_strided(size, stride, 2, as), sums = empty_strided(size, stride, 2, as);
  if (!space.finish(p.rows)) {
    torch::stable::zero_(products);
    torch::stable::zero_(sums);
    return {products, sums};
  }
  const int64_t numbers = row_sums_workspace(p);
  Tensor workspace = empty_strided(&numbers, &step, 1, as);
  p.products = static_cast<float*>(products.mutable_data_ptr());
  p.sums = static_cast<float*>(sums.mutable_data_ptr());
  p.workspace = static_cast<float*>(workspace.mutable_data_ptr());
  Launch launch(grads);
  ltx::row_sums(p, launch.context());
  return {products, sums};
}

}  // namespace ltx::host
