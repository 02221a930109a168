#include "sheaf/kernels/cuda/cudnn_headers.h"
#if SHEAF_HAS_CUDNN  // else cudnn_absent.cc

#include "sheaf/kernels/cuda/cudnn_attention.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <cuda_runtime.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/cudnn_graph.h"
#include "sheaf/kernels/cuda/runtime.h"

// Patterns that cuDNN 9 recognises as attention: it fuses all operations between inputs and outputs in memory into
// one kernel. Its own single operation for attention has no causal mask before 9.21.
namespace sheaf::kernels::cuda::cudnn {
namespace {

// Names of the tensors in memory.
enum Id : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kDOut,
  kDQ,
  kDK,
  kDV,
  kRowSums,  // of dout * out, in our workspace
  kSumOfDQ,  // dq in f32, there, too, unless deterministic
  kScale,    // by value
  kMasked,
  kOne,
  kBegins,
  kWindow,  // by value, in f32: keys of the window, less those of kPast
  kPast,    // by value: keys before the first query's own
};

constexpr cudnnDataType_t kFloat = CUDNN_DATA_FLOAT;
constexpr size_t align_part(int64_t bytes) {
  return (static_cast<size_t>(bytes) + 255) / 256 * 256;
}

/// Sizes and the two ways to view [B, T, heads, D]: as [B, heads, T, D] and, transposed, as
/// [B, heads, D, T].
struct Sizes {
  int64_t batch, queries, keys, heads, groups, width, value_width;
  cudnnDataType_t type;

  explicit Sizes(const Attention& a)
      : batch(a.q.shape[0]),
        queries(a.q.shape[1]),
        keys(a.k.shape[1]),
        heads(a.q.shape[2]),
        groups(a.k.shape[2]),
        width(a.q.shape[3]),
        value_width(a.v.shape[3]),
        type(a.q.dtype == kBF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF) {}
  Dims rows() const { return {batch, heads, queries, width}; }
  Dims value_rows() const { return {batch, heads, queries, value_width}; }
  /// Gradients of keys and values, one for each query head.
  Dims key_rows(int64_t of_width) const { return {batch, heads, keys, of_width}; }
  Dims scores() const { return {batch, heads, queries, keys}; }
  Dims statistics() const { return {batch, heads, queries, 1}; }
  Dims transposed_scores() const { return {batch, heads, keys, queries}; }
  Dims transposed_strides() const { return {heads * queries * keys, queries * keys, 1, keys}; }
  Handle tensor(Graph& g, Id id, const View& v) const {
    return g.tensor(id, type, {v.shape[0], v.shape[2], v.shape[1], v.shape[3]},
                    {v.strides[0], v.strides[2], v.strides[1], v.strides[3]});
  }
  Handle transposed(Graph& g, Id id, const View& v) const {
    return g.tensor(id, type, {v.shape[0], v.shape[2], v.shape[3], v.shape[1]},
                    {v.strides[0], v.strides[2], v.strides[3], v.strides[1]});
  }
  Handle lse(Graph& g, const Attention& a) const {
    const Shape strides = lse_strides(a);
    return g.tensor(kLse, kFloat, statistics(), {strides[0], strides[1], strides[2], 1});
  }
};

bool has_documents(const Attention& a) { return a.begins.rank() > 0; }

int64_t past(const Attention& a) { return a.k.shape[1] - a.q.shape[1]; }

/// scores, or kMasked if the key is after the query, or before its document or its window. Each condition is a separate select, in
/// any order: cuDNN 9.19 does not recognise attention if two are combined. A query's position is its index plus kPast. Diagonals are
/// those of NVIDIA's own graphs, which compare a window's in f32, with indices of its own: its frontend says of others that they give
/// the same results, but may be slower.
Handle mask(Graph& g, const Attention& a, Handle scores) {
  const Sizes s(a);
  const auto index = [&](int64_t axis) { return g.index(axis, scores, g.between(CUDNN_DATA_INT32, s.scores())); };
  const auto plus = [&](Handle x, Id id, cudnnDataType_t type) {
    return g.plus(x, g.scalar(id, type), type, g.between(type, s.scores()));
  };
  const auto keep = [&](Handle x, cudnnPointwiseMode_t comparison, Handle with) {
    const Handle seen = g.compare(comparison, x, with, g.between(CUDNN_DATA_BOOLEAN, s.scores()));
    scores = g.select(seen, scores, g.scalar(kMasked), g.between(kFloat, s.scores()));
  };
  if (has_documents(a)) {
    const int64_t stride = a.begins.strides[0];
    keep(index(3), CUDNN_POINTWISE_CMP_GE,
         g.tensor(kBegins, CUDNN_DATA_INT32, {s.batch, 1, s.queries, 1}, {stride, stride, 1, 1}));
  }
  const Handle query = index(2), key = index(3);
  keep(past(a) ? plus(query, kPast, CUDNN_DATA_INT32) : query, CUDNN_POINTWISE_CMP_GE, key);
  if (a.window) {
    const Handle row = index(2), column = index(3);
    keep(plus(column, kWindow, kFloat), CUDNN_POINTWISE_CMP_GT, row);
  }
  return scores;
}

Graph forward_graph(const Attention& a) {
  const Sizes s(a);
  Graph g;
  const auto scores = [&] { return g.between(kFloat, s.scores()); };
  const auto statistic = [&] { return g.between(kFloat, s.statistics()); };
  const Handle q = s.tensor(g, kQ, a.q), k = s.transposed(g, kK, a.k), v = s.tensor(g, kV, a.v);
  const Handle products = g.matmul(q, k, scores());
  const Handle scaled = g.pointwise(CUDNN_POINTWISE_MUL, products, g.scalar(kScale), scores());
  const Handle masked = mask(g, a, scaled);
  const Handle largest = g.reduce(CUDNN_REDUCE_TENSOR_MAX, masked, statistic());
  const Handle shifted = g.pointwise(CUDNN_POINTWISE_SUB, masked, largest, scores());
  const Handle weights = g.pointwise(CUDNN_POINTWISE_EXP, shifted, nullptr, scores());
  const Handle sum = g.reduce(CUDNN_REDUCE_TENSOR_ADD, weights, statistic());
  const Handle log = g.pointwise(CUDNN_POINTWISE_LOG, sum, nullptr, statistic());
  g.pointwise(CUDNN_POINTWISE_ADD, largest, log, s.lse(g, a));
  const Handle probabilities =
      g.pointwise(CUDNN_POINTWISE_DIV, weights, sum, g.between(s.type, s.scores()));
  g.matmul(probabilities, v, s.tensor(g, kOut, a.out));
  return g;
}

Graph backward_graph(const Attention& a) {
  const Sizes s(a);
  Graph g;
  const auto scores = [&] { return g.between(kFloat, s.scores()); };
  const Handle q = s.tensor(g, kQ, a.q), k = s.transposed(g, kK, a.k), v = s.transposed(g, kV, a.v),
               out = s.tensor(g, kOut, a.out), dout = s.tensor(g, kDOut, a.dout),
               lse = s.lse(g, a);
  const Handle scale = g.scalar(kScale);

  const Handle outputs = g.pointwise(
      CUDNN_POINTWISE_MUL, dout, out,
      g.between(kFloat, s.value_rows(),
                {s.heads * s.queries * s.value_width, s.queries * s.value_width,
                 s.heads * s.value_width, 1}));
  const Handle sums = g.reduce(CUDNN_REDUCE_TENSOR_ADD, outputs, g.between(kFloat, s.statistics()));
  // The multiplication by 1 is dropout's. As in NVIDIA's own graphs, it is always there, and these sums are in memory.
  const Handle row_sums = g.pointwise(CUDNN_POINTWISE_MUL, sums, g.scalar(kOne),
                                      g.tensor(kRowSums, kFloat, s.statistics(), dense_strides(s.statistics())));

  const Handle products = g.matmul(q, k, scores());
  const Handle scaled = g.pointwise(CUDNN_POINTWISE_MUL, products, scale, scores());
  const Handle shifted = g.pointwise(CUDNN_POINTWISE_SUB, scaled, lse, scores());
  const Handle masked = mask(g, a, shifted);  // as in NVIDIA's own graphs
  const Handle probabilities = g.pointwise(CUDNN_POINTWISE_EXP, masked, nullptr, scores());

  // A product with the transposed scores, summed over the query heads that share a key head.
  const auto into_keys = [&](Handle from, Handle with, const Dims& rows, Handle to) {
    const Handle turned = g.reshape(from, g.between(s.type, s.transposed_scores(), s.transposed_strides()));
    if (s.heads == s.groups) {
      g.matmul(turned, with, to);
    } else {
      const Handle all = g.matmul(turned, with, g.between(s.type, rows));
      g.reduce(CUDNN_REDUCE_TENSOR_ADD, all, to);
    }
  };
  into_keys(probabilities, dout, s.key_rows(s.value_width), s.tensor(g, kDV, a.dv));

  const Handle dprobabilities = g.matmul(dout, v, scores());
  const Handle centred = g.pointwise(CUDNN_POINTWISE_SUB, dprobabilities, row_sums, scores());
  const Handle weighted = g.pointwise(CUDNN_POINTWISE_MUL, centred, probabilities, scores());
  const Handle dscores = g.pointwise(CUDNN_POINTWISE_MUL, weighted, scale, scores());
  into_keys(dscores, q, s.key_rows(s.width), s.tensor(g, kDK, a.dk));

  const View& kv = a.k;
  const Handle keys =
      g.reshape(k, g.between(s.type, {kv.shape[0], kv.shape[2], kv.shape[1], kv.shape[3]},
                             {kv.strides[0], kv.strides[2], kv.strides[1], kv.strides[3]}));
  const Handle dq = s.tensor(g, kDQ, a.dq);
  if (a.deterministic) {
    g.matmul(dscores, keys, dq);
  } else {
    const Handle sum =
        g.matmul(dscores, keys, g.tensor(kSumOfDQ, kFloat, s.rows(), dense_strides(s.rows())));
    g.pointwise(CUDNN_POINTWISE_IDENTITY, sum, nullptr, dq);
  }
  return g;
}

bool is_backward(const Attention& a) { return a.dout.rank() != 0; }
Graph graph_of(const Attention& a) { return is_backward(a) ? backward_graph(a) : forward_graph(a); }

std::atomic<int64_t> calls{0};

struct Answer {
  std::unique_ptr<const Plan> plan;
  std::string refusal;
};

/// A device's handle, and its plans. cuDNN's handles serve one thread at a time.
struct DeviceAttention {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  std::map<std::vector<int64_t>, Answer> answers;

  /// Asks about one of the parts, with the mutex held.
  const Answer& ask(const Attention& a) {
    const std::vector<int64_t> key = plan_key(a);
    if (const auto known = answers.find(key); known != answers.end()) return known->second;
    check_can_be_planned(a);
    Answer answer;
    try {
      load();
      answer.refusal = version_refusal(version(), a);
      if (answer.refusal.empty()) {
        if (!handle) check_status(cudnnCreate(&handle), "cudnnCreate");
        answer.plan = std::make_unique<const Plan>(graph_of(a), Target{.handle = handle});
      }
    } catch (const Refusal& refusal) {
      answer.refusal = refusal.what();
    }
    return answers.emplace(key, std::move(answer)).first->second;
  }
};

DeviceAttention& attention_of(int device) {
  // Never freed: at exit the driver may be gone before us.
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, DeviceAttention>;
  std::lock_guard lock(*mutex);
  return (*devices)[device];
}

/// Throws Refusal if there is no GPU: a step may be planned without one.
DeviceAttention& current_device() {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) throw Refusal(str("no device: ", cudaGetErrorString(error)));
  return attention_of(device);
}

/// Our own parts of the workspace; cuDNN's comes before them.
size_t row_sum_bytes(const Attention& a) {
  return is_backward(a) ? align_part(a.lse.numel() * static_cast<int64_t>(sizeof(float))) : 0;
}
size_t dq_bytes(const Attention& a) {
  return is_backward(a) && !a.deterministic
             ? align_part(a.q.numel() * static_cast<int64_t>(sizeof(float)))
             : 0;
}
size_t workspace_of(const Attention& a, const Plan& plan) {
  return align_part(plan.workspace()) + row_sum_bytes(a) + dq_bytes(a);
}
/// Precedes the workspace of the parts, and is shared by them: an lse that is not packed as required is copied there.
size_t lse_bytes(const Attention& a) {
  return is_backward(a) && !a.lse.contiguous()
             ? align_part(a.lse.numel() * static_cast<int64_t>(sizeof(float)))
             : 0;
}

void run(const Stream& stream, cudnnHandle_t handle, const Plan& plan, const Attention& a,
         Workspace workspace) {
  float scale = static_cast<float>(a.scale), one = 1, masked = masked_score(version(), a);
  std::vector<int64_t> ids{kQ, kK, kV, kOut, kLse, kScale, kMasked};
  std::vector<void*> pointers{a.q.data,   a.k.data, a.v.data, a.out.data,
                              a.lse.data, &scale,   &masked};
  if (has_documents(a)) ids.push_back(kBegins), pointers.push_back(a.begins.data);
  auto window = static_cast<float>(std::min(a.window, a.k.shape[1]) - past(a));
  auto after = static_cast<int32_t>(past(a));
  if (a.window) ids.push_back(kWindow), pointers.push_back(&window);
  if (after) ids.push_back(kPast), pointers.push_back(&after);
  if (is_backward(a)) {
    char* const row_sums = static_cast<char*>(workspace.data) + align_part(plan.workspace());
    ids.insert(ids.end(), {kDOut, kDQ, kDK, kDV, kRowSums, kOne});
    pointers.insert(pointers.end(), {a.dout.data, a.dq.data, a.dk.data, a.dv.data, row_sums, &one});
    if (!a.deterministic) {
      char* const sum = row_sums + row_sum_bytes(a);
      fill_bytes(stream, sum, 0, dq_bytes(a));  // cuDNN adds to it
      ids.push_back(kSumOfDQ), pointers.push_back(sum);
    }
  }
  plan.run(handle, ids, pointers, workspace.data);
}

}  // namespace

std::string refusal(const Attention& a) {
  const std::string why = layout_refusal(a);
  if (!why.empty()) return why;
  try {
    DeviceAttention& device = current_device();
    const Attention part = parts_of(with_packed_lse(a)).front();
    std::lock_guard lock(device.mutex);
    return device.ask(part).refusal;
  } catch (const Refusal& refusal) {
    return refusal.what();
  }
}

std::string refusal_on(std::string_view properties, const Attention& a, int64_t* workspace) {
  const std::string why = layout_refusal(a);
  if (!why.empty()) return why;
  try {
    load();
    if (std::string old = version_refusal(version(), a); !old.empty()) return old;
    const Descriptor device = device_properties(properties);
    const Attention part = parts_of(with_packed_lse(a)).front();
    const Plan plan(graph_of(part), {.properties = device.handle()});
    *workspace = static_cast<int64_t>(workspace_of(part, plan) + lse_bytes(a));
    return "";
  } catch (const Refusal& refusal) {
    return refusal.what();
  }
}

size_t attention_workspace(const Attention& a) {
  DeviceAttention& device = current_device();
  const Attention part = parts_of(with_packed_lse(a)).front();
  std::lock_guard lock(device.mutex);
  const Answer& answer = device.ask(part);
  if (!answer.plan) fail_for(a, answer.refusal);
  return workspace_of(part, *answer.plan) + lse_bytes(a);
}

void attention(const Stream& stream, const Attention& a, Workspace workspace) {
  const std::string why = layout_refusal(a);
  if (!why.empty()) fail_for(a, why);
  Attention packed = with_packed_lse(a);
  const size_t of_lse = lse_bytes(a);
  if (of_lse > 0) packed.lse.data = workspace.data;
  const std::vector<Attention> parts = parts_of(packed);
  DeviceAttention& device = attention_of(stream.device.index);
  std::lock_guard lock(device.mutex);
  const Answer& answer = device.ask(parts.front());
  if (!answer.plan) fail_for(a, answer.refusal);
  check<ShapeError>(workspace.bytes >= of_lse + workspace_of(parts.front(), *answer.plan),
                    "[attention] workspace too small: ", workspace.bytes, " bytes");
  if (of_lse > 0) copy(stream, a.lse, packed.lse);
  const Workspace of_parts{static_cast<char*>(workspace.data) + of_lse, workspace.bytes - of_lse};
  ++calls;
  try {
    check_status(cudnnSetStream(device.handle, static_cast<cudaStream_t>(stream.handle)),
                 "cudnnSetStream");
    for (const Attention& part : parts) run(stream, device.handle, *answer.plan, part, of_parts);
  } catch (const Refusal& refusal) {
    fail_for(a, refusal.what());
  }
}

int64_t attention_calls() { return calls; }

}  // namespace sheaf::kernels::cuda::cudnn

#endif
