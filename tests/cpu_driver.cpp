// The CPU kernels without torch: runs all entry points over std::thread ranges and prints a checksum per case.
//
// Built with ThreadSanitizer it finds races; built with -DLTX_CPU_MAX_ISA=0, 1 and 2, and run with 1 and more threads,
// it must print the same text, for a row's bits depend on neither. From the repository root:
//
//   g++ -std=c++17 -O1 -g -fsanitize=thread -ffp-contract=off -Ikernel_src kernel_src/cpu/*.cpp tests/cpu_driver.cpp \
//       -pthread -o cpu_driver && ./cpu_driver 4

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ltx/group_norm.h"
#include "ltx/params.h"

namespace {

int threads = 4;

// Ranges of at least `grain`, one thread each.
void parallel_for(int64_t begin, int64_t end, int64_t grain, ltx::Context::RangeFn fn, void* state) {
  const int64_t ranges = std::max<int64_t>(1, std::min<int64_t>(threads, (end - begin) / std::max<int64_t>(grain, 1)));
  std::vector<std::thread> running;
  for (int64_t i = 0; i < ranges; ++i) {
    const int64_t from = begin + (end - begin) * i / ranges, to = begin + (end - begin) * (i + 1) / ranges;
    running.emplace_back([=] { fn(from, to, state); });
  }
  for (std::thread& thread : running) thread.join();
}

uint32_t random_bits() {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

// `count` numbers in [-range, range] as one of the dtypes.
struct Tensor {
  Tensor(int64_t count, ltx::DType dtype, float range = 4.f) : dtype(dtype), bytes(count * size()) {
    for (int64_t i = 0; i < count; ++i) {
      const float value = range * (static_cast<float>(random_bits() & 0xffffu) / 32768.f - 1.f);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      if (dtype == ltx::DType::kFloat16) {
        // Truncated, and zero where fp16 would be denormal: any numbers will do.
        const uint32_t magnitude = (bits & 0x7fffffffu) >> 13;
        bits = (bits >> 16 & 0x8000u) | (magnitude > 0x1c000u ? magnitude - 0x1c000u : 0u);
      } else if (dtype == ltx::DType::kBFloat16) {
        bits >>= 16;
      }
      std::memcpy(&bytes[static_cast<size_t>(i * size())], &bits, static_cast<size_t>(size()));
    }
  }

  int64_t size() const { return dtype == ltx::DType::kFloat32 ? 4 : 2; }

  // [rows, width] through a Rows space of one dimension; row_stride 0 for an operand that all rows share.
  ltx::RowView view(int64_t row_stride) {
    ltx::RowView view;
    view.data = bytes.data();
    view.dtype = dtype;
    view.column_stride = 1;
    view.stride[0] = row_stride;
    return view;
  }

  ltx::DType dtype;
  std::vector<unsigned char> bytes;
};

void print(const std::string& name, const void* data, size_t bytes) {
  uint64_t hash = 1469598103934665603u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211u;
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}
void print(const std::string& name, const Tensor& tensor) { print(name, tensor.bytes.data(), tensor.bytes.size()); }

// Rows of fp8 and their scales.
struct Quantised {
  Quantised(int64_t count, int64_t width)
      : values(static_cast<size_t>(count * width)), scales(static_cast<size_t>(count)) {
    output.values = values.data();
    output.scales = scales.data();
  }
  void print_as(const std::string& name) const {
    print(name + " values", values.data(), values.size());
    print(name + " scales", scales.data(), scales.size() * sizeof(float));
  }

  std::vector<uint8_t> values;
  std::vector<float> scales;
  ltx::QuantOutput output;
};

ltx::Rows rows_of(int64_t count, int64_t width) {
  ltx::Rows rows;
  rows.count = count;
  rows.width = width;
  rows.ndim = 1;
  rows.size[0] = count;
  return rows;
}

const char* const kDTypes[] = {"float32", "float16", "bfloat16"};

void run_norm(ltx::DType dtype, ltx::Rounding rounding, int64_t width, const ltx::Context& context) {
  const int64_t count = 1 + 300000 / width;
  Tensor input(count * width, dtype), residual(count * width, dtype), out(count * width, dtype);
  Tensor residual_out(count * width, dtype), weight(width, ltx::DType::kBFloat16), scale(width, dtype);
  Tensor shift(width, ltx::DType::kFloat16), gate(count * width, dtype), table(width, ltx::DType::kFloat32);
  ltx::NormParams p;
  p.rows = rows_of(count, width);
  p.dtype = dtype;
  p.rounding = rounding;
  p.eps = 1e-6f;
  p.input = input.view(width);
  p.out = out.view(width);
  p.weight = weight.view(0);
  const std::string name = std::string(kDTypes[static_cast<int>(dtype)]) +
                           (rounding == ltx::Rounding::kEager ? " eager " : " fp32 ") + std::to_string(width);
  ltx::norm(p, context);
  print("rms " + name, out);
  p.statistic = ltx::Statistic::kLayer;
  p.bias = shift.view(0);
  ltx::norm(p, context);
  print("layer " + name, out);
  p.scale = {scale.view(0), table.view(0)};
  p.shift = {shift.view(0), ltx::RowView()};
  p.gate = {gate.view(width), ltx::RowView()};
  p.residual = residual.view(width);
  p.residual_out = residual_out.view(width);
  ltx::norm(p, context);
  print("block " + name, out);
  print("block residual " + name, residual_out);
  Quantised quantised(count, width);
  p.out = ltx::RowView();
  p.quantised = quantised.output;
  ltx::norm_quant(p, context);
  quantised.print_as("block quantised " + name);
  p.quantised = ltx::QuantOutput();
  p.statistic = ltx::Statistic::kNone;
  p.residual_out = residual.view(width);  // in place
  ltx::norm(p, context);
  print("gated residual " + name, residual);
}

void run_backward(ltx::DType dtype, ltx::Statistic statistic, int64_t width, const ltx::Context& context) {
  const int64_t count = 1 + 300000 / width;
  Tensor h(count * width, dtype), grad(count * width, dtype), grad2(count * width, dtype), gate(width, dtype);
  Tensor grad_residual(count * width, dtype), weight(width, ltx::DType::kBFloat16), scale(count * width, dtype);
  Tensor out(count * width, dtype), residual_out(count * width, dtype);
  ltx::NormBackwardParams p;
  p.rows = rows_of(count, width);
  p.dtype = dtype;
  p.statistic = statistic;
  p.eps = 1e-6f;
  p.input = h.view(width);
  p.grad = grad.view(width);
  p.grad_residual = grad_residual.view(width);
  p.weight = weight.view(0);
  p.scale = {scale.view(width), ltx::RowView()};
  p.gate = {gate.view(0), ltx::RowView()};
  p.out = out.view(width);
  p.residual_out = residual_out.view(width);
  const std::string name = std::string(kDTypes[static_cast<int>(dtype)]) + " " +
                           std::to_string(static_cast<int>(statistic)) + " " + std::to_string(width);
  ltx::norm_backward(p, context);
  print("gradient " + name, out);
  print("gradient of the branch " + name, residual_out);
  p.grad2 = grad2.view(width);
  p.scale2 = p.scale;
  ltx::norm_backward(p, context);
  print("gradient of two " + name, out);
}

void run_group_norm(ltx::DType dtype, int64_t channels, const ltx::Context& context) {
  const int64_t batch = 2, pixels = 1031;
  Tensor input(batch * pixels * channels, dtype), residual(batch * pixels * channels, dtype);
  Tensor out(batch * pixels * channels, dtype), residual_out(batch * pixels * channels, dtype);
  Tensor weight(channels, dtype), bias(channels, dtype);
  ltx::GroupNormParams p;
  p.dtype = dtype;
  p.silu = true;
  p.eps = 1e-6f;
  p.batch = batch;
  p.pixels = pixels;
  p.channels = channels;
  p.groups = 4;
  p.hidden.input = input.bytes.data();
  p.hidden.residual = residual.bytes.data();
  p.hidden.input_stride = p.hidden.residual_stride = p.out_stride = p.residual_out_stride = pixels * channels;
  p.out = out.bytes.data();
  p.residual_out = residual_out.bytes.data();
  p.weight = weight.bytes.data();
  p.bias_norm = bias.bytes.data();
  std::vector<float> moments(static_cast<size_t>(p.moment_count())), factors(static_cast<size_t>(p.factor_count()));
  p.moments = moments.data();
  p.factors = factors.data();
  const std::string name = std::string(kDTypes[static_cast<int>(dtype)]) + " " + std::to_string(channels);
  ltx::group_norm(p, context);
  print("group norm " + name, out);
  print("group norm residual " + name, residual_out);
  Tensor large(batch * pixels * channels * 4, dtype);
  ltx::UpsampleParams u;
  u.dtype = dtype;
  u.batch = batch;
  u.lines = pixels;
  u.width = 1;
  u.channels = channels;
  u.scale[0] = u.scale[1] = 2;
  u.hidden = p.hidden;
  u.out = large.bytes.data();
  ltx::upsample_nearest(u, context);
  print("upsampled " + name, large);
}

void run_glu(ltx::DType dtype, ltx::Rounding rounding, int64_t width, const ltx::Context& context) {
  const int64_t count = 1 + 300000 / width;
  Tensor gate(count * width, dtype, 20.f), up(count * width, dtype), bias(width, ltx::DType::kFloat32);
  Tensor out(count * width, dtype);
  const char* const activations[] = {"gelu ", "gelu tanh ", "silu "};
  for (int activation = 0; activation < 3; ++activation) {
    ltx::GluParams p;
    p.rows = rows_of(count, width);
    p.dtype = dtype;
    p.rounding = rounding;
    p.activation = static_cast<ltx::Activation>(activation);
    p.gate = gate.view(width);
    p.up = up.view(width);
    p.out = out.view(width);
    const std::string name = std::string(kDTypes[static_cast<int>(dtype)]) +
                             (rounding == ltx::Rounding::kEager ? " eager " : " fp32 ") + std::to_string(width);
    ltx::glu(p, context);
    print(activations[activation] + name, out);
    Quantised quantised(count, width);
    p.out = ltx::RowView();
    ltx::glu_quant(p, quantised.output, context);
    quantised.print_as(std::string("quantised ") + activations[activation] + name);
    p.out = out.view(width);
    p.up = ltx::RowView();
    p.bias = bias.view(0);
    ltx::glu(p, context);
    print(std::string("bias ") + activations[activation] + name, out);
  }
}

void run_rotary(ltx::DType dtype, bool interleaved, ltx::QkNorm norm, const ltx::Context& context) {
  const int64_t batch = 2, sequence = 257, heads = 6, width = 72, rotary = 64;
  const int64_t elements = batch * sequence * heads * width;
  Tensor query(elements, dtype), key(elements, dtype), query_out(elements, dtype), key_out(elements, dtype);
  Tensor cos(sequence * rotary, ltx::DType::kFloat32), sin(sequence * rotary, ltx::DType::kFloat32);
  Tensor weight(heads * width, ltx::DType::kFloat32);
  ltx::RotaryParams p;
  p.operands = 2;
  p.batch = batch;
  p.head_dim = width;
  p.rotary_dim = rotary;
  p.dtype = dtype;
  p.interleaved = interleaved;
  p.norm = norm;
  for (int o = 0; o < 2; ++o) {
    ltx::RotaryOperand& x = p.operand[o];
    x.eps = 1e-6f;
    x.input = (o == 0 ? query : key).bytes.data();
    x.output = (o == 0 ? query_out : key_out).bytes.data();
    // The query lies as [batch, sequence, heads, width], the key as [batch, heads, sequence, width].
    x.input_stride = {sequence * heads * width, o == 0 ? heads * width : width, o == 0 ? width : sequence * width, 1};
    x.output_stride = x.input_stride;
    x.sequence = sequence;
    x.heads = heads;
    x.weight = norm == ltx::QkNorm::kNone ? nullptr : weight.bytes.data();
    x.weight_stride = 1;
    x.cos = cos.bytes.data();
    x.sin = sin.bytes.data();
    x.cos_stride = x.sin_stride = {0, rotary, 0, 1};
  }
  const std::string name = std::string(kDTypes[static_cast<int>(dtype)]) + (interleaved ? " interleaved " : " half ") +
                           std::to_string(static_cast<int>(norm));
  ltx::rotary(p, nullptr, context);
  print("rotary query " + name, query_out);
  print("rotary key " + name, key_out);
  if (norm != ltx::QkNorm::kNone) return;
  ltx::RotaryAngles angles;
  angles.grid[2] = sequence;
  for (int32_t& end : angles.axis_end) end = static_cast<int32_t>(rotary / 2);
  for (int pair = 0; pair < rotary / 2; ++pair) {
    angles.inverse_frequency[pair] = static_cast<float>(std::pow(10000.0, -2.0 * pair / rotary)) * 400.f;
  }
  ltx::rotary(p, &angles, context);
  print("rope query " + name, query_out);
  print("rope key " + name, key_out);
}

void run_attention(ltx::DType dtype, int64_t width, int64_t keys, const ltx::Context& context) {
  const int64_t batch = 2, queries = 37, heads = 3;
  Tensor query(batch * queries * heads * width, dtype), out(batch * queries * heads * width, dtype);
  Tensor text(batch * keys * heads * width * 2, dtype), weight(heads * width, ltx::DType::kBFloat16);
  Tensor mask(batch * keys, ltx::DType::kFloat32);
  ltx::AttentionParams p;
  p.batch = batch;
  p.queries = queries;
  p.keys = keys;
  p.heads = heads;
  p.head_dim = width;
  p.dtype = dtype;
  p.eps = 1e-6f;
  p.scale = 0.1f;
  p.query = query.bytes.data();
  p.output = out.bytes.data();
  p.key = text.bytes.data();
  p.value = text.bytes.data() + heads * width * text.size();
  p.query_stride = p.output_stride = {queries * heads * width, heads * width, width, 1};
  p.key_stride = p.value_stride = {keys * heads * width * 2, heads * width * 2, width, 1};
  p.query_weight = p.key_weight = weight.bytes.data();
  p.query_weight_dtype = p.key_weight_dtype = weight.dtype;
  p.query_weight_stride = p.key_weight_stride = 1;
  const std::string name = std::string(kDTypes[static_cast<int>(dtype)]) + " " + std::to_string(width) + " columns " +
                           std::to_string(keys) + " keys";
  ltx::attention(p, context);
  print("attention " + name, out);
  p.mask = mask.bytes.data();
  p.mask_stride_batch = keys;
  p.mask_stride_key = 1;
  ltx::attention(p, context);
  print("masked attention " + name, out);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) threads = std::atoi(argv[1]);
  ltx::Context context;
  context.parallel_for = parallel_for;
  for (const ltx::DType dtype : {ltx::DType::kFloat32, ltx::DType::kFloat16, ltx::DType::kBFloat16}) {
    for (const ltx::Rounding rounding : {ltx::Rounding::kFp32, ltx::Rounding::kEager}) {
      for (const int64_t width : {1, 37, 64, 512, 2056, 40000}) {
        run_norm(dtype, rounding, width, context);
        run_glu(dtype, rounding, width, context);
      }
    }
    for (const int64_t width : {1, 37, 64, 512, 2056, 40000}) {
      for (const ltx::Statistic statistic : {ltx::Statistic::kRms, ltx::Statistic::kLayer}) {
        run_backward(dtype, statistic, width, context);
      }
    }
    for (const int64_t channels : {4, 36, 128, 640}) run_group_norm(dtype, channels, context);
    for (const int64_t width : {1, 37, 64, 256}) {
      for (const int64_t keys : {1, 40, 257}) run_attention(dtype, width, keys, context);
    }
    for (const bool interleaved : {true, false}) {
      for (const ltx::QkNorm norm : {ltx::QkNorm::kNone, ltx::QkNorm::kPerHead, ltx::QkNorm::kAcrossHeads}) {
        run_rotary(dtype, interleaved, norm, context);
      }
    }
  }
  return 0;
}
