// Linear layers with weights in fp8: scaled_linear, and weight_only_linear at the end. CUDA alone.
//
// scaled_linear: the product of quantised rows and a quantised weight, by cuBLASLt without a workspace.
//
//   out[r, c] = bf16(scales[r] * weight_scales[c] * sum_k values[r, k] * weight[c, k] + bias[c] + addend[r, c])
//
// torch._scaled_mm calls the same function of the same library on Hopper, but offers it a workspace. For large products
// cuBLASLt then takes kernels that count their tiles in 4 bytes of it, which it clears before each: on an H200 that
// costs 1 to 4 us a product of LTX-Video's (5376 tokens), 0.4 to 0.6 ms of a step of 29. Without a workspace it takes
// the same kernels with a fixed order of tiles, and the bits are the same. Also, torch asks for an algorithm at every
// call; here one is kept for each kind of product, and a call takes the host less time. bf16 products gain nothing
// that a step shows (all in benchmarks/results/h200-tuning.json).
//
// Where cuBLASLt is older than 12.9, or has no algorithm, the product is torch._scaled_mm's.
#ifdef CUDA_KERNEL

#include <functional>
#include <initializer_list>
#include <mutex>
#include <unordered_map>

#include "cublaslt.h"
#include "ltx/force.cuh"
#include "ltx/weight_only.cuh"
#include "tensor_checks.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

struct LinearArgs {
  Arg values, scales, weight, weight_scales, bias, addend, out;
  bool use_fast_accum = true;
  int64_t width = 0, channels = 0, rows = 0;
  int64_t out_step = 0, addend_step = 0;  // from row to row
};

// ---- Checks: as check_scaled_linear and check_product of ltx_kernels/_checks.py

void check_dtype(const Arg& a, int32_t dtype) {
  if (a.dtype != dtype) fail(a.name, "dtype " + dtype_text(dtype), dtype_text(a.dtype));
}

bool is_contiguous(const Arg& a) {
  int64_t step = 1;
  for (int64_t d = a.dim - 1; d >= 0; --d) {
    if (a.size[d] != 1 && a.stride[d] != step) return false;
    step *= a.size[d];
  }
  return true;
}

void check_contiguous(const Arg& a) {
  if (a.numel() != 0 && !is_contiguous(a))
    fail(a.name, "a contiguous tensor", "strides " + shape_text(a.stride, a.dim));
}

// The step from row to row of a matrix that cuBLASLt can address.
int64_t row_step(const Arg& a) {
  int64_t step = a.last(), wanted = 0;
  bool single = true;
  bool fits = a.dim > 0 && (a.last() == 1 || a.stride[a.dim - 1] == 1);
  for (int64_t d = a.dim - 2; d >= 0; --d) {
    if (a.size[d] == 1) continue;
    if (single) {
      step = a.stride[d];
    } else {
      fits = fits && a.stride[d] == wanted;
    }
    single = false;
    wanted = a.stride[d] * a.size[d];
  }
  if (!fits || step < a.last() || step % 8 != 0 || reinterpret_cast<uintptr_t>(a.data) % 16 != 0) {
    fail(a.name, "rows of neighbouring elements, one step apart, at multiples of 16 bytes",
         "strides " + shape_text(a.stride, a.dim));
  }
  return step;
}

// An operand or output of the result's shape.
void check_like_result(LinearArgs& a, const Arg& like, int64_t& step) {
  std::vector<int64_t> shape(a.values.size, a.values.size + a.values.dim);
  shape.back() = a.channels;
  check_dtype(like, aoti_torch_dtype_bfloat16());
  check_shape(like, shape.data(), a.values.dim);
  check_same_device(like, a.values);
  if (like.numel() != 0) step = row_step(like);
}

void check_inputs(LinearArgs& a) {
  check_dim(a.weight, 2);
  for (const Arg* matrix : {&a.values, &a.weight}) check_dtype(*matrix, aoti_torch_dtype_float8_e4m3fn());
  for (const Arg* vector : {&a.scales, &a.weight_scales}) check_dtype(*vector, aoti_torch_dtype_float32());
  a.channels = a.weight.size[0];
  a.width = a.weight.size[1];
  if (a.channels % 16 != 0 || a.width % 16 != 0) {
    fail(a.weight.name, "sizes that are multiples of 16", "shape " + shape_text(a.weight));
  }
  check_contiguous(a.weight);
  check_min_dim(a.values, 1);
  if (a.values.last() != a.width) {
    fail(a.values.name, text("a last dimension of ", a.width, " (that of weight)"), "shape " + shape_text(a.values));
  }
  std::vector<int64_t> scales_shape(a.values.size, a.values.size + a.values.dim);
  scales_shape.back() = 1;
  check_shape(a.scales, scales_shape.data(), a.values.dim);
  check_shape(a.weight_scales, {a.channels});
  if (a.bias) {
    check_shape(a.bias, {a.channels});
    check_same_device(a.bias, a.values);
  }
  for (const Arg* other : {&a.scales, &a.weight, &a.weight_scales}) check_same_device(*other, a.values);
  if (a.bias) check_dtype(a.bias, aoti_torch_dtype_bfloat16());
  for (const Arg* operand : {&a.values, &a.scales, &a.weight_scales, &a.bias}) {
    if (*operand) check_contiguous(*operand);
  }
  a.rows = a.scales.numel();
  if (a.addend) check_like_result(a, a.addend, a.addend_step);
}

void check_given_output(LinearArgs& a) {
  check_like_result(a, a.out, a.out_step);
  if (!has_own_memory(a.out)) {
    fail(a.out.name, "memory of its own for every element", "strides " + shape_text(a.out.stride, a.out.dim));
  }
  check_overlap(a.out, a.addend, true);
  for (const Arg* other : {&a.values, &a.scales, &a.weight, &a.weight_scales, &a.bias}) {
    check_overlap(a.out, *other, false);
  }
}

// ---- cuBLASLt

using namespace cublaslt;

// What an algorithm was chosen for.
struct Kind {
  int64_t rows, width, channels;
  uint32_t alignment, sum_alignment;  // of the factors, of addend and output, in bytes; 256 and more are one
  bool bias, use_fast_accum;
  int64_t out_step, addend_step;  // addend_step: 0 without an addend

  bool operator==(const Kind& o) const {
    return rows == o.rows && width == o.width && channels == o.channels && alignment == o.alignment &&
           sum_alignment == o.sum_alignment && bias == o.bias && use_fast_accum == o.use_fast_accum &&
           out_step == o.out_step && addend_step == o.addend_step;
  }
};

struct Hash {
  size_t operator()(const Kind& k) const {
    size_t hash = 0;
    for (const uint64_t part :
         {uint64_t(k.rows), uint64_t(k.width), uint64_t(k.channels), uint64_t(k.alignment), uint64_t(k.sum_alignment),
          uint64_t(k.bias * 2 + k.use_fast_accum), uint64_t(k.out_step), uint64_t(k.addend_step)}) {
      hash = hash * 0x9e3779b97f4a7c15u + std::hash<uint64_t>()(part);
    }
    return hash;
  }
};

uint32_t common_alignment(std::initializer_list<const void*> pointers) {
  uintptr_t addresses = 256;
  for (const void* pointer : pointers) addresses |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(addresses & -addresses);
}

Kind kind_of(const LinearArgs& a, const void* out) {
  Kind kind = {a.rows, a.width, a.channels};
  kind.alignment = common_alignment({a.values.data, a.weight.data, a.bias.data});
  kind.sum_alignment = common_alignment({out, a.addend.data});
  kind.bias = bool(a.bias);
  kind.use_fast_accum = a.use_fast_accum;
  kind.out_step = a.out_step;
  kind.addend_step = a.addend_step;
  return kind;
}

// The descriptors of one kind of product, and its algorithm. To cuBLASLt matrices are column by column: the product is
// out^T = weight * values^T, with the weight as the transposed one.
class Plan {
 public:
  Plan(const Api& api, Handle handle, const LinearArgs& a, const Kind& kind) : api_(api) {
    usable_ = api.MatmulDescCreate(&desc_, kCompute32F, kFloat32) == kSuccess && set(kTransA, kTranspose) &&
              set(kFastAccum, static_cast<int8_t>(a.use_fast_accum)) && set(kAScaleMode, kScaleOfEachRow) &&
              set(kBScaleMode, kScaleOfEachRow) &&
              (!a.bias || (set(kEpilogue, kEpilogueBias) && set(kBiasDataType, kBFloat16))) && set_pointers(a) &&
              api.MatrixLayoutCreate(&weight_, kE4M3, a.width, a.channels, a.width) == kSuccess &&
              api.MatrixLayoutCreate(&values_, kE4M3, a.width, a.rows, a.width) == kSuccess &&
              api.MatrixLayoutCreate(&out_, kBFloat16, a.channels, a.rows, a.out_step) == kSuccess &&
              api.MatrixLayoutCreate(&addend_, kBFloat16, a.channels, a.rows, a.addend ? a.addend_step : a.out_step) ==
                  kSuccess &&
              choose(handle, kind);
  }
  Plan(const Plan&) = delete;
  ~Plan() {
    for (Layout layout : {weight_, values_, out_, addend_}) {
      if (layout) api_.MatrixLayoutDestroy(layout);
    }
    if (desc_) api_.MatmulDescDestroy(desc_);
  }

  // False where cuBLASLt has no such product.
  bool run(Handle handle, const LinearArgs& a, void* out, void* stream) {
    const float one = 1.f, zero = 0.f;
    const void* addend = a.addend ? a.addend.data : out;
    usable_ = usable_ && set_pointers(a) &&
              api_.Matmul(handle, desc_, &one, a.weight.data, weight_, a.values.data, values_, a.addend ? &one : &zero,
                          addend, addend_, out, out_, &algorithm_, nullptr, 0, stream) == kSuccess;
    return usable_;
  }

 private:
  template <typename T>
  bool set(DescAttribute attribute, const T& value) {
    return api_.MatmulDescSetAttribute(desc_, attribute, &value, sizeof(value)) == kSuccess;
  }

  bool set_pointers(const LinearArgs& a) {
    return set(kAScalePointer, a.weight_scales.data) && set(kBScalePointer, a.scales.data) &&
           (!a.bias || set(kBiasPointer, a.bias.data));
  }

  // The first that the heuristic names for no workspace at all.
  bool choose(Handle handle, const Kind& kind) {
    Preference preference = nullptr;
    if (api_.MatmulPreferenceCreate(&preference) != kSuccess) return false;
    const uint64_t workspace_bytes = 0;
    Heuristic heuristic = {};
    int found = 0;
    const auto prefer = [&](PreferenceAttribute attribute, const auto& value) {
      return api_.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)) == kSuccess;
    };
    const bool chosen = prefer(kMaxWorkspaceBytes, workspace_bytes) && prefer(kMinAlignmentABytes, kind.alignment) &&
                        prefer(kMinAlignmentBBytes, kind.alignment) &&
                        prefer(kMinAlignmentCBytes, kind.sum_alignment) &&
                        prefer(kMinAlignmentDBytes, kind.sum_alignment) &&
                        api_.MatmulAlgoGetHeuristic(handle, desc_, weight_, values_, addend_, out_, preference, 1,
                                                    &heuristic, &found) == kSuccess;
    api_.MatmulPreferenceDestroy(preference);
    algorithm_ = heuristic.algorithm;
    return chosen && found == 1 && heuristic.state == kSuccess;
  }

  const Api& api_;
  Desc desc_ = nullptr;
  Layout weight_ = nullptr, values_ = nullptr, out_ = nullptr, addend_ = nullptr;
  Algorithm algorithm_ = {};
  bool usable_ = false;
};

// The plans of one device. One thread at a time: a plan holds the pointers of a call, and threads that launch on one
// device wait for one another anyway.
class Plans {
 public:
  bool run(const Api& api, const LinearArgs& a, void* out, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!handle_ && api.Create(&handle_) != kSuccess) return false;
    const Kind kind = kind_of(a, out);
    auto plan = plans_.find(kind);
    if (plan == plans_.end()) {
      if (plans_.size() == kMost) plans_.clear();  // rows of ever new numbers
      plan = plans_.try_emplace(kind, api, handle_, a, kind).first;
    }
    return plan->second.run(handle_, a, out, stream);
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex mutex_;
  Handle handle_ = nullptr;
  std::unordered_map<Kind, Plan, Hash> plans_;
};

// Never destroyed: when the process ends, CUDA may end before this library.
Plans& plans_of(int32_t device) {
  static std::mutex& mutex = *new std::mutex;
  static auto& plans = *new std::unordered_map<int32_t, Plans>;
  std::lock_guard<std::mutex> lock(mutex);
  return plans[device];
}

bool by_cublaslt(const LinearArgs& a, void* out, const Context& context) {
  if (forced().linear == Kernel::kGeneral) return false;
  const Api* api = cublaslt::api();
  const bool done = api && plans_of(context.device).run(*api, a, out, context.stream);
  if (!done && forced().linear == Kernel::kPacked) fail_forced("cuBLASLt 12.9 on a Hopper GPU", "linear=cublaslt");
  return done;
}

// ---- torch._scaled_mm

// The addend comes after the product's rounding, which is one more.
Tensor by_torch(const Tensor& values, const Tensor& scales, const Tensor& weight, const Tensor& weight_scales,
                const OptionalTensor& bias, const OptionalTensor& addend, const LinearArgs& a) {
  using torch::headeronly::ScalarType;
  using torch::stable::detail::from;
  StableIValue stack[] = {
      from(torch::stable::reshape(values, {a.rows, a.width})),
      from(torch::stable::transpose(weight, 0, 1)),
      from(torch::stable::reshape(scales, {a.rows, 1})),
      from(torch::stable::reshape(weight_scales, {1, a.channels})),
      from(bias),
      from(std::nullopt),  // scale_result
      from(std::optional<ScalarType>(ScalarType::BFloat16)),
      from(a.use_fast_accum),
  };
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_scaled_mm", "", stack, TORCH_ABI_VERSION));
  const Tensor flat = torch::stable::detail::to<Tensor>(stack[0]);
  std::vector<int64_t> shape(a.values.size, a.values.size + a.values.dim);
  shape.back() = a.channels;
  const Tensor product =
      torch::stable::reshape(flat, torch::headeronly::IntHeaderOnlyArrayRef(shape.data(), a.values.dim));
  // The stable ABI has no Scalar for aten::add.
  return addend ? torch::stable::subtract(product, *addend, -1.0) : product;
}

}  // namespace

namespace {

LinearArgs linear_args(const Tensor& values, const Tensor& scales, const Tensor& weight, const Tensor& weight_scales,
                       const OptionalTensor& bias, const OptionalTensor& addend, bool use_fast_accum) {
  LinearArgs a;
  a.values = arg("values", values);
  a.scales = arg("scales", scales);
  a.weight = arg("weight", weight);
  a.weight_scales = arg("weight_scales", weight_scales);
  a.bias = arg("bias", bias);
  a.addend = arg("addend", addend);
  a.use_fast_accum = use_fast_accum;
  check_inputs(a);
  return a;
}

// cuBLASLt reads scales at multiples of 16 bytes. A sample in the middle of a batch may have its scales elsewhere.
Tensor at_16_bytes(const Tensor& scales, Arg& a) {
  if (reinterpret_cast<uintptr_t>(a.data) % 16 == 0) return scales;
  const Tensor copy = torch::stable::clone(scales);
  a.data = copy.mutable_data_ptr();
  return copy;
}

bool is_empty(const LinearArgs& a) { return a.rows == 0 || a.channels == 0 || a.width == 0; }

}  // namespace

void scaled_linear_out(const Tensor& out, const Tensor& values, const Tensor& scales, const Tensor& weight,
                       const Tensor& weight_scales, const OptionalTensor& bias, const OptionalTensor& addend,
                       bool use_fast_accum) {
  LinearArgs a = linear_args(values, scales, weight, weight_scales, bias, addend, use_fast_accum);
  a.out = mutable_arg("out", out);
  check_given_output(a);
  const Tensor row_scales = at_16_bytes(scales, a.scales);
  const Tensor channel_scales = at_16_bytes(weight_scales, a.weight_scales);
  Launch launch(a.values);
  if (!is_empty(a) && by_cublaslt(a, a.out.data, launch.context())) return;
  Tensor target = out;
  torch::stable::copy_(target, by_torch(values, row_scales, weight, channel_scales, bias, addend, a));
}

Tensor scaled_linear(const Tensor& values, const Tensor& scales, const Tensor& weight, const Tensor& weight_scales,
                     const OptionalTensor& bias, const OptionalTensor& addend, bool use_fast_accum) {
  LinearArgs a = linear_args(values, scales, weight, weight_scales, bias, addend, use_fast_accum);
  Arg like = a.values;
  like.dtype = aoti_torch_dtype_bfloat16();
  Tensor out = empty_rows(like, a.channels);
  a.out_step = a.channels;
  const Tensor row_scales = at_16_bytes(scales, a.scales);
  const Tensor channel_scales = at_16_bytes(weight_scales, a.weight_scales);
  Launch launch(a.values);
  if (!is_empty(a) && by_cublaslt(a, out.mutable_data_ptr(), launch.context())) return out;
  return by_torch(values, row_scales, weight, channel_scales, bias, addend, a);
}

// ---- weight_only_linear: as check_weight_only_linear of ltx_kernels/_checks.py

Tensor weight_only_linear(const Tensor& input, const Tensor& weight, const Tensor& weight_scales,
                          const OptionalTensor& bias) {
  Arg x = arg("input", input), w = arg("weight", weight);
  const Arg scales = arg("weight_scales", weight_scales), b = arg("bias", bias);
  WeightOnlyParams p;
  p.dtype = float_dtype(x);
  check_dim(w, 2);
  check_dtype(w, aoti_torch_dtype_float8_e4m3fn());
  check_dtype(scales, aoti_torch_dtype_float32());
  p.channels = w.size[0];
  p.width = w.size[1];
  if (p.width == 0 || p.width % 16 != 0) {
    fail(w.name, "a last dimension that is a positive multiple of 16", "shape " + shape_text(w));
  }
  check_min_dim(x, 1);
  if (x.last() != p.width) {
    fail(x.name, text("a last dimension of ", p.width, " (that of weight)"), "shape " + shape_text(x));
  }
  check_shape(scales, {p.channels});
  if (b) {
    check_same_dtype(b, x);
    check_shape(b, {p.channels});
    check_same_device(b, x);
  }
  check_same_device(w, x);
  check_same_device(scales, x);
  for (const Arg& operand : {x, w, scales, b}) {
    if (operand) check_contiguous(operand);
  }
  Tensor out = empty_rows(x, p.channels);
  p.rows = x.numel() / p.width;
  if (p.rows == 0 || p.channels == 0) return out;
  Launch launch(x);
  const Tensor own_input = at_16_bytes(input, x), own_weight = at_16_bytes(weight, w);
  p.input = x.data;
  p.weight = w.data;
  p.scales = static_cast<const float*>(scales.data);
  p.bias = b ? b.data : nullptr;
  p.out = out.mutable_data_ptr();
  ltx::weight_only_linear(p, launch.context());
  return out;
}

}  // namespace ltx::host

#endif
