// How attention's work is cut: tiles of query tokens, their contexts in chunks, one plan for all layers
// of a step that look equally far back.
#pragma once

#include <algorithm>
#include <vector>

#include "kv_pages.h"

namespace ncompass {

constexpr int kChunkTokens = 256;
constexpr int kPreferredRows = 24;   // of a tile: the scores of a chunk fit the L1 cache
constexpr int kItemsPerThread = 16;  // fewer than that are split by chunks

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

struct Tile;

// Neighbouring chunks of a tile that one task goes through.
struct Stretch {
  const Tile* tile = nullptr;
  int64_t first_chunk = 0;
  int64_t end_chunk = 0;

  bool operator==(const Stretch& other) const {
    return tile == other.tile && first_chunk == other.first_chunk;
  }
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

  Stretch stretch() const { return {this, first_chunk, end_chunk}; }
  int64_t end_position() const { return position + num_tokens; }
  // Of the chunk that begins at `first`.
  int tokens_of(int64_t first) const {
    return static_cast<int>(std::min<int64_t>(kChunkTokens, end_position() - first));
  }
  int64_t block(int64_t first, int64_t page) const { return block_table[first / kPageTokens + page]; }
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
  std::vector<Tile> tiles;
  std::vector<Stretch> parts;  // few long contexts: their chunks are shared out
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
      for (int64_t c = tiles[i].first_chunk; c < tiles[i].end_chunk; ++c) {
        parts.push_back({&tiles[i], c, c + 1});
      }
    }
  }
  AttentionPlan(AttentionPlan&&) = default;  // the parts point to the tiles, which stay where they are
  AttentionPlan(const AttentionPlan&) = delete;

  bool is_split() const { return !parts.empty(); }
  int64_t shared_bytes() const { return parts.size() * partial_elements * sizeof(float); }

  Partial partial(float* memory, int64_t index) const {
    return Partial::at(memory + index * partial_elements, max_rows, head_dim);
  }
};

}  // namespace ncompass
