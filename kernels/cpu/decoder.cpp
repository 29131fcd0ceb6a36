// One step of a whole decoder in one parallel region: the operations of the other files, one after
// the other on all threads, with a barrier where one needs what all threads did before.
#include "decoder.h"

#include "api.h"
#include "guard.h"
#include "linear.h"
#include "paged_attention.h"
#include "rotary.h"

namespace ncompass {
namespace {

template <class Dot>
PackedWeight<Dot> weight_of(const DecoderLinear& linear, int64_t out_features,
                            int64_t in_features) {
  return {static_cast<const typename Dot::Weight*>(linear.packed), out_features, in_features};
}

// The sizes of a step's memory, and the memory.
template <class KvDot>
class Workspace {
 public:
  using Mid = typename KvDot::Activation;

  Workspace(Context& context, const DecoderModel& model, const DecoderStep& step,
            int64_t attention_bytes, int64_t attention_shared_bytes)
      : qkv_stride(spread_stride<Mid>((model.num_heads + 2 * model.num_kv_heads) * model.head_dim)),
        attended_stride(spread_stride<Mid>(model.num_heads * model.head_dim)),
        gated_stride(spread_stride<Mid>(model.intermediate)) {
    const int64_t most_rows = std::max(step.num_tokens, step.num_rows);
    const int64_t longest =
        std::max({model.hidden, model.intermediate, model.num_heads * model.head_dim});
    // 1. of each thread: sums of two panels, converted rows of a small product, a row, attention
    const int64_t sums = 2 * kMaxBlockRows * kPanelWidth * sizeof(float);
    const int64_t private_rows = rows_bytes_of(std::min(most_rows, kPrivateRows), longest);
    const int64_t row = round_up(longest * sizeof(float), 64);
    const int64_t head = kMaxHeadDim * sizeof(float);
    for (Scratch& memory : context.private_scratch) {
      char* next = memory.reserve<char>(sums + private_rows + row + head + attention_bytes);
      own_.push_back({reinterpret_cast<float*>(next), next + sums,
                      reinterpret_cast<float*>(next + sums + private_rows),
                      next + sums + private_rows + row,
                      next + sums + private_rows + row + head});
    }
    // 2. of all threads
    const int64_t shared_rows = most_rows > kPrivateRows ? rows_bytes_of(most_rows, longest) : 0;
    const int64_t mid = round_up((qkv_stride + attended_stride + gated_stride) * most_rows *
                                     static_cast<int64_t>(sizeof(Mid)),
                                 64);
    const int64_t gathered = round_up(step.num_rows * attended_stride * sizeof(Mid), 64);
    const int64_t hidden_rows = round_up(step.num_rows * model.hidden * sizeof(float), 64);
    char* next = context.shared_scratch.reserve<char>(mid + shared_rows + gathered + hidden_rows +
                                                      attention_shared_bytes);
    qkv = reinterpret_cast<Mid*>(next);
    attended = qkv + qkv_stride * most_rows;
    gated = attended + attended_stride * most_rows;
    next += mid;
    shared_rows_ = next;
    next += shared_rows;
    gathered_attended = reinterpret_cast<Mid*>(next);
    next += gathered;
    gathered_hidden = reinterpret_cast<float*>(next);
    next += hidden_rows;
    attention_shared = reinterpret_cast<float*>(next);
  }

  struct Own {
    float* sums;
    char* rows;
    float* row;
    char* head;
    char* attention;
  };
  const Own& own(int thread) const { return own_[thread]; }
  char* rows(int thread, int64_t num_rows) const {
    return num_rows > kPrivateRows ? shared_rows_ : own_[thread].rows;
  }

  const int64_t qkv_stride, attended_stride, gated_stride;
  Mid* qkv;
  Mid* attended;
  Mid* gated;
  Mid* gathered_attended;   // of the rows whose logits are wanted
  float* gathered_hidden;
  float* attention_shared;

 private:
  // Of any form: floats are the widest activations, but short rows of integers have their scales.
  static int64_t rows_bytes_of(int64_t num_rows, int64_t length) {
    return std::max(ConvertedRows::bytes<FloatDot>(num_rows, length + 4),
                    ConvertedRows::bytes<Int8Dot>(num_rows, length + 4));
  }

  char* shared_rows_;
  std::vector<Own> own_;
};

template <class KvDot>
class Decoding {
 public:
  using Mid = typename KvDot::Activation;
  using Element = typename KvDot::Weight;

  Decoding(Context& context, const DecoderModel& model, const DecoderStep& step,
           const std::vector<AttentionPlan>& plans, const std::vector<int>& plan_of_layer)
      : context_(context),
        model_(model),
        step_(step),
        plans_(plans),
        plan_of_layer_(plan_of_layer),
        workspace_(context, model, step,
                   TileScratch<KvDot>::bytes(plans[0].max_rows, model.head_dim),
                   largest_shared(plans)) {}

  // On each thread.
  void run(Worker& worker) const {
    float* hidden = step_.hidden;
    int64_t num_rows = step_.num_tokens;
    const Mid* attended = workspace_.attended;
    for (int64_t i = 0; i < model_.num_layers; ++i) {
      const DecoderLayer& layer = model_.layers[i];
      const bool is_last = i + 1 == model_.num_layers;
      project(worker, layer, hidden);
      if (!writes_in_attention(i)) rotate(worker, layer, i);
      if (is_last && step_.num_rows == 0) return;  // only its keys and values were wanted
      attend_layer(worker, layer, i);
      if (is_last && !wants_every_row()) {
        gather(worker, hidden);
        hidden = workspace_.gathered_hidden;
        attended = workspace_.gathered_attended;
        num_rows = step_.num_rows;
      }
      add_product(worker, layer.output, attended, workspace_.attended_stride,
                  attended_width(), begin_of(worker, layer.gate, model_.intermediate, model_.hidden),
                  hidden, num_rows);
      gate(worker, layer, hidden, num_rows);
      add_product(worker, layer.down, workspace_.gated, workspace_.gated_stride,
                  model_.intermediate, begin_of_next(worker, i), hidden, num_rows);
    }
    if (step_.num_rows > 0) compute_logits(worker, hidden);
  }

 private:
  static int64_t largest_shared(const std::vector<AttentionPlan>& plans) {
    int64_t bytes = 0;
    for (const AttentionPlan& plan : plans) bytes = std::max(bytes, plan.shared_bytes());
    return bytes;
  }

  bool wants_every_row() const {
    if (step_.num_rows != step_.num_tokens) return false;
    for (int64_t i = 0; i < step_.num_rows; ++i) {
      if (step_.rows[i] != i) return false;
    }
    return true;
  }

  // Where this thread will probably begin to read the weight of a product to come: it is fetched while
  // the product before it ends, so that memory has no pause between them.
  const char* begin_of(const Worker& worker, const DecoderLinear& linear, int64_t out_features,
                       int64_t in_features) const {
    const char* begin = nullptr;
    with_dot(context_, linear.form, [&](auto dot) {
      const auto weight = weight_of<decltype(dot)>(linear, out_features, in_features);
      const int64_t panel = worker.first_of(weight.num_panels());
      begin = reinterpret_cast<const char*>(weight.panel(panel));
    });
    return begin;
  }
  int64_t attended_width() const { return model_.num_heads * model_.head_dim; }
  int64_t qkv_width() const {
    return (model_.num_heads + 2 * model_.num_kv_heads) * model_.head_dim;
  }
  // After layer `index`.
  const char* begin_of_next(const Worker& worker, int64_t index) const {
    if (index + 1 == model_.num_layers) {
      return begin_of(worker, model_.head, model_.vocabulary, model_.hidden);
    }
    return begin_of(worker, model_.layers[index + 1].qkv, qkv_width(), model_.hidden);
  }

  // norm(hidden) in the form of Dot.
  template <class Dot>
  Rows<Dot> normalized(Worker& worker, const float* hidden, const float* norm, int64_t num_rows,
                       const PackedWeight<Dot>& weight) const {
    float* row_memory = workspace_.own(worker.thread).row;
    return make_rows<Dot>(
        worker, num_rows, weight.padded_length(), workspace_.rows(worker.thread, num_rows),
        [&](int64_t row, typename Dot::Activation* out, float* scale) {
          normalize_row(hidden + row * model_.hidden, norm, model_.hidden, model_.eps, row_memory);
          convert_row<Dot>(row_memory, model_.hidden, weight.padded_length(), out, scale);
        });
  }

  // qkv = norm(hidden) [Q K V]
  void project(Worker& worker, const DecoderLayer& layer, const float* hidden) const {
    const int64_t width = qkv_width();
    const char* after = begin_of(worker, layer.output, model_.hidden, attended_width());
    with_dot(context_, layer.qkv.form, [&](auto dot) {
      using Dot = decltype(dot);
      const PackedWeight<Dot> weight = weight_of<Dot>(layer.qkv, width, model_.hidden);
      const Rows<Dot> rows = normalized(worker, hidden, layer.input_norm, step_.num_tokens, weight);
      write_product(worker, rows, step_.num_tokens, weight, after,
                    Results<Mid>{layer.qkv.bias, nullptr, 0, workspace_.qkv, workspace_.qkv_stride,
                                 width});
    });
  }

  // Where each sequence has one token, a task of attention needs no other's keys: it rotates and
  // writes those of its own head itself, while their page is in its cache (1.3 ms less at 64).
  bool writes_in_attention(int64_t index) const {
    return step_.num_tokens == step_.num_sequences && step_.num_rows > 0 &&
           !plans_[plan_of_layer_[index]].is_split();
  }

  RotaryCall rotary_call() const {
    Mid* q = workspace_.qkv;
    Mid* k = q + model_.num_heads * model_.head_dim;
    const Mid* v = k + model_.num_kv_heads * model_.head_dim;
    const int64_t stride = workspace_.qkv_stride;
    return {model_.num_heads, q,      stride,          k,
            stride,           v,      stride,          model_.cos_sin,
            model_.rotary_dim, step_.positions, step_.slots};
  }

  template <class PageElement>
  Pages<PageElement> pages(int64_t index) const {
    return {static_cast<PageElement*>(step_.keys[index]),
            static_cast<PageElement*>(step_.values[index]), model_.num_kv_heads, model_.head_dim};
  }

  // Rotates the queries and the key of one KV head of a token; key and value go to their page.
  void rotate_head(const DecoderLayer& layer, const RotaryCall& call,
                   const Pages<Element>& pages, int64_t token, int64_t head,
                   Element* scratch) const {
    const int64_t group = model_.num_heads / model_.num_kv_heads;
    Mid* row = workspace_.qkv + token * workspace_.qkv_stride;
    normalize_heads(layer.query_norm, group, row + head * group * model_.head_dim);
    normalize_heads(layer.key_norm, 1, row + (model_.num_heads + head) * model_.head_dim);
    rotate_queries<Mid>(call, model_.head_dim, token, head * group, group);
    rotate_and_write_head<Mid>(call, pages, token, head, scratch);
  }

  void rotate(Worker& worker, const DecoderLayer& layer, int64_t index) const {
    const RotaryCall call = rotary_call();
    const auto layer_pages = pages<Element>(index);
    auto* scratch = reinterpret_cast<Element*>(workspace_.own(worker.thread).head);
    constexpr int64_t kTokens = 4;  // of a task
    worker.take((step_.num_tokens + kTokens - 1) / kTokens, [&](int64_t task, int64_t) {
      const int64_t end = std::min((task + 1) * kTokens, step_.num_tokens);
      for (int64_t token = task * kTokens; token < end; ++token) {
        for (int64_t head = 0; head < model_.num_kv_heads; ++head) {
          rotate_head(layer, call, layer_pages, token, head, scratch);
        }
      }
    });
    worker.barrier();
  }

  void normalize_heads(const float* norm, int64_t num_heads, Mid* heads) const {
    for (int64_t head = 0; norm != nullptr && head < num_heads; ++head) {
      Mid* x = heads + head * model_.head_dim;
      normalize_row(x, norm, model_.head_dim, model_.eps, x);
    }
  }

  void attend_layer(Worker& worker, const DecoderLayer& layer, int64_t index) const {
    const AttentionCall call = attention_call(model_, step_, layer.window, workspace_.qkv,
                                              workspace_.qkv_stride, workspace_.attended,
                                              workspace_.attended_stride);
    const Attention<KvDot> attention(call, pages<const Element>(index));
    const RotaryCall rotary = rotary_call();
    const auto own_pages = pages<Element>(index);
    const auto& own = workspace_.own(worker.thread);
    auto* scratch = reinterpret_cast<Element*>(own.head);
    const bool is_written_here = writes_in_attention(index);
    attend<KvDot, Mid>(worker, attention, plans_[plan_of_layer_[index]], own.attention,
                       workspace_.attention_shared, [&](const Tile& tile) {
                         if (!is_written_here) return;
                         rotate_head(layer, rotary, own_pages, tile.first_token, tile.kv_head,
                                     scratch);
                       });
    worker.barrier();
  }

  // Beyond its keys and values the last layer matters only where logits are wanted.
  void gather(Worker& worker, const float* hidden) const {
    const int64_t stride = workspace_.attended_stride;
    worker.take(step_.num_rows, [&](int64_t row, int64_t) {
      const int64_t token = step_.rows[row];
      std::copy_n(workspace_.attended + token * stride, model_.num_heads * model_.head_dim,
                  workspace_.gathered_attended + row * stride);
      std::copy_n(hidden + token * model_.hidden, model_.hidden,
                  workspace_.gathered_hidden + row * model_.hidden);
    });
    worker.barrier();
  }

  // hidden += x W^T + bias
  void add_product(Worker& worker, const DecoderLinear& linear, const Mid* x, int64_t x_stride,
                   int64_t in_features, const char* after, float* hidden,
                   int64_t num_rows) const {
    with_dot(context_, linear.form, [&](auto dot) {
      using Dot = decltype(dot);
      const PackedWeight<Dot> weight = weight_of<Dot>(linear, model_.hidden, in_features);
      const Rows<Dot> rows = rows_of<Dot>(worker, x, x_stride, num_rows, weight,
                                          workspace_.rows(worker.thread, num_rows));
      write_product(worker, rows, num_rows, weight, after,
                    Results<float>{linear.bias, hidden, model_.hidden, hidden, model_.hidden,
                                   model_.hidden});
    });
  }

  // gated = silu(norm(hidden) G) * (norm(hidden) U)
  void gate(Worker& worker, const DecoderLayer& layer, const float* hidden,
            int64_t num_rows) const {
    with_dot(context_, layer.gate.form, [&](auto dot) {
      using Dot = decltype(dot);
      const auto gate = weight_of<Dot>(layer.gate, model_.intermediate, model_.hidden);
      const auto up = weight_of<Dot>(layer.up, model_.intermediate, model_.hidden);
      const Rows<Dot> rows = normalized(worker, hidden, layer.mlp_norm, num_rows, gate);
      const GatedResults<Mid> results{layer.gate.bias, layer.up.bias, workspace_.gated,
                                      workspace_.gated_stride, model_.intermediate};
      const char* after = begin_of(worker, layer.down, model_.hidden, model_.intermediate);
      multiply_panel_pairs(worker, rows, num_rows, gate, up, after, workspace_.own(worker.thread).sums,
                           [&](int64_t first, int64_t count, int64_t panel, const float* gates,
                               const float* ups) {
                             results.write(first, count, panel, gates, ups);
                           });
      worker.barrier();
    });
  }

  void compute_logits(Worker& worker, const float* hidden) const {
    with_dot(context_, model_.head.form, [&](auto dot) {
      using Dot = decltype(dot);
      const auto weight = weight_of<Dot>(model_.head, model_.vocabulary, model_.hidden);
      const Rows<Dot> rows =
          normalized(worker, hidden, model_.final_norm, step_.num_rows, weight);
      write_product(worker, rows, step_.num_rows, weight, nullptr,
                    Results<float>{model_.head.bias, nullptr, 0, step_.logits, model_.vocabulary,
                                   model_.vocabulary});
    });
  }

  template <class Dot, class Out>
  void write_product(Worker& worker, const Rows<Dot>& rows, int64_t num_rows,
                     const PackedWeight<Dot>& weight, const char* after,
                     const Results<Out>& results) const {
    multiply_panels(worker, rows, num_rows, weight, after, workspace_.own(worker.thread).sums,
                    [&](int64_t first, int64_t count, int64_t panel, const float* sums) {
                      results.write(first, count, panel, sums);
                    });
    worker.barrier();
  }

 public:
  static AttentionCall attention_call(const DecoderModel& model, const DecoderStep& step,
                                      int64_t window, const void* q, int64_t q_stride, void* out,
                                      int64_t out_stride) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(model.head_dim));
    return {model.num_heads,    q,
            q_stride,           out,
            out_stride,         step.num_sequences,
            step.query_start,   step.context_lens,
            step.block_tables,  step.max_blocks,
            scale,              window,
            0.0f};
  }

 private:
  Context& context_;
  const DecoderModel& model_;
  const DecoderStep& step_;
  const std::vector<AttentionPlan>& plans_;
  const std::vector<int>& plan_of_layer_;
  const Workspace<KvDot> workspace_;
};

template <class KvDot>
void decode(Context& context, const DecoderModel& model, const DecoderStep& step) {
  using Step = Decoding<KvDot>;
  // Layers with one window share a plan.
  std::vector<AttentionPlan> plans;
  std::vector<int64_t> windows;
  std::vector<int> plan_of_layer;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    const int64_t window = model.layers[i].window;
    const auto known = std::find(windows.begin(), windows.end(), window);
    plan_of_layer.push_back(static_cast<int>(known - windows.begin()));
    if (known != windows.end()) continue;
    const AttentionCall call = Step::attention_call(model, step, window, nullptr, 0, nullptr, 0);
    check(call, step.num_blocks, model.num_kv_heads, step.num_tokens);
    windows.push_back(window);
    plans.emplace_back(call, model.num_kv_heads, model.head_dim, context.team.size());
  }
  const Step decoding(context, model, step, plans, plan_of_layer);
  context.team.run([&](Worker& worker) { decoding.run(worker); });
}

void check_step(const DecoderModel& model, const DecoderStep& step) {
  check_pages(step.num_blocks, model.num_kv_heads, model.head_dim);
  RotaryCall rotary{};
  rotary.rotary_dim = model.rotary_dim;
  rotary.positions = step.positions;
  rotary.slots = step.slots;
  check(rotary, step.num_tokens, model.head_dim, model.max_positions, step.num_blocks);
  for (int64_t i = 0; i < step.num_rows; ++i) {
    require(step.rows[i] >= 0 && step.rows[i] < step.num_tokens,
            "decoder: a row is beyond the step's tokens");
  }
}

}  // namespace
}  // namespace ncompass

using namespace ncompass;

const char* ncompass_decode(Context* context, const DecoderModel* model, const DecoderStep* step) {
  return guarded([&] {
    if (step->num_tokens == 0) return;
    check_step(*model, *step);
    const Session session(context->team);
    if (model->kv_dtype == DType::kFloat32) return decode<FloatDot>(*context, *model, *step);
#if NCOMPASS_HAS_BF16_DOT
    if (context->use_native_bf16_dot) return decode<NativeBf16Dot>(*context, *model, *step);
#endif
    decode<WidenedBf16Dot>(*context, *model, *step);
  });
}
