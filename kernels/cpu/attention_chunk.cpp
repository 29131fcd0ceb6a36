// The products of one tile of attention with one chunk of its context; paged_attention.h tells how.
#include "paged_attention.h"

namespace ncompass {

// Calls body(row, rows, vectors) for blocks of rows, the last two being compile-time constants: the
// block's height, and how many vectors at once go with it (at most `num_vectors`).
template <class Dot>
template <class Body>
void Attention<Dot>::for_each_block(int64_t num_rows, int num_vectors, const Body& body) {
  for (int64_t row = 0; row < num_rows;) {
    const int64_t left = num_rows - row;
    if (left <= kFlatRows) {
      with_constant<kFlatRows>(left, [&](auto rows) {
        with_constant<kFlatVectors>(std::min(num_vectors, kFlatVectors),
                                    [&](auto vectors) { body(row, rows, vectors); });
      });
      return;
    }
    const int64_t height = std::min<int64_t>(left, kTallRows);
    with_constant<kTallRows, kFlatRows + 1>(height, [&](auto rows) {
      with_constant<kTallVectors>(std::min(num_vectors, kTallVectors),
                                  [&](auto vectors) { body(row, rows, vectors); });
    });
    row += height;
  }
}

// scores[r][vector...] of some rows with some vectors of tokens of one page.
template <class Dot>
template <int kRows, int kVectors>
void Attention<Dot>::score(const Activation* queries, int64_t query_stride, const Element* panel,
                           int vector, Stream& ahead, float* scores) const {
  F32 sums[kRows][kVectors];
  clear(sums);
  accumulate<Dot, kRows, kVectors>(
      sums, queries, query_stride, panel + vector * F32::kWidth * Dot::kDepth,
      kPageTokens * Dot::kDepth, pages_.head_dim / Dot::kDepth, ahead);
  store_tile(sums, scores + vector * F32::kWidth, kScoreStride);
}

// scores [rows, num_tokens] = queries . keys.
template <class Dot>
void Attention<Dot>::multiply_keys(const Tile& tile, int64_t first, int num_tokens,
                                   const TileScratch<Dot>& scratch, Stream& ahead) const {
  constexpr int kWidth = F32::kWidth;
  for (int page = tile.first_page(first); page * kPageTokens < num_tokens; ++page) {
    ahead.consume();
    const Element* panel = pages_.key_panel(tile.block(first, page), tile.kv_head);
    const int page_tokens = std::min(kPageTokens, num_tokens - page * kPageTokens);
    const int page_vectors = (page_tokens + kWidth - 1) / kWidth;
    for_each_block(rows(tile), page_vectors, [&](int64_t row, auto rows, auto vectors) {
      float* scores = scratch.scores + row * kScoreStride + page * kPageTokens;
      const Activation* queries = scratch.queries + row * scratch.query_stride;
      int vector = 0;
      for (; vector + vectors() <= page_vectors; vector += vectors()) {
        score<rows(), vectors()>(queries, scratch.query_stride, panel, vector, ahead, scores);
      }
      if (vector == page_vectors) return;
      with_constant<std::max(vectors() - 1, 1)>(page_vectors - vector, [&](auto rest) {
        score<rows(), rest()>(queries, scratch.query_stride, panel, vector, ahead, scores);
      });
    });
  }
}

// s = c tanh(scale s / c) from vector to vector.
template <class Dot>
void Attention<Dot>::cap_scores(float* scores, int first, int end) const {
  const F32 cap = broadcast(call_.softcap), factor = broadcast(call_.scale / call_.softcap);
  for (int j = first; j < end; j += F32::kWidth) {
    store(scores + j, cap * tanh(load(scores + j) * factor));
  }
}

// Scores of one row -> unnormalised probabilities, 0 where the row may not look.
template <class Dot>
void Attention<Dot>::soften_row(const Tile& tile, int64_t first, int num_tokens, int64_t row,
                                const TileScratch<Dot>& scratch, const Partial& partial,
                                Stream& ahead) const {
  constexpr int kWidth = F32::kWidth;
  float* scores = scratch.scores + row * kScoreStride;
  Activation* probabilities = scratch.probabilities + row * kScoreStride;
  // 1. the visible part [begin, end) of the chunk
  const int64_t position = tile.position + row / group_;
  const int end = static_cast<int>(std::min<int64_t>(num_tokens, position + 1 - first));
  int begin = 0;
  if (call_.window > 0) {
    begin = static_cast<int>(std::max<int64_t>(0, position + 1 - call_.window - first));
  }
  partial.largest[row] = kMinusInfinity;
  partial.weight[row] = 0.0f;
  const int padded_tokens = (num_tokens + kWidth - 1) / kWidth * kWidth;
  if (begin >= end) {
    for (int j = 0; j < padded_tokens; j += kWidth) store(probabilities + j, zero());
    return;
  }
  const int first_vector = begin / kWidth * kWidth;
  const auto is_whole = [&](int j) { return j >= begin && j + kWidth <= end; };
  const auto visible = [&](F32 x, int j, float otherwise) {
    const F32 hidden = broadcast(otherwise);
    x = keep_first(x, std::min(end - j, kWidth), hidden);
    return keep_first(hidden, std::clamp(begin - j, 0, kWidth), x);
  };
  // 2. the largest score, in units of log2
  if (call_.softcap > 0) cap_scores(scores, first_vector, end);
  const float factor = call_.softcap > 0 ? kLog2E : call_.scale * kLog2E;
  F32 most = broadcast(kMinusInfinity);
  for (int j = first_vector; j < end; j += kWidth) {
    const F32 score = load(scores + j);
    most = max(is_whole(j) ? score : visible(score, j, kMinusInfinity), most);
  }
  const float largest = reduce_max(most) * factor;
  // 3. probabilities and their sum
  F32 sum = zero();
  for (int j = 0; j < first_vector; j += kWidth) store(probabilities + j, zero());
  for (int j = first_vector; j < end; j += kWidth) {
    F32 probability = exp2(fma(load(scores + j), broadcast(factor), broadcast(-largest)));
    if (!is_whole(j)) probability = visible(probability, j, 0.0f);
    sum = sum + probability;
    store(probabilities + j, probability);
    ahead.advance();
  }
  for (int j = (end + kWidth - 1) / kWidth * kWidth; j < padded_tokens; j += kWidth) {
    store(probabilities + j, zero());
  }
  partial.largest[row] = largest;
  partial.weight[row] = reduce_add(sum);
}

template <class Dot>
template <int kRows, int kVectors>
void Attention<Dot>::add_page(const Tile& tile, int64_t first, int page, int num_tokens,
                              int64_t row, int64_t channel, const TileScratch<Dot>& scratch,
                              Stream& ahead, F32 (&sums)[kRows][kVectors]) const {
  constexpr int kDepth = Dot::kDepth;
  const int tokens = std::min(kPageTokens, num_tokens - page * kPageTokens);
  const int num_steps = tokens / kDepth;
  const Activation* probabilities =
      scratch.probabilities + row * kScoreStride + page * kPageTokens;
  const Element* panel =
      pages_.value_panel(tile.block(first, page), tile.kv_head) + channel * kDepth;
  if (row == 0 && channel == 0) ahead.consume();
  accumulate<Dot, kRows, kVectors>(sums, probabilities, kScoreStride, panel,
                                   pages_.head_dim * kDepth, num_steps, ahead);
  if constexpr (kDepth > 1) {
    if (tokens % kDepth == 0) return;
    // The other half of the last pair may hold anything.
    Dot::template step_low<kRows, kVectors>(sums, probabilities + num_steps * kDepth,
                                            kScoreStride,
                                            panel + num_steps * pages_.head_dim * kDepth);
  }
}

// Some rows' sums of some vectors of channels.
template <class Dot>
template <int kRows, int kVectors>
void Attention<Dot>::add_values(const Tile& tile, int64_t first, int num_tokens, int64_t row,
                                int vector, const TileScratch<Dot>& scratch,
                                const Partial& partial, Stream& ahead) const {
  const int64_t channel = vector * F32::kWidth;
  F32 sums[kRows][kVectors];
  clear(sums);
  for (int page = tile.first_page(first); page * kPageTokens < num_tokens; ++page) {
    add_page<kRows, kVectors>(tile, first, page, num_tokens, row, channel, scratch, ahead, sums);
  }
  store_tile(sums, partial.values + row * pages_.head_dim + channel, pages_.head_dim);
}

// partial.values = probabilities . values.
template <class Dot>
void Attention<Dot>::multiply_values(const Tile& tile, int64_t first, int num_tokens,
                                     const TileScratch<Dot>& scratch, const Partial& partial,
                                     Stream& ahead) const {
  const int head_vectors = static_cast<int>(pages_.head_dim) / F32::kWidth;
  for_each_block(rows(tile), head_vectors, [&](int64_t row, auto rows, auto vectors) {
    int vector = 0;
    for (; vector + vectors() <= head_vectors; vector += vectors()) {
      add_values<rows(), vectors()>(tile, first, num_tokens, row, vector, scratch, partial, ahead);
    }
    if (vector == head_vectors) return;
    with_constant<std::max(vectors() - 1, 1)>(head_vectors - vector, [&](auto rest) {
      add_values<rows(), rest()>(tile, first, num_tokens, row, vector, scratch, partial, ahead);
    });
  });
}

template <class Dot>
void Attention<Dot>::attend_chunk(const Tile& tile, int64_t chunk, const TileScratch<Dot>& scratch,
                                  const Partial& partial, Stream& ahead) const {
  const int64_t first = chunk * kChunkTokens;
  const int num_tokens = tile.tokens_of(first);
  multiply_keys(tile, first, num_tokens, scratch, ahead);
  for (int64_t row = 0; row < rows(tile); ++row) {
    soften_row(tile, first, num_tokens, row, scratch, partial, ahead);
  }
  multiply_values(tile, first, num_tokens, scratch, partial, ahead);
}

template class Attention<FloatDot>;
template class Attention<WidenedBf16Dot>;
#if NCOMPASS_HAS_BF16_DOT
template class Attention<NativeBf16Dot>;
#endif

}  // namespace ncompass
