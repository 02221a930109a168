// What all optimizers share: they work on the flat shards of units, in one pass each, with state of the shard's shape.
//
// Learning rate and weight decay are multiplied by factors of each parameter (Factors), wherever it lies in a unit:
//
//   optim::AdamW optimizer(model, {.lr = 1e-3, .factors = {.lr = [](const nn::Parameter& p) { return p.table() ? 10 : 1; }}});
//
// freeze() takes a parameter out of training. Whatever else should differ takes an optimizer of its own, over units of its
// own, because an optimizer is given whole units (half of one is a ConfigError). shard() makes any module a unit:
//
//   shard(model, mesh, {.units = nn::units_at({"body", "head"})});  // the model itself keeps no parameter
//   materialize(model, world.device());
//   optim::AdamW body(model.body, {.beta2 = 0.95});
//   optim::SGD head(model.head, {.momentum = 0.9});
//
// clip_grad_norm(model, ..) spans all of them, and models::save_checkpoint takes them together.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/distributed/unit.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/nn/module.h"

namespace sheaf::optim {

/// What step() can be given.
struct StepOptions {
  std::optional<double> lr = std::nullopt;  ///< learning rate of this step; the optimizer's own if absent
  Tensor scalars = {};  ///< next_scalars(), where the parameters live; undefined: step() takes them there
};

/// How an optimizer's state rests.
struct StateOptions {
  /// bf16, with f32 masters: half of the bytes. Computed in f32 and rounded stochastically where it is stored, the same
  /// for any mesh (kernels/optimizer.h). Absent: the masters' own.
  std::optional<DType> dtype = std::nullopt;
  bool offload = false;  ///< on a GPU it is kept in the host's memory
};

/// A number for each parameter.
using FactorRule = std::function<double(const nn::Parameter&)>;
/// Whether it has two dimensions or more, so that it is neither a bias nor a norm's.
bool decays_matrices(const nn::Parameter& p);

/// What an optimizer's learning rate and weight decay are multiplied by for each parameter: finite, at least 0. A parameter
/// whose learning rate is 0 stays as it is.
struct Factors {
  FactorRule lr = {};  ///< of the learning rate, the decay's included; absent: 1
  FactorRule weight_decay = decays_matrices;
};

/// Elements of a parameter that this rank holds: in its shard they start at piece.shard_offset, in the state at `at`.
struct StatePart {
  LocalPiece piece;
  int64_t at;
};

/// A piece of an optimizer's work: parameters of one flat buffer of a unit, with their state.
struct ShardState {
  std::shared_ptr<Unit> unit;
  size_t buffer;                   ///< index into unit->buffers()
  std::vector<int> leaves;         ///< the parameters, indices into unit->leaves()
  std::vector<StatePart> parts;    ///< what this rank has of them, in the order of the shard
  Tensor segments;                 ///< f64 [k, 4], one for each part: begin, end, its factors (kernels::Segment)
  std::vector<std::string> names;  ///< of the state tensors: "m", "v"
  std::vector<Tensor> state;       ///< one per name: of the shard's type but for StateOptions::dtype, or of these parameters alone
  FlatBuffer& flat() const { return unit->buffers()[buffer]; }
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(Optimizer&&) noexcept = default;
  Optimizer& operator=(Optimizer&&) noexcept = default;

  /// Updates the parameters from their gradients, times the scale that clip_grad_norm left, and the state. Units that
  /// have no gradient stay as they are. Recorded as part of the update if a recording lives. Where clip_grad_norm has found
  /// infinity for a LossScaler nothing changes, and no step is applied.
  void step(const StepOptions& options = {});
  /// The values that change from step to step, as the next step reads them: for a caller that brings them to the
  /// device together with other things, or for each replay of a step that is a graph.
  std::vector<double> next_scalars(const StepOptions& options = {}) const { return scalars(options, steps_ + 1); }
  /// Frees the gradients.
  void zero_grad();
  /// Steps taken so far, skipped ones included: with shards()' state and, where there is a LossScaler, applied_steps()
  /// all that resuming needs.
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps);
  /// Steps that were not skipped, which the device counts; nothing if the optimizer has met no LossScaler, or has no use for
  /// it. Waits for the device.
  std::optional<int64_t> applied_steps() const;
  void set_applied_steps(int64_t steps);  ///< after set_steps()

  std::vector<ShardState>& shards() { return shards_; }
  const std::vector<ShardState>& shards() const { return shards_; }

 protected:
  /// Works on whole flat shards, with zero_state() for each of `states` beside them. `name` is for the tape and messages.
  /// Parameters that are steered (nn::Parameter::steer) are not among them: step() moves those itself.
  /// ConfigError for invalid factors.
  Optimizer(std::string name, std::span<const nn::Parameter> parameters, const Factors& factors,
            const std::vector<std::string>& states, const StateOptions& options);
  /// The derived class fills shards(), with flat_shards() of these parameters.
  Optimizer(std::string name, std::span<const nn::Parameter> parameters);
  /// Values that change from step to step, as one f64 vector; `step` counts from 1.
  virtual std::vector<double> scalars(const StepOptions& options, int64_t step) const = 0;
  /// Whether the first of them are those of AdamW, with bias corrections.
  virtual bool corrects_bias() const { return false; }
  /// Updates one shard, unless its flat().found_inf is set; scalars and clip scale (undefined: 1) are tensors.
  virtual void update(ShardState& shard, const Tensor& scalars, const Tensor& clip_scale) = 0;
  /// Updates all that have a gradient, by default one after another.
  virtual void update_all(std::span<ShardState* const> shards, const Tensor& scalars);
  /// Names for the tape those tensors that this recording has not met.
  void name_leaves(const ShardState& shard) const;

 private:
  void steer() const;
  Tensor found_inf() const;
  Tensor count_applied(const Tensor& scalars, const Tensor& found_inf);
  std::string name_;
  std::vector<std::shared_ptr<Unit>> units_;  // with something to train, each once
  std::vector<ShardState> shards_;
  int64_t steps_ = 0;
  Tensor applied_;  // i64 []; undefined: all of them
};

namespace detail {
/// The flat buffers of these parameters that are trained and not steered, without state: whole, their parts in place. ConfigError
/// as nn::trainable_units; DTypeError for masters that are neither f32 nor f64.
std::vector<ShardState> flat_shards(const std::string& who, std::span<const nn::Parameter> parameters);
/// On the device of the shard, f64 [k, 4].
Tensor segment_table(std::span<const kernels::Segment> segments, Device device);
/// Zeros for an optimizer's state of values of this type. Where it is offloaded the step's kernel reads and writes it in the
/// host's memory, each byte once, in both directions of the bus at the same time. DTypeError for a dtype that state cannot have.
Tensor zero_state(const Type& type, Device device, const StateOptions& options);
/// By index: learning rate and weight decay of the unit's leaves among these parameters, as factors of segments without elements.
std::vector<kernels::Segment> factors_of(const std::string& who, const Unit& unit, std::span<const nn::Parameter> parameters,
                                         const Factors& factors);
/// A segment of a leaf's elements, with its factors.
kernels::Segment segment_of(const kernels::Segment& leaf, int64_t begin, int64_t count);
}  // namespace detail

/// For update() of an optimizer of one's own: runs its step op (OpKind::step), whose inputs are the shard's parameters [n], their gradient
/// [n], each state [n], segments f64 [k, 4] (kernels::Segment), scalars f64 (Optimizer::scalars) [, clip scale, one f32 or f64 [,
/// found_inf, one i32]], and whose outputs are the parameters and each state, in their memory: examples/lion.h.
void apply_step(const OpDef& op, const void* attrs, ShardState& shard, const Tensor& scalars, const Tensor& clip_scale);
/// Input `index` of such an op, or View{} where the step has none: the clip scale, which is then 1, and found_inf, a number that
/// forbids any change unless it is 0.
View optional_input(const Execute& c, int index);

}  // namespace sheaf::optim
