// What a thread is about to read of the KV cache, brought nearer while it computes.
//
// A decode reads each key and value once, from memory. The pages of a tile are fetched in the order in
// which they are read, then those of the tile after it: a row at each step of any of the loops (products
// and softmax alike), up to kLeadBytes ahead. So no page comes in a burst, and the one that a token is
// written to is there before it is. (Fetching values while their keys are read, and keys a chunk ahead,
// missed both where a context had just begun a chunk: attention of 64 took 19.7 ms instead of 19.0.)
#pragma once

#include "attention_plan.h"
#include "dot.h"

namespace ncompass {

constexpr int64_t kLeadBytes = 256 << 10;  // an eighth of a second-level cache

template <class Element>
class KvStream {
 public:
  explicit KvStream(const Pages<const Element>& pages)
      : pages_(pages),
        most_ahead_(std::max<int64_t>(2, kLeadBytes / static_cast<int64_t>(
                                             pages.head_dim * kPageTokens * sizeof(Element)))) {}

  // The thread goes through `stretch` now, and probably through `next` after it, if that has a tile.
  void begin(const Stretch& stretch, const Stretch& next) {
    const bool is_expected = stretches_[1].tile != nullptr && stretch == stretches_[1];
    if (is_expected && index_ > 0) {
      --index_;
      stretches_[0] = stretch;
      stretches_[1] = next;
      if (index_ == 1) start_of_stretch();
    } else {
      stretches_[0] = stretch;
      stretches_[1] = next;
      index_ = 0;
      num_ahead_ = rows_left_ = 0;
      start_of_stretch();
    }
    if (rows_left_ == 0) fetch_page();
  }

  // The thread reads the next page of its stretch now: all keys of a chunk, then all of its values.
  void consume() {
    if (num_ahead_ == 0 && index_ == 0) step();  // overtaken
    if (num_ahead_ > 0) --num_ahead_;
    if (num_ahead_ == 0) rows_left_ = 0;
    if (rows_left_ == 0) fetch_page();
  }

  // A row: as many lines as most steps of a product read.
  inline void advance() {
    if (rows_left_ == 0) return;
    for (int64_t line = 0; line < lines_; ++line) {
      _mm_prefetch(row_ + line * kLineBytes, _MM_HINT_T1);
    }
    row_ += kRowBytes;
    if (--rows_left_ == 0) fetch_page();
  }

 private:
  static constexpr int64_t kRowBytes = kPageTokens * sizeof(float);  // of keys
  static constexpr int64_t kRowLines = kRowBytes / kLineBytes;

  void start_of_stretch() {
    if (index_ > 1 || stretches_[index_].tile == nullptr) return;
    chunk_ = stretches_[index_].first_chunk;
    is_values_ = false;
    page_ = stretches_[index_].tile->first_page(chunk_ * kChunkTokens);
  }

  // To the page after this one.
  void step() {
    const Stretch& stretch = stretches_[index_];
    const int64_t first = chunk_ * kChunkTokens;
    if (++page_ * kPageTokens < stretch.tile->tokens_of(first)) return;
    if (is_values_ && ++chunk_ == stretch.end_chunk) {
      ++index_;
      return start_of_stretch();
    }
    is_values_ = !is_values_;
    page_ = stretch.tile->first_page(chunk_ * kChunkTokens);
  }

  // Begins with the next page, unless that is too far ahead.
  __attribute__((noinline)) void fetch_page() {
    if (index_ > 1 || stretches_[index_].tile == nullptr || num_ahead_ >= most_ahead_) return;
    const Tile& tile = *stretches_[index_].tile;
    const int64_t first = chunk_ * kChunkTokens;
    const int64_t tokens =
        std::min<int64_t>(kPageTokens, tile.tokens_of(first) - page_ * kPageTokens);
    const int64_t block = tile.block(first, page_);
    if (is_values_) {
      row_ = reinterpret_cast<const char*>(pages_.value_panel(block, tile.kv_head));
      const int64_t bytes = tokens * pages_.head_dim * static_cast<int64_t>(sizeof(Element));
      rows_left_ = (bytes + kRowBytes - 1) / kRowBytes;
      lines_ = kRowLines;
    } else {
      row_ = reinterpret_cast<const char*>(pages_.key_panel(block, tile.kv_head));
      rows_left_ = pages_.head_dim / Pages<Element>::kDepth;
      lines_ = (tokens * static_cast<int64_t>(sizeof(float)) + kLineBytes - 1) / kLineBytes;
    }
    ++num_ahead_;
    step();
  }

  const Pages<const Element> pages_;
  const int64_t most_ahead_;  // pages
  Stretch stretches_[2];      // that the thread goes through, and the next one
  int index_ = 0;             // of the stretch that is being fetched; 2: both have been
  int64_t chunk_ = 0;         // the next page to fetch
  int64_t page_ = 0;
  bool is_values_ = false;
  int64_t num_ahead_ = 0;  // pages begun and not read yet
  const char* row_ = nullptr;
  int64_t rows_left_ = 0;
  int64_t lines_ = 0;  // of each row
};

}  // namespace ncompass
