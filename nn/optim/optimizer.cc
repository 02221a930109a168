#include "sheaf/nn/optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/transfer.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/nn/square_sums.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf::optim {

namespace {

// count, scalars [, found_inf] -> scalars, and the count in place.
struct CountAdamW {
  static constexpr const char* kName = "count_step";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), count_adamw, c.input(1), optional_input(c, 2), c.output(1), c.output(0));
  }
};

// param, gradient [, found_inf] -> param, in place.
struct Steer {
  static constexpr const char* kName = "steer";
  static constexpr OpKind kKind = OpKind::step;
  struct Attrs { double rate; };
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), sign_step, c.output(0), c.input(1), a.rate, optional_input(c, 2));
  }
  static void describe(const Attrs& a, std::string& out) { out += str("rate ", a.rate); }
};

}  // namespace

bool decays_matrices(const nn::Parameter& p) { return p.shape().rank() >= 2 && !p.bias(); }

Optimizer::Optimizer(std::string name, std::span<const nn::Parameter> parameters)
    : name_(std::move(name)), units_(nn::trainable_units(name_, parameters)) {}

Optimizer::Optimizer(std::string name, std::span<const nn::Parameter> parameters, const Factors& factors,
                     const std::vector<std::string>& states, const StateOptions& options)
    : Optimizer(std::move(name), parameters) {
  shards_ = detail::flat_shards(name_, parameters);
  for (ShardState& shard : shards_) {
    const std::vector<kernels::Segment> of_leaf = detail::factors_of(name_, *shard.unit, parameters, factors);
    std::vector<kernels::Segment> segments;
    for (const auto& [piece, at] : shard.parts) segments.push_back(detail::segment_of(of_leaf[piece.leaf], at, piece.runs.numel()));
    const Tensor& values = shard.flat().shard;
    shard.segments = detail::segment_table(segments, values.device());
    shard.names = states;
    for (size_t s = 0; s < states.size(); ++s) shard.state.push_back(detail::zero_state(values.type(), values.device(), options));
  }
}

Optimizer::Optimizer(Optimizer&& other) noexcept { *this = std::move(other); }

Optimizer& Optimizer::operator=(Optimizer&& other) noexcept {
  name_ = std::move(other.name_);
  units_ = std::move(other.units_);
  shards_ = std::move(other.shards_);
  steps_ = std::move(other.steps_);
  applied_ = std::move(other.applied_);
  begun_ = std::move(other.begun_);
  if (begun_) begun_->optimizer = this;
  return *this;
}

void Optimizer::step(const StepOptions& options) {
  if (units_.empty()) return;
  const PhaseScope phase(Phase::update);
  if (begun_ && (options.lr || options.scalars))
    fail<ConfigError>("[", name_, "] this step began with step_in_backward(), which was given its options: end it by step() without any");
  nn::reduce_waiting(units_);  // or refuse, before the step counts
  const Tensor found_inf = this->found_inf();
  const std::shared_ptr<Begun> begun = std::exchange(begun_, nullptr);
  if (!begun) expect_scalars(options);
  const int64_t before = (*steps_)++;
  if (Recording* r = Recording::current()) r->after_rerun([steps = steps_] { ++*steps; });
  for (const auto& unit : units_) unit->close_for_change();
  for (const auto& unit : units_) steer(*unit);
  if (shards_.empty()) return;
  Tensor scalars = begun ? begun->scalars : scalars_of(options, *steps_);
  std::vector<ShardState*> shards;
  for (ShardState& shard : shards_)
    if (shard.flat().grad) shards.push_back(&shard);
  if (found_inf && !applied_ && corrects_bias()) set_applied_steps(before);
  if (applied_ && !begun) scalars = count_applied(scalars, found_inf);
  update_all(shards, scalars);
}

void Optimizer::step_in_backward(const StepOptions& options) {
  if (units_.empty()) return;
  const PhaseScope phase(Phase::update);
  expect_scalars(options);
  begun_ = std::make_shared<Begun>(Begun{this, {}});
  if (!shards_.empty()) begun_->scalars = scalars_of(options, *steps_ + 1);
  if (applied_) begun_->scalars = count_applied(begun_->scalars, {});
  for (const auto& unit : units_)
    unit->update_when_reduced([step = std::weak_ptr(begun_), &unit = *unit] {
      const auto begun = step.lock();
      if (!begun) fail<LifetimeError>("[step_in_backward] the optimizer of unit '", path_label(unit.name()), "' is gone");
      begun->optimizer->update_unit(unit, begun->scalars);
    });
}

void Optimizer::expect_scalars(const StepOptions& options) const {
  if (options.lr) detail::expect_valid(name_, {{"lr", *options.lr}});
  if (const Recording* r = Recording::current(); !options.scalars && !shards_.empty() && r && r->is_for_program())
    fail<ConfigError>("[", name_, "] in a step that is compiled the learning rate and what else changes from step to step have to ",
                      "come in: give next_scalars() to step() as StepOptions::scalars");
}

Tensor Optimizer::scalars_of(const StepOptions& options, int64_t step) const {
  Tensor scalars = options.scalars;
  if (!scalars) {
    const std::vector<double> values = this->scalars(options, step);
    const Shape shape{static_cast<int64_t>(values.size())};
    const Device device = shards_[0].flat().shard.device();
    scalars = device.is_meta() ? Tensor::empty({kF64, shape, {}}, device) : Tensor::from(values, shape).to(device);
  }
  if (Recording* r = Recording::current()) r->leaf(scalars, name_ + ".scalars");
  return scalars;
}

// During the backward, of a unit whose gradients are complete.
void Optimizer::update_unit(Unit& unit, const Tensor& scalars) {
  const PhaseScope phase(Phase::update);
  steer(unit);
  std::vector<ShardState*> shards;
  for (ShardState& shard : shards_)
    if (shard.unit.get() == &unit && shard.flat().grad) shards.push_back(&shard);
  for (FlatBuffer& b : unit.buffers())
    if (b.has_slope() && b.grad) nn::keep_squares(b);
  update_all(shards, scalars);
}

void Optimizer::steer(Unit& unit) const {
  const PathScope path(unit.name());
  for (const FlatBuffer& b : unit.buffers()) {
    if (!b.trainable || b.steered == 0 || !b.grad) continue;
    if (Recording* r = Recording::current()) r->leaf(b.shard, b.name), r->leaf(b.grad, "gradient of " + b.name);
    const Tensor inputs[] = {b.shard, b.grad, b.found_inf};
    const OutputSpec output{.type = b.shard.type(), .into = b.shard};
    const Steer::Attrs attrs{b.steered};
    apply_typed(op_def<Steer>(), &attrs, std::span(inputs, b.found_inf ? 3 : 2), std::span(&output, 1));
  }
}

// One for all shards: it is one step.
Tensor Optimizer::found_inf() const {
  const ShardState* first = nullptr;
  for (const ShardState& shard : shards_) {
    if (!shard.flat().grad) continue;
    if (!first) first = &shard;
    const Tensor &a = first->flat().found_inf, &b = shard.flat().found_inf;
    if (a.defined() != b.defined() || (a && a.id() != b.id()))
      fail<ConfigError>("[", name_, "] units '", path_label(first->unit->name()), "' and '", path_label(shard.unit->name()),
                        "' were not clipped together: with a loss scaler, give all that an optimizer steps to one "
                        "clip_grad_norm()");
  }
  return first ? first->flat().found_inf : Tensor();
}

// The host's bias corrections assume that no step was skipped.
Tensor Optimizer::count_applied(const Tensor& scalars, const Tensor& found_inf) {
  if (Recording* r = Recording::current()) r->leaf(applied_, name_ + ".applied_steps");
  const Tensor inputs[] = {applied_, scalars, found_inf};
  const OutputSpec outputs[] = {{.type = scalars.type()}, {.type = applied_.type(), .into = applied_}};
  return apply_typed(op_def<CountAdamW>(), nullptr, std::span(inputs, found_inf ? 3 : 2), outputs)[0];
}

void Optimizer::set_steps(int64_t steps) {
  check<ConfigError>(steps >= 0, "[", name_, "] ", steps, " steps");
  *steps_ = steps;
  if (applied_) set_applied_steps(steps);
}

std::optional<int64_t> Optimizer::applied_steps() const {
  if (!applied_) return std::nullopt;
  return applied_.device().is_meta() ? *steps_ : applied_.item<int64_t>();
}

void Optimizer::set_applied_steps(int64_t steps) {
  if (shards_.empty()) return;
  const Device device = shards_[0].flat().shard.device();
  if (!applied_) applied_ = Tensor::empty({kI64, {}, {}}, device);
  if (!device.is_meta()) transfer(device, applied_.view().data, Device::cpu(), &steps, sizeof steps);
}

void Optimizer::update_all(std::span<ShardState* const> shards, const Tensor& scalars) {
  for (ShardState* shard : shards) {
    const PathScope path(shard->unit->name());
    name_leaves(*shard);
    update(*shard, scalars);
  }
}

void Optimizer::name_leaves(const ShardState& shard) const {
  Recording* r = Recording::current();
  if (!r) return;
  const FlatBuffer& b = shard.flat();
  r->leaf(b.shard, b.name);
  r->leaf(b.grad, "gradient of " + b.name);
  for (size_t i = 0; i < shard.state.size(); ++i) {
    const Tensor& state = shard.state[i];
    const bool offloaded = state.storage()->where() == MemoryKind::host && kernels::is_for_gpu(state.device());
    r->leaf(state, str(name_, ".", shard.names[i], " of ", b.name, offloaded ? " in the host's memory" : ""));
  }
  r->leaf(shard.segments, name_ + ".segments of " + b.name);
}

void Optimizer::zero_grad() {
  for (const auto& unit : units_) unit->zero_grad();
}

namespace detail {

void expect_valid(const std::string& who, std::initializer_list<Hyperparameter> all) {
  for (const auto& [name, value, is_decay] : all)
    check<ConfigError>(value >= 0 && std::isfinite(value) && !(is_decay && value >= 1), "[", who, "] ", name, " is ", value, ": it is finite, at least 0",
                       is_decay ? " and below 1" : "");
}

std::vector<ShardState> flat_shards(const std::string& who, std::span<const nn::Parameter> parameters) {
  std::vector<ShardState> shards;
  for (const auto& unit : nn::trainable_units(who, parameters)) {
    for (size_t b = 0; b < unit->buffers().size(); ++b) {
      const FlatBuffer& flat = unit->buffers()[b];
      if (!flat.has_slope()) continue;
      if (flat.dtype != kF32 && flat.dtype != kF64)
        fail<DTypeError>("[", who, "] unit '", path_label(unit->name()), "' has ", flat.dtype, " parameters; masters are f32 or ",
                         "f64");
      ShardState shard{unit, b, flat.leaves, {}, {}, {}, {}};
      for (const LocalPiece& piece : unit->pieces(flat))
        if (piece.runs.numel() > 0) shard.parts.push_back({piece, piece.shard_offset});
      std::ranges::sort(shard.parts, {}, &StatePart::at);  // kernels search them
      shards.push_back(std::move(shard));
    }
  }
  return shards;
}

Tensor segment_table(std::span<const kernels::Segment> segments, Device device) {
  const Shape shape{std::ssize(segments), kernels::Segment::kColumns};
  if (device.is_meta()) return Tensor::empty({kF64, shape, {}}, device);
  std::vector<double> values;
  for (const auto& [begin, end, lr, weight_decay] : segments) values.insert(values.end(), {begin, end, lr, weight_decay});
  return Tensor::from(values, shape).to(device);
}

Tensor zero_state(const Type& type, Device device, const StateOptions& options) {
  Type at_rest = type;
  at_rest.dtype = options.dtype.value_or(type.dtype);
  if (at_rest.dtype != type.dtype && !(at_rest.dtype == kBF16 && type.dtype == kF32))
    fail<DTypeError>("[optimizer] state in ", at_rest.dtype, " for masters in ", type.dtype, ": it has their dtype, or is bf16 for f32");
  const MemoryUse use(HeldFor::optimizer_state, "", "");
  const Tensor state = Tensor::empty(at_rest, device, options.offload ? MemoryKind::host : MemoryKind::normal);
  if (device.is_meta()) return state;
  SHEAF_ON_DEVICE(RankContext::current().stream(device), fill, state.view(), 0.0);
  return state;
}

std::vector<kernels::Segment> factors_of(const std::string& who, const Unit& unit, std::span<const nn::Parameter> parameters,
                                         const Factors& factors) {
  const auto factor = [&](const FactorRule& rule, const nn::Parameter& p, const char* what) {
    const double value = rule ? rule(p) : 1.0;
    check<ConfigError>(value >= 0 && std::isfinite(value), "[", who, "] parameter '", p.name(), "': the factor of its ", what, " is ", value,
                       ": it is finite and at least 0");
    return value;
  };
  std::vector<kernels::Segment> out(unit.leaves().size());
  for (const nn::Parameter& p : parameters)
    if (p.unit().get() == &unit)
      out[p.index()] = {0, 0, factor(factors.lr, p, "learning rate"), factor(factors.weight_decay, p, "weight decay")};
  return out;
}

kernels::Segment segment_of(const kernels::Segment& leaf, int64_t begin, int64_t count) {
  return {static_cast<double>(begin), static_cast<double>(begin + count), leaf.lr, leaf.weight_decay};
}

}  // namespace detail

View optional_input(const Execute& c, int index) { return c.num_inputs() > index ? c.input(index) : View{}; }

void apply_step(const OpDef& op, const void* attrs, ShardState& shard, const Tensor& scalars) {
  FlatBuffer& b = shard.flat();
  std::vector<Tensor> inputs{b.shard, b.grad};
  std::vector<OutputSpec> outputs{{.type = b.shard.type(), .into = b.shard}};
  for (const Tensor& s : shard.state) {
    inputs.push_back(s);
    outputs.push_back({.type = s.type(), .into = s});
  }
  inputs.push_back(shard.segments);
  inputs.push_back(scalars);
  if (b.found_inf && !b.grad_scale)
    fail<LifetimeError>("[", op.name, "] ", b.name, ": found_inf without grad_scale, which a loss scaler sets with it");
  if (b.grad_scale) inputs.push_back(b.grad_scale);
  if (b.found_inf) inputs.push_back(b.found_inf);
  apply_typed(op, attrs, inputs, outputs);
}

}  // namespace sheaf::optim
