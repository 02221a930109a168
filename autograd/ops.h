// The public operations on tensors. Each is one struct in autograd/ops/. Shapes are global; dtypes of tensor operands
// must agree (cast() converts); Python-like scalars are weak. Dimensions may be negative, counted from the end.
#pragma once

#include <optional>

#include "sheaf/autograd/layer_ops.h"
#include "sheaf/autograd/op.h"
#include "sheaf/core/block_format.h"
#include "sheaf/core/random.h"

namespace sheaf {

/// The device on which ops without tensor inputs (zeros, arange, ...) create their result: that of the rank, or of the innermost
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
/// on another mesh, or none though x is on one, and for one that cuts a dimension which x does not have.
/// Communicates where the table says so, on the gather lane, and waits for the result. Mesh axes change in their order, a
/// node each; if a later axis also cuts that dimension, it is gathered first and cut again afterwards.
Tensor redistribute(const Tensor& x, const Layout& to);
/// Like redistribute(), for row-wise consumers such as linear layers: an all_gather or all_to_all with at least
/// RecordingOptions::piece_rows rows per piece does not block, and products start on rows as they arrive. See [Note: in pieces].
/// `products`: how many products share the rows, as those of experts do; then each gets about piece_rows. All ranks must record, with
/// equal `piece_rows` and `overlap`, or none.
Tensor redistribute_in_pieces(const Tensor& x, const Layout& to, double products = 1);
/// The same for keys and values [B, T, 2 G, D], keys first, whose tokens are cut over ranks, and attention by `readers` query heads for
/// each of the G: attention starts on heads as they arrive. On GPUs each part has piece_rows² rows of queries over all its heads, enough to
/// occupy a GPU.
Tensor redistribute_in_heads(const Tensor& keys_values, const Layout& to, int64_t readers);
/// redistribute() with the placement of one mesh axis changed. An x without a mesh is whole on every rank, so it is returned if it is to
/// be Replicate: a model that names an axis also runs without one. PlacementError for other placements of it.
Tensor redistribute(const Tensor& x, const std::string& axis, const Placement& to);
/// x gathered or added up on every rank: Replicate on every axis of its mesh, if it has one. Collective.
Tensor full_tensor(const Tensor& x);

// ---- memory ---------------------------------------------------------------------------------------------------------
/// `x`'s type with every element `value`.
Tensor full_like(const Tensor& x, double value);
/// A value of the given type (layout included) with every element `value`; for Partial, rank 0 holds it.
Tensor full_of(const Type& type, double value);
/// A dense copy of x, in memory of its own.
Tensor copy_of(const Tensor& x);
/// x itself where it is dense; else a dense copy. What is undefined stays so: the op that it goes to refuses it.
Tensor contiguous(const Tensor& x);
/// Stores x into `to`'s memory, or adds it to the contents: averages of weights, caches, slots of gradients. `to` may be a view, but
/// not an expanded one (ShapeError); x has its shape (ShapeError), dtype (DTypeError) and layout (PlacementError), or no mesh, and may
/// be a view of the same memory. In-place changes are not differentiable: it is an error (LifetimeError) to change memory whose
/// gradients are asked for or that a derivative reads, and to ask through that memory for a gradient of what was stored into it.
void store_into(const Tensor& to, const Tensor& x);
void add_into(const Tensor& to, const Tensor& x);

// ---- elementwise, reductions, shape, indexing, random ----------------------------------------------------------------
/// Dimensions of a tensor, negative ones from the end; none given means all.
class Dims {
 public:
  Dims() = default;
  Dims(int dim) : dims_{dim} {}                            // NOLINT: sum(x, 0)
  Dims(std::initializer_list<int> dims) : dims_(dims) {}   // NOLINT: sum(x, {0, 2})
  Dims(std::vector<int> dims) : dims_(std::move(dims)) {}  // NOLINT
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
/// NaN if either is NaN. If the operands are equal, the first gets the gradient.
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
// With a weak scalar: the result keeps x's dtype. Integer tensors do not accept a fractional scalar.
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
Tensor log1p(const Tensor& x);  ///< log(1 + x), accurate also near 0
Tensor expm1(const Tensor& x);  ///< exp(x) - 1, likewise
Tensor erf(const Tensor& x);    ///< the error function, 2 / sqrt(pi) times the integral of exp(-t²) from 0 to x
Tensor sqrt(const Tensor& x);
Tensor rsqrt(const Tensor& x);  ///< 1 / sqrt(x)
Tensor square(const Tensor& x);
Tensor abs(const Tensor& x);   ///< gradient 0 at 0
Tensor sign(const Tensor& x);  ///< -1, 0 or 1
/// To whole numbers, in x's dtype: downwards, and to the nearest, halves to even. The gradient is 0: a straight-through one is a
/// custom_vjp().
Tensor floor(const Tensor& x);
Tensor round(const Tensor& x);
Tensor sin(const Tensor& x);
Tensor cos(const Tensor& x);
/// Conversion; floats to integers truncate and saturate, anything to bool is "not zero".
Tensor cast(const Tensor& x, DType dtype);
/// linear() of a weight stored in blocks [O, I / 64 · block_bytes(format)], with the bits of linear() of its values, which never
/// exist in memory except where they are multiplied (on a GPU: in the workspace). For frozen weights: it has no derivative. x and
/// bias are of one dtype.
Tensor linear_of_blocks(const Tensor& x, const Tensor& blocks, BlockFormat format, const Tensor& bias = {});
/// The values of blocks[.., n · block_bytes(format)], u8, as [.., n · 64] of a floating dtype: products of codes and scales, rounded
/// once. Blocks are constants: they get no gradient. A backward that reads the values of gathered blocks dequantizes them again.
Tensor dequantize(const Tensor& blocks, BlockFormat format, DType dtype);
/// min(max(x, lo), hi); the gradient passes within the closed interval. ConfigError if lo > hi.
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
Tensor silu(const Tensor& x);      ///< x sigmoid(x)
Tensor softplus(const Tensor& x);  ///< log(1 + exp(x))
/// x Phi(x), or its approximation by tanh (Hendrycks and Gimpel 2016), as in GPT-2.
enum class GeluKind : uint8_t { exact, tanh };
Tensor gelu(const Tensor& x, GeluKind kind = GeluKind::exact);
/// silu(gate) * up, of equal shapes (Shazeer 2020, https://arxiv.org/abs/2002.05202).
Tensor swiglu(const Tensor& gate, const Tensor& up);
struct ClampedSwigluOptions { double alpha = 1.702, limit = 7.0; };  ///< positive, alpha finite
/// The gate of gpt-oss's experts (OpenAI, https://arxiv.org/abs/2508.10925): with g = min(gate, limit) and u = up clamped to
/// [-limit, limit], g sigmoid(alpha g) (u + 1). Of equal shapes; gradients pass where an operand is within the limits, bounds
/// included.
Tensor clamped_swiglu(const Tensor& gate, const Tensor& up, const ClampedSwigluOptions& options = {});
/// gelu(gate) * up, of equal shapes, with the tanh approximation (Shazeer 2020). Only the two operands are kept: the backward
/// recomputes gelu(gate).
Tensor geglu(const Tensor& gate, const Tensor& up);

// Reductions over `dims` (none: all); with keepdim, reduced dimensions stay with size 1. sum of integers and bool is i64. sum and
// mean of a sharded dimension are Partial, and means divide by the global count; the others require whole dimensions. mean, var and
// logsumexp are for floating dtypes (DTypeError). ShapeError for a dimension given twice.
Tensor sum(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor mean(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
struct VarOptions {
  double correction = 1;
  bool keepdim = false;
};
/// sum((x - mean)^2) / (n - correction)
Tensor var(const Tensor& x, const Dims& dims = {}, const VarOptions& options = {});
/// NaN if any element is; equal extremes share the gradient. Throws ShapeError where there is no element.
Tensor max(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor min(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor logsumexp(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
/// i64 position of the first largest element; no gradient. ShapeError for an empty dimension.
Tensor argmax(const Tensor& x, int dim = -1, bool keepdim = false);
/// i64 positions of the k largest elements of the last dimension, in descending order, ties by position: [.., k]. NaN is larger than
/// all. x is floating (DTypeError) and 0 <= k <= its size (ShapeError); no gradient. The elements themselves, with their gradient, are
/// gather(x, -1, top_k(x, k)).
Tensor top_k(const Tensor& x, int64_t k);

/// x as a constant: no gradient flows back through it. A view, of any placement; for a teacher's output, a target computed from
/// parameters, a metric inside a step.
Tensor stop_gradient(const Tensor& x);

// Shape. Results share x's memory where strides can express them; only reshape may have to copy.
/// One size may be -1; ShapeError if the numbers of elements differ. A cut of dimension d remains one if d is the first of the
/// dimensions that are merged or split.
Tensor reshape(const Tensor& x, const Shape& shape);
/// Inserts dimensions of size 1 at these positions of the result; a cut keeps its dimension.
Tensor unsqueeze(const Tensor& x, const Dims& dims);
/// Removes these dimensions, which must have size 1 (ShapeError).
Tensor squeeze(const Tensor& x, const Dims& dims);
/// Swaps two dimensions; a view.
Tensor transpose(const Tensor& x, int dim0, int dim1);
/// Dimension i of the result is dimension order[i] of x; ShapeError unless `order` names each once.
Tensor permute(const Tensor& x, const Dims& order);
/// x[.., M, N] with zeros in place of what is right of (tril) or left of (triu) this diagonal: 0 is the main one, positive ones are right
/// of it. ShapeError for fewer than two dimensions.
Tensor tril(const Tensor& x, int64_t diagonal = 0);
Tensor triu(const Tensor& x, int64_t diagonal = 0);
/// Repeats dimensions of size 1, and adds dimensions in front, without copying. ShapeError if another size changes.
Tensor expand(const Tensor& x, const Shape& shape);
/// Positions begin, begin + step, .. below end of one dimension, negative ones from the end; a view. ShapeError unless
/// 0 <= begin <= end <= its size and step >= 1.
Tensor slice(const Tensor& x, int dim, int64_t begin, int64_t end, int64_t step = 1);
/// Views, one after another along `dim`: of these sizes, or `chunks` of equal size. ShapeError if the sizes do not add up to the
/// dimension's. To visit all positions of a dimension, split it once: the gradients of slices are padded, each to the whole of x,
/// those of parts are concatenated.
std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes, int dim = 0);
std::vector<Tensor> chunk(const Tensor& x, int64_t chunks, int dim = 0);
/// Tensors that differ only in the size of dimension `dim`: ShapeError, DTypeError or PlacementError otherwise. `dim` must not be
/// sharded: rows of a batch that is are combined by stack(xs, 1) and reshape(), in another order.
Tensor concat(const std::vector<Tensor>& xs, int dim = 0);
/// The inverse of split() of a tensor of type `whole`, for its parts or others of their types: if an axis shards `whole` in parts
/// (OwnershipMap::parts), and so each of these evenly, the result is sharded as `whole` is.
Tensor concat_as(const std::vector<Tensor>& parts, int dim, const Type& whole);
/// Tensors of one type along a new dimension; errors as concat's.
Tensor stack(const std::vector<Tensor>& xs, int dim = 0);
/// x with `before` and `after` positions of `value` around it along `dim`; ShapeError if one is negative.
Tensor pad(const Tensor& x, int dim, int64_t before, int64_t after, double value = 0);

// Indexing; indices are i64, i32, u32, u16 or u8. An index outside the dimension throws DataError.
/// out[.., i, ..] = x[.., index[.., i, ..], ..] along `dim`, in index's shape, which is x's except for `dim` (ShapeError).
Tensor gather(const Tensor& x, int dim, const Tensor& index);
/// x with src[.., i, ..] added at [.., index[.., i, ..], ..], in the order of i. index and src have one shape, x's except for `dim`
/// (ShapeError), and x and src one dtype (DTypeError).
Tensor scatter_add(const Tensor& x, int dim, const Tensor& index, const Tensor& src);
/// x's entries along `dim` at the positions `index` (of any shape, which replaces the dimension).
Tensor take(const Tensor& x, const Tensor& index, int dim = 0);
/// x with src[.., i, ..] added at [.., index[i], ..] for a 1-D index, in the order of i.
Tensor index_add(const Tensor& x, int dim, const Tensor& index, const Tensor& src);
/// Running sums, from the end if reverse. Integers and bool give i64.
Tensor cumsum(const Tensor& x, int dim, bool reverse = false);

/// Sums of products, in NumPy's notation: einsum("bthd,bshd->bhts", {q, k}). A letter names a dimension, of one size wherever it occurs
/// (ShapeError), "..." those that are left; letters that are not in the result are summed over, and without "->" the result has
/// those of "..." and, in alphabetical order, letters that occur once. Operands are combined from left to right: a matmul each, of
/// floating dtypes, if something is summed, else a mul. ConfigError for an equation that does not say what to do, or a letter twice in
/// one operand. Dimensions may be cut as matmul's and sum's.
Tensor einsum(const std::string& equation, const std::vector<Tensor>& operands);

// Creation, on default_device(). Values of a given type (layout included) hold this rank's part.
Tensor full(const Shape& shape, double value, DType dtype = kF32);
Tensor zeros(const Shape& shape, DType dtype = kF32);
Tensor ones(const Shape& shape, DType dtype = kF32);
/// The identity matrix [n, n].
Tensor eye(int64_t n, DType dtype = kF32);
/// 0, 1, ..., n - 1.
Tensor arange(int64_t n, DType dtype = kI64);
/// start, start + step, ... below (for negative steps above) stop. ConfigError for a step of 0.
Tensor arange(double start, double stop, double step, DType dtype = kI64);
/// Normal and uniform values: pure functions of the key and each element's global index (see core/random.h). Without a key they
/// depend on the recording's seed, step and first sample, the module path and the call number. The dtype is floating (DTypeError),
/// the layout has no Partial (PlacementError). A key is written Key{1337}: a number is a mean, or a lower bound.
Tensor randn(const Type& type, Key key, double mean = 0, double std = 1);
Tensor randn(const Type& type, double mean = 0, double std = 1);
Tensor uniform(const Type& type, Key key, double lo = 0, double hi = 1);
Tensor uniform(const Type& type, double lo = 0, double hi = 1);
/// Zeroes each element with probability p in [0, 1) and divides the others by 1 - p; keyed as above. Dimension 0 counts samples, so
/// that a batch sharded over ranks or split into micro-batches drops the same elements as the whole batch.
Tensor dropout(const Tensor& x, double p);
Tensor dropout(const Tensor& x, double p, Key key);

}  // namespace sheaf
