// CPU rows quantised to fp8 (ltx/params.h, QuantOutput). A few rows at a time go through the norm or the activation as
// fp32 rows, where nothing rounds, and from there, still in the cache, to their scale and values.

#ifndef LTX_ISA

#include <algorithm>

#define LTX_ISA_FILE "cpu/quant.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void norm_quant(const NormParams& params, const Context& context) { LTX_DISPATCH(norm_quant, params, context); }

void glu_quant(const GluParams& params, const QuantOutput& output, const Context& context) {
  LTX_DISPATCH(glu_quant, params, output, context);
}

}  // namespace ltx

#else  // once per instruction set

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

// fp32 elements of each operand at hand: three such blocks stay in the L2 cache.
constexpr int64_t kBlockElements = 32768;

// |x| as an integer, in which numbers keep their order and NaNs are above them all.
LTX_INLINE I magnitude_bits(F x) { return (I)((U)x & 0x7fffffffu); }

// e4m3 in the lowest byte of each lane, to nearest even, at most 448. Denormals (below 2^-6) go through an addition
// whose ulp is theirs, 2^-9.
LTX_INLINE U to_e4m3(F x) {
  const U sign = ((U)x >> 24) & 0x80u;
  const I magnitude = magnitude_bits(x), largest = (I)splat(kE4m3Max);
  const U finite = (U)(magnitude < largest ? magnitude : largest);
  const U normal = ((finite + 0x7ffffu + ((finite >> 20) & 1u)) >> 20) - (120u << 3);
  const U denormal = (U)((F)finite + 0x1p14f) - (U)splat(0x1p14f);
  const U value = sign | ((I)finite < (I)splat(0x1p-6f) ? denormal : normal);
  return magnitude > (I)splat(__builtin_inff()) ? splat_bits(0x7fu) : value;
}

void quantise_row(const float* row, int64_t width, const float* static_scale, uint8_t* values, float* scale_out) {
  float scale = 0.f;
  if (static_scale != nullptr) {
    scale = *static_scale;
  } else {
    I most = {};
    for (int64_t c = 0; c < width; c += kLanes) {
      const I magnitude = magnitude_bits(load_upto(row + c, width - c));
      most = magnitude > most ? magnitude : most;
    }
    int32_t amax = 0;
    for (int i = 0; i < kLanes; ++i) amax = std::max(amax, static_cast<int32_t>(most[i]));
    __builtin_memcpy(&scale, &amax, sizeof(scale));
    scale /= kE4m3Max;
  }
  if (scale < kMinScale) scale = kMinScale;
  *scale_out = scale;
  const float inverse = 1.f / scale;
  for (int64_t c = 0; c < width; c += kLanes) {
    const U codes = to_e4m3(load_upto(row + c, width - c) * inverse);
    uint8_t bytes[kLanes];
    for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<uint8_t>(codes[i]);
    __builtin_memcpy(values + c, bytes, static_cast<size_t>(std::min<int64_t>(kLanes, width - c)));
  }
}

// Calls rows_at(index, first, count) for runs of at most `block` rows, over all of [begin, end).
template <class RowsAt>
void for_runs(const Rows& rows, int64_t block, int64_t begin, int64_t end, const RowsAt& rows_at) {
  RowIndex index(rows, begin);
  for (int64_t row = begin; row < end;) {
    const int64_t count = std::min({index.run(), block, end - row});
    rows_at(index, row, count);
    row += count;
    index.next(count);
  }
}

// A few rows of an op, as its params: a space of one dimension.
class Block {
 public:
  Block(const Rows& rows, const RowIndex& index, int64_t count) : rows_(rows), index_(index) {
    own_.count = own_.size[0] = count;
    own_.width = rows.width;
    own_.ndim = 1;
  }

  const Rows& rows() const { return own_; }

  RowView view(const RowView& whole) const {
    RowView view = whole;
    view.data = index_.pointer(whole, 0);
    view.stride[0] = rows_.ndim == 0 ? 0 : whole.stride[rows_.ndim - 1];
    return view;
  }

  IndexView view(const IndexView& whole) const {
    IndexView view = whole;
    view.data = index_.pointer(whole);
    view.stride[0] = rows_.ndim == 0 ? 0 : whole.stride[rows_.ndim - 1];
    return view;
  }

  // Rows of the block in scratch memory.
  RowView scratch(float* data) const {
    RowView view;
    view.data = data;
    view.column_stride = 1;
    view.stride[0] = round_up(rows_.width, kSumLanes);
    return view;
  }

  // The rows in fp32 and contiguous: where they are, or copied to `data`.
  RowView expanded(const RowView& whole, float* data) const {
    RowView source = view(whole);
    if (source.data == nullptr || (source.dtype == DType::kFloat32 && source.column_stride == 1)) return source;
    const RowView target = scratch(data);
    expand_into(target, whole, own_.width);
    return target;
  }

  // The first `width` columns of the fp32 rows `target`; the columns up to the next multiple of kSumLanes become zero.
  void expand_into(const RowView& target, const RowView& whole, int64_t width) const {
    const char* source = index_.pointer(whole, 0);
    const int64_t step = index_.row_step(whole);
    for (int64_t r = 0; r < own_.count; ++r) {
      expand(static_cast<float*>(target.data) + r * target.stride[0], source + r * step, whole.dtype,
             whole.column_stride, width);
    }
  }

  // The fp32 rows `from` as row operand `whole`, whose columns are contiguous.
  void narrowed(const RowView& whole, const RowView& from) const {
    char* target = index_.pointer(whole, 0);
    const int64_t step = index_.row_step(whole);
    for (int64_t r = 0; r < own_.count; ++r) {
      narrow(target + r * step, static_cast<float*>(from.data) + r * from.stride[0], whole.dtype, own_.width);
    }
  }

  // `first`: the number of the block's first row in the whole op.
  void quantise(const RowView& from, const QuantOutput& output, int64_t first) const {
    for (int64_t r = 0; r < own_.count; ++r) {
      const int64_t row = first + r;
      quantise_row(static_cast<float*>(from.data) + r * from.stride[0], own_.width, output.static_scale,
                   output.values + row * own_.width, output.scales + row);
    }
  }

 private:
  const Rows& rows_;
  const RowIndex& index_;
  Rows own_;
};

int64_t block_rows(const Rows& rows) { return std::max<int64_t>(1, kBlockElements / rows.width); }

int64_t block_elements(const Rows& rows) { return block_rows(rows) * round_up(rows.width, kSumLanes); }

void norm_quant_rows(const NormParams& p, const QuantOutput& output, int64_t begin, int64_t end) {
  Scratch scratch(5, block_elements(p.rows));
  float *input = scratch.take(), *residual = scratch.take(), *hidden = scratch.take(), *normalised = scratch.take();
  float* const normalised2 = scratch.take();
  for_runs(p.rows, block_rows(p.rows), begin, end, [&](const RowIndex& index, int64_t first, int64_t count) {
    const Block block(p.rows, index, count);
    NormParams q = p;
    q.rows = block.rows();
    q.dtype = DType::kFloat32;
    q.input = block.expanded(p.input, input);
    q.residual = block.expanded(p.residual, residual);
    for (Modulator* modulator : {&q.gate, &q.scale, &q.shift, &q.scale2, &q.shift2}) {
      modulator->value = block.view(modulator->value);
      modulator->table = block.view(modulator->table);
    }
    for (RowView* vector : {&q.weight, &q.bias, &q.branch_weight}) *vector = block.view(*vector);
    q.index = block.view(p.index);
    if (p.residual.data != nullptr) q.residual_out = block.scratch(hidden);
    const bool normalises = p.statistic != Statistic::kNone;
    if (normalises) q.out = block.scratch(normalised);
    if (p.quantised2.values != nullptr) q.out2 = block.scratch(normalised2);
    if (normalises || p.residual.data != nullptr) norm(q, Context{});
    if (p.residual_out.data != nullptr) block.narrowed(p.residual_out, q.residual_out);
    block.quantise(normalises ? q.out : p.residual.data != nullptr ? q.residual_out : q.input, output, first);
    if (p.quantised2.values != nullptr) block.quantise(q.out2, p.quantised2, first);
  });
}

void glu_quant_rows(const GluParams& p, const QuantOutput& output, int64_t begin, int64_t end) {
  Rows whole = p.rows;  // with the prefix
  whole.width += p.prefix_width;
  Rows gates = p.rows;
  gates.width /= p.gate_repeat;
  Scratch scratch(3, block_elements(whole));
  float *gate = scratch.take(), *up = scratch.take(), *out = scratch.take();
  for_runs(p.rows, block_rows(whole), begin, end, [&](const RowIndex& index, int64_t first, int64_t count) {
    const Block block(p.rows, index, count), whole_block(whole, index, count);
    GluParams q = p;
    q.rows = block.rows();
    q.dtype = DType::kFloat32;
    q.gate = Block(gates, index, count).expanded(p.gate, gate);
    q.up = block.expanded(p.up, up);
    q.bias = block.view(p.bias);
    const RowView y = whole_block.scratch(out);
    if (p.prefix_width > 0) block.expand_into(y, p.prefix, p.prefix_width);
    q.out = y;
    q.out.data = out + p.prefix_width;
    glu(q, Context{});
    whole_block.quantise(y, output, first);
  });
}

template <class Params>
struct QuantJob {
  const Params& params;
  const QuantOutput& output;
  void (*rows)(const Params&, const QuantOutput&, int64_t, int64_t);
  void operator()(int64_t begin, int64_t end) const { rows(params, output, begin, end); }
};

void norm_quant(const NormParams& params, const Context& context) {
  for_ranges(context, params.rows.count, params.rows.width,
             QuantJob<NormParams>{params, params.quantised, norm_quant_rows});
}

void glu_quant(const GluParams& params, const QuantOutput& output, const Context& context) {
  for_ranges(context, params.rows.count, params.prefix_width + params.rows.width,
             QuantJob<GluParams>{params, output, glu_quant_rows});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
