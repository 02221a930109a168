// Parameter: a named leaf of a model. Buffer: state without gradient. Both are handles on a small record, so they
// survive any move of the module that holds them; copies of a handle mean the same leaf.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/block_format.h"
#include "sheaf/core/tensor.h"

namespace sheaf {

class Unit;

/// Base of types that convert to a tensor in expressions, so that the ops are found for it as they are for a Tensor (by
/// argument-dependent lookup): `2.0 * scale` needs no using-directive.
struct TensorOperand {};

namespace nn {

/// How a leaf's initial values are drawn. They depend on the seed, the leaf's name and the element's flat index alone.
struct Init {
  enum class Kind : uint8_t { constant, normal, uniform };
  Kind kind = Kind::constant;
  double value = 0;  ///< the constant, the standard deviation, or the bound b of [center - b, center + b)
  double center = 0;

  static Init zeros() { return {}; }
  static Init ones() { return {Kind::constant, 1.0}; }
  static Init constant(double value) { return {Kind::constant, value}; }
  static Init normal(double std) { return {Kind::normal, std}; }
  static Init uniform(double bound) { return {Kind::uniform, bound}; }
  static Init between(double low, double high) { return {Kind::uniform, (high - low) / 2, (low + high) / 2}; }
  bool operator==(const Init&) const = default;
};

/// A trainable (or frozen) leaf. It has no memory until materialize() has put it into a unit. Converts to a Tensor where an op
/// expects one: the value that its unit holds ready for compute, gathered if necessary. A default Parameter is absent (a bias that a
/// layer lacks) and converts to an undefined Tensor.
class Parameter : public TensorOperand {
 public:
  Parameter() = default;
  Parameter(const Shape& shape, Init init, DType dtype = kF32);

  /// Throws LifetimeError, naming it, before materialize() and for a field that SHEAF_FIELDS does not list.
  Tensor value() const;
  operator Tensor() const { return value(); }  // NOLINT: a parameter is used where tensors are

  bool defined() const { return state_ != nullptr; }
  explicit operator bool() const { return defined(); }
  const Shape& shape() const { return state().shape; }
  DType dtype() const { return state().dtype; }
  int64_t numel() const { return shape().numel(); }
  /// The path of its field, "blocks.3.mlp.up.weight": relative to the module last asked for its parameters, then, permanently, to the
  /// one that was materialized.
  const std::string& name() const { return state().name; }
  const Init& init() const { return state().init; }
  bool trainable() const { return state().trainable; }
  /// Excludes it from training: no gradient, no optimizer state. Before materialize() (its unit is laid out there).
  void freeze();
  /// The same, and nothing else changes it either once it is loaded: it is stored in its unit's compute dtype
  /// (ShardOptions::compute_dtype), if that is narrower.
  void freeze_for_good();
  /// Computation uses it in its own dtype, whatever ShardOptions::compute_dtype and ::reduce_dtype say. Before materialize().
  void keep_exact();
  bool exact() const { return state().exact; }
  /// It is stored, gathered and saved in blocks of 64 consecutive values (core/block_format.h), and each value() dequantizes them, to
  /// its unit's compute dtype, for as long as the values are used. For a parameter that is frozen for good, before materialize();
  /// ConfigError for another, ShapeError if rows are not multiples of 64.
  void quantize(BlockFormat format);
  const std::optional<BlockFormat>& blocks() const { return state().blocks; }
  /// The source of value(): the bytes, as its unit holds them ready.
  Tensor in_blocks() const;
  /// Its gradient is a measurement, not a derivative (MixtureOfExperts: an expert's load above the mean). It is summed over ranks and
  /// micro-batches as every gradient is, and kept exact. Each optimizer step moves every element by `rate` against the gradient's
  /// sign (signSGD; Bernstein et al., https://arxiv.org/abs/1802.04434), whatever the optimizer and its learning rate; it is in no
  /// norm, and has no state. Before materialize(); ConfigError for a rate that is not above 0.
  void steer(double rate);
  /// That rate; 0: its gradient is a derivative.
  double steered() const { return state().steered; }
  /// Another initialization. Before materialize().
  void set_init(Init init);

  /// Its rows are looked up or scored individually: an embedding, the head over a vocabulary, a router, taps of channels. Optimizers
  /// that treat a matrix as a map between hidden spaces (optim::Muon) exclude it, and so do adapters, FP8 and quantization.
  void set_table() { state().table = true; }
  bool table() const { return state().table; }

  /// It holds biases, perhaps those of several layers: the biases of experts [E, O]. Whatever its rank, optimizers treat it as
  /// vectors: it does not decay (optim::decays_matrices), and optim::Muon excludes it.
  void set_bias() { state().bias = true; }
  bool bias() const { return state().bias; }

  /// How the ranks of a tensor axis (ShardOptions::tensor_axis) share it: each computes with its part by `map` and never has the
  /// rest. Without such an axis it has no effect. Before materialize(); PlacementError for a flat or uneven map, or one that does not
  /// fit the shape.
  void set_cut(const OwnershipMap& map);
  const std::optional<OwnershipMap>& cut() const { return state().cut; }
  /// It holds the rows of several matrices, of these sizes, without a cut: optim::Muon orthogonalises each by itself, as it does parts of a
  /// cut. ShapeError if they are not its rows.
  void set_matrices(const std::vector<int64_t>& rows);
  const std::vector<int64_t>& matrices() const { return state().matrices; }
  /// The mesh axis that shards it: -1 if it is whole on every rank that computes with it, and before materialize().
  int cut_axis() const;

  /// Its unit and its index there; null and -1 before materialize().
  const std::shared_ptr<Unit>& unit() const { return state().unit; }
  int index() const { return state().index; }

  /// What code has said about a leaf of this shape: clone() copies all of it.
  struct Settings {
    DType dtype = kF32;
    Init init;
    bool trainable = true, frozen_for_good = false, table = false, bias = false, exact = false;
    bool init_is_set = false;  ///< by set_init()
    double steered = 0;
    std::optional<OwnershipMap> cut;
    std::vector<int64_t> matrices;
    std::optional<BlockFormat> blocks;
  };
  struct State : Settings {
    Settings& settings() { return *this; }
    Shape shape;
    std::string name;
    std::shared_ptr<Unit> unit;
    int index = -1;
    int constant_scopes = 0;  ///< AsConstants that live
  };
  /// Two handles are the same leaf if they share a record.
  const State* id() const { return state_.get(); }
  State& state() const;

 private:
  friend void tie(Parameter& a, const Parameter& b);
  std::shared_ptr<State> state_;
};

/// Makes `a` the same leaf as `b`: one value used twice, whose gradients are summed. Its name, in messages, checkpoints and optimizers,
/// is the path of whichever of the two the model lists first. Its initial values are b's; it is a table if one of them is, and holds
/// biases if both do. Other settings must be equal, so that none is lost: ConfigError, naming both, if only one is frozen, frozen for
/// good, exact, steered (or by another rate), in blocks or cut along a tensor axis, or if `a` has another init by set_init().
/// ShapeError for another shape or dtype. Before materialize(); later settings of either are those of both.
void tie(Parameter& a, const Parameter& b);

/// State without gradient, whole on every rank: a running mean, a table. Allocated by materialize(). It is changed by assign(),
/// between recordings: forward stores its result in a Tensor, which outlives its recording, and the loop assigns it after
/// recording.take() (docs/own_models.md has a running mean).
class Buffer : public TensorOperand {
 public:
  Buffer() = default;
  Buffer(const Shape& shape, Init init, DType dtype = kF32);
  /// Throws LifetimeError before materialize().
  Tensor value() const;
  operator Tensor() const { return value(); }  // NOLINT
  bool defined() const { return state_ != nullptr; }
  const std::string& name() const { return state().name; }

  struct State {
    Shape shape;
    DType dtype = kF32;
    Init init;
    std::string name;
    Tensor value;
  };
  const State* id() const { return state_.get(); }
  State& state() const;

 private:
  std::shared_ptr<State> state_;
};

/// The units of these parameters, each once, in order.
std::vector<std::shared_ptr<Unit>> distinct_units(std::span<const Parameter> parameters);

}  // namespace nn

/// The whole value on every rank, dense and without a layout. Collective if the parameter is sharded; outside of any
/// recording. For tests and export.
Tensor full_parameter(const nn::Parameter& p);
/// The same for its gradient; undefined if there is none. Collective.
Tensor full_gradient(const nn::Parameter& p);
/// Gives a parameter the values of a whole tensor (no layout, same shape and dtype): each rank copies its own piece, without
/// communication. Outside of any recording, whose backward may read the old values. ShapeError or DTypeError for another shape or dtype,
/// PlacementError for a value that is sharded or Partial along an axis, LifetimeError in a recording or before materialize(); all name
/// the parameter. Of a parameter in blocks NonFiniteError for a value that is not finite.
void assign(const nn::Parameter& p, const Tensor& whole);
/// The same for a buffer, on every rank. The value may have a layout in which it is whole, such as Invariant.
void assign(const nn::Buffer& b, const Tensor& whole);
/// Not for parameters: what they are converted to may be a gathered or cast copy. assign() changes them.
void store_into(const nn::Parameter& p, const Tensor& x) = delete;
void add_into(const nn::Parameter& p, const Tensor& x) = delete;

}  // namespace sheaf
