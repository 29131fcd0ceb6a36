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

#include <algorithm>
#include <limits>
#include <vector>

#include "dot.h"
#include "kv_pages.h"

namespace ncompass {


constexpr int kChunkTokens = 256;
constexpr int kChunkPages = kChunkTokens / kPageTokens;
constexpr int kScoreStride = kChunkTokens + 16;  // not a multiple of 4 KB over a few rows
constexpr int kPreferredRows = 24;               // of a tile: the scores of a chunk fit the L1 cache
constexpr int kItemsPerThread = 16;              // fewer than that are split by chunks
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;

struct AttentionCall {
  int64_t num_heads;
  const void* q;
  int64_t q_stride;
  void* out;
  int64_t out_stride;
  int64_t num_sequences;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t max_blocks;
  float scale;
  int64_t window;  // 0 = none
  float softcap;   // 0 = none
};

// A tile: `num_tokens` neighbouring query tokens of a sequence with the heads of one KV head.
struct Tile {
  int64_t first_token;  // in the step
  int64_t num_tokens;
  int64_t kv_head;
  int64_t position;  // of the first token in its context
  int64_t begin;     // the first position that any of its tokens sees
  const int32_t* block_table;
  int64_t first_chunk;
  int64_t end_chunk;
  int64_t first_partial;  // where its chunks' partials lie, if they are kept

  int64_t end_position() const { return position + num_tokens; }
  // The first page of a chunk that matters; those before it may be gone from the cache.
  int first_page(int64_t first) const {
    return static_cast<int>(std::max<int64_t>(0, begin - first) / kPageTokens);
  }
};

// A (partial) result of a tile: m [rows], l [rows], o [rows, head_dim].
struct Partial {
  float* largest;
  float* weight;
  float* values;

  static int64_t elements(int64_t num_rows, int64_t head_dim) {
    return (num_rows * (head_dim + 2) + 15) / 16 * 16;
  }
  static Partial at(float* memory, int64_t num_rows, int64_t head_dim) {
    return {memory + num_rows * head_dim, memory + num_rows * (head_dim + 1), memory};
  }
};

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

  Attention(const AttentionCall& call, const Pages<const Element>& pages)
      : call_(call), pages_(pages), group_(call.num_heads / pages.num_kv_heads) {}

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

  // One chunk's partial result. `next` is what this thread probably does after the tile, or null.
  void attend_chunk(const Tile& tile, const Tile* next, int64_t chunk,
                    const TileScratch<Dot>& scratch, const Partial& partial) const;

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
  int64_t block(const Tile& tile, int64_t first, int page) const {
    return tile.block_table[first / kPageTokens + page];
  }

  // The parts of a chunk.
  StridedPrefetch keys_ahead(const Tile& tile, const Tile* next, int64_t page, int64_t channel,
                             int64_t num_channels, int64_t num_steps) const;
  template <class Body>
  static void for_each_block(int64_t num_rows, int num_vectors, const Body& body);
  void multiply_keys(const Tile& tile, int64_t first, int num_tokens,
                     const TileScratch<Dot>& scratch) const;
  template <int kRows, int kVectors>
  void score(const Activation* queries, int64_t query_stride, const Element* panel, int vector,
             Prefetch values, float* scores) const;
  void soften_row(const Tile& tile, int64_t first, int num_tokens, int64_t row,
                  const TileScratch<Dot>& scratch, const Partial& partial) const;
  void cap_scores(float* scores, int first, int end) const;
  void multiply_values(const Tile& tile, const Tile* next, int64_t first, int num_tokens,
                       const TileScratch<Dot>& scratch, const Partial& partial) const;
  template <int kRows, int kVectors>
  void add_values(const Tile& tile, const Tile* next, int64_t first, int num_tokens, int64_t row,
                  int vector, const TileScratch<Dot>& scratch, const Partial& partial) const;
  template <int kRows, int kVectors>
  void add_page(const Tile& tile, const Tile* next, int64_t first, int page, int num_tokens,
                int64_t row, int64_t channel, const TileScratch<Dot>& scratch,
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

// Everything that would lead outside an array.
inline void check(const AttentionCall& call, int64_t num_blocks, int64_t num_kv_heads,
           int64_t num_tokens) {
  require(call.num_heads > 0 && call.num_heads % num_kv_heads == 0,
          "attention: the query heads do not divide among the KV heads");
  require(call.query_start[0] == 0 && call.query_start[call.num_sequences] == num_tokens,
          "attention: query_start does not cover the tokens");
  for (int64_t i = 0; i < call.num_sequences; ++i) {
    const int64_t num_queries = int64_t{call.query_start[i + 1]} - call.query_start[i];
    const int64_t context = call.context_lens[i];
    require(num_queries > 0 && num_queries <= context,
            "attention: a sequence has no tokens, or more than its context");
    const int64_t num_pages = (context + kPageTokens - 1) / kPageTokens;
    require(num_pages <= call.max_blocks, "attention: a context is longer than its block table");
    int64_t first_page = 0;
    if (call.window > 0) {
      first_page = std::max<int64_t>(0, context - num_queries + 1 - call.window) / kPageTokens;
    }
    for (int64_t page = first_page; page < num_pages; ++page) {
      const int32_t block = call.block_tables[i * call.max_blocks + page];
      require(block >= 0 && block < num_blocks, "attention: a block is beyond the cache");
    }
  }
}

// The tiles of all sequences; the late, costly ones of a long prefill first.
inline std::vector<Tile> cut_into_tiles(const AttentionCall& call, int64_t num_kv_heads) {
  const int64_t group = call.num_heads / num_kv_heads;
  const int64_t tile_tokens = std::max<int64_t>(1, kPreferredRows / group);
  std::vector<Tile> tiles;
  int64_t num_partials = 0;
  for (int64_t i = 0; i < call.num_sequences; ++i) {
    const int64_t start = call.query_start[i];
    const int64_t num_queries = call.query_start[i + 1] - start;
    const int64_t past = call.context_lens[i] - num_queries;
    const int64_t num_tiles = (num_queries + tile_tokens - 1) / tile_tokens;
    for (int64_t t = num_tiles - 1; t >= 0; --t) {
      Tile tile;
      tile.first_token = start + t * tile_tokens;
      tile.num_tokens = std::min(tile_tokens, num_queries - t * tile_tokens);
      tile.position = past + t * tile_tokens;
      tile.block_table = call.block_tables + i * call.max_blocks;
      tile.begin = call.window > 0 ? std::max<int64_t>(0, tile.position + 1 - call.window) : 0;
      tile.first_chunk = tile.begin / kChunkTokens;
      tile.end_chunk = (tile.end_position() + kChunkTokens - 1) / kChunkTokens;
      for (int64_t head = 0; head < num_kv_heads; ++head) {
        tile.kv_head = head;
        tile.first_partial = num_partials;
        num_partials += tile.end_chunk - tile.first_chunk;
        tiles.push_back(tile);
      }
    }
  }
  return tiles;
}

// What all layers of a step with one window share: its tiles, and whether they are cut further.
struct AttentionPlan {
  struct Part {
    int64_t tile;
    int64_t chunk;
  };
  std::vector<Tile> tiles;
  std::vector<Part> parts;  // few long contexts: their chunks are shared out
  int64_t max_rows;
  int64_t head_dim;
  int64_t partial_elements;

  AttentionPlan(const AttentionCall& call, int64_t num_kv_heads, int64_t head_dim, int num_threads)
      : tiles(cut_into_tiles(call, num_kv_heads)), head_dim(head_dim) {
    const int64_t group = call.num_heads / num_kv_heads;
    max_rows = std::max<int64_t>(1, kPreferredRows / group) * group;
    partial_elements = Partial::elements(max_rows, head_dim);
    const int64_t num_tiles = static_cast<int64_t>(tiles.size());
    const Tile& last = tiles.back();
    const int64_t num_partials = last.first_partial + last.end_chunk - last.first_chunk;
    const bool is_split = num_threads > 1 && num_tiles < kItemsPerThread * num_threads &&
                          num_partials > num_tiles;
    for (int64_t i = 0; is_split && i < num_tiles; ++i) {
      for (int64_t c = tiles[i].first_chunk; c < tiles[i].end_chunk; ++c) parts.push_back({i, c});
    }
  }
  bool is_split() const { return !parts.empty(); }
  int64_t shared_bytes() const { return parts.size() * partial_elements * sizeof(float); }

  Partial partial(float* memory, int64_t index) const {
    return Partial::at(memory + index * partial_elements, max_rows, head_dim);
  }
};

// The part of one thread in a step's attention. `own` is its memory, `shared` that of the plan.
// In a plan that is not split, prepare(tile) comes before anything of the tile is read.
template <class Dot, class T, class Prepare>
void attend(Worker& worker, const Attention<Dot>& attention, const AttentionPlan& plan, char* own,
            float* shared, const Prepare& prepare) {
  const TileScratch<Dot> scratch = TileScratch<Dot>::at(own, plan.max_rows, plan.head_dim);
  const std::vector<Tile>& tiles = plan.tiles;
  const int64_t num_tiles = static_cast<int64_t>(tiles.size());
  const Partial total = plan.partial(scratch.partials, 0);
  if (!plan.is_split()) {
    const Partial partial = plan.partial(scratch.partials, 1);
    worker.take(num_tiles, [&](int64_t task, int64_t next) {
      const Tile& tile = tiles[task];
      const Tile* next_tile = next < 0 ? nullptr : &tiles[next];
      prepare(tile);
      attention.template load_queries<T>(tile, scratch);
      attention.attend_chunk(tile, next_tile, tile.first_chunk, scratch, total);
      for (int64_t chunk = tile.first_chunk + 1; chunk < tile.end_chunk; ++chunk) {
        attention.attend_chunk(tile, next_tile, chunk, scratch, partial);
        attention.merge(attention.rows(tile), total, partial);
      }
      attention.template write<T>(tile, total);
    });
    return;
  }
  // The chunks are merged in the same order as above.
  worker.take(static_cast<int64_t>(plan.parts.size()), [&](int64_t task, int64_t) {
    const Tile& tile = tiles[plan.parts[task].tile];
    attention.template load_queries<T>(tile, scratch);
    attention.attend_chunk(tile, nullptr, plan.parts[task].chunk, scratch,
                           plan.partial(shared, task));
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
