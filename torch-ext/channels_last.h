// What the ops on channels-last tensors ask of their tensors (channels_last.cpp, group_norm.cpp): [batch, channels,
// frames, height, width] in torch.channels_last_3d memory, and images without frames in torch.channels_last memory.
// Inputs in another memory order are copied into this one.
#pragma once

#include "op_inputs.h"

namespace ltx::host {

// Dimensions of a video. Height and width of an image are its last two.
enum : int { kBatch, kChannels, kFrames, kHeight, kWidth, kDims };
constexpr int kImageDims = kDims - 1;

// What an axis is multiplied by, or padded with, at most: the product of three fits in 64 bits.
constexpr int64_t kMaxGrowth = 65536;

inline bool is_image_or_video(const Arg& a) { return a.dim == kImageDims || a.dim == kDims; }

// Calls each(d) for all dimensions but the batch, the fastest in memory first.
template <typename Each>
void for_dims_by_stride(int64_t dim, const Each& each) {
  each(kChannels);
  for (int64_t d = dim - 1; d > kChannels; --d) each(d);
}

// Whether the pixels of a batch element lie one after the other, each with its channels side by side. Sizes of one have
// no stride to compare.
inline bool has_dense_pixels(const Arg& a) {
  int64_t step = 1;
  bool dense = true;
  for_dims_by_stride(a.dim, [&](int64_t d) {
    dense = dense && (a.size[d] == 1 || a.stride[d] == step);
    step *= a.size[d];
  });
  return dense;
}

inline bool is_dense(const Arg& a) {
  return has_dense_pixels(a) && (a.size[kBatch] <= 1 || a.stride[kBatch] == a.numel() / a.size[kBatch]);
}

inline int64_t batch_stride(const Arg& a) { return a.size[kBatch] == 1 ? 0 : a.stride[kBatch]; }

// A tensor, or a copy of it where an op could not read it as it lies in memory. It has to outlive the launch.
class Readable {
 public:
  // channels_last: the memory order of the copy; otherwise contiguous.
  template <typename Fits>
  Readable(const char* name, const OptionalTensor& tensor, bool channels_last, const Fits& fits) {
    if (!tensor) return;
    arg_ = arg(name, *tensor);
    if (fits(arg_)) return;
    using torch::headeronly::MemoryFormat;
    const MemoryFormat packed = arg_.dim == kDims ? MemoryFormat::ChannelsLast3d : MemoryFormat::ChannelsLast;
    copy_ = torch::stable::contiguous(*tensor, channels_last ? packed : MemoryFormat::Contiguous);
    // contiguous() goes by its own reading of the strides of sizes of one, and may have returned the tensor itself.
    Arg copied = arg(name, *copy_);
    if (!fits(copied)) {
      copy_ = torch::stable::clone(*copy_);
      copied = arg(name, *copy_);
    }
    arg_ = copied;
  }
  const Arg& operator*() const { return arg_; }
  const Arg* operator->() const { return &arg_; }

 private:
  Arg arg_;
  OptionalTensor copy_;
};

inline Readable channels_last(const char* name, const OptionalTensor& tensor) {
  return Readable(name, tensor, true, [](const Arg& a) { return !is_image_or_video(a) || has_dense_pixels(a); });
}
inline Readable dense_channels_last(const char* name, const OptionalTensor& tensor) {
  return Readable(name, tensor, true, [](const Arg& a) { return !is_image_or_video(a) || is_dense(a); });
}
// Vectors and planes: the last dimension, and here all others, are contiguous.
inline Readable plain(const char* name, const OptionalTensor& tensor) {
  return Readable(name, tensor, false, [](const Arg& a) {
    int64_t step = 1;
    for (int64_t d = a.dim - 1; d >= 0; --d) {
      if (a.size[d] != 1 && a.stride[d] != step) return false;
      step *= a.size[d];
    }
    return true;
  });
}
// [batch, channels]: rows of channels, any distance apart.
inline Readable rows(const char* name, const OptionalTensor& tensor) {
  return Readable(name, tensor, false,
                  [](const Arg& a) { return a.dim == 0 || a.dim > 2 || a.last() == 1 || a.stride[a.dim - 1] == 1; });
}

inline const void* check_vector(const Arg& a, const Arg& input, int64_t count) {
  if (!a) return nullptr;
  check_same_device(a, input);
  check_same_dtype(a, input);
  check_shape(a, {count});
  return a.data;
}

inline void check_like(const Arg& a, const Arg& input) {
  if (!a) return;
  check_same_device(a, input);
  check_same_dtype(a, input);
  check_shape(a, input.size, input.dim);
}

// A tensor in channels-last memory, of the dtype, device and dimensions of `as`.
inline Tensor new_channels_last(const int64_t* size, const Arg& as) {
  int64_t stride[kDims], step = 1;
  const auto place = [&](int64_t d) {
    stride[d] = step;
    step *= size[d] > 1 ? size[d] : 1;
  };
  for_dims_by_stride(as.dim, place);
  place(kBatch);
  return empty_strided(size, stride, as.dim, as);
}

inline void check_channels_last_output(const Arg& out, const Arg& input, const int64_t* size, bool dense) {
  check_output(out, input, size, input.dim);
  if (out.numel() != 0 && !(dense ? is_dense(out) : has_dense_pixels(out))) {
    fail(out.name, text("channels-last memory (torch.channels_last", input.dim == kDims ? "_3d)" : ")"),
         "strides " + shape_text(out.stride, out.dim));
  }
}

}  // namespace ltx::host
