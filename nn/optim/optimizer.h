// Common to all optimizers: they process the flat shards of units, in one pass each, with state of the shard's shape.
//
// Learning rate and weight decay are multiplied by per-parameter factors (Factors), independent of units:
//
//   optim::AdamW optimizer(model, {.lr = 1e-3, .factors = {.lr = [](const nn::Parameter& p) { return p.table() ? 10 : 1; }}});
//
// freeze() excludes a parameter from training. For any other difference use separate optimizers over separate units, because an
// optimizer is given whole units (half of one is a ConfigError). shard() makes any module a unit:
//
//   shard(model, mesh, {.units = nn::units_at({"body", "head"})});  // the model itself keeps no parameter
//   materialize(model, world.device());
//   optim::AdamW body(model.body, {.beta2 = 0.95});
//   optim::SGD head(model.head, {.momentum = 0.9});
//
// clip_grad_norm(model, ..) covers all of them, and models::save_checkpoint saves them together.
//
// [Note: updates in the backward] Gradients of all units are in memory together only because a step comes after the backward. Where
// nothing depends on all of them, neither clipping nor a loss scaler, each can be used and freed once it is reduced:
//
//   optimizer.step_in_backward({.lr = lr});
//   recording.backward(loss, {.last_micro_batch = true});
//   const Tensor norm = grad_norm(model);  // known nevertheless: from sums of squares that the updates leave
//   optimizer.step();
//   optimizer.zero_grad();
//
// That saves 4 bytes for each parameter of the rank's shards. (After Lv et al. 2023, Full Parameter Fine-tuning for Large Language
// Models with Limited Resources.) What needs all gradients refuses: clip_grad_norm, grad_norms, full_gradient, directions. If the
// backward throws, some units may have been updated: continue from a checkpoint.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/distributed/unit.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/nn/module.h"

namespace sheaf::optim {

/// Arguments of step().
struct StepOptions {
  std::optional<double> lr = std::nullopt;  ///< learning rate of this step; the optimizer's own if absent
  /// next_scalars({.lr = ..}), on the parameters' device; `lr` is then not read. Undefined: step() copies them there.
  Tensor scalars = {};
};

/// How an optimizer's state is stored.
struct StateOptions {
  /// bf16, with f32 masters: half of the bytes. Computed in f32 and rounded stochastically when stored, the same for any mesh
  /// (kernels/optimizer.h). Absent: the masters' dtype.
  std::optional<DType> dtype = std::nullopt;
  bool offload = false;  ///< on a GPU it is kept in host memory
};

/// A number for each parameter.
using FactorRule = std::function<double(const nn::Parameter&)>;
/// Whether it has two dimensions or more and is not marked as biases (Parameter::set_bias), nor thus a norm's.
bool decays_matrices(const nn::Parameter& p);

/// Factors of an optimizer's learning rate and weight decay for each parameter: finite, at least 0. A parameter whose learning rate
/// is 0 is not changed, unless it is steered (nn::Parameter::steer).
struct Factors {
  FactorRule lr = {};  ///< of the learning rate, also where it multiplies the decay; absent: 1
  FactorRule weight_decay = decays_matrices;
};

/// Elements of a parameter that this rank holds: in its shard they start at piece.shard_offset, in the state at `at`.
struct StatePart {
  LocalPiece piece;
  int64_t at;
};

/// A work item of an optimizer: parameters of one flat buffer of a unit, with their state.
struct ShardState {
  std::shared_ptr<Unit> unit;
  size_t buffer;                   ///< index into unit->buffers()
  std::vector<int> leaves;         ///< the parameters, indices into unit->leaves()
  std::vector<StatePart> parts;    ///< this rank's parts of them, in the order of the shard
  Tensor segments;                 ///< f64 [k, 4], one row per part: begin, end, its factors (kernels::Segment)
  std::vector<std::string> names;  ///< of the state tensors: "m", "v"
  std::vector<Tensor> state;       ///< one per name: of the shard's type except for StateOptions::dtype, or of these parameters alone
  FlatBuffer& flat() const { return unit->buffers()[buffer]; }
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(Optimizer&& other) noexcept;
  Optimizer& operator=(Optimizer&& other) noexcept;

  /// Updates the parameters from their gradients, times the scale set by clip_grad_norm, and the state. Units without a gradient are
  /// not changed. Recorded as part of the update if there is a recording. If clip_grad_norm has found an overflow for a LossScaler
  /// nothing changes, and the step does not count as applied.
  void step(const StepOptions& options = {});
  /// Begins the step before its last backward: recording.backward(loss, {.last_micro_batch = true}) then updates each unit as soon as
  /// its gradient is reduced, and frees the gradient; step(), without options, updates what is left, and ends the step. The same bits,
  /// with the gradients of a few units in memory instead of all: [Note: updates in the backward].
  void step_in_backward(const StepOptions& options = {});
  /// The values that change from step to step, for the next step: for a caller that copies them to the device together with other
  /// data, or before each replay of a graph.
  std::vector<double> next_scalars(const StepOptions& options = {}) const { return scalars(options, *steps_ + 1); }
  /// Frees the gradients.
  void zero_grad();
  /// Steps taken so far, skipped ones included: with shards()' state and, if there is a LossScaler, applied_steps() all that resuming
  /// needs.
  int64_t steps() const { return *steps_; }
  void set_steps(int64_t steps);
  /// Steps that were not skipped, which the device counts; nothing if the optimizer has not been used with a LossScaler, or does not
  /// need the count. Waits for the device.
  std::optional<int64_t> applied_steps() const;
  void set_applied_steps(int64_t steps);  ///< after set_steps()

  std::vector<ShardState>& shards() { return shards_; }
  const std::vector<ShardState>& shards() const { return shards_; }

 protected:
  /// Processes whole flat shards, with zero_state() for each of `states`. `name` is for the tape and messages. Parameters that are
  /// steered (nn::Parameter::steer) are not included: step() updates those itself. ConfigError for invalid factors.
  Optimizer(std::string name, std::span<const nn::Parameter> parameters, const Factors& factors,
            const std::vector<std::string>& states, const StateOptions& options);
  /// The derived class fills shards(), using flat_shards() of these parameters.
  Optimizer(std::string name, std::span<const nn::Parameter> parameters);
  /// Values that change from step to step, as one f64 vector; `step` counts from 1.
  virtual std::vector<double> scalars(const StepOptions& options, int64_t step) const = 0;
  /// Whether the scalars begin with AdamW's, including bias corrections.
  virtual bool corrects_bias() const { return false; }
  /// Updates one shard by its flat().grad times flat().grad_scale (undefined: 1), unless flat().found_inf is set. All are tensors.
  virtual void update(ShardState& shard, const Tensor& scalars) = 0;
  /// Updates all shards that have a gradient, by default one after another.
  virtual void update_all(std::span<ShardState* const> shards, const Tensor& scalars);
  /// Names for the tape the tensors that are new to this recording.
  void name_leaves(const ShardState& shard) const;

 private:
  struct Begun {  // by step_in_backward(); units refer to it
    Optimizer* optimizer;
    Tensor scalars;
  };
  void expect_scalars(const StepOptions& options) const;
  Tensor scalars_of(const StepOptions& options, int64_t step) const;
  void update_unit(Unit& unit, const Tensor& scalars);
  void steer(Unit& unit) const;
  Tensor found_inf() const;
  Tensor count_applied(const Tensor& scalars, const Tensor& found_inf);
  std::string name_;
  std::vector<std::shared_ptr<Unit>> units_;  // those with trainable parameters, each once
  std::vector<ShardState> shards_;
  std::shared_ptr<int64_t> steps_ = std::make_shared<int64_t>(0);  // programs count, too, also after the optimizer was moved
  Tensor applied_;  // i64 []; undefined: all of them were
  std::shared_ptr<Begun> begun_;
};

namespace detail {
/// Hyper-parameters, by name: ConfigError if one is not finite or is negative, or a decay is not below 1.
struct Hyperparameter {
  const char* name;
  double value;
  bool is_decay = false;
};
void expect_valid(const std::string& who, std::initializer_list<Hyperparameter> all);
/// The flat buffers with trained, unsteered ones of these parameters, without state: whole, their parts in place. ConfigError as in
/// nn::trainable_units; DTypeError for masters that are neither f32 nor f64.
std::vector<ShardState> flat_shards(const std::string& who, std::span<const nn::Parameter> parameters);
/// f64 [k, 4], on this device.
Tensor segment_table(std::span<const kernels::Segment> segments, Device device);
/// Zeros for an optimizer's state of values of this type. If it is offloaded the step's kernel reads and writes it in host memory,
/// each byte once, in both directions of the bus at the same time. DTypeError for a dtype that state cannot have.
Tensor zero_state(const Type& type, Device device, const StateOptions& options);
/// By leaf index: learning rate and weight decay of the unit's leaves among these parameters, as factors of empty segments.
std::vector<kernels::Segment> factors_of(const std::string& who, const Unit& unit, std::span<const nn::Parameter> parameters,
                                         const Factors& factors);
/// A segment of a leaf's elements, with its factors.
kernels::Segment segment_of(const kernels::Segment& leaf, int64_t begin, int64_t count);
}  // namespace detail

/// For update() of a custom optimizer: runs its step op (OpKind::step), whose inputs are the shard's parameters [n], their gradient
/// [n], each state [n], segments f64 [k, 4] (kernels::Segment), scalars f64 (Optimizer::scalars) [, clip scale, one f32 or f64
/// [, found_inf, one i32]], and whose outputs are the parameters and each state, in place: examples/lion.h.
void apply_step(const OpDef& op, const void* attrs, ShardState& shard, const Tensor& scalars);
/// Input `index` of such an op, or View{} if absent: the clip scale, which is then 1, and found_inf, a number that forbids any change
/// unless it is 0.
View optional_input(const Execute& c, int index);

}  // namespace sheaf::optim
