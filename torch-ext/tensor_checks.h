// The one idiom for looking at tensors: an Arg is a tensor with its name; every check names the argument, what was
// expected and what came. Both backends run these checks, so they raise the same errors; torch-ext/ltx_kernels/
// _checks.py repeats the texts for the fake and the reference implementations, and tests/test_errors.py compares them.
//
// Errors are plain std::runtime_error: STD_TORCH_CHECK would put function, file and line before the text.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ltx/params.h"
#include "stable_abi.h"

namespace ltx::host {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Arg {
  const char* name = nullptr;
  void* data = nullptr;
  int64_t dim = 0;
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;

  explicit operator bool() const { return name != nullptr; }
  int64_t last() const { return size[dim - 1]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d = 0; d < dim; ++d) n *= size[d];
    return n;
  }
};

[[noreturn]] inline void fail(const char* name, const std::string& expected, const std::string& got);

inline Arg arg(const char* name, const Tensor& tensor) {
  Arg a;
  a.name = name;
  if (!tensor.defined()) fail(name, "a tensor", "None");  // the dispatcher takes None for any tensor but the first
  AtenTensorHandle handle = tensor.get();
  int64_t* shape = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &a.dim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &shape));
  a.size = shape;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &shape));
  a.stride = shape;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &a.dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &a.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &a.device_index));
  // The const accessor: a mutable one would materialise lazily cloned (copy-on-write) inputs.
  const void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &data));
  a.data = const_cast<void*>(data);
  return a;
}

inline Arg arg(const char* name, const OptionalTensor& tensor) { return tensor ? arg(name, *tensor) : Arg{}; }

inline Arg mutable_arg(const char* name, const Tensor& tensor) {
  Arg a = arg(name, tensor);
  a.data = tensor.mutable_data_ptr();
  return a;
}

// ---- Texts

// Numbers are written as Python's format(number, "g") writes them, in every locale.
template <typename Number>
std::string number_text(Number number) {
  char buffer[32];
  if constexpr (std::is_floating_point_v<Number>) {
    if (std::isnan(number)) return "nan";  // to_chars would write its sign
    return {buffer, std::to_chars(buffer, std::end(buffer), number, std::chars_format::general, 6).ptr};
  } else {
    return {buffer, std::to_chars(buffer, std::end(buffer), number).ptr};
  }
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::string s;
  const auto append = [&s](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      s += number_text(part);
    } else {
      s += part;
    }
  };
  (append(parts), ...);
  return s;
}

[[noreturn]] inline void fail(const char* name, const std::string& expected, const std::string& got) {
  throw std::runtime_error(text(name, ": expected ", expected, ", got ", got));
}

inline std::string shape_text(const int64_t* size, int64_t dim) {
  std::string s = "[";
  for (int64_t d = 0; d < dim; ++d) s += (d ? ", " : "") + std::to_string(size[d]);
  return s + "]";
}
inline std::string shape_text(const Arg& a) { return shape_text(a.size, a.dim); }

inline std::string device_text(const Arg& a) {
  if (a.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (a.device_type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(a.device_index);
  if (a.device_type == aoti_torch_device_type_meta()) return "meta";
  return "device type " + std::to_string(a.device_type);
}

inline std::string dtype_text(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return "float32";
  if (dtype == aoti_torch_dtype_float16()) return "float16";
  if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
  if (dtype == aoti_torch_dtype_float64()) return "float64";
  if (dtype == aoti_torch_dtype_int64()) return "int64";
  if (dtype == aoti_torch_dtype_int32()) return "int32";
  if (dtype == aoti_torch_dtype_int16()) return "int16";
  if (dtype == aoti_torch_dtype_int8()) return "int8";
  if (dtype == aoti_torch_dtype_uint8()) return "uint8";
  if (dtype == aoti_torch_dtype_bool()) return "bool";
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return "float8_e4m3fn";
  if (dtype == aoti_torch_dtype_float8_e5m2()) return "float8_e5m2";
  if (dtype == aoti_torch_dtype_complex64()) return "complex64";
  if (dtype == aoti_torch_dtype_complex128()) return "complex128";
  return "dtype code " + std::to_string(dtype);
}

// ---- Checks

inline DType float_dtype(const Arg& a, const char* expected = "dtype float32, float16 or bfloat16") {
  if (a.dtype == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (a.dtype == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (a.dtype == aoti_torch_dtype_float32()) return DType::kFloat32;
  fail(a.name, expected, dtype_text(a.dtype));
}

inline IndexType index_type(const Arg& a) {
  if (a.dtype == aoti_torch_dtype_int64()) return IndexType::kInt64;
  if (a.dtype == aoti_torch_dtype_int32()) return IndexType::kInt32;
  if (a.dtype == aoti_torch_dtype_bool()) return IndexType::kBool;
  fail(a.name, "dtype int64, int32 or bool", dtype_text(a.dtype));
}

inline void check_same_dtype(const Arg& a, const Arg& as) {
  if (a.dtype != as.dtype) {
    fail(a.name, text("dtype ", dtype_text(as.dtype), " (that of ", as.name, ")"), dtype_text(a.dtype));
  }
}

inline void check_same_device(const Arg& a, const Arg& as) {
  if (a.device_type != as.device_type || a.device_index != as.device_index) {
    fail(a.name, text("device ", device_text(as), " (that of ", as.name, ")"), device_text(a));
  }
}

inline void check_min_dim(const Arg& a, int64_t dim) {
  if (a.dim < dim) {
    fail(a.name, text("at least ", dim, dim == 1 ? " dimension" : " dimensions"), "shape " + shape_text(a));
  }
}

inline void check_dim(const Arg& a, int64_t dim) {
  if (a.dim != dim) fail(a.name, text(dim, " dimensions"), "shape " + shape_text(a));
}

inline void check_shape(const Arg& a, const int64_t* size, int64_t dim) {
  bool same = a.dim == dim;
  for (int64_t d = 0; same && d < dim; ++d) same = a.size[d] == size[d];
  if (!same) fail(a.name, "shape " + shape_text(size, dim), shape_text(a));
}
inline void check_shape(const Arg& a, std::initializer_list<int64_t> shape) {
  check_shape(a, shape.begin(), static_cast<int64_t>(shape.size()));
}

inline float check_eps(double eps, const char* name = "eps") {
  if (!(eps >= 0) || std::isinf(eps)) fail(name, "a finite number >= 0", text(eps));
  return static_cast<float>(eps);
}

template <typename Code>
Code check_code(const char* name, int64_t value, Code first, Code last) {
  if (value < static_cast<int64_t>(first) || value > static_cast<int64_t>(last)) {
    fail(name, text("a code from ", static_cast<int64_t>(first), " to ", static_cast<int64_t>(last)), text(value));
  }
  return static_cast<Code>(value);
}
inline Rounding check_rounding(int64_t code) { return check_code("rounding", code, Rounding::kFp32, Rounding::kEager); }

// ---- Memory: what an output may share. Fakes have no memory, so these have no Python twin.

// Elements from the lowest to one past the highest address.
inline int64_t extent(const Arg& a) {
  int64_t n = 1;
  for (int64_t d = 0; d < a.dim; ++d) n += (a.size[d] - 1) * a.stride[d];
  return n;
}

// Whether no two elements lie in one place. Strides that do not nest count as if some did: torch makes no such tensors.
inline bool has_own_memory(const Arg& a) {
  int64_t nested = 0, wanted = 0, last = 0, reach = 0;
  for (int64_t d = 0; d < a.dim; ++d) {
    if (a.size[d] == 0) return true;
    wanted += a.size[d] > 1;
  }
  for (; nested < wanted; ++nested) {  // the dimensions by their strides, smallest first
    int64_t next = -1;
    for (int64_t d = 0; d < a.dim; ++d) {
      if (a.size[d] > 1 && a.stride[d] > last && (next < 0 || a.stride[d] < a.stride[next])) next = d;
    }
    if (next < 0 || a.stride[next] <= reach) return false;
    last = a.stride[next];
    reach += (a.size[next] - 1) * last;
  }
  return true;
}

// The output has the wanted shape, the dtype and device of `as`, and no two elements in one place.
inline void check_output(const Arg& out, const Arg& as, const int64_t* size, int64_t dim) {
  check_shape(out, size, dim);
  check_same_dtype(out, as);
  check_same_device(out, as);
  if (!has_own_memory(out)) {
    fail(out.name, "memory of its own for every element", "strides " + shape_text(out.stride, out.dim));
  }
}

inline int64_t element_size(const Arg& a) {
  if (a.dtype == aoti_torch_dtype_int64()) return 8;
  for (const int32_t byte :
       {aoti_torch_dtype_bool(), aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e5m2()}) {
    if (a.dtype == byte) return 1;
  }
  return a.dtype == aoti_torch_dtype_float32() || a.dtype == aoti_torch_dtype_int32() ? 4 : 2;
}

// Whether an element of one tensor and an element of another share a byte. The places of a tensor's elements are its
// address plus sums of index * stride, so the distance of two elements is the distance of the addresses plus, for each
// stride of either tensor, a count * stride. The search goes from the largest stride to the smallest; what the smaller
// ones can add bounds the counts worth trying, to two or three where strides nest. Slices of a packed tensor, which
// interleave, are told apart in this way. Strides that need more than kMostSteps counts pass for an overlap.
class SharedBytes {
 public:
  SharedBytes(const Arg& a, const Arg& b) : width_a_(element_size(a)), width_b_(element_size(b)) {
    add(a, width_a_, 1);
    add(b, width_b_, -1);
    std::sort(levels_.begin(), levels_.end(), [](const Level& x, const Level& y) { return x.stride > y.stride; });
  }

  bool any(int64_t distance) { return search(0, distance); }

 private:
  struct Level {
    int64_t stride, least, most;  // counts from `least`, <= 0, to `most`, >= 0
  };

  static constexpr int kMostSteps = 1 << 14;

  void add(const Arg& a, int64_t width, int sign) {
    for (int64_t d = 0; d < a.dim; ++d) {
      const int64_t stride = a.stride[d] * width, count = a.size[d] - 1;
      if (stride == 0 || count == 0) continue;
      size_t i = 0;
      while (i < levels_.size() && levels_[i].stride != stride) ++i;
      if (i == levels_.size()) levels_.push_back({stride, 0, 0});
      (sign > 0 ? levels_[i].most : levels_[i].least) += sign * count;
    }
  }

  bool search(size_t level, int64_t distance) {
    // Two elements share a byte at distances from -(width_a - 1) to width_b - 1.
    if (level == levels_.size()) return distance > -width_a_ && distance < width_b_;
    if (++steps_ > kMostSteps) return true;
    int64_t lower = 0, upper = 0;  // what the smaller strides can add
    for (size_t i = level + 1; i < levels_.size(); ++i) {
      lower += levels_[i].least * levels_[i].stride;
      upper += levels_[i].most * levels_[i].stride;
    }
    const Level& l = levels_[level];
    const int64_t first = std::max(l.least, ceil_div(-width_a_ + 1 - upper - distance, l.stride));
    const int64_t last = std::min(l.most, floor_div(width_b_ - 1 - lower - distance, l.stride));
    for (int64_t count = first; count <= last; ++count) {
      if (search(level + 1, distance + count * l.stride)) return true;
    }
    return false;
  }

  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
  static int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

  int64_t width_a_, width_b_;
  std::vector<Level> levels_;
  int steps_ = 0;
};

// `may_be_same`: an op that reads each element before it writes it may work in place.
inline void check_overlap(const Arg& out, const Arg& other, bool may_be_same) {
  if (!other || out.numel() == 0 || other.numel() == 0) return;
  const char *out_begin = static_cast<const char*>(out.data), *other_begin = static_cast<const char*>(other.data);
  const char* out_end = out_begin + extent(out) * element_size(out);
  const char* other_end = other_begin + extent(other) * element_size(other);
  if (out_end <= other_begin || other_end <= out_begin) return;
  bool same = out_begin == other_begin && out.dim == other.dim && out.dtype == other.dtype;
  for (int64_t d = 0; same && d < out.dim; ++d) {
    same = out.size[d] == other.size[d] && (out.size[d] == 1 || out.stride[d] == other.stride[d]);
  }
  if (same && may_be_same) return;
  if (!same && !SharedBytes(out, other).any(out_begin - other_begin)) return;
  fail(out.name,
       may_be_same ? text("exactly the memory of ", other.name, " or none of it")
                   : text("memory apart from that of ", other.name),
       "an overlap");
}

// ---- Outputs

// The stable ABI keeps torch's own exception to itself. Code that retries with a smaller batch looks for the last
// words.
[[noreturn]] inline void fail_memory(const int64_t* size, int64_t dim, const Arg& as) {
  fail("output",
       text("memory for shape ", shape_text(size, dim), " of ", dtype_text(as.dtype), " on ", device_text(as)),
       "none: no usable device, or out of memory.");
}

inline Tensor empty_strided(const int64_t* size, const int64_t* stride, int64_t dim, const Arg& as) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(dim, size, stride, as.dtype, as.device_type, as.device_index, &handle)) {
    fail_memory(size, dim, as);
  }
  return Tensor(handle);
}

// A contiguous tensor of input's dtype and leading shape with `width` columns; with `count`, that many of them side by
// side: [count, ...].
inline Tensor empty_rows(const Arg& input, int64_t width, int64_t count = 0) {
  constexpr int64_t kInline = 8;
  int64_t buffer[2 * kInline];
  std::vector<int64_t> heap;
  int64_t* size = buffer;
  const int64_t first = count == 0 ? 0 : 1, dim = input.dim + first;
  if (dim > kInline) {
    heap.resize(2 * dim);
    size = heap.data();
  }
  int64_t* stride = size + dim;
  int64_t step = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    size[d] = d == dim - 1 ? width : d < first ? count : input.size[d - first];
    stride[d] = step;
    step *= size[d] > 1 ? size[d] : 1;
  }
  return empty_strided(size, stride, dim, input);
}

// ---- Row spaces

// Collects the operands of a row op and merges the leading dimensions that all of them walk with one stride.
class RowSpace {
 public:
  // The space is that of `input`: its last dimension is the columns, all others count rows.
  RowSpace(const Arg& input, int64_t width) : input_(input), width_(width) {}

  // An operand of the input's leading shape.
  void add(RowView& view, const Arg& a) { push(view, a, a.dim, false); }

  // A vector of `width` elements (or of one), the same for every row.
  void add_vector(RowView& view, const Arg& a) {
    if (!a) return;
    check_same_device(a, input_);
    float_dtype(a);
    check_shape(a, {width_});
    push(view, a, 1, false);
  }

  // Anything that broadcasts to the input. Two dimensions beside an input of three or more: one vector per batch.
  void add_broadcast(RowView& view, const Arg& a) {
    if (!a) return;
    check_same_device(a, input_);
    float_dtype(a);
    const bool per_batch = a.dim == 2 && input_.dim >= 3;
    bool fits = a.dim <= input_.dim;
    if (per_batch) {
      fits = fits_dim(a.size[0], input_.size[0]) && fits_dim(a.size[1], width_);
    } else {
      for (int64_t d = 1; fits && d <= a.dim; ++d) fits = fits_dim(a.size[a.dim - d], input_.size[input_.dim - d]);
    }
    if (!fits) {
      std::string expected = "a shape that broadcasts to " + shape_text(input_);
      if (input_.dim >= 3) {
        const int64_t batch_shape[] = {input_.size[0], width_};
        expected += " (or " + shape_text(batch_shape, 2) + ", per batch)";
      }
      fail(a.name, expected, shape_text(a));
    }
    push(view, a, a.dim, per_batch);
  }

  // Row numbers: anything that broadcasts to the input's leading shape.
  void add_index(IndexView& view, const Arg& a) {
    check_same_device(a, input_);
    view.type = index_type(a);
    const int64_t leading = input_.dim - 1;
    bool fits = a.dim <= leading;
    for (int64_t d = 1; fits && d <= a.dim; ++d) fits = fits_dim(a.size[a.dim - d], input_.size[leading - d]);
    if (!fits) fail(a.name, "a shape that broadcasts to " + shape_text(input_.size, leading), shape_text(a));
    view.data = a.data;
    entries_[count_++] = Entry{view.stride, &a, a.dim + 1, false};
  }

  // The rows that an index names: [rows, width], or [batch, rows, width].
  void add_rows(RowView& view, const Arg& a) {
    if (!a) return;
    check_same_device(a, input_);
    float_dtype(a);
    const bool per_batch = a.dim == 3 && input_.dim >= 2;
    const bool fits =
        (per_batch || a.dim == 2) && fits_dim(a.last(), width_) && (!per_batch || fits_dim(a.size[0], input_.size[0]));
    if (!fits) {
      std::string expected = text("shape [rows, ", width_, "]");
      if (input_.dim >= 2) expected += text(" or [", input_.size[0], ", rows, ", width_, "]");
      fail(a.name, expected + " with index", shape_text(a));
    }
    push(view, a, per_batch ? 3 : 1, per_batch);
    view.index_stride = a.stride[a.dim - 2];
  }

  // Fills rows and the strides of every added view. False when there is nothing to compute.
  bool finish(Rows& rows) {
    rows = Rows{};
    rows.count = 1;
    rows.width = width_;
    for (int64_t d = 0; d + 1 < input_.dim; ++d) rows.count *= input_.size[d];
    if (rows.count == 0 || rows.width == 0) return false;
    // Innermost first; reversed below.
    for (int64_t d = input_.dim - 2; d >= 0; --d) {
      if (input_.size[d] == 1) continue;
      const int n = rows.ndim;
      bool merge = n > 0;
      for (int i = 0; merge && i < count_; ++i) {
        merge = stride(i, d) == entries_[i].strides[n - 1] * rows.size[n - 1];
      }
      if (merge) {
        rows.size[n - 1] *= input_.size[d];
        continue;
      }
      if (n == kMaxDims) {
        fail(input_.name, text("at most ", kMaxDims, " leading dimensions that cannot be merged"),
             "shape " + shape_text(input_) + " with strides " + shape_text(input_.stride, input_.dim));
      }
      rows.size[n] = input_.size[d];
      for (int i = 0; i < count_; ++i) entries_[i].strides[n] = stride(i, d);
      rows.ndim = n + 1;
    }
    for (int i = 0; i < rows.ndim / 2; ++i) {
      std::swap(rows.size[i], rows.size[rows.ndim - 1 - i]);
      for (int j = 0; j < count_; ++j) {
        int64_t* s = entries_[j].strides;
        std::swap(s[i], s[rows.ndim - 1 - i]);
      }
    }
    return true;
  }

 private:
  struct Entry {
    int64_t* strides;  // of the view
    const Arg* a;      // the caller's, which lives as long as the row space
    int64_t dim;
    bool per_batch;
  };

  static bool fits_dim(int64_t size, int64_t full) { return size == full || size == 1; }

  void push(RowView& view, const Arg& a, int64_t dim, bool per_batch) {
    view.data = a.data;
    view.dtype = float_dtype(a);
    // A broadcast column has stride 0; a single column may be read with any stride, and 1 takes the fast path.
    view.column_stride = a.dim == 0 ? 0 : a.last() == 1 ? (width_ == 1 ? 1 : 0) : a.stride[a.dim - 1];
    entries_[count_++] = Entry{view.stride, &a, dim, per_batch};
  }
  int64_t stride(int i, int64_t d) const {
    const Entry& e = entries_[i];
    if (e.per_batch) return d == 0 && e.a->size[0] != 1 ? e.a->stride[0] : 0;
    const int64_t own = d - (input_.dim - e.dim);
    return own < 0 || e.a->size[own] == 1 ? 0 : e.a->stride[own];
  }

  static constexpr int kMaxOperands = 20;
  const Arg& input_;
  int64_t width_;
  Entry entries_[kMaxOperands];
  int count_ = 0;
};

// ---- Where to run

// Makes the input's device current for the launch, with its current stream.
class Launch {
 public:
  explicit Launch(const Arg& input) {
#ifdef CUDA_KERNEL
    context_.device = input.device_index;
    if (torch::stable::accelerator::getCurrentDeviceIndex() != input.device_index) guard_.emplace(input.device_index);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(input.device_index, &context_.stream));
#else
    (void)input;
    context_.parallel_for = [](int64_t begin, int64_t end, int64_t grain, Context::RangeFn fn, void* state) {
      TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, fn, state));
    };
#endif
  }
  const Context& context() const { return context_; }

 private:
  Context context_;
#ifdef CUDA_KERNEL
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#endif
};

}  // namespace ltx::host
