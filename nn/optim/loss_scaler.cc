#include "sheaf/nn/optim/loss_scaler.h"

#include <cmath>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/loss_scale.h"

namespace sheaf::optim {
namespace {

using namespace kernels;  // the order of the counts

// found_inf of one clip_grad_norm(), found_inf so far -> that, in place.
struct NoteOverflow {
  static constexpr const char* kName = "note_overflow";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) { SHEAF_ON_DEVICE(c.stream(), add_into, c.output(0), c.input(0)); }
};

// found_inf, factor, counts -> factor, counts, in place; found_inf becomes 0.
struct UpdateLossScale {
  static constexpr const char* kName = "update_loss_scale";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = LossScaleRule;
  static void execute(const Attrs& rule, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), update_loss_scale, c.input(0), rule, c.output(0), c.output(1));
    SHEAF_ON_DEVICE(c.stream(), fill, c.output(2), 0.0);
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str("growth ", a.growth, " after ", a.growth_interval, ", backoff ", a.backoff);
  }
};

// Invariant is compatible only with Invariant: the factor, the same on all ranks, may be placed as either.
Tensor placed_beside(const Tensor& factor, const Layout& layout) {
  Layout placed = layout;
  bool invariant = false;
  for (int a = 0; a < placed.num_axes(); ++a) {
    if (placed[a].is_invariant()) invariant = true;
    else placed[a] = Placement::replicate();
  }
  return invariant ? redistribute(factor, placed) : factor;
}

}  // namespace

LossScaler::LossScaler(Device device, const LossScalerOptions& options) : options_(options) {
  const auto in_range = [](const char* what, double value, bool is) {
    check<ConfigError>(is && std::isfinite(value), "[loss_scaler] ", what, " is ", value);
  };
  in_range("minimum, which is positive,", options.minimum, options.minimum >= 0x1p-64);
  in_range("maximum, between minimum and 2^64,", options.maximum,
           options.maximum >= options.minimum && options.maximum <= 0x1p64);
  in_range("initial, between minimum and maximum,", options.initial,
           options.initial >= options.minimum && options.initial <= options.maximum);
  in_range("growth_factor, at least 1,", options.growth_factor, options.growth_factor >= 1);
  in_range("backoff_factor, in (0, 1],", options.backoff_factor, options.backoff_factor > 0 && options.backoff_factor <= 1);
  in_range("growth_interval, at least 1,", static_cast<double>(options.growth_interval), options.growth_interval >= 1);
  factor_ = Tensor::empty({kF32, {}, {}}, device);
  counts_ = Tensor::empty({kI64, {kLossScaleCounts}, {}}, device);
  found_inf_ = Tensor::empty({kI32, {}, {}}, device);
  if (!device.is_meta()) store_into(found_inf_, zeros({}, kI32).to(device));
  set_state({.factor = options.initial});
}

void LossScaler::name_leaves() const {
  Recording* r = Recording::current();
  if (!r) return;
  r->leaf(factor_, "loss_scaler.factor");
  r->leaf(counts_, "loss_scaler.counts");
  r->leaf(found_inf_, "loss_scaler.found_inf");
}

Tensor LossScaler::scale(const Tensor& loss) const {
  if (loss.numel() != 1) fail<ShapeError>("[loss_scaler] a loss is a scalar, not ", loss.type());
  name_leaves();
  const Tensor factor = loss.dtype() == kF32 ? factor_ : cast(factor_, loss.dtype());
  return mul(loss, placed_beside(factor, loss.layout()));
}

void LossScaler::found(const Tensor& found_inf) {
  name_leaves();
  const Tensor inputs[] = {found_inf, found_inf_};
  const OutputSpec output{.type = found_inf_.type(), .into = found_inf_};
  apply_typed(op_def<NoteOverflow>(), nullptr, inputs, std::span(&output, 1));
  note_looked(true);
}

void LossScaler::note_looked(bool has) {
  *has_looked_ = has;
  if (Recording* r = Recording::current()) r->on_rerun([looked = has_looked_, has] { *looked = has; });
}

void LossScaler::update() {
  if (!*has_looked_)
    fail<LifetimeError>("[loss_scaler] nobody has looked for infinity in the gradients since the last update(): call "
                        "clip_grad_norm(model, max_norm, scaler) before optimizer.step()");
  const PhaseScope phase(Phase::update);
  name_leaves();
  const LossScaleRule rule{options_.growth_factor, options_.backoff_factor, options_.minimum, options_.maximum,
                           options_.growth_interval};
  const Tensor inputs[] = {found_inf_, factor_, counts_};
  const OutputSpec outputs[] = {{.type = factor_.type(), .into = factor_}, {.type = counts_.type(), .into = counts_},
                                {.type = found_inf_.type(), .into = found_inf_}};
  apply_typed(op_def<UpdateLossScale>(), &rule, inputs, outputs);
  note_looked(false);
}

LossScaler::State LossScaler::state() const {
  if (factor_.device().is_meta()) return {.factor = options_.initial};
  const std::vector<int64_t> counts = counts_.to_vector<int64_t>();
  return {factor_.item<double>(), counts[kGoodSteps], counts[kLostSteps], counts[kSkippedSteps]};
}

void LossScaler::set_state(const State& s) {
  check<ConfigError>(s.factor > 0 && std::isfinite(s.factor), "[loss_scaler] the factor is ", s.factor, ": it is finite and above 0");
  if (factor_.device().is_meta()) return;
  store_into(factor_, Tensor::scalar(s.factor).to(factor_.device()));
  store_into(counts_, Tensor::from(std::vector<int64_t>{s.good_steps, s.lost_steps, s.skipped_steps}, {kLossScaleCounts})
                          .to(factor_.device()));
}

}  // namespace sheaf::optim
