// qk_norm_cross_attention: the norms of query and key, the scores, their softmax and its product with the values.
// Checks the tensors, fills AttentionParams (kernel_src/ltx/params.h has the formula) and calls ltx::attention of the
// backend.
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

constexpr int64_t kMaxHeadDim = 256;  // on both backends: a head and its sums stay in the registers of a CUDA block

struct AttentionArgs {
  Arg query, key, value, query_weight, key_weight, mask, out;
};

HeadStrides head_strides(const Arg& a) { return strides_of(a, {0, 1, 2}); }

void check_weight(const Arg& weight, const Arg& query) {
  if (!weight) return;
  check_same_device(weight, query);
  float_dtype(weight);
  check_shape(weight, {query.size[2] * query.size[3]});
}

int64_t weight_stride(const Arg& weight) { return weight && weight.size[0] > 1 ? weight.stride[0] : 0; }

float check_scale(std::optional<double> scale, int64_t head_dim) {
  if (!scale) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (!std::isfinite(*scale)) fail("scale", "a finite number", text(*scale));
  return static_cast<float>(*scale);
}

// Everything but the output.
AttentionParams check_inputs(const AttentionArgs& a, double eps, std::optional<double> scale) {
  AttentionParams p;
  check_dim(a.query, 4);
  p.dtype = float_dtype(a.query);
  p.eps = check_eps(eps);
  p.batch = a.query.size[0];
  p.queries = a.query.size[1];
  p.heads = a.query.size[2];
  p.head_dim = a.query.size[3];
  p.scale = check_scale(scale, p.head_dim);
  if (p.head_dim > kMaxHeadDim) {
    fail("query", text("a last dimension of at most ", kMaxHeadDim), "shape " + shape_text(a.query));
  }
  check_same_device(a.key, a.query);
  check_same_dtype(a.key, a.query);
  check_dim(a.key, 4);
  if (a.key.size[0] != p.batch || a.key.size[2] != p.heads || a.key.size[3] != p.head_dim) {
    fail("key", text("the batch size, heads and last dimension of query ", shape_text(a.query)),
         "shape " + shape_text(a.key));
  }
  p.keys = a.key.size[1];
  check_same_device(a.value, a.query);
  check_same_dtype(a.value, a.query);
  check_shape(a.value, a.key.size, 4);
  check_weight(a.query_weight, a.query);
  check_weight(a.key_weight, a.query);
  if (a.mask) {
    check_same_device(a.mask, a.query);
    p.mask_dtype = float_dtype(a.mask);
    const bool per_batch = a.mask.dim == 2 && a.mask.size[0] == p.batch;
    if (a.mask.dim != 2 || a.mask.size[1] != p.keys || (!per_batch && a.mask.size[0] != 1)) {
      fail("mask", text("shape [", p.batch, ", ", p.keys, "] or [1, ", p.keys, "]"), shape_text(a.mask));
    }
    p.mask = a.mask.data;
    p.mask_stride_batch = a.mask.size[0] == 1 ? 0 : a.mask.stride[0];
    p.mask_stride_key = a.mask.size[1] == 1 ? 0 : a.mask.stride[1];
  }
  p.query_weight = a.query_weight.data;
  p.key_weight = a.key_weight.data;
  if (a.query_weight) p.query_weight_dtype = float_dtype(a.query_weight);
  if (a.key_weight) p.key_weight_dtype = float_dtype(a.key_weight);
  p.query_weight_stride = weight_stride(a.query_weight);
  p.key_weight_stride = weight_stride(a.key_weight);
  return p;
}

// On tensor cores, heads have to lie in whole packs of 16 bytes. What does not is copied: the general CUDA kernel takes
// any, but adds in another order, and the bits of a result must not depend on where its input lies.
bool needs_copy([[maybe_unused]] const Arg& a, [[maybe_unused]] const AttentionParams& p) {
#ifdef CUDA_KERNEL
  if (p.dtype == DType::kFloat32 || (p.head_dim != 64 && p.head_dim != 128)) return false;
  constexpr int64_t kPack = 8;
  bool packed = reinterpret_cast<uintptr_t>(a.data) % (kPack * element_size(a)) == 0 && a.stride[3] == 1;
  for (int64_t d = 0; d < 3; ++d) packed = packed && (a.size[d] == 1 || a.stride[d] % kPack == 0);
  return !packed;
#else
  return false;
#endif
}

// A tensor, or what the kernel reads or writes in its place.
struct Operand {
  Operand(const Arg& a, const AttentionParams& p) : arg(a) {
    if (!needs_copy(a, p)) return;
    copy = empty_rows(a, p.head_dim);
    arg = host::arg(a.name, *copy);
  }

  void read(const Tensor& tensor, const void*& data, HeadStrides& stride) {
    if (copy) torch::stable::copy_(*copy, tensor);
    data = arg.data;
    stride = head_strides(arg);
  }

  Arg arg;
  std::optional<Tensor> copy;
};

void run(AttentionParams& p, const AttentionArgs& a, const Tensor& query, const Tensor& key, const Tensor& value,
         Tensor out) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0 || p.head_dim == 0) return;
  if (p.keys == 0) {  // nothing to attend to: zeros, as scaled_dot_product_attention has it
    torch::stable::zero_(out);
    return;
  }
  Launch launch(a.query);
  Operand query_operand(a.query, p), key_operand(a.key, p), value_operand(a.value, p), out_operand(a.out, p);
  query_operand.read(query, p.query, p.query_stride);
  key_operand.read(key, p.key, p.key_stride);
  value_operand.read(value, p.value, p.value_stride);
  p.output = out_operand.arg.data;
  p.output_stride = head_strides(out_operand.arg);
#ifdef CUDA_KERNEL
  const int64_t rows = p.batch * (p.queries + p.keys), step = 1;
  Arg floats = a.query;
  floats.dtype = aoti_torch_dtype_float32();
  Tensor workspace = empty_strided(&rows, &step, 1, floats);
  p.workspace = static_cast<float*>(workspace.mutable_data_ptr());
#endif
  ltx::attention(p, launch.context());
  if (out_operand.copy) torch::stable::copy_(out, *out_operand.copy);
}

AttentionArgs attention_args(const Tensor& query, const Tensor& key, const Tensor& value,
                             const OptionalTensor& query_weight, const OptionalTensor& key_weight,
                             const OptionalTensor& mask) {
  AttentionArgs a;
  a.query = arg("query", query);
  a.key = arg("key", key);
  a.value = arg("value", value);
  a.query_weight = arg("query_weight", query_weight);
  a.key_weight = arg("key_weight", key_weight);
  a.mask = arg("mask", mask);
  return a;
}

}  // namespace

void qk_norm_cross_attention_out(const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
                                 const OptionalTensor& query_weight, const OptionalTensor& key_weight,
                                 const OptionalTensor& mask, double eps, std::optional<double> scale) {
  AttentionArgs a = attention_args(query, key, value, query_weight, key_weight, mask);
  AttentionParams p = check_inputs(a, eps, scale);
  a.out = mutable_arg("out", out);
  check_output(a.out, a.query, a.query.size, 4);
  // A row's head of the query is read before its place in the output is written, and the row's statistic before both.
  check_overlap(a.out, a.query, true);
  for (const Arg* other : {&a.key, &a.value, &a.query_weight, &a.key_weight, &a.mask}) {
    check_overlap(a.out, *other, false);
  }
  run(p, a, query, key, value, out);
}

Tensor qk_norm_cross_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& query_weight, const OptionalTensor& key_weight,
                               const OptionalTensor& mask, double eps, std::optional<double> scale) {
  AttentionArgs a = attention_args(query, key, value, query_weight, key_weight, mask);
  AttentionParams p = check_inputs(a, eps, scale);
  Tensor out = empty_rows(a.query, p.head_dim);
  a.out = arg("out", out);
  run(p, a, query, key, value, out);
  return out;
}

}  // namespace ltx::host
