// Ops on video tensors in channels-last memory, for the decoders of video autoencoders: channel_norm, pixel_shuffle and
// unpatchify. The formulas are in ltx/channels_last.h.
//
// Each op reads every input once and writes every output once; channel_norm also writes the padding of the convolution
// that reads its result. Every step rounds to the tensors' dtype, in pairs of 16-bit elements where the GPU has such
// instructions. A channel sum is taken over the lanes that share a voxel, in an order that depends on the number of
// channels alone.
#include <algorithm>
#include <cmath>

#include "ltx/channels_last.cuh"
#include "ltx/channels_last.h"
#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/reduce.cuh"

namespace ltx {
namespace {

// H200, bf16, norm with modulation of 128x49x128x192: 1.32 x a copy, with 256 threads 1.35 (h200-vae-tuning.json).
constexpr int kThreads = 128;

// ---- Steps of channel_norm

// x / value, to the bits of an IEEE division for results that are normal numbers. kBFloat16: x and value are bf16 and
// the quotient will be rounded to bf16. Then a product with the reciprocal is enough, because a quotient of two 8-bit
// significands is never closer than 2^-17 of itself to a point where rounding to bf16 changes. The value is the root of
// a number that fp32 holds, so that its reciprocal is finite unless it is zero; where it is zero or infinite the
// product is what the division would give.
template <bool kBFloat16>
struct Divisor {
  float value, reciprocal;
  __device__ __forceinline__ explicit Divisor(float d) : value(d), reciprocal(1.f / d) {}
  __device__ __forceinline__ float divide(float x) const {
    const float quotient = __fmul_rn(x, reciprocal);
    if constexpr (kBFloat16) return quotient;
    const float corrected = fmaf(fmaf(-value, quotient, x), reciprocal, quotient);
    return isfinite(corrected) ? corrected : quotient;
  }
};

template <typename T, int kWidth, ChannelNorm kNorm>
struct Steps {
  using P = Pack<T, kWidth>;

  // The part of a channel sum that a pack gives.
  static __device__ __forceinline__ float squares(const P& h) {
    float x[kWidth];
    if constexpr (kNorm == ChannelNorm::kRmsStepwise) {
      unpack(rounded<Multiply>(h, h), x);
      return tree_sum(x);
    }
    unpack(h, x);
    float even = 0.f, odd = 0.f;
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      even = fmaf(x[i], x[i], even);
      if (i + 1 < kWidth) odd = fmaf(x[i + 1], x[i + 1], odd);
    }
    return even + odd;
  }

  // From the channel sum to the factor or divisor of a voxel.
  static __device__ __forceinline__ float statistic(float sum, float inverse_channels, float eps) {
    if constexpr (kNorm == ChannelNorm::kL2) {
      const float length = __fsqrt_rn(sum);
      return length < eps ? eps : length;  // a NaN stays
    }
    const float mean = __fmul_rn(sum, inverse_channels);
    if constexpr (kNorm == ChannelNorm::kRms) return rsqrtf(__fadd_rn(mean, eps));
    return round_to<T>(__fsqrt_rn(round_to<T>(__fadd_rn(round_to<T>(mean), eps))));
  }

  static __device__ __forceinline__ P normalised(const P& h, float statistic, float root_channels) {
    if constexpr (kNorm == ChannelNorm::kNone) return h;
    float x[kWidth];
    unpack(h, x);
    if constexpr (kNorm == ChannelNorm::kRms) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = __fmul_rn(x[i], statistic);
    } else {
      const Divisor<std::is_same_v<T, __nv_bfloat16> && kNorm == ChannelNorm::kRmsStepwise> divisor(statistic);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = divisor.divide(x[i]);
    }
    if constexpr (kNorm == ChannelNorm::kL2) {
      unpack(to_pack<T, kWidth>(x), x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = __fmul_rn(x[i], root_channels);
    }
    return to_pack<T, kWidth>(x);
  }

  static __device__ __forceinline__ P activated(const P& y) {
    float x[kWidth];
    unpack(y, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = silu<T>(x[i]);
    return to_pack<T, kWidth>(x);
  }
};

struct NormArgs {
  ChannelNormParams p;
  FastDivide frame, width;        // voxels of a frame, and of a row
  uint32_t voxels;                // of a batch element
  uint32_t frame_out, width_out;  // voxels of a padded frame, and of its row
  uint32_t iterations;            // voxels that a group of lanes works on, one after the other
  float inverse_channels, root_channels;
};

// Where the result of an input voxel goes: `place` in the output, and copies in the padding if it lies at an edge.
struct Target {
  uint32_t place;
  bool at_edge;
  uint32_t frame, y, x;  // set for voxels at an edge
};

__device__ __forceinline__ Target target_of(const NormArgs& a, uint32_t voxel) {
  const ChannelNormParams& p = a.p;
  const uint32_t front = static_cast<uint32_t>(p.front), frame_size = a.frame.divisor;
  const bool first = voxel < frame_size, last = voxel + frame_size >= a.voxels;
  Target t{voxel + front * frame_size, (first && front != 0) || (last && p.back != 0), 0, 0, 0};
  if (!p.reflect && !t.at_edge) return t;
  uint32_t in_frame;
  t.frame = a.frame.divide(voxel, in_frame);
  t.x = in_frame;
  if (p.reflect) {
    t.y = a.width.divide(in_frame, t.x);
    t.at_edge = t.at_edge || t.y == 1 || t.y + 2 == p.height || t.x == 1 || t.x + 2 == p.width;
    t.place = (t.frame + front) * a.frame_out + (t.y + 1) * a.width_out + t.x + 1;
  }
  return t;
}

// Calls write(place) for the copies. Edges are few voxels, so this is a loop over all that could be one.
template <typename Write>
__device__ __forceinline__ void for_each_copy(const NormArgs& a, const Target& t, const Write& write) {
  const ChannelNormParams& p = a.p;
  const uint32_t front = static_cast<uint32_t>(p.front);
  const uint32_t first = t.frame == 0 ? 0 : t.frame + front;
  const uint32_t last = t.frame + front + (t.frame + 1 == p.frames ? static_cast<uint32_t>(p.back) : 0);
  const uint32_t height = static_cast<uint32_t>(p.height), width = static_cast<uint32_t>(p.width);
  // Rows and columns of a padded frame: 0 the voxel's own, 1 the one before the first, 2 the one after the last.
#pragma unroll 1
  for (int side = 0; side < (p.reflect ? 9 : 1); ++side) {
    const int vertical = side / 3, horizontal = side % 3;
    if ((vertical == 1 && t.y != 1) || (vertical == 2 && t.y + 2 != height)) continue;
    if ((horizontal == 1 && t.x != 1) || (horizontal == 2 && t.x + 2 != width)) continue;
    uint32_t in_frame = t.x;
    if (p.reflect) {
      const uint32_t row = vertical == 0 ? t.y + 1 : vertical == 1 ? 0 : height + 1;
      in_frame = row * a.width_out + (horizontal == 0 ? t.x + 1 : horizontal == 1 ? 0 : width + 1);
    }
#pragma unroll 1
    for (uint32_t frame = first; frame <= last; ++frame) {
      const uint32_t place = frame * a.frame_out + in_frame;
      if (place != t.place) write(place);
    }
  }
}

// `lanes` neighbouring lanes share a voxel; a lane owns the packs lane, lane + lanes, ... of it, at most kPacks.
// grid: x = groups of voxels, y = batch.
template <typename T, int kPacks, ChannelNorm kNorm>
__global__ void __launch_bounds__(kThreads) channel_norm_kernel(const __grid_constant__ NormArgs a, uint32_t lanes) {
  constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  using S = Steps<T, kWidth, kNorm>;
  const ChannelNormParams& p = a.p;
  const uint32_t lane = threadIdx.x % lanes, groups = kThreads / lanes;
  const uint32_t first = blockIdx.x * groups * a.iterations + threadIdx.x / lanes;
  const int64_t batch = blockIdx.y;
  const uint32_t channels = static_cast<uint32_t>(p.channels), step = lanes * kWidth;
  const auto owned = [&](int k) { return lane * kWidth + k * step < channels; };
  // The lane's first element of a voxel, in each tensor of this batch element.
  const T* const input = static_cast<const T*>(p.input) + batch * p.input_stride + lane * kWidth;
  const T* const residual = static_cast<const T*>(p.residual) + batch * p.residual_stride + lane * kWidth;
  T* const out = static_cast<T*>(p.out) + batch * p.out_stride + lane * kWidth;
  T* const residual_out = static_cast<T*>(p.residual_out) + batch * p.residual_out_stride + lane * kWidth;
  const bool adds = p.residual != nullptr, keeps = p.residual_out != nullptr, biased = p.bias != nullptr;
  const bool weighted = p.weight != nullptr, modulated = p.scale != nullptr, noisy = p.noise != nullptr;

  // Vectors of the channels, which every voxel of the loop uses: kept in registers where there are enough of these.
  constexpr bool kKeep = kPacks == 1;
  P bias, weight, factor, shift;
  const auto load_vectors = [&](int k) {
    const uint32_t column = lane * kWidth + k * step;
    if (biased) bias = load<T, kWidth>(p.bias, column);
    if (weighted) weight = load<T, kWidth>(p.weight, column);
    if (modulated) {
      P scale = load<T, kWidth>(p.scale, batch * p.scale_stride + column);
      if (p.scale_table) scale = rounded<Add>(scale, load<T, kWidth>(p.scale_table, column));
      factor = rounded<Add>(filled<T, kWidth>(1.f), scale);
      shift = load<T, kWidth>(p.shift, batch * p.shift_stride + column);
      if (p.shift_table) shift = rounded<Add>(shift, load<T, kWidth>(p.shift_table, column));
    }
  };
  if (kKeep && owned(0)) load_vectors(0);

  // The next voxel's packs are on their way while this one is computed.
  P next[kPacks], next_residual[kPacks];
  const auto request = [&](uint32_t voxel) {
    if (voxel >= a.voxels) return;
    const int64_t offset = static_cast<int64_t>(voxel) * channels;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!owned(k)) continue;
      next[k] = load<T, kWidth>(input, offset + k * step);
      if (adds) next_residual[k] = load<T, kWidth>(residual, offset + k * step);
    }
  };
  request(first);
  // All lanes of a warp take part in every sum, with or without a voxel.
#pragma unroll 1
  for (uint32_t i = 0; i < a.iterations; ++i) {
    const uint32_t voxel = first + i * groups;
    const bool present = voxel < a.voxels;
    P h[kPacks], extra[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      h[k] = next[k];
      extra[k] = next_residual[k];
    }
    if (i + 1 < a.iterations) request(voxel + groups);
    T noise;
    if (noisy && present) {
      uint32_t in_frame;
      a.frame.divide(voxel, in_frame);
      noise = static_cast<const T*>(p.noise)[in_frame];
    }
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!present || !owned(k)) continue;
      if (!kKeep) load_vectors(k);
      if (biased) h[k] = rounded<Add>(h[k], bias);
      if (noisy) {
        const P scale = load<T, kWidth>(p.noise_scale, lane * kWidth + k * step);
        h[k] = rounded<Add>(h[k], rounded<Multiply>(filled<T, kWidth>(to_float(noise)), scale));
      }
      if (adds) h[k] = rounded<Add>(h[k], extra[k]);
      if (keeps) store(residual_out, static_cast<int64_t>(voxel) * channels + k * step, h[k]);
      if constexpr (kNorm != ChannelNorm::kNone) sum += S::squares(h[k]);
    }
    float statistic = 0.f;
    if constexpr (kNorm != ChannelNorm::kNone) {
      statistic = S::statistic(lane_sum(sum, static_cast<int>(lanes)), a.inverse_channels, p.eps);
    }
    if (!present) continue;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!owned(k)) continue;
      if (!kKeep) load_vectors(k);
      P y = S::normalised(h[k], statistic, a.root_channels);
      if (weighted) y = rounded<Multiply>(y, weight);
      if (modulated) y = rounded<Add>(rounded<Multiply>(y, factor), shift);
      h[k] = p.silu ? S::activated(y) : y;
    }
    const auto write = [&](uint32_t place) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (owned(k)) store(out, static_cast<int64_t>(place) * channels + k * step, h[k]);
      }
    };
    const Target target = target_of(a, voxel);
    write(target.place);
    if (target.at_edge) for_each_copy(a, target, write);
  }
}

// Any number of channels and any alignment: a warp has a voxel, and a lane reads its elements one by one, twice.
template <typename T, ChannelNorm kNorm>
__global__ void __launch_bounds__(kThreads, 8) channel_norm_general(const __grid_constant__ NormArgs a) {
  using P = Pack<T, 1>;
  using S = Steps<T, 1, kNorm>;
  const ChannelNormParams& p = a.p;
  const uint32_t voxel = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (voxel >= a.voxels) return;
  const int64_t batch = blockIdx.y;
  uint32_t in_frame;
  a.frame.divide(voxel, in_frame);
  const auto hidden = [&](int64_t c) {
    P h = load<T, 1>(p.input, batch * p.input_stride + voxel * p.channels + c);
    if (p.bias) h = rounded<Add>(h, load<T, 1>(p.bias, c));
    if (p.noise) {
      h = rounded<Add>(h, rounded<Multiply>(load<T, 1>(p.noise, in_frame), load<T, 1>(p.noise_scale, c)));
    }
    if (p.residual) h = rounded<Add>(h, load<T, 1>(p.residual, batch * p.residual_stride + voxel * p.channels + c));
    return h;
  };
  const Target target = target_of(a, voxel);
  float sum = 0.f;
  if (kNorm != ChannelNorm::kNone || p.residual_out) {
    for (int64_t c = threadIdx.x % 32; c < p.channels; c += 32) {
      const P h = hidden(c);
      if (p.residual_out) {
        store(p.residual_out, batch * p.residual_out_stride + voxel * p.channels + c, h);
      }
      sum += S::squares(h);
    }
  }
  const float statistic = S::statistic(lane_sum(sum, 32), a.inverse_channels, p.eps);
  for (int64_t c = threadIdx.x % 32; c < p.channels; c += 32) {
    // residual_out may have overwritten the input or the residual.
    P y =
        p.residual_out ? load<T, 1>(p.residual_out, batch * p.residual_out_stride + voxel * p.channels + c) : hidden(c);
    y = S::normalised(y, statistic, a.root_channels);
    if (p.weight) y = rounded<Multiply>(y, load<T, 1>(p.weight, c));
    if (p.scale) {
      P scale = load<T, 1>(p.scale, batch * p.scale_stride + c),
        shift = load<T, 1>(p.shift, batch * p.shift_stride + c);
      if (p.scale_table) scale = rounded<Add>(scale, load<T, 1>(p.scale_table, c));
      if (p.shift_table) shift = rounded<Add>(shift, load<T, 1>(p.shift_table, c));
      y = rounded<Add>(rounded<Multiply>(y, rounded<Add>(filled<T, 1>(1.f), scale)), shift);
    }
    if (p.silu) y = S::activated(y);
    const auto write = [&](uint32_t place) { store<T, 1>(p.out, batch * p.out_stride + place * p.channels + c, y); };
    write(target.place);
    if (target.at_edge) for_each_copy(a, target, write);
  }
}

// Lanes that share a voxel, and the packs that each owns: one, as long as a warp is enough. Three for the channels of
// Wan, which are three times a power of two.
struct Geometry {
  int lanes = 0, packs = 0;
};
Geometry geometry(int64_t packs) {
  const auto is_power = [](int64_t n) { return n > 0 && (n & (n - 1)) == 0; };
  if (packs % 3 == 0 && packs <= 96 && is_power(packs / 3)) return {static_cast<int>(packs / 3), 3};
  for (const int each : {1, 4}) {
    const int lanes = next_power_of_two(ceil_div(packs, each));
    if (lanes <= 32) return {lanes, each};
  }
  return {};
}

template <typename T, ChannelNorm kNorm>
void launch_norm(const ChannelNormParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  NormArgs a{};
  a.p = p;
  a.frame = FastDivide(p.height * p.width);
  a.width = FastDivide(p.width);
  a.voxels = thread_count("channel_norm", p.frames * p.height * p.width);
  a.width_out = static_cast<uint32_t>(p.width + (p.reflect ? 2 : 0));
  a.frame_out = static_cast<uint32_t>((p.height + (p.reflect ? 2 : 0)) * a.width_out);
  a.inverse_channels = 1.f / static_cast<float>(p.channels);
  a.root_channels = std::sqrt(static_cast<float>(p.channels));
  const unsigned batch = static_cast<unsigned>(p.batch);
  bool aligned = p.channels % kPackWidth<T> == 0;
  for (const void* vector : {p.bias, p.noise_scale, p.weight, p.scale_table, p.shift_table}) {
    aligned = aligned && is_aligned(vector, 0, p.dtype);
  }
  aligned = aligned && is_aligned(p.input, p.input_stride, p.dtype) &&
            is_aligned(p.residual, p.residual_stride, p.dtype) && is_aligned(p.out, p.out_stride, p.dtype) &&
            is_aligned(p.residual_out, p.residual_out_stride, p.dtype) &&
            is_aligned(p.scale, p.scale_stride, p.dtype) && is_aligned(p.shift, p.shift_stride, p.dtype);
  const Geometry g = geometry(p.channels / kPackWidth<T>);
  if (takes_packed("channels_last", forced().channels_last, aligned && g.lanes > 0)) {
    const int64_t groups = kThreads / g.lanes, blocks = ceil_div(a.voxels, groups);
    // Several voxels a group, so that the vectors are loaded once; fewer where blocks would not fill the GPU. (H200,
    // bf16, norm with modulation of 128x49x128x192: 1.32 x a copy with 8, 1.37 with 4: h200-vae-tuning.json.)
    a.iterations =
        static_cast<uint32_t>(std::clamp<int64_t>(blocks * p.batch / (8 * multiprocessors(context.device)), 1, 8));
    const dim3 grid(grid_size(ceil_div(a.voxels, groups * a.iterations)), batch);
    if (g.packs == 1) {
      channel_norm_kernel<T, 1, kNorm><<<grid, kThreads, 0, stream>>>(a, g.lanes);
    } else if (g.packs == 3) {
      channel_norm_kernel<T, 3, kNorm><<<grid, kThreads, 0, stream>>>(a, g.lanes);
    } else {
      channel_norm_kernel<T, 4, kNorm><<<grid, kThreads, 0, stream>>>(a, g.lanes);
    }
  } else {
    const dim3 grid(grid_size(ceil_div(a.voxels, kThreads / 32)), batch);
    channel_norm_general<T, kNorm><<<grid, kThreads, 0, stream>>>(a);
  }
  check_launch("channel_norm");
}

// ---- pixel_shuffle

struct ShuffleArgs {
  PixelShuffleParams p;
  FastDivide groups, width, height, frames;  // groups: threads of a voxel
  uint32_t threads;
};

// Where output voxel number `part` of input voxel (frame, y, x) is; negative: it is dropped.
__device__ __forceinline__ int64_t shuffled_voxel(const PixelShuffleParams& p, uint32_t batch, uint32_t frame,
                                                  uint32_t y, uint32_t x, uint32_t part) {
  const uint32_t up[] = {static_cast<uint32_t>(p.upscale[0]), static_cast<uint32_t>(p.upscale[1]),
                         static_cast<uint32_t>(p.upscale[2])};
  const uint32_t k = part % up[2], j = part / up[2] % up[1], i = part / (up[2] * up[1]);
  const uint32_t skip = static_cast<uint32_t>(p.skip), f = frame * up[0] + i;
  if (f < skip) return -1;
  const uint32_t frames = static_cast<uint32_t>(p.frames) * up[0] - skip;
  const uint32_t row = (batch * frames + f - skip) * static_cast<uint32_t>(p.height) * up[1] + y * up[1] + j;
  return static_cast<int64_t>(row) * static_cast<uint32_t>(p.width * up[2]) + x * up[2] + k;
}

// A thread has kWidth output channels of all kParts output voxels that one input voxel gives: kParts packs, which lie
// side by side in the input, and one in each of the output voxels.
template <typename T, int kParts>
__global__ void __launch_bounds__(kThreads) pixel_shuffle_kernel(const __grid_constant__ ShuffleArgs a) {
  constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  const PixelShuffleParams& p = a.p;
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= a.threads) return;
  uint32_t group, x, y, frame;
  const uint32_t voxel = a.groups.divide(thread, group);
  const uint32_t batch = a.frames.divide(a.height.divide(a.width.divide(voxel, x), y), frame);
  const int64_t channel = static_cast<int64_t>(group) * kWidth * kParts;
  P in[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    in[i] = load<T, kWidth>(p.input, voxel * p.channels * kParts + channel + i * kWidth);
  }
  if (p.bias) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) in[i] = rounded<Add>(in[i], load<T, kWidth>(p.bias, channel + i * kWidth));
  }
  if (p.residual) {
    const int64_t residual = batch * p.residual_stride[0] + frame * p.residual_stride[1] + y * p.residual_stride[2] +
                             x * p.residual_stride[3] +
                             static_cast<uint32_t>(channel) % static_cast<uint32_t>(p.residual_channels);
#pragma unroll
    for (int i = 0; i < kParts; ++i) in[i] = rounded<Add>(in[i], load<T, kWidth>(p.residual, residual + i * kWidth));
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    P out;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) {
      const int element = c * kParts + part;
      out.set_bits(c, in[element / kWidth].bits(element % kWidth));
    }
    const int64_t target = shuffled_voxel(p, batch, frame, y, x, part);
    if (target >= 0) store(p.out, target * p.channels + group * kWidth, out);
  }
}

// One output channel of one input voxel a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads) pixel_shuffle_general(const __grid_constant__ ShuffleArgs a) {
  using P = Pack<T, 1>;
  const PixelShuffleParams& p = a.p;
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= a.threads) return;
  uint32_t channel, x, y, frame;
  const uint32_t voxel = a.groups.divide(thread, channel);
  const uint32_t batch = a.frames.divide(a.height.divide(a.width.divide(voxel, x), y), frame);
  const int parts = static_cast<int>(p.upscale[0] * p.upscale[1] * p.upscale[2]);
  for (int part = 0; part < parts; ++part) {
    const int64_t from = static_cast<int64_t>(channel) * parts + part;
    P value = load<T, 1>(p.input, voxel * p.channels * parts + from);
    if (p.bias) value = rounded<Add>(value, load<T, 1>(p.bias, from));
    if (p.residual) {
      const int64_t residual = batch * p.residual_stride[0] + frame * p.residual_stride[1] + y * p.residual_stride[2] +
                               x * p.residual_stride[3] + from % p.residual_channels;
      value = rounded<Add>(value, load<T, 1>(p.residual, residual));
    }
    const int64_t target = shuffled_voxel(p, batch, frame, y, x, part);
    if (target >= 0) store(p.out, target * p.channels + channel, value);
  }
}

template <typename T>
void launch_shuffle(const PixelShuffleParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int64_t parts = p.upscale[0] * p.upscale[1] * p.upscale[2];
  constexpr int kWidth = kPackWidth<T>;
  bool fits = p.channels % kWidth == 0 && is_aligned(p.input, 0, p.dtype) && is_aligned(p.bias, 0, p.dtype) &&
              is_aligned(p.out, 0, p.dtype) && is_aligned(p.residual, 0, p.dtype) &&
              (parts == 2 || parts == 4 || parts == 8);
  for (const int64_t stride : p.residual_stride) fits = fits && stride % kWidth == 0;
  if (p.residual) fits = fits && p.residual_channels % (kWidth * parts) == 0;
  const bool packed = takes_packed("channels_last", forced().channels_last, fits);
  const int64_t groups = packed ? p.channels / kWidth : p.channels;
  ShuffleArgs a{};
  a.p = p;
  a.groups = FastDivide(groups);
  a.width = FastDivide(p.width);
  a.height = FastDivide(p.height);
  a.frames = FastDivide(p.frames);
  const int64_t threads = p.batch * p.frames * p.height * p.width * groups;
  a.threads = thread_count("pixel_shuffle", threads);
  const unsigned grid = grid_size(ceil_div(threads, kThreads));
  if (!packed) {
    pixel_shuffle_general<T><<<grid, kThreads, 0, stream>>>(a);
  } else if (parts == 8) {
    pixel_shuffle_kernel<T, 8><<<grid, kThreads, 0, stream>>>(a);
  } else if (parts == 4) {
    pixel_shuffle_kernel<T, 4><<<grid, kThreads, 0, stream>>>(a);
  } else {
    pixel_shuffle_kernel<T, 2><<<grid, kThreads, 0, stream>>>(a);
  }
  check_launch("pixel_shuffle");
}

// ---- unpatchify

struct UnpatchifyArgs {
  UnpatchifyParams p;
  FastDivide width, height, frames;
  uint32_t voxels;
};

// One output channel of one input voxel a thread, whose patch it writes row by row. grid: y = channels.
// kPatch 0: any patch, element by element.
template <typename T, int kPatch>
__global__ void __launch_bounds__(kThreads, 8) unpatchify_kernel(const __grid_constant__ UnpatchifyArgs a) {
  const UnpatchifyParams& p = a.p;
  const uint32_t voxel = blockIdx.x * kThreads + threadIdx.x;
  if (voxel >= a.voxels) return;
  uint32_t x, y, frame;
  const uint32_t batch = a.frames.divide(a.height.divide(a.width.divide(voxel, x), y), frame);
  const uint32_t patch = kPatch ? kPatch : static_cast<uint32_t>(p.patch);
  const uint32_t channel = blockIdx.y, from = channel * patch * patch;
  const uint32_t row = static_cast<uint32_t>(p.width) * patch;
  const uint32_t image =
      (batch * static_cast<uint32_t>(p.channels) + channel) * static_cast<uint32_t>(p.frames) + frame;
  const uint32_t line = (image * static_cast<uint32_t>(p.height) + y) * patch;
  T* const out = static_cast<T*>(p.out) + static_cast<int64_t>(line) * row + x * patch;
  const T* const in = static_cast<const T*>(p.input) + voxel * p.channels * patch * patch + from;
  const auto finished = [&](auto value, auto bias) {
    if (p.bias) value = rounded<Add>(value, bias);
    if (p.clamp) {
      constexpr int kCount = sizeof(value) / sizeof(T);
      float z[kCount];
      unpack(value, z);
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[i] = z[i] < -1.f ? -1.f : z[i] > 1.f ? 1.f : z[i];  // keeps NaN
      value = to_pack<T, kCount>(z);
    }
    return value;
  };
  if constexpr (kPatch == 0) {
    for (uint32_t j = 0; j < patch; ++j) {
      for (uint32_t k = 0; k < patch; ++k) {
        Pack<T, 1> bias{};
        if (p.bias) bias = load<T, 1>(p.bias, from + k * patch + j);
        store(out, j * row + k, finished(load<T, 1>(in, k * patch + j), bias));
      }
    }
  } else {
    using P = Pack<T, kPatch>;
    P columns[kPatch];
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
      P bias{};
      if (p.bias) bias = load<T, kPatch>(p.bias, from + k * kPatch);
      columns[k] = finished(load<T, kPatch>(in, k * kPatch), bias);
    }
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      P pixels;
#pragma unroll
      for (int k = 0; k < kPatch; ++k) pixels.set_bits(k, columns[k].bits(j));
      store(out, j * row, pixels);
    }
  }
}

template <typename T>
void launch_unpatchify(const UnpatchifyParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  UnpatchifyArgs a{};
  a.p = p;
  a.width = FastDivide(p.width);
  a.height = FastDivide(p.height);
  a.frames = FastDivide(p.frames);
  const int64_t voxels = p.batch * p.frames * p.height * p.width;
  a.voxels = thread_count("unpatchify", voxels);
  const dim3 grid(grid_size(ceil_div(voxels, kThreads)), static_cast<unsigned>(p.channels));
  const bool fits = (p.patch == 4 || p.patch == 2) && is_aligned(p.input, 0, p.dtype) &&
                    is_aligned(p.out, 0, p.dtype) && is_aligned(p.bias, 0, p.dtype);
  if (!takes_packed("channels_last", forced().channels_last, fits)) {
    unpatchify_kernel<T, 0><<<grid, kThreads, 0, stream>>>(a);
  } else if (p.patch == 4) {
    unpatchify_kernel<T, 4><<<grid, kThreads, 0, stream>>>(a);
  } else {
    unpatchify_kernel<T, 2><<<grid, kThreads, 0, stream>>>(a);
  }
  check_launch("unpatchify");
}

}  // namespace

void channel_norm(const ChannelNormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.norm == ChannelNorm::kRms) return launch_norm<T, ChannelNorm::kRms>(p, context);
    if (p.norm == ChannelNorm::kRmsStepwise) return launch_norm<T, ChannelNorm::kRmsStepwise>(p, context);
    if (p.norm == ChannelNorm::kL2) return launch_norm<T, ChannelNorm::kL2>(p, context);
    return launch_norm<T, ChannelNorm::kNone>(p, context);
  });
}

void pixel_shuffle(const PixelShuffleParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) { launch_shuffle<decltype(zero)>(p, context); });
}

void unpatchify(const UnpatchifyParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) { launch_unpatchify<decltype(zero)>(p, context); });
}

}  // namespace ltx
