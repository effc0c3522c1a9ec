// qk_norm_cross_attention: the norms of query and key, the scores, their softmax and its product with the values.
// attention: the same without norms, for the heads and the GPU that ltx::hopper_attention is for; only the CUDA variant
// has it. Both check the tensors, fill their params (kernel_src/ltx/params.h has the formulas) and call the backend.
#include "op_inputs.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

constexpr int64_t kMaxHeadDim = 256;  // on both backends: a head and its sums stay in the registers of a CUDA block
[[maybe_unused]] constexpr int64_t kHopperHeadDim = 64;

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

void check_key_and_value(const Arg& query, const Arg& key, const Arg& value) {
  check_same_device(key, query);
  check_same_dtype(key, query);
  check_dim(key, 4);
  if (key.size[0] != query.size[0] || key.size[2] != query.size[2] || key.size[3] != query.size[3]) {
    fail("key", text("the batch size, heads and last dimension of query ", shape_text(query)),
         "shape " + shape_text(key));
  }
  check_same_device(value, query);
  check_same_dtype(value, query);
  check_shape(value, key.size, 4);
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
  check_key_and_value(a.query, a.key, a.value);
  p.keys = a.key.size[1];
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

// Whether heads lie in whole packs of 16 bytes, `least_stride` elements or more apart.
[[maybe_unused]] bool lies_in_packs(const Arg& a, int64_t least_stride) {
  constexpr int64_t kPack = 8;
  bool packed = reinterpret_cast<uintptr_t>(a.data) % (kPack * element_size(a)) == 0 && a.stride[3] == 1;
  for (int64_t d = 0; d < 3; ++d) {
    packed = packed && (a.size[d] == 1 || (a.stride[d] % kPack == 0 && a.stride[d] >= least_stride));
  }
  return packed;
}

// On tensor cores they have to. What does not is copied: the general CUDA kernel takes any, but adds in another order,
// and the bits of a result must not depend on where its input lies.
bool needs_copy([[maybe_unused]] const Arg& a, [[maybe_unused]] const AttentionParams& p) {
#ifdef CUDA_KERNEL
  return p.dtype != DType::kFloat32 && (p.head_dim == 64 || p.head_dim == 128) && !lies_in_packs(a, 0);
#else
  return false;
#endif
}

// A tensor, or what the kernel reads or writes in its place.
struct Operand {
  Operand(const Arg& a, bool needs_copy) : arg(a) {
    if (!needs_copy) return;
    copy = empty_rows(a, a.last());
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
  Operand query_operand(a.query, needs_copy(a.query, p)), key_operand(a.key, needs_copy(a.key, p)),
      value_operand(a.value, needs_copy(a.value, p)), out_operand(a.out, needs_copy(a.out, p));
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

#ifdef CUDA_KERNEL

bool has_attention(int64_t device) { return ltx::has_hopper_attention(static_cast<int>(device)); }

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<double> scale) {
  const Arg q = arg("query", query), k = arg("key", key), v = arg("value", value);
  check_dim(q, 4);
  if (float_dtype(q) != DType::kBFloat16) fail("query", "dtype bfloat16", dtype_text(q.dtype));
  HopperAttentionParams p;
  p.scale = check_scale(scale, q.last());
  if (q.last() != kHopperHeadDim) {
    fail("query", text("a last dimension of ", kHopperHeadDim), "shape " + shape_text(q));
  }
  check_key_and_value(q, k, v);
  if (!has_attention(q.device_index)) fail("query", "a GPU that this op has a kernel for", device_text(q));
  p.batch = q.size[0];
  p.queries = q.size[1];
  p.keys = k.size[1];
  p.heads = q.size[2];
  Tensor out = empty_rows(q, kHopperHeadDim);
  if (q.numel() == 0) return out;
  if (p.keys == 0) return torch::stable::zero_(out);
  const auto operand = [](const Arg& a) { return Operand(a, !lies_in_packs(a, 1)); };
  Launch launch(q);
  Operand query_operand = operand(q), key_operand = operand(k), value_operand = operand(v);
  query_operand.read(query, p.query, p.query_stride);
  key_operand.read(key, p.key, p.key_stride);
  value_operand.read(value, p.value, p.value_stride);
  p.output = out.mutable_data_ptr();
  ltx::hopper_attention(p, launch.context());
  return out;
}

#endif  // CUDA_KERNEL

}  // namespace ltx::host
