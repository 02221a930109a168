#include "sheaf/nn/optim/optimizer.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf::optim {
namespace {

// Where this rank's pieces of the buffer's parameters lie in its shard, and which of them decay.
Tensor segments_of(const Unit& unit, const FlatBuffer& b, const std::vector<bool>& decays) {
  std::vector<int64_t> values;
  std::vector<LocalPiece> pieces = unit.pieces(b);
  std::ranges::sort(pieces, {}, &LocalPiece::shard_offset);  // kernels search them
  for (const LocalPiece& piece : pieces) {
    if (piece.runs.numel() == 0) continue;
    values.push_back(piece.shard_offset);
    values.push_back(piece.shard_offset + piece.runs.numel());
    values.push_back(decays[piece.leaf]);
  }
  const Shape shape{static_cast<int64_t>(values.size()) / 3, 3};
  if (b.shard.device().is_meta()) return Tensor::empty({kI64, shape, {}}, Device::meta());
  return Tensor::from(values, shape).to(b.shard.device());
}

}  // namespace

bool decays_matrices(const nn::Parameter& p) { return p.shape().rank() >= 2; }

Optimizer::Optimizer(std::string name, std::span<const nn::Parameter> parameters, const DecayRule& decays, int states)
    : name_(std::move(name)) {
  for (const auto& unit : nn::trainable_units(name_, parameters)) {
    std::vector<bool> decayed(unit->leaves().size(), false);
    for (const nn::Parameter& p : parameters)
      if (p.unit() == unit) decayed[p.index()] = decays(p);
    for (size_t b = 0; b < unit->buffers().size(); ++b) {
      const FlatBuffer& flat = unit->buffers()[b];
      if (!flat.trainable) continue;
      if (flat.dtype != kF32 && flat.dtype != kF64)
        fail<DTypeError>("[", name_, "] unit '", path_label(unit->name()), "' has ", flat.dtype, " parameters; masters are f32 or f64");
      ShardState shard{unit, b, segments_of(*unit, flat, decayed), {}};
      for (int s = 0; s < states; ++s) shard.state.push_back(full_like(flat.shard, 0.0));
      shards_.push_back(std::move(shard));
    }
  }
}

void Optimizer::step(const StepOptions& options) {
  if (shards_.empty()) return;
  const PhaseScope phase(Phase::update);
  ++steps_;
  std::vector<std::shared_ptr<Unit>> units;
  for (const ShardState& shard : shards_) units.push_back(shard.unit);
  nn::reduce_waiting(units);
  for (const auto& unit : units) unit->close_for_change();
  Tensor scalars = options.scalars;
  if (!scalars) {
    const std::vector<double> values = this->scalars(options, steps_);
    const Shape shape{static_cast<int64_t>(values.size())};
    const Device device = shards_[0].flat().shard.device();
    scalars = device.is_meta() ? Tensor::empty({kF64, shape, {}}, device) : Tensor::from(values, shape).to(device);
  }
  Recording* r = Recording::current();
  if (r) r->leaf(scalars, name_ + ".scalars");
  const std::vector<std::string> names = state_names();
  for (ShardState& shard : shards_) {
    FlatBuffer& b = shard.flat();
    if (!b.grad) continue;
    const PathScope path(shard.unit->name());
    if (r) {  // names for the tape, of what this recording has not met
      r->leaf(b.shard, b.name);
      r->leaf(b.grad, "gradient of " + b.name);
      for (size_t i = 0; i < shard.state.size(); ++i) r->leaf(shard.state[i], str(name_, ".", names[i], " of ", b.name));
      r->leaf(shard.segments, name_ + ".segments of " + b.name);
    }
    update(shard, scalars, b.grad_scale);
  }
}

void Optimizer::zero_grad() {
  for (ShardState& shard : shards_) shard.unit->zero_grad();
}

namespace detail {

View optional_input(const Execute& c, int index) { return c.num_inputs() > index ? c.input(index) : View{}; }

void apply_step(const OpDef& op, const void* attrs, ShardState& shard, const Tensor& scalars, const Tensor& clip_scale) {
  FlatBuffer& b = shard.flat();
  std::vector<Tensor> inputs{b.shard, b.grad};
  std::vector<OutputSpec> outputs{{b.shard.type(), b.shard, -1, 0}};
  for (const Tensor& s : shard.state) {
    inputs.push_back(s);
    outputs.push_back({s.type(), s, -1, 0});
  }
  inputs.push_back(shard.segments);
  inputs.push_back(scalars);
  if (clip_scale) inputs.push_back(clip_scale);
  apply_typed(op, attrs, inputs, outputs);
}

}  // namespace detail
}  // namespace sheaf::optim
