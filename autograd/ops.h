// The public operations on tensors. Each is one struct in autograd/ops/. Shapes are global; dtypes of tensor operands
// must agree (cast() converts); Python-like scalars are weak. Dimensions may be negative, counted from the end.
#pragma once

#include <optional>

#include "sheaf/autograd/op.h"
#include "sheaf/core/block_format.h"
#include "sheaf/core/random.h"
#include "sheaf/kernels/rotary_scaling.h"

namespace sheaf {

/// Where ops without tensor inputs (zeros, arange, ...) place their result: the device of the rank, or of the innermost
/// DeviceScope, such as meta in a dry run.
Device default_device();
class DeviceScope {
 public:
  explicit DeviceScope(Device device);
  ~DeviceScope();

 private:
  std::optional<Device> previous_;
};

// ---- placement ------------------------------------------------------------------------------------------------------
/// The same value in another layout; see the table in docs/placements.md. Backward: dual(to) → dual(from). PlacementError for a layout
/// on another mesh, or one that cuts a dimension which x does not have.
/// Communicates where the table says so, on the gather lane, and waits for the result. Mesh axes change in their order, a
/// node each; what a later axis cuts inside of an earlier one's cut is put together first and cut again behind.
Tensor redistribute(const Tensor& x, const Layout& to);
/// The same for who computes row by row, as layers do. Where it is an all_gather of enough rows (RecordingOptions::piece_rows), it
/// does not wait: products go on with rows as they come. See [Note: in pieces]. Ranks agree on that option and on
/// RecordingOptions::overlap, and all of them record, or none.
Tensor redistribute_in_pieces(const Tensor& x, const Layout& to);
/// The same of keys and values [B, T, 2 G, D], keys first, of which ranks have tokens, for attention by `readers` query heads for each of
/// them: it goes on with heads as they come, some of the G after others. On GPUs each part has piece_rows² rows of queries, over all its
/// heads, so that there is enough to do for all of a GPU.
Tensor redistribute_in_heads(const Tensor& keys_values, const Layout& to, int64_t readers);
/// The same with the placement of one mesh axis changed.
Tensor redistribute(const Tensor& x, const std::string& axis, const Placement& to);

// ---- memory ---------------------------------------------------------------------------------------------------------
/// `x`'s type with every element `value`.
Tensor full_like(const Tensor& x, double value);
/// A value of the given type (layout included) with every element `value`; for Partial, rank 0 holds it.
Tensor full_of(const Type& type, double value);
/// x in memory of its own.
Tensor copy_of(const Tensor& x);
/// Dense copy.
Tensor contiguous(const Tensor& x);
/// Stores x into `to`'s memory, or adds it to what is there: averages of weights, caches, slots of gradients. `to` may be a view; x has
/// its shape (ShapeError), dtype (DTypeError) and layout (PlacementError). A change has no derivative: memory of what gradients are asked
/// for cannot be changed, nor what a derivative reads, and no gradient passes through memory to what was stored there (LifetimeError).
void store_into(const Tensor& to, const Tensor& x);
void add_into(const Tensor& to, const Tensor& x);

// ---- group A: elementwise, reductions, shape, indexing, random --------------------------------------------------------
/// Dimensions of a tensor, negative ones from the end; none given means all.
class Dims {
 public:
  Dims() = default;
  Dims(int dim) : dims_{dim} {}                              // NOLINT: sum(x, 0)
  Dims(std::initializer_list<int> dims) : dims_(dims) {}     // NOLINT: sum(x, {0, 2})
  Dims(std::vector<int> dims) : dims_(std::move(dims)) {}    // NOLINT
  void push_back(int dim) { dims_.push_back(dim); }
  bool empty() const { return dims_.empty(); }
  size_t size() const { return dims_.size(); }
  int operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  auto begin() const { return dims_.begin(); }
  auto end() const { return dims_.end(); }

 private:
  std::vector<int> dims_;
};

// Elementwise with NumPy broadcasting; operands of one dtype. Integers throw DTypeError in div and pow, and
// in most ops of one operand below.
Tensor add(const Tensor& a, const Tensor& b);
Tensor sub(const Tensor& a, const Tensor& b);
Tensor mul(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, const Tensor& b);
Tensor pow(const Tensor& a, const Tensor& b);
/// NaN if either is NaN. Of two equal operands the first takes the gradient.
Tensor minimum(const Tensor& a, const Tensor& b);
Tensor maximum(const Tensor& a, const Tensor& b);
/// Comparisons and logic: bool results, no gradients; for logic, "not zero" is true.
Tensor eq(const Tensor& a, const Tensor& b);
Tensor ne(const Tensor& a, const Tensor& b);
Tensor lt(const Tensor& a, const Tensor& b);
Tensor le(const Tensor& a, const Tensor& b);
Tensor gt(const Tensor& a, const Tensor& b);
Tensor ge(const Tensor& a, const Tensor& b);
Tensor logical_and(const Tensor& a, const Tensor& b);
Tensor logical_or(const Tensor& a, const Tensor& b);
Tensor logical_not(const Tensor& x);
Tensor isfinite(const Tensor& x);
// With a weak scalar: the result keeps x's dtype. Integers take no fractional scalar.
Tensor add(const Tensor& x, double scalar);
Tensor sub(const Tensor& x, double scalar);
Tensor sub(double scalar, const Tensor& x);
Tensor mul(const Tensor& x, double scalar);
Tensor div(const Tensor& x, double scalar);
Tensor div(double scalar, const Tensor& x);
Tensor pow(const Tensor& x, double exponent);
Tensor pow(double base, const Tensor& x);
Tensor minimum(const Tensor& x, double scalar);
Tensor maximum(const Tensor& x, double scalar);
Tensor eq(const Tensor& x, double scalar);
Tensor ne(const Tensor& x, double scalar);
Tensor lt(const Tensor& x, double scalar);
Tensor le(const Tensor& x, double scalar);
Tensor gt(const Tensor& x, double scalar);
Tensor ge(const Tensor& x, double scalar);

Tensor neg(const Tensor& x);
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor rsqrt(const Tensor& x);  ///< 1 / sqrt(x)
Tensor square(const Tensor& x);
Tensor abs(const Tensor& x);    ///< gradient 0 at 0
Tensor sign(const Tensor& x);   ///< -1, 0 or 1
Tensor sin(const Tensor& x);
Tensor cos(const Tensor& x);
/// Conversion; floats to integers truncate and saturate, anything to bool is "not zero".
Tensor cast(const Tensor& x, DType dtype);
/// linear() of a weight that rests in blocks [O, I / 64 · block_bytes(format)], with its bits, without its values in memory but where
/// they are multiplied (a GPU's: in the workspace). For what is not trained: it has no derivative. x and bias are of one dtype.
Tensor linear_of_blocks(const Tensor& x, const Tensor& blocks, BlockFormat format, const Tensor& bias = {});
/// The values of blocks[.., n · block_bytes(format)], u8, as [.., n · 64] of a floating dtype: products of codes and scales, rounded
/// once. Blocks are constants: they take no gradient. A backward that reads the values of gathered blocks makes them again.
Tensor dequantize(const Tensor& blocks, BlockFormat format, DType dtype);
/// min(max(x, lo), hi); the gradient passes within the closed interval.
Tensor clamp(const Tensor& x, double lo, double hi);
/// cond ? a : b, with broadcasting; cond is bool or "not zero".
Tensor where(const Tensor& cond, const Tensor& a, const Tensor& b);
Tensor where(const Tensor& cond, const Tensor& a, double b);
Tensor where(const Tensor& cond, double a, const Tensor& b);

inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
inline Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
inline Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
inline Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
inline Tensor operator+(const Tensor& x, double s) { return add(x, s); }
inline Tensor operator+(double s, const Tensor& x) { return add(x, s); }
inline Tensor operator-(const Tensor& x, double s) { return sub(x, s); }
inline Tensor operator-(double s, const Tensor& x) { return sub(s, x); }
inline Tensor operator*(const Tensor& x, double s) { return mul(x, s); }
inline Tensor operator*(double s, const Tensor& x) { return mul(x, s); }
inline Tensor operator/(const Tensor& x, double s) { return div(x, s); }
inline Tensor operator/(double s, const Tensor& x) { return div(s, x); }
inline Tensor operator-(const Tensor& x) { return neg(x); }

// Activations.
Tensor relu(const Tensor& x);  ///< gradient 0 at 0
Tensor tanh(const Tensor& x);
Tensor sigmoid(const Tensor& x);
Tensor silu(const Tensor& x);  ///< x sigmoid(x)
Tensor softplus(const Tensor& x);  ///< log(1 + exp(x))
/// x Phi(x), or its approximation by tanh (Hendrycks and Gimpel 2016), as in GPT-2.
enum class GeluKind : uint8_t { exact, tanh };
Tensor gelu(const Tensor& x, GeluKind kind = GeluKind::exact);
/// silu(gate) * up, of equal shapes (Shazeer 2020, https://arxiv.org/abs/2002.05202).
Tensor swiglu(const Tensor& gate, const Tensor& up);
struct ClampedSwigluOptions { double alpha = 1.702, limit = 7.0; };  ///< positive, alpha finite
/// The gate of gpt-oss's experts (OpenAI, https://arxiv.org/abs/2508.10925): with g = min(gate, limit) and u = up held to [-limit, limit],
/// g sigmoid(alpha g) (u + 1). Of equal shapes; gradients pass where an operand is within, at the limit, too.
Tensor clamped_swiglu(const Tensor& gate, const Tensor& up, const ClampedSwigluOptions& options = {});
/// gelu(gate) * up, of equal shapes, with the tanh approximation (Shazeer 2020). Neither is kept but these two: a backward makes it again.
Tensor geglu(const Tensor& gate, const Tensor& up);

// Reductions over `dims` (none: all); with keepdim, reduced dimensions stay with size 1. sum of integers and bool is i64.
// sum and mean of a sharded dimension are Partial, and means divide by the global count; the others need their dimensions
// whole.
Tensor sum(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor mean(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// sum((x - mean)^2) / (n - correction)
Tensor var(const Tensor& x, const Dims& dims = {}, double correction = 1, bool keepdim = false);
/// NaN if any element is; equal extremes share the gradient. Throws ShapeError where there is no element.
Tensor max(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor min(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor logsumexp(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// i64 position of the first largest element.
Tensor argmax(const Tensor& x, int dim = -1, bool keepdim = false);
/// i64 positions of the k largest elements of the last dimension, the largest first, of equal ones the first first: [.., k].
/// NaN is larger than all.
Tensor top_k(const Tensor& x, int64_t k);

/// x as a constant: no gradient flows back through it. A view, of any placement; a teacher's output, a target that is
/// computed from parameters, a metric inside a step.
Tensor stop_gradient(const Tensor& x);

// Shape. Results share x's memory where strides can say what is meant; only reshape may have to copy.
/// One size may be -1. A cut of dimension d stays a cut if d is the first of the dimensions that merge or split.
Tensor reshape(const Tensor& x, const Shape& shape);
/// With dimensions of size 1 at these places of the result; a cut keeps its dimension.
Tensor unsqueeze(const Tensor& x, const Dims& dims);
/// Without these dimensions, which have size 1; ShapeError if one has not.
Tensor squeeze(const Tensor& x, const Dims& dims);
/// Two dimensions change places; a view.
Tensor transpose(const Tensor& x, int dim0, int dim1);
/// Dimension i of the result is dimension order[i] of x.
Tensor permute(const Tensor& x, const Dims& order);
/// Repeats dimensions of size 1, and adds dimensions in front, without copying.
Tensor expand(const Tensor& x, const Shape& shape);
/// Positions [begin, end) of one dimension, negative ones from the end; a view.
Tensor slice(const Tensor& x, int dim, int64_t begin, int64_t end);
/// Views, one after another along `dim`, of these sizes; or so many of equal size. ShapeError if they are not the dimension's.
std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes, int dim = 0);
std::vector<Tensor> chunk(const Tensor& x, int64_t chunks, int dim = 0);
/// At most 64 tensors, alike but for dimension `dim`: ShapeError, DTypeError or PlacementError if they are not.
Tensor concat(const std::vector<Tensor>& xs, int dim = 0);
/// The same along a new dimension.
Tensor stack(const std::vector<Tensor>& xs, int dim = 0);
/// x with so many positions of `value` before and after it along `dim`.
Tensor pad(const Tensor& x, int dim, int64_t before, int64_t after, double value = 0);

// Indexing; indices i64, i32, u32, u16 or u8. An index outside the dimension throws DataError.
/// out[.., i, ..] = x[.., index[.., i, ..], ..] along `dim`.
Tensor gather(const Tensor& x, int dim, const Tensor& index);
/// x with src[.., i, ..] added at [.., index[.., i, ..], ..], in the order of i.
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& src);
/// x's entries along `dim` at the positions `index` (of any shape, which replaces the dimension).
Tensor take(const Tensor& x, const Tensor& index, int dim = 0);
/// x with src[.., i, ..] added at [.., index[i], ..] for a 1-D index, in the order of i.
Tensor index_add(const Tensor& x, int dim, const Tensor& index, const Tensor& src);
/// Running sums, from the end if reverse. Integers and bool give i64.
Tensor cumsum(const Tensor& x, int dim, bool reverse = false);

// Creation, on default_device(). Values of a given type (layout included) hold this rank's part.
Tensor full(const Shape& shape, double value, DType dtype = kF32);
Tensor zeros(const Shape& shape, DType dtype = kF32);
Tensor ones(const Shape& shape, DType dtype = kF32);
/// 0, 1, ..., n - 1.
Tensor arange(int64_t n, DType dtype = kI64);
/// start, start + step, ... below (for negative steps above) stop.
Tensor arange(double start, double stop, double step, DType dtype = kI64);
/// Normal and uniform values: pure functions of the key and each element's global index (see core/random.h). Without a
/// key, of the recording's seed, step and first sample and of the module path and call.
Tensor randn(const Type& type, Key key, double mean = 0, double std = 1);
Tensor randn(const Type& type, double mean = 0, double std = 1);
Tensor uniform(const Type& type, Key key, double lo = 0, double hi = 1);
Tensor uniform(const Type& type, double lo = 0, double hi = 1);
/// Each element zeroed with probability p in [0, 1), the others divided by 1 - p; keyed as above. Dimension 0 counts
/// samples, so that a batch cut over ranks or micro-batches drops what the whole batch would have dropped.
Tensor dropout(const Tensor& x, double p);
Tensor dropout(const Tensor& x, double p, Key key);

// ---- group B: products, normalisation, attention, losses, optimizers --------------------------------------------------
/// Which products round their operands to FP8 first, rows of the first and columns of the second, each with a scale of its own
/// (kernels/fp8.h): E4M3, which GPUs multiply at twice the rate of bf16; on CPUs, and on GPUs without it, the values that it
/// stands for. Of f32, bf16 and f16. Derivatives pass through the rounding as if it were not there; the products that compute them
/// round in turn. With an operand that is Partial nothing is rounded: what is rounded does not add up.
enum class Fp8 : uint8_t {
  none,
  activations,  ///< of a linear layer y and the gradient of x: a row's bits follow from that row alone, as without
  all,          ///< the gradient of its weight, too, rounded over the rows that a rank has; never that of a bias
};
struct MatmulOptions {
  /// Of dense [B, M, K] and [B, K, N], or their transposes, each product is made as if it were the only one: then its bits do
  /// not depend on B on GPUs either, nor on where it lies in the batch.
  bool each_alone = false;
  bool fp8 = false;  ///< rounds (Fp8); of gradients that of `a` alone, as linear() with Fp8::activations
};
/// [.., M, K] times [.., K, N]; leading dimensions broadcast. Any strides: transposed operands cost nothing.
Tensor matmul(const Tensor& a, const Tensor& b, const MatmulOptions& options = {});
/// x[.., I] weight[O, I]ᵀ + bias[O]. Where the result is Partial, so is the bias; a Replicate one is kept on
/// one rank. The sum goes `onward`: see apply_onward().
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, Fp8 fp8 = Fp8::none, const Onward& onward = {});
/// A gelu (tanh form) and what it was applied to.
struct GeluOfLinear {
  Tensor value, before;
};
/// gelu(linear(x, weight, bias)): on a GPU one product computes both.
GeluOfLinear linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, Fp8 fp8 = Fp8::none);
/// linear(x.value, weight, bias) for what linear_gelu gave. All of its gradient goes to x.before, none to x.value: on a GPU
/// the product that makes it applies gelu's derivative.
Tensor gelu_linear(const GeluOfLinear& x, const Tensor& weight, const Tensor& bias = {}, Fp8 fp8 = Fp8::none, const Onward& onward = {});
/// Rows of table[V, C] by integer tokens[..]: [.., C]. A token outside [0, V) throws DataError. Of a table whose rows are cut
/// over ranks each looks up its own, for all tokens: Partial.
Tensor embedding(const Tensor& tokens, const Tensor& table);

/// Normalisation over the last dimension, with optional scale and shift of its size. Statistics in f32 (f64 for f64).
/// Layer normalisation (Ba et al., https://arxiv.org/abs/1607.06450): (x - mean) / sqrt(var + eps), biased variance.
Tensor layer_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5);
/// x / sqrt(mean(x²) + eps) (Zhang and Sennrich, https://arxiv.org/abs/1910.07467).
Tensor rms_norm(const Tensor& x, const Tensor& weight = {}, double eps = 1e-5);

/// x + r and its norm, in one pass over memory: what a residual stream needs between two layers. x and r have one
/// shape; the values are those of add and of the norm above. In backward the gradients of both outputs become the
/// gradient of x and of r, one tensor, in one pass; in bf16 and f16 it is rounded once, where add would round a second
/// time.
struct NormedSum {
  Tensor sum, normed;
};
NormedSum add_layer_norm(const Tensor& x, const Tensor& r, const Tensor& weight = {}, const Tensor& bias = {},
                         double eps = 1e-5);
NormedSum add_rms_norm(const Tensor& x, const Tensor& r, const Tensor& weight = {}, double eps = 1e-5);
/// exp(x - max) over its sum along `dim`, of a floating dtype; its logarithm. Statistics in f32 (f64 for f64).
Tensor softmax(const Tensor& x, int dim = -1);
Tensor log_softmax(const Tensor& x, int dim = -1);

/// Which rows of which experts the tokens of sequences go to. E experts in Q parts, part q those from E q / Q on; K choices of each of T
/// tokens; N groups of a sequence's tokens, group n those from T n / N on; R rows that a part has for a group, its experts' one behind
/// another.
struct ExpertRoutes {
  Tensor slots;    ///< i32 [.., T, K]: the part of a choice's expert times R, plus its row there; -1: there was no place left
  Tensor sources;  ///< i32 [Q, .., N, R]: the choice in a row, counted from the first of its group; -1: it is empty
  Tensor counts;   ///< i32 [E, .., N]: the rows of each expert
};
/// Rows for choices[.., T, K], i64 in [0, experts) (DataError), in the order of tokens, then of a token's choices; an expert has `places`
/// for a group, so that which choices are dropped depends on no later ones. Each expert is a part of its own, with so many rows; or there
/// are fewer `parts`, which have as many rows as a group's tokens can fill if no two choices of one are the same (what is more is dropped):
/// T K / N where one part has all experts and none lacks places, however many there are. Sequences may be cut anyhow, and tokens if each
/// rank has whole groups, all of one size or one for each rank. 0 parts: as many as experts.
ExpertRoutes expert_routes(const Tensor& choices, int64_t experts, int64_t places, int64_t groups = 1, int64_t parts = 0);
/// R there, for groups of at most so many `tokens`.
int64_t rows_of_part(int64_t tokens, int64_t choices, int64_t experts, int64_t places, int64_t parts);
/// Rows of x[.., T, C] for each expert, zeros in empty ones: [Q, .., N, R, C]. Times the choices' weights[.., T, K], if
/// given: f32 (f64 for f64).
Tensor to_experts(const Tensor& x, const ExpertRoutes& routes, const Tensor& weights = {});
/// The sum over each token's choices of their rows[Q, .., N, R, C], times weights[.., T, K] if given: [.., T, C].
Tensor from_experts(const Tensor& rows, const ExpertRoutes& routes, const Tensor& weights = {});
struct ExpertLinearOptions {
  Tensor bias = {};   ///< [E, O]
  bool fp8 = false;   ///< as linear() with Fp8::activations
  double fill = 1.0;  ///< the share of rows that will be in use, about: GPUs skip the others where they are most
};
/// x[Q, .., R, I] weight[E, O, I]ᵀ + bias[E, O], each expert's rows, counts[E, ..] of them, with its own matrix and bias: [Q, .., R, O].
/// Rows that are not in use must be zero in the result's gradient, and finite in x, as they are if they come from to_experts and go to
/// from_experts; what they are in the result nobody may ask. CPUs skip them, and so do GPUs, but for experts that are parts of their own and
/// well filled. Ranks may have experts of their own, where there is a part for each rank, or for each expert.
Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& counts, const ExpertLinearOptions& options = {});

struct AttentionOptions {
  bool causal = true;  ///< query t of T sees keys s <= t + S - T
  double scale = 0;    ///< of the scores; 0: 1 / sqrt(D)
  /// Where the document of each token begins, i32[B, T] (document_begins): a token then sees those of its own document alone,
  /// up to itself, and gets, bit for bit on CPUs and from our own kernels on GPUs, what it would get if there were no others.
  /// Causal only, with as many keys as queries. Cut with the batch.
  Tensor begins = {};
  /// Keys that a query sees, itself and those before it: query t those with t + S - T - window < s, of the ones above
  /// (sliding-window attention; Beltagy et al., https://arxiv.org/abs/2004.05150). Causal only, and the work is that of the
  /// window. 0: all.
  int64_t window = 0;
  /// A score of each head, [H], that every query sees beside its keys, and that no value answers: what a query takes of its keys
  /// adds up to less than 1 (gpt-oss, https://arxiv.org/abs/2508.10925; kernels/attention_sinks.h). Computed in the dtype of
  /// statistics, f32 or f64. Undefined: none. Not in latent_attention().
  Tensor sinks = {};
};
/// softmax(scale q kᵀ) v per head for q[B, T, H, D], k[B, S, G, D] and v[B, S, G, E]: [B, T, H, E]. H is a multiple of G, and head
/// h reads key head h / (H / G). Never builds the T x S matrix. A query that sees no key gives zeros. Queries may be
/// Shard(1) beside keys and values that are Replicate, whose gradients are then Partial: each rank computes its own, at their positions.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options = {});
/// The same for a packed projection [B, T, (H + 2 G) D] of queries, keys and values, to [B, T, H D]. Its gradient is one
/// tensor, written where it belongs: three slices would each be padded and added. Heads are cut by
/// OwnershipMap::parts(2, {H D, G D, G D}, units) where every unit has whole key heads: the result is Shard(2) in as many units.
Tensor packed_attention(const Tensor& qkv, int64_t heads, int64_t key_heads, const AttentionOptions& options = {});
/// Attention of multi-head latent attention (DeepSeek-AI, https://arxiv.org/abs/2405.04434): of q[B, T, H D] and up[B, T, H (N + E)],
/// which has N elements of each key and the E of its value, with the D - N last elements of keys, which all heads share, in
/// shared[B, T, D - N]: [B, T, H E]. Keys are put together where they are needed, and never kept. Heads are cut by
/// OwnershipMap::even of q and up in as many units; queries as attention's.
Tensor latent_attention(const Tensor& q, const Tensor& up, const Tensor& shared, int64_t heads, const AttentionOptions& options = {});
struct GatedDeltaRuleOptions {
  int64_t heads = 0;      ///< H, of values; a multiple of key_heads
  int64_t key_heads = 0;  ///< G, of queries and keys
  int64_t key_width = 0;  ///< D
  double scale = 0;       ///< of queries; 0: 1 / sqrt(D)
  /// Queries and keys are divided by sqrt(sum of their squares + norm_eps) first; 0: they are taken as they are.
  double norm_eps = 1e-6;
  Tensor begins = {};   ///< as in AttentionOptions: the state is zero before each document
  Tensor initial = {};  ///< the state before the first token [B, H, D, E], f32 (f64 for f64); undefined: zero
  bool keeps_state = false;  ///< the state behind the last token is a result
};
struct DeltaRuleResult {
  Tensor out;    ///< [B, T, H E]
  Tensor state;  ///< [B, H, D, E], f32 (f64 for f64), if it is kept
};
/// The gated delta rule (Yang et al., https://arxiv.org/abs/2412.06464) of a packed projection [B, T, 2 G D + H E] of queries, keys and
/// values: a head has a state S[D, E] in place of keys and values of all tokens. With decay[B, T, H] <= 0 and beta[B, T, H], computed in
/// f32 (f64 for f64), each token makes it S = exp(decay) S, then S + k (beta (v - Sᵀ k))ᵀ, and gets scale Sᵀ q. Value head h reads key
/// head h / (H / G). In chunks of 64 tokens (kernels/delta_rule.h). Heads are cut by OwnershipMap::parts(2, {G D, G D, H E}, units) where
/// every unit has whole key heads: the result is Shard(2) in as many units. Second derivatives have matrices [B, H, T, T] in memory, and want decays
/// that are finite.
DeltaRuleResult gated_delta_rule(const Tensor& qkv, const Tensor& decay, const Tensor& beta, const GatedDeltaRuleOptions& options);
struct CausalConvOptions {
  bool silu = false;   ///< behind it
  Tensor begins = {};  ///< as in AttentionOptions: what lies before a token's document is zero
};
/// Each channel's convolution along the tokens, of a token and the W - 1 before it: Σ_j weight[c, j] x[b, t - W + 1 + j, c], for
/// x[B, T, C] and weight[C, W]. Channels may be cut anyhow, tokens not.
Tensor causal_conv(const Tensor& x, const Tensor& weight, const CausalConvOptions& options = {});
/// A packed projection [B, T, (H + 2 G) D] with each key and value head `times` times, side by side: [B, T, (H + 2 G times) D].
/// Where `times` divides H / G its attention is that of qkv, and more ranks can share its heads. A cut by OwnershipMap::parts in
/// units of whole key heads stays one in as many units. The gradient of a head is the sum of its copies'.
Tensor repeat_key_heads(const Tensor& qkv, int64_t heads, int64_t key_heads, int64_t times);
/// The tensor of repeat_key_heads from queries [B, T, H D] that ranks have cut evenly, in units of whole groups that read one copy,
/// and keys and values [B, T, 2 G D] that all of them have: each takes the copies that its queries read, and nothing travels. So more
/// ranks can share a layer than it has key heads. `times` divides H / G.
Tensor pack_heads(const Tensor& queries, const Tensor& keys_values, int64_t heads, int64_t key_heads, int64_t times);
/// Of documents one behind another in tokens[.., T], integers, each but the last ended by the token `end_of_text`: where that of
/// each token begins, i32[.., T]. The token that ends a document belongs to it. Sequences must be whole on every rank.
Tensor document_begins(const Tensor& tokens, int64_t end_of_text);
/// rms_norm over D of each query and key of a packed x[B, T, H + 2 G, D], by weights [D] that all queries, and all keys,
/// share; values stay (Qwen3, https://arxiv.org/abs/2505.09388). Heads are cut by OwnershipMap::parts(2, {H, G, G}, units).
Tensor packed_rms_norm(const Tensor& x, int64_t heads, const Tensor& query_weight, const Tensor& key_weight,
                       double eps = 1e-5);
struct RotaryOptions {
  double theta = 10000.0;      ///< base of the frequencies
  int64_t first_position = 0;
  int64_t heads = -1;          ///< the first so many are rotated, such as queries and keys of a packed projection; -1: all
  int64_t width = -1;          ///< of each the last so many elements; -1: all
  bool neighbours = false;     ///< pairs are elements 2i and 2i + 1 of these, as in DeepSeek's checkpoints
  RotaryScaling scaling = {};  ///< lowers the frequencies (it says how, and from where)
};
/// Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864) of x[B, T, H, D]: of R rotated elements, those of pair
/// i, which are i and i + R/2 as in Llama's Hugging Face checkpoints, turn by (first_position + t) theta^(-2i/R). Tokens may
/// be cut, which turn by where they stand, and heads, packed ones in parts if the rotated ones end with one.
Tensor rotary(const Tensor& x, const RotaryOptions& options = {});

struct CrossEntropyOptions {
  int64_t ignore_index = -1;  ///< rows with this target count nothing
  double divide_by = 0;       ///< what the sum over rows is divided by; 0: the global number of targets, ignored or not,
                              ///< of this call: with gradient accumulation give that of all micro-batches
  Tensor divisor = {};        ///< the same as a scalar tensor; takes precedence. What a model adds to its loss, a mean over
                              ///< tokens whether they are targets or not, goes by divide_by if both are given
  bool recompute = false;     ///< linear_cross_entropy: compute the logits again in backward, which saves the memory of
                              ///< the weight's gradient between the two and costs a third more
  bool per_target = false;    ///< the loss of each target [..] instead of their mean, 0 where it is ignored, divided by nothing:
                              ///< the negative of its log-likelihood
};
/// Scalar loss in nats, f32 (f64 for f64): the sum over rows of log(sum(exp(logits))) - logits[target], divided. Integer
/// targets[..] for logits[.., V]; one outside [0, V) throws DataError. Rows cut over ranks give a Partial loss.
Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options = {});
/// cross_entropy(linear(x, weight), targets) in chunks of rows, so that the logits never exist whole. Where ranks have rows
/// of the weight each, it is put together from linear_lse: x and targets are whole on that axis, the loss is Partial. So it is
/// for the losses of each target, whose backward computes the logits again.
Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& targets,
                            const CrossEntropyOptions& options = {});
/// What each part of a vocabulary knows of the loss (Shoeybi et al., https://arxiv.org/abs/1909.08053, section 3).
struct LinearLse {
  Tensor lse;            ///< [M, ..]: log(sum(exp(logits))) over each of the M parts in which ranks cut the weight's rows
  Tensor target_logits;  ///< [..]: the logit of the target; Partial where ranks cut them
};
/// Of logits = linear(x[.., C], weight[V, C]), which never exist whole, and integer targets[..]; M is 1 where no rank cuts V.
/// For a target of ignore_index logsumexp(lse, {0}) and the target's logit are both 0.
LinearLse linear_lse(const Tensor& x, const Tensor& weight, const Tensor& targets, int64_t ignore_index = -1);

// ---- end ------------------------------------------------------------------------------------------------------------
}  // namespace sheaf
