// qk_norm_cross_attention: the norms of query and key, the scores, their softmax and its product with the values.
// attention and attention_int8: the same without norms, for the heads and the GPU that ltx::hopper_attention is for;
// only the CUDA variant has them. All check the tensors, fill their params (kernel_src/ltx/params.h has the formulas)
// and call the backend.
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

// `grouped`: several heads of the query may share one of key and value.
void check_key_and_value(const Arg& query, const Arg& key, const Arg& value, bool grouped = false) {
  check_same_device(key, query);
  check_same_dtype(key, query);
  check_dim(key, 4);
  const int64_t heads = query.size[2], key_heads = key.size[2];
  const bool fits = heads == key_heads || (grouped && key_heads > 0 && heads % key_heads == 0);
  if (key.size[0] != query.size[0] || !fits || key.size[3] != query.size[3]) {
    fail("key",
         grouped ? text("the batch size and last dimension of query ", shape_text(query), " and heads that divide its")
                 : text("the batch size, heads and last dimension of query ", shape_text(query)),
         "shape " + shape_text(key));
  }
  check_same_device(value, query);
  check_same_dtype(value, query);
  check_shape(value, key.size, 4);
}

// One addend, or bool, a key; the strides by which the samples walk it.
void check_mask(const Arg& mask, const Arg& key, int64_t& stride_batch, int64_t& stride_key) {
  const int64_t batch = key.size[0], keys = key.size[1];
  const bool per_batch = mask.dim == 2 && mask.size[0] == batch;
  if (mask.dim != 2 || mask.size[1] != keys || (!per_batch && mask.size[0] != 1)) {
    std::string expected = text("shape [", batch, ", ", keys, "]");
    if (batch != 1) expected += text(" or [1, ", keys, "]");
    fail("mask", expected, shape_text(mask));
  }
  stride_batch = mask.size[0] == 1 ? 0 : mask.stride[0];
  stride_key = mask.size[1] == 1 ? 0 : mask.stride[1];
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
    check_mask(a.mask, a.key, p.mask_stride_batch, p.mask_stride_key);
    p.mask = a.mask.data;
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

// Tensor cores need this, so other heads are copied. The general CUDA kernel supports them but adds in another order,
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

namespace {

struct PlainArgs {
  Arg query, key, value, mask, key_lengths, out, lse;
};

PlainArgs plain_args(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                     const OptionalTensor& key_lengths) {
  PlainArgs a;
  a.query = arg("query", query);
  a.key = arg("key", key);
  a.value = arg("value", value);
  a.mask = arg("mask", mask);
  a.key_lengths = arg("key_lengths", key_lengths);
  return a;
}

// Everything but the outputs. `int8`: the scores are products of integers.
HopperAttentionParams check_inputs(const PlainArgs& a, std::optional<double> scale, bool is_causal, bool int8 = false) {
  HopperAttentionParams p;
  p.is_causal = is_causal;
  p.int8 = int8;
  check_dim(a.query, 4);
  p.dtype = float_dtype(a.query);
  if (p.dtype == DType::kFloat32) fail("query", "dtype float16 or bfloat16", dtype_text(a.query.dtype));
  p.batch = a.query.size[0];
  p.queries = a.query.size[1];
  p.heads = a.query.size[2];
  p.head_dim = a.query.size[3];
  p.scale = check_scale(scale, p.head_dim);
  if (p.head_dim != 128 && !(p.head_dim == 64 && !int8)) {
    fail("query", int8 ? "a last dimension of 128" : "a last dimension of 64 or 128", "shape " + shape_text(a.query));
  }
  check_key_and_value(a.query, a.key, a.value, !int8);
  p.keys = a.key.size[1];
  p.key_heads = a.key.size[2];
  if (a.mask) {
    if (is_causal) fail("mask", "None with is_causal; key_lengths leaves out keys", "a tensor");
    check_same_device(a.mask, a.query);
    p.mask_is_bool = a.mask.dtype == aoti_torch_dtype_bool();
    if (!p.mask_is_bool) p.mask_dtype = float_dtype(a.mask, "dtype bool, float32, float16 or bfloat16");
    check_mask(a.mask, a.key, p.mask_stride_batch, p.mask_stride_key);
    p.mask = a.mask.data;
  }
  if (a.key_lengths) {
    check_same_device(a.key_lengths, a.query);
    if (a.key_lengths.dtype != aoti_torch_dtype_int32()) {
      fail("key_lengths", "dtype int32", dtype_text(a.key_lengths.dtype));
    }
    check_shape(a.key_lengths, {p.batch});
    p.key_lengths = static_cast<const int32_t*>(a.key_lengths.data);
    p.key_lengths_stride = p.batch == 1 ? 0 : a.key_lengths.stride[0];
  }
  if (!has_attention(a.query.device_index)) fail("query", "a GPU that this op has a kernel for", device_text(a.query));
  return p;
}

// A number a head and query, [batch, heads, queries] in float32.
Tensor empty_lse(const HopperAttentionParams& p, const Arg& query) {
  const int64_t size[] = {p.batch, p.heads, p.queries};
  const int64_t stride[] = {p.heads * p.queries, p.queries, 1};
  Arg floats = query;
  floats.dtype = aoti_torch_dtype_float32();
  return empty_strided(size, stride, 3, floats);
}

// `lse`: null where it is not asked for.
void run(HopperAttentionParams& p, const PlainArgs& a, const Tensor& query, const Tensor& key, const Tensor& value,
         Tensor out, Tensor* lse) {
  if (p.batch == 0 || p.queries == 0 || p.heads == 0) return;
  if (p.keys == 0) {
    torch::stable::zero_(out);
    if (lse) torch::stable::fill_(*lse, -INFINITY);
    return;
  }
  Launch launch(a.query);
  const auto operand = [](const Arg& arg) { return Operand(arg, !lies_in_packs(arg, 1)); };
  Operand query_operand = operand(a.query), key_operand = operand(a.key), value_operand = operand(a.value),
          out_operand = operand(a.out);
  query_operand.read(query, p.query, p.query_stride);
  key_operand.read(key, p.key, p.key_stride);
  value_operand.read(value, p.value, p.value_stride);
  p.output = out_operand.arg.data;
  p.output_stride = head_strides(out_operand.arg);
  if (lse) p.lse = static_cast<float*>(lse->mutable_data_ptr());
  const int64_t floats = ltx::hopper_attention_workspace(p, launch.context().device) / sizeof(float), step = 1;
  std::optional<Tensor> workspace;
  if (floats > 0) {
    Arg like = a.query;
    like.dtype = aoti_torch_dtype_float32();
    workspace = empty_strided(&floats, &step, 1, like);
    p.workspace = workspace->mutable_data_ptr();
  }
  ltx::hopper_attention(p, launch.context());
  if (out_operand.copy) torch::stable::copy_(out, *out_operand.copy);
}

// No output may be in place: another block may still read that memory, and rows may be computed once more.
void check_outputs(const PlainArgs& a, const HopperAttentionParams& p) {
  check_output(a.out, a.query, a.query.size, 4);
  for (const Arg* other : {&a.query, &a.key, &a.value, &a.mask, &a.key_lengths}) check_overlap(a.out, *other, false);
  if (!a.lse) return;
  check_same_device(a.lse, a.query);
  if (float_dtype(a.lse) != DType::kFloat32) fail("lse", "dtype float32", dtype_text(a.lse.dtype));
  check_shape(a.lse, {p.batch, p.heads, p.queries});
  if (extent(a.lse) != a.lse.numel()) fail("lse", "a contiguous tensor", "strides " + shape_text(a.lse.stride, 3));
}

}  // namespace

void attention_out(const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
                   const OptionalTensor& mask, const OptionalTensor& key_lengths, std::optional<double> scale,
                   bool is_causal) {
  PlainArgs a = plain_args(query, key, value, mask, key_lengths);
  HopperAttentionParams p = check_inputs(a, scale, is_causal);
  a.out = mutable_arg("out", out);
  check_outputs(a, p);
  run(p, a, query, key, value, out, nullptr);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                 const OptionalTensor& key_lengths, std::optional<double> scale, bool is_causal) {
  PlainArgs a = plain_args(query, key, value, mask, key_lengths);
  HopperAttentionParams p = check_inputs(a, scale, is_causal);
  Tensor out = empty_rows(a.query, p.head_dim);
  a.out = arg("out", out);
  run(p, a, query, key, value, out, nullptr);
  return out;
}

void attention_lse_out(const Tensor& out, const Tensor& lse, const Tensor& query, const Tensor& key,
                       const Tensor& value, const OptionalTensor& mask, const OptionalTensor& key_lengths,
                       std::optional<double> scale, bool is_causal) {
  PlainArgs a = plain_args(query, key, value, mask, key_lengths);
  HopperAttentionParams p = check_inputs(a, scale, is_causal);
  a.out = mutable_arg("out", out);
  a.lse = mutable_arg("lse", lse);
  check_outputs(a, p);
  Tensor numbers = lse;
  run(p, a, query, key, value, out, &numbers);
}

std::tuple<Tensor, Tensor> attention_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const OptionalTensor& mask, const OptionalTensor& key_lengths,
                                         std::optional<double> scale, bool is_causal) {
  PlainArgs a = plain_args(query, key, value, mask, key_lengths);
  HopperAttentionParams p = check_inputs(a, scale, is_causal);
  Tensor out = empty_rows(a.query, p.head_dim), lse = empty_lse(p, a.query);
  a.out = arg("out", out);
  run(p, a, query, key, value, out, &lse);
  return {out, lse};
}

void attention_int8_out(const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
                        const OptionalTensor& key_lengths, std::optional<double> scale) {
  PlainArgs a = plain_args(query, key, value, std::nullopt, key_lengths);
  HopperAttentionParams p = check_inputs(a, scale, false, true);
  a.out = mutable_arg("out", out);
  check_outputs(a, p);
  run(p, a, query, key, value, out, nullptr);
}

Tensor attention_int8(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& key_lengths,
                      std::optional<double> scale) {
  PlainArgs a = plain_args(query, key, value, std::nullopt, key_lengths);
  HopperAttentionParams p = check_inputs(a, scale, false, true);
  Tensor out = empty_rows(a.query, p.head_dim);
  a.out = arg("out", out);
  run(p, a, query, key, value, out, nullptr);
  return out;
}

#endif  // CUDA_KERNEL

}  // namespace ltx::host
