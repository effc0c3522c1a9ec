// CPU attention with few keys: out = softmax(scale * n(query) n(key)^T + mask) value for each batch entry and head, n
// being the RMS norm over all heads of a token. Nothing is rounded to the dtype before the output.
//
// First the statistic of every token, so that a head can be normalised without the others and the output may be the
// query. Then the unit of work is a query row of one head; a range of them goes head by head. The keys and values of a
// head are brought once to fp32 panels of kPanel columns (of keys as columns: n(key)^T), and query rows are multiplied
// with them a block at a time. Each element of a product is summed by one lane, so that its bits depend neither on the
// rows beside it nor on the instruction set.

#ifndef LTX_ISA

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#define LTX_ISA_FILE "cpu/attention.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void attention(const AttentionParams& params, const Context& context) { LTX_DISPATCH(attention, params, context); }

}  // namespace ltx

#else  // once per instruction set

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int64_t kPanel = 2 * kLanes;  // columns of a panel
constexpr int64_t kTileRows = 4;        // rows multiplied at once: with two vectors each, eight independent sums
constexpr int kBlockRows = 16;          // query rows whose scores are held at a time; a panel is read once for all
constexpr int64_t kSumTerms = 32;       // terms added one after the other, before their sum joins the element's

// c[row][column] = sum over k of a[row][k] * panel[k][column], for kTileRows rows and the columns of a panel.
void multiply_tile(const float* a, int64_t a_step, const float* panel, int64_t depth, float* c, int64_t c_step) {
  for (int64_t begin = 0; begin < depth; begin += kSumTerms) {
    const int64_t end = std::min(begin + kSumTerms, depth);
    F sum[kTileRows][2] = {};
    for (int64_t k = begin; k < end; ++k) {
      const F left = load(panel + k * kPanel), right = load(panel + k * kPanel + kLanes);
#pragma GCC unroll 4
      for (int64_t r = 0; r < kTileRows; ++r) {
        const float factor = a[r * a_step + k];
        sum[r][0] = sum[r][0] + left * factor;
        sum[r][1] = sum[r][1] + right * factor;
      }
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < kTileRows; ++r) {
      float* target = c + r * c_step;
      if (begin > 0) {
        sum[r][0] = load(target) + sum[r][0];
        sum[r][1] = load(target + kLanes) + sum[r][1];
      }
      store(target, sum[r][0]);
      store(target + kLanes, sum[r][1]);
    }
  }
}

// The product of up to kBlockRows rows with all panels; rows up to a whole tile are computed.
void multiply(const float* a, int64_t a_step, int64_t rows, const float* panels, int64_t depth, int64_t columns,
              float* c, int64_t c_step) {
  for (int64_t column = 0; column < columns; column += kPanel) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      multiply_tile(a + row * a_step, a_step, panels + column * depth, depth, c + row * c_step + column, c_step);
    }
  }
}

struct RowTerm {
  const float* row;
  LTX_INLINE F operator()(int64_t c) const { return load(row + c); }
};

// Scores times scale, plus the mask's addends, to e^(score - greatest), in place; returns the sum. The row is padded
// to whole kSumLanes, the padding becomes zero. A NaN stays one. Where all scores are -infinity, all become zero.
float exponentials(float* row, const float* mask, float scale, int64_t keys) {
  const int64_t padded = round_up(keys, kSumLanes);
  F greatest = splat(-kInfinity);
  for (int64_t t = 0; t < padded; t += kLanes) {
    const F score = load(row + t) * scale + load(mask + t);
    store(row + t, score);
    if (t + kLanes <= keys) greatest = score > greatest ? score : greatest;
  }
  std::fill(row + keys, row + padded, -kInfinity);  // NaN if the query held one or an infinity
  float lanes[kLanes];
  store(lanes, greatest);
  float most = -kInfinity;
  for (float x : lanes) most = std::max(most, x);
  for (int64_t t = keys / kLanes * kLanes; t < keys; ++t) most = row[t] > most ? row[t] : most;
  if (most == -kInfinity) most = 0.f;

  constexpr int64_t kStep = kWide * kLanes;
  for (int64_t t = 0; t < padded; t += kStep) {
    const Wide distance = most - load_wide(row + t);
    Wide e = scaled_exp_minus(bounded_magnitude(distance, 130.f)) * kUnscale;
    LTX_EACH_PART e.part[p] = distance.part[p] == distance.part[p] ? e.part[p] : distance.part[p];
    store_wide(row + t, e);
  }
  return sum_row(padded, RowTerm{row});
}

// Works through query rows of heads; owns the memory for that.
class HeadRange {
 public:
  HeadRange(const AttentionParams& p, const float* query_rstd, const float* key_rstd)
      : p_(p),
        query_rstd_(query_rstd),
        key_rstd_(key_rstd),
        element_(static_cast<int64_t>(size_of(p.dtype))),
        columns_(round_up(p.head_dim, kSumLanes)),
        scores_(round_up(p.keys, kPadding)),
        rows_(2 * kBlockRows + 3, columns_),
        score_rows_(kBlockRows + 1, scores_),
        key_panels_(1, round_up(p.keys, kPanel) * p.head_dim),
        value_panels_(1, columns_ * p.keys) {
    queries_ = take_block(rows_, columns_);
    products_ = take_block(rows_, columns_);
    row_ = rows_.take();
    query_weight_ = p.query_weight ? rows_.take() : nullptr;
    key_weight_ = p.key_weight ? rows_.take() : nullptr;
    weights_ = take_block(score_rows_, scores_);
    mask_ = score_rows_.take();
    keys_ = key_panels_.take();
    values_ = value_panels_.take();
    std::fill(keys_ + p.keys / kPanel * kPanel * p.head_dim, keys_ + round_up(p.keys, kPanel) * p.head_dim, 0.f);
  }

  void run(int64_t batch, int64_t head, int64_t begin, int64_t end) {
    prepare(batch, head);
    for (int64_t row = begin; row < end; row += kBlockRows) {
      run_block(batch, head, row, std::min<int64_t>(kBlockRows, end - row));
    }
  }

 private:
  // Of a row of scores: whole sums, whole panels and whole steps of the exponential.
  static constexpr int64_t kPadding = std::max<int64_t>(kSumLanes, kWide* kLanes);

  // A block of rows, which starts as zeros: tiles reach beyond the rows of a call.
  static float* take_block(Scratch& scratch, int64_t width) {
    float* block = scratch.take();
    for (int r = 1; r < kBlockRows; ++r) scratch.take();
    std::fill(block, block + kBlockRows * width, 0.f);
    return block;
  }

  const char* at(const void* data, const HeadStrides& stride, int64_t batch, int64_t token, int64_t head) const {
    return static_cast<const char*>(data) +
           (batch * stride.batch + token * stride.sequence + head * stride.head) * element_;
  }

  // A head of a weight of all heads.
  void expand_weight(float* target, const void* weight, DType dtype, int64_t stride, int64_t head) const {
    if (target == nullptr) return;
    const char* begin =
        static_cast<const char*>(weight) + head * p_.head_dim * stride * static_cast<int64_t>(size_of(dtype));
    expand(target, begin, dtype, stride, p_.head_dim);
  }

  void normalise(float* target, const char* head, int64_t column_stride, float rstd, const float* weight) const {
    expand(target, head, p_.dtype, column_stride, p_.head_dim);
    for (int64_t c = 0; c < p_.head_dim; c += kLanes) {
      F x = load(target + c) * rstd;
      if (weight != nullptr) x = x * load(weight + c);
      store(target + c, x);
    }
  }

  // Brings the keys, the values and the mask of a head to fp32.
  void prepare(int64_t batch, int64_t head) {
    expand_weight(query_weight_, p_.query_weight, p_.query_weight_dtype, p_.query_weight_stride, head);
    expand_weight(key_weight_, p_.key_weight, p_.key_weight_dtype, p_.key_weight_stride, head);
    if (p_.mask == nullptr) {
      std::fill(mask_, mask_ + scores_, 0.f);
    } else {
      const int64_t size = static_cast<int64_t>(size_of(p_.mask_dtype));
      const char* mask = static_cast<const char*>(p_.mask) + batch * p_.mask_stride_batch * size;
      expand(mask_, mask, p_.mask_dtype, p_.mask_stride_key, p_.keys);
    }
    for (int64_t t = 0; t < p_.keys; ++t) {
      normalise(row_, at(p_.key, p_.key_stride, batch, t, head), p_.key_stride.column, key_rstd_[batch * p_.keys + t],
                key_weight_);
      float* target = keys_ + t / kPanel * kPanel * p_.head_dim + t % kPanel;
      for (int64_t c = 0; c < p_.head_dim; ++c) target[c * kPanel] = row_[c];

      expand(row_, at(p_.value, p_.value_stride, batch, t, head), p_.dtype, p_.value_stride.column, p_.head_dim);
      for (int64_t c = 0; c < round_up(p_.head_dim, kPanel); c += kLanes) {
        store(values_ + c / kPanel * kPanel * p_.keys + t * kPanel + c % kPanel, load(row_ + c));
      }
    }
  }

  void run_block(int64_t batch, int64_t head, int64_t begin, int64_t count) {
    for (int64_t r = 0; r < count; ++r) {
      normalise(queries_ + r * columns_, at(p_.query, p_.query_stride, batch, begin + r, head), p_.query_stride.column,
                query_rstd_[batch * p_.queries + begin + r], query_weight_);
    }
    multiply(queries_, columns_, count, keys_, p_.head_dim, p_.keys, weights_, scores_);
    float sums[kBlockRows];
    for (int64_t r = 0; r < count; ++r) sums[r] = exponentials(weights_ + r * scores_, mask_, p_.scale, p_.keys);
    multiply(weights_, scores_, count, values_, p_.keys, p_.head_dim, products_, columns_);
    for (int64_t r = 0; r < count; ++r) {
      float* product = products_ + r * columns_;
      for (int64_t c = 0; c < columns_; c += kLanes) {
        store(product + c, sums[r] == 0.f ? F{} : load(product + c) / sums[r]);
      }
      char* target = const_cast<char*>(at(p_.output, p_.output_stride, batch, begin + r, head));
      if (p_.output_stride.column == 1) {
        narrow(target, product, p_.dtype, p_.head_dim);
      } else {
        narrow(row_, product, p_.dtype, p_.head_dim);
        scatter(target, p_.dtype, p_.output_stride.column, p_.head_dim, row_);
      }
    }
  }

  const AttentionParams& p_;
  const float *query_rstd_, *key_rstd_;
  int64_t element_, columns_, scores_;
  Scratch rows_, score_rows_, key_panels_, value_panels_;
  float *queries_, *products_, *row_, *query_weight_, *key_weight_, *weights_, *mask_, *keys_, *values_;
};

// 1 / rms over all heads of tokens [begin, end) of all batch entries, in the order of the batch.
void token_rstd(const AttentionParams& p, const void* data, const HeadStrides& stride, int64_t sequence, float* rstd,
                const Context& context) {
  const int64_t width = p.heads * p.head_dim;
  const auto job = [&](int64_t begin, int64_t end) {
    Scratch scratch(1, round_up(width, kSumLanes) + kSumLanes);
    float* row = scratch.take();
    for (int64_t token = begin; token < end; ++token) {
      const int64_t offset = token / sequence * stride.batch + token % sequence * stride.sequence;
      const char* heads = static_cast<const char*>(data) + offset * static_cast<int64_t>(size_of(p.dtype));
      expand_heads(row, heads, p.dtype, stride, p.heads, p.head_dim);
      rstd[token] = rms_rstd(row, width, p.eps);
    }
  };
  for_ranges(context, p.batch * sequence, width, job);
}

void attention(const AttentionParams& params, const Context& context) {
  const AttentionParams& p = params;
  std::vector<float> query_rstd(static_cast<size_t>(p.batch * p.queries));
  std::vector<float> key_rstd(static_cast<size_t>(p.batch * p.keys));
  token_rstd(p, p.query, p.query_stride, p.queries, query_rstd.data(), context);
  token_rstd(p, p.key, p.key_stride, p.keys, key_rstd.data(), context);
  const auto job = [&](int64_t begin, int64_t end) {
    HeadRange range(p, query_rstd.data(), key_rstd.data());
    for (int64_t unit = begin; unit < end;) {
      const int64_t head = unit / p.queries, row = unit % p.queries;
      const int64_t count = std::min(end - unit, p.queries - row);
      range.run(head / p.heads, head % p.heads, row, row + count);
      unit += count;
    }
  };
  // A range brings its keys and values to fp32 before its first row: of few rows that would be most of the work.
  for_ranges(context, p.batch * p.heads * p.queries, std::max<int64_t>(1, p.keys * p.head_dim / kBlockRows), job);
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
