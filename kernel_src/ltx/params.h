// Launch parameters: what the bindings hand to a backend, and all that a backend knows about the caller.
//
// The entry points at the end are defined once by the CUDA sources (kernel_src/*.cu) and once by the CPU
// sources (kernel_src/cpu/*.cpp); a variant links one of the two sets. Plain data only: no torch and no CUDA header,
// so that a kernel can be built, sanitised and timed without either.
//
// Everything here has been checked by torch-ext/: pointers are valid, sizes agree, counts are not zero.
// All strides are in elements; zero means broadcast.
#pragma once

#include <cstdint>

namespace ltx {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class Statistic : int32_t { kNone = 0, kRms = 1, kLayer = 2 };
// kEagerWeight: as kEager, but a norm multiplies with its weight before it rounds.
enum class Rounding : int32_t { kFp32 = 0, kEager = 1, kEagerWeight = 2 };
enum class Activation : int32_t { kGelu = 0, kGeluTanh = 1, kSilu = 2, kSigmoid = 3, kClampedSilu = 4 };
enum class QkNorm : int32_t { kNone = 0, kPerHead = 1, kAcrossHeads = 2 };
enum class PositionType : int32_t { kInt64 = 0, kInt32 = 1, kFloat32 = 2 };
enum class IndexType : int32_t { kInt64 = 0, kInt32 = 1, kBool = 2 };

// Leading dimensions left after the bindings have merged those that every operand walks with one stride.
constexpr int kMaxDims = 8;

// Where to run. CUDA reads device and stream; the CPU backend calls parallel_for (torch's pool, or a test's threads).
struct Context {
  using RangeFn = void (*)(int64_t begin, int64_t end, void* state);
  int32_t device = -1;
  void* stream = nullptr;
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* state) = nullptr;
};

// The index space of a row op: `count` rows of `width` columns; row r has the multi-index of r in size[0..ndim),
// last dimension fastest.
struct Rows {
  int64_t count = 0;
  int64_t width = 0;
  int32_t ndim = 0;
  int64_t size[kMaxDims] = {};
};

// One tensor seen through a Rows space: element (i, c) lies at data + sum_d i[d] * stride[d] + c * column_stride.
// data == nullptr: the operand is absent. Where the op has an index (NormParams), index[i] * index_stride is added: the
// operand is a set of rows, and each row of the op reads the one that the index names.
struct RowView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t column_stride = 0;
  int64_t stride[kMaxDims] = {};
  int64_t index_stride = 0;
};

// One number for each row of the op, from 0 to rows - 1. data == nullptr: the op has none.
struct IndexView {
  const void* data = nullptr;
  IndexType type = IndexType::kInt64;
  uint32_t rows = 0;
  int64_t stride[kMaxDims] = {};
};

constexpr int64_t index_size(IndexType type) {
  return type == IndexType::kInt64 ? 8 : type == IndexType::kInt32 ? 4 : 1;
}

// The number that lies `offset` elements from an index's data, in memory of the host.
inline int64_t number_at(const void* data, IndexType type, int64_t offset) {
  if (type == IndexType::kInt64) return static_cast<const int64_t*>(data)[offset];
  if (type == IndexType::kInt32) return static_cast<const int32_t*>(data)[offset];
  return static_cast<const uint8_t*>(data)[offset];
}

// A modulation input. The value used is value + table, the table being one optional row of `width` elements
// (AdaLN-single: a learned table plus a timestep embedding), so that the sum never exists in memory.
struct Modulator {
  RowView value;
  RowView table;
};

// Where an op that quantises writes, in place of `out`: y is what `out` would hold before its rounding.
//   scale  = max(static_scale, or amax(|y|) / 448 of the row, kMinScale)
//   values = e4m3(y * (1 / scale)), to nearest even, saturating at +-448
// All are contiguous. A row has one scale and `width` values; a prefix (GluParams) adds its own before them. A NaN in y
// makes the row's amax NaN.
constexpr float kE4m3Max = 448.f;
constexpr float kMinScale = 0x1p-120f;  // of rows of zeros; it and its reciprocal are normal numbers
struct QuantOutput {
  uint8_t* values = nullptr;
  float* scales = nullptr;
  const float* static_scale = nullptr;  // one number where the rows are; null: each row has its own
};

// b   = input, or where norms_branch: input * rstd * (weight_offset + branch_weight)
//                                                      rstd = 1 / sqrt(mean(input^2) + branch_eps)
// h   = residual + b * gate                            (h = b without a residual; gate = 1 when absent)
// n   = h * rstd * (weight_offset + weight)            kRms,   rstd = 1 / sqrt(mean(h^2) + eps)
//     = (h - mean) * rstd * weight + bias              kLayer, rstd = 1 / sqrt(mean((h - mean)^2) + eps)
// out = (n * (1 + scale) + shift) * out_gate           each factor left out when absent
// out2 = n * (1 + scale2) + shift2                     when present
// residual_out = h                                     when present; kNone computes only this
// input, residual, out, out2 and residual_out have dtype `dtype`; every other operand has its own. norm_quant writes
// `quantised` and `quantised2` in place of out and out2; with kNone it quantises h. The norm of a branch is kRms, and
// needs a residual. With an index, a row reads the row that the index names of every modulator's value.
struct NormParams {
  Rows rows;
  DType dtype = DType::kFloat32;
  Statistic statistic = Statistic::kRms;
  Rounding rounding = Rounding::kFp32;
  float eps = 0.f;
  float weight_offset = 0.f;
  RowView input, residual, weight, bias, out, residual_out;
  Modulator gate, scale, shift, out_gate;
  bool norms_branch = false;
  float branch_eps = 0.f;
  RowView branch_weight, out2;
  Modulator scale2, shift2;
  IndexView index;
  QuantOutput quantised, quantised2;
};

// The gradients of an op of the norm family. With the names of NormParams, and h as `input`:
//   t   = grad * factor + grad2 * factor2      factor = (weight_offset + weight) * (1 + scale) * out_gate
//                                              factor2 = (weight_offset + weight) * (1 + scale2)
//   d   = norm'(t; h) + grad_residual          the gradient of h
//   out = d                                    the gradient of the residual
//   residual_out = d * gate                    the gradient of what the gate multiplies
//                = norm'(d * gate * (weight_offset + branch_weight); branch)          where norms_branch
// with norm'(t; h) = (t - n mean(t n)) rstd, n = h rstd                               kRms
//                  = (t - mean(t) - n mean(t n)) rstd, n = (h - mean(h)) rstd         kLayer
// kNone: d = grad, and only residual_out is written. `branch` is the op's input, which it normalised on its own, by
// kRms. grad2, grad_residual and residual_out may be absent. The gradients, h and branch have dtype `dtype`.
// `residual`, `bias`, the shifts, `out2` and `rounding` are not used.
struct NormBackwardParams : NormParams {
  RowView grad, grad2, grad_residual, branch;
};

// out = activation(gate) * up. Without up: out = activation(gate + bias), bias being one optional row.
// kSigmoid:     out = scale * sigmoid(gate) * up, one column of gate for every gate_repeat columns of up
// kClampedSilu: out = g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit), u = clamp(up, -limit, limit)
// gate, up, prefix and out have dtype `dtype`. glu_quant alone takes a prefix: `prefix_width` columns that stand before
// the columns of out, unchanged, and are quantised with them as one row.
struct GluParams {
  Rows rows;
  DType dtype = DType::kFloat32;
  Activation activation = Activation::kGelu;
  Rounding rounding = Rounding::kFp32;
  float scale = 1.f, alpha = 1.f, limit = 0.f;
  int64_t gate_repeat = 1;
  RowView gate, up, bias, out;
  RowView prefix;
  int64_t prefix_width = 0;
};

// The gradients of gate and up, given the gradient of out. `gate` stands for gate + bias where there is a bias.
//   grad_gate = grad * up * activation'(gate)
//   grad_up   = grad * activation(gate)                when up is present
// A gate that serves gate_repeat columns of up: the row is those columns, and grad_gate is one number, the sum over
// them. All views have dtype `dtype`, but for the bias; `out`, `prefix` and `rounding` are not used.
struct GluBackwardParams : GluParams {
  RowView grad, grad_gate, grad_up;
};

// Strides of a [batch, sequence, heads, head_dim] tensor, whatever the order of its dimensions in memory.
struct HeadStrides {
  int64_t batch = 0, sequence = 0, head = 0, column = 0;
};

// The query or the key of a rotary op.
struct RotaryOperand {
  const void* input = nullptr;
  void* output = nullptr;
  HeadStrides input_stride, output_stride;
  int64_t sequence = 0, heads = 0;
  // The norm's: weight and bias have head_dim elements (kPerHead) or heads * head_dim (kAcrossHeads).
  float eps = 0.f;
  const void* weight = nullptr;
  const void* bias = nullptr;
  DType weight_dtype = DType::kFloat32, bias_dtype = DType::kFloat32;
  int64_t weight_stride = 0, bias_stride = 0;
  const void* cos = nullptr;  // null where the angles are computed
  const void* sin = nullptr;
  HeadStrides cos_stride, sin_stride;
};

// x   = input, or its norm over a head (kPerHead) or over all heads of a token (kAcrossHeads):
//       input * rstd * (weight_offset + weight)                   kRms; without a weight the factor is left out
//       (input - mean) * rstd * (weight_offset + weight) + bias   kLayer; without a bias the addend is left out
// out = x rotated, in the first rotary_dim columns of each head; the others pass through.
// Eager rounding rounds x once, after the weight; with cast_before_weight it rounds before the weight as well.
// Pair p is (2p, 2p + 1) when interleaved, else (p, p + rotary_dim / 2). With a full-width table each element of the
// pair has its own cos and sin: out[a] = x[a] * cos[a] - x[b] * sin[a], out[b] = x[b] * cos[b] + x[a] * sin[b].
// A half-width table has one entry per pair.
struct RotaryParams {
  RotaryOperand operand[2];
  int32_t operands = 1;
  int64_t batch = 0;
  int64_t head_dim = 0, rotary_dim = 0;
  DType dtype = DType::kFloat32, table_dtype = DType::kFloat32;
  bool interleaved = true, half_width_table = false;
  QkNorm norm = QkNorm::kNone;
  Statistic statistic = Statistic::kRms;  // of the norm
  Rounding rounding = Rounding::kFp32;
  bool cast_before_weight = false;
  float weight_offset = 0.f;
};

// Angles of rope_1d and rope_3d: pair p turns by fp32(position) * inverse_frequency[p], where the position of token s
// is its coordinate on the pair's axis of a grid_0 x grid_1 x grid_2 grid (last fastest; rope_1d: a 1 x 1 x S grid),
// or positions[b, s] where given. Pairs [0, axis_end[0]) turn with axis 0, up to axis_end[1] with axis 1, then axis 2.
constexpr int kMaxPairs = 512;
struct RotaryAngles {
  const void* positions = nullptr;
  PositionType position_type = PositionType::kInt64;
  int64_t position_stride_batch = 0, position_stride_sequence = 0;
  int64_t grid[3] = {1, 1, 1};
  int32_t axis_end[3] = {0, 0, 0};
  float inverse_frequency[kMaxPairs] = {};
};

// Attention with few keys, such as text tokens. For each batch and head, with n the RMS norm over all heads of a token
// (h * rstd * weight; weight: heads * head_dim elements, null for ones):
//   out = softmax(scale * n(query) n(key)^T + mask) value
// The mask has one addend a key. A query whose addends are all -infinity gives zeros.
struct AttentionParams {
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  void* output = nullptr;
  HeadStrides query_stride, key_stride, value_stride, output_stride;
  const void* query_weight = nullptr;
  const void* key_weight = nullptr;
  DType query_weight_dtype = DType::kFloat32, key_weight_dtype = DType::kFloat32;
  int64_t query_weight_stride = 0, key_weight_stride = 0;
  const void* mask = nullptr;
  DType mask_dtype = DType::kFloat32;
  int64_t mask_stride_batch = 0, mask_stride_key = 0;
  int64_t batch = 0, queries = 0, keys = 0, heads = 0, head_dim = 0;
  DType dtype = DType::kFloat32;
  float eps = 0.f, scale = 1.f;
  float* workspace = nullptr;  // CUDA: batch * (queries + keys) numbers; unused on the CPU
};

// Attention of heads of 64 and 128 columns in 16 bits, on Hopper alone. For each batch and head:
//   out = softmax(scale * query key^T + mask) value
//   lse = log(sum(exp(scale * query key^T + mask)))     natural logarithm; -infinity where no key counts
// Keys count up to key_lengths[batch] (0 to `keys`; numbers beyond stand for the nearest), where the mask is not false
// or -infinity, and with is_causal up to the query's own place. A query without a key that counts gives zeros.
// Head h of the query uses head h / (heads / key_heads) of key and value.
// Of query, key and value, a column lies beside the next, the data at a multiple of 16 bytes, and the other strides are
// positive multiples of 8 elements, or zero for a dimension of one; the same holds for the output. No size is 2^31 or
// more.
struct HopperAttentionParams {
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  void* output = nullptr;
  HeadStrides query_stride, key_stride, value_stride, output_stride;
  int64_t batch = 0, queries = 0, keys = 0, heads = 0, key_heads = 0, head_dim = 0;  // heads: a multiple of key_heads
  DType dtype = DType::kBFloat16;
  float scale = 1.f;
  bool is_causal = false;                // comes without a mask
  const int32_t* key_lengths = nullptr;  // [batch]
  int64_t key_lengths_stride = 0;
  const void* mask = nullptr;  // bool, or an addend of mask_dtype
  bool mask_is_bool = false;
  DType mask_dtype = DType::kFloat32;
  int64_t mask_stride_batch = 0, mask_stride_key = 0;
  float* lse = nullptr;  // [batch, heads, queries], contiguous
  // Multiplies query and key as integers of 8 bits: heads of 128, key_heads == heads, no mask, no lse, not causal.
  bool int8 = false;
  void* workspace = nullptr;  // of hopper_attention_workspace() bytes
};

void norm(const NormParams& params, const Context& context);
void norm_backward(const NormBackwardParams& params, const Context& context);
void glu(const GluParams& params, const Context& context);
void glu_backward(const GluBackwardParams& params, const Context& context);
void rotary(const RotaryParams& params, const RotaryAngles* angles, const Context& context);
void attention(const AttentionParams& params, const Context& context);

// CUDA alone. Whether this build has code for hopper_attention that the device runs; it may be asked of any device.
bool has_hopper_attention(int device);
int64_t hopper_attention_workspace(const HopperAttentionParams& params, int device);  // may be zero
void hopper_attention(const HopperAttentionParams& params, const Context& context);

void norm_quant(const NormParams& params, const Context& context);
void glu_quant(const GluParams& params, const QuantOutput& output, const Context& context);

}  // namespace ltx
