// Attention of any mix of prefill, chunked prefill and decode over the paged KV cache.
//
// The query heads of one KV head, for a few neighbouring tokens, form the rows of a tile; both
// products of the tile are the inner loop of dot.h on the panels of kv_pages.h. The context is cut
// into chunks of kChunkTokens from its start. Each chunk gives a partial result
//
//   m = max_j s_j,   l = sum_j 2^(s_j - m),   o = sum_j 2^(s_j - m) v_j
//
// and the partials are merged in ascending order: (Online softmax, arXiv 1805.02867; FlashAttention,
// arXiv 2205.14135; FlashDecoding splits the context the same way.)
//
// A chunk is always computed for itself and then merged, whether one thread walks through all of
// them or many share them. So neither the batch, nor the cutting of a prefill, nor the number of
// threads changes a bit of a token's result.
//
// Scores beyond a row's context are replaced before the maximum is taken, and values beyond the
// tile's context never enter a product: what lies in unused parts of a page does not matter.
#pragma once

#include <limits>

#include "dot.h"
#include "kv_stream.h"

namespace ncompass {

constexpr int kScoreStride = kChunkTokens + 16;  // not a multiple of 4 KB over a few rows
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

template <class Dot>
struct TileScratch {
  using Activation = typename Dot::Activation;
  Activation* queries;  // [rows, query_stride]
  int64_t query_stride;
  float* scores;              // [rows, kScoreStride]
  Activation* probabilities;  // [rows, kScoreStride]; for floats the scores themselves
  float* partials;            // two of them

  static int64_t bytes(int64_t num_rows, int64_t head_dim) {
    return num_rows * (query_row(head_dim) + 2 * kScoreStride) * sizeof(float) +
           2 * Partial::elements(num_rows, head_dim) * sizeof(float);
  }
  static int64_t query_row(int64_t head_dim) { return head_dim + 16; }
  static TileScratch at(char* memory, int64_t num_rows, int64_t head_dim) {
    TileScratch scratch;
    scratch.partials = reinterpret_cast<float*>(memory);
    scratch.scores = scratch.partials + 2 * Partial::elements(num_rows, head_dim);
    float* next = scratch.scores + num_rows * kScoreStride;
    scratch.probabilities = reinterpret_cast<Activation*>(next);
    if constexpr (std::is_same_v<Activation, float>) scratch.probabilities = scratch.scores;
    scratch.queries = reinterpret_cast<Activation*>(next + num_rows * kScoreStride);
    scratch.query_stride = query_row(head_dim);
    return scratch;
  }
};

template <class Dot>
class Attention {
 public:
  using Element = typename Dot::Weight;
  using Activation = typename Dot::Activation;
  using Stream = KvStream<Element>;

  Attention(const AttentionCall& call, const Pages<const Element>& pages)
      : call_(call), pages_(pages), group_(call.num_heads / pages.num_kv_heads) {}

  Stream stream() const { return Stream(pages_); }
  int64_t rows(const Tile& tile) const { return tile.num_tokens * group_; }

  template <class T>
  void load_queries(const Tile& tile, const TileScratch<Dot>& scratch) const {
    const T* q = static_cast<const T*>(call_.q) + tile.first_token * call_.q_stride +
                 tile.kv_head * group_ * pages_.head_dim;
    for (int64_t row = 0; row < rows(tile); ++row) {
      const T* head = q + row / group_ * call_.q_stride + row % group_ * pages_.head_dim;
      Activation* query = scratch.queries + row * scratch.query_stride;
      for_each_vector(pages_.head_dim,
                      [&](int64_t i, int count) { store(query + i, load(head + i, count), count); });
    }
  }

  // One chunk's partial result. What the thread reads next comes nearer meanwhile.
  void attend_chunk(const Tile& tile, int64_t chunk, const TileScratch<Dot>& scratch,
                    const Partial& partial, Stream& ahead) const;

  // total = total merged with `partial`, which lies later in the context.
  void merge(int64_t num_rows, const Partial& total, const Partial& partial) const {
    const int64_t head_dim = pages_.head_dim;
    for (int64_t row = 0; row < num_rows; ++row) {
      if (partial.largest[row] == kMinusInfinity) continue;
      float* old_values = total.values + row * head_dim;
      const float* new_values = partial.values + row * head_dim;
      if (total.largest[row] == kMinusInfinity) {
        std::copy_n(new_values, head_dim, old_values);
        total.largest[row] = partial.largest[row];
        total.weight[row] = partial.weight[row];
        continue;
      }
      const float largest = std::max(total.largest[row], partial.largest[row]);
      const F32 old_share = exp2(broadcast(total.largest[row] - largest));
      const F32 new_share = exp2(broadcast(partial.largest[row] - largest));
      for_each_vector(head_dim, [&](int64_t i, int) {
        store(old_values + i,
              fma(load(old_values + i), old_share, load(new_values + i) * new_share));
      });
      const F32 weight = fma(broadcast(total.weight[row]), old_share,
                             broadcast(partial.weight[row]) * new_share);
      store(&total.weight[row], weight, 1);
      total.largest[row] = largest;
    }
  }

  template <class T>
  void write(const Tile& tile, const Partial& total) const {
    const int64_t head_dim = pages_.head_dim;
    T* out = static_cast<T*>(call_.out) + tile.first_token * call_.out_stride +
             tile.kv_head * group_ * head_dim;
    for (int64_t row = 0; row < rows(tile); ++row) {
      T* head = out + row / group_ * call_.out_stride + row % group_ * head_dim;
      const F32 inverse = broadcast(1.0f / total.weight[row]);
      for_each_vector(head_dim, [&](int64_t i, int) {
        store(head + i, load(total.values + row * head_dim + i) * inverse);
      });
    }
  }

 private:
  // The parts of a chunk.
  template <class Body>
  static void for_each_block(int64_t num_rows, int num_vectors, const Body& body);
  void multiply_keys(const Tile& tile, int64_t first, int num_tokens,
                     const TileScratch<Dot>& scratch, Stream& ahead) const;
  template <int kRows, int kVectors>
  void score(const Activation* queries, int64_t query_stride, const Element* panel, int vector,
             Stream& ahead, float* scores) const;
  void soften_row(const Tile& tile, int64_t first, int num_tokens, int64_t row,
                  const TileScratch<Dot>& scratch, const Partial& partial, Stream& ahead) const;
  void cap_scores(float* scores, int first, int end) const;
  void multiply_values(const Tile& tile, int64_t first, int num_tokens,
                       const TileScratch<Dot>& scratch, const Partial& partial,
                       Stream& ahead) const;
  template <int kRows, int kVectors>
  void add_values(const Tile& tile, int64_t first, int num_tokens, int64_t row, int vector,
                  const TileScratch<Dot>& scratch, const Partial& partial, Stream& ahead) const;
  template <int kRows, int kVectors>
  void add_page(const Tile& tile, int64_t first, int page, int num_tokens, int64_t row,
                int64_t channel, const TileScratch<Dot>& scratch, Stream& ahead,
                F32 (&sums)[kRows][kVectors]) const;

  const AttentionCall& call_;
  const Pages<const Element> pages_;
  const int64_t group_;
};

// Compiled in attention_chunk.cpp alone: they take longer than all the rest.
extern template class Attention<FloatDot>;
extern template class Attention<WidenedBf16Dot>;
#if NCOMPASS_HAS_BF16_DOT
extern template class Attention<NativeBf16Dot>;
#endif

// The part of one thread in a step's attention. `own` is its memory, `shared` that of the plan.
// In a plan that is not split, prepare(tile) comes before anything of the tile is read.
template <class Dot, class T, class Prepare>
void attend(Worker& worker, const Attention<Dot>& attention, const AttentionPlan& plan, char* own,
            float* shared, const Prepare& prepare) {
  const TileScratch<Dot> scratch = TileScratch<Dot>::at(own, plan.max_rows, plan.head_dim);
  const std::vector<Tile>& tiles = plan.tiles;
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  const Partial total = plan.partial(scratch.partials, 0);
  auto ahead = attention.stream();
  if (!plan.is_split()) {
    const Partial partial = plan.partial(scratch.partials, 1);
    worker.take(num_tiles, [&](int64_t task, int64_t next) {
      const Tile& tile = tiles[task];
      ahead.begin(tile.stretch(), next < 0 ? Stretch{} : tiles[next].stretch());
      prepare(tile);
      attention.template load_queries<T>(tile, scratch);
      attention.attend_chunk(tile, tile.first_chunk, scratch, total, ahead);
      for (int64_t chunk = tile.first_chunk + 1; chunk < tile.end_chunk; ++chunk) {
        attention.attend_chunk(tile, chunk, scratch, partial, ahead);
        attention.merge(attention.rows(tile), total, partial);
      }
      attention.template write<T>(tile, total);
    });
    return;
  }
  // The chunks are merged in the same order as above.
  worker.take(static_cast<int64_t>(plan.parts.size()), [&](int64_t task, int64_t next) {
    const Stretch& part = plan.parts[task];
    ahead.begin(part, next < 0 ? Stretch{} : plan.parts[next]);
    attention.template load_queries<T>(*part.tile, scratch);
    attention.attend_chunk(*part.tile, part.first_chunk, scratch, plan.partial(shared, task),
                           ahead);
  });
  worker.barrier();
  worker.take(num_tiles, [&](int64_t task, int64_t) {
    const Tile& tile = tiles[task];
    std::fill_n(total.largest, attention.rows(tile), kMinusInfinity);
    for (int64_t i = 0; i < tile.end_chunk - tile.first_chunk; ++i) {
      attention.merge(attention.rows(tile), total, plan.partial(shared, tile.first_partial + i));
    }
    attention.template write<T>(tile, total);
  });
}

}  // namespace ncompass
