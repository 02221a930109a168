#include "sheaf/nn/optim/muon.h"

#include <algorithm>
#include <cmath>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/kernels/optimizer.h"
#include "sheaf/nn/optim/muon_ops.h"

namespace sheaf::optim {
namespace {

using namespace kernels::cpu;  // the order of the scalars

double factor(MuonScale scale, int64_t rows, int64_t cols) {
  const auto m = static_cast<double>(rows), n = static_cast<double>(cols);
  return scale == MuonScale::match_rms ? 0.2 * std::sqrt(std::max(m, n)) : std::sqrt(std::max(1.0, m / n));
}

Tensor apply_to(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, const Type& type) {
  const OutputSpec spec{.type = type};
  return apply_typed(op, attrs, inputs, std::span(&spec, 1))[0];
}

Type with_dtype(Type type, DType dtype) {
  type.dtype = dtype;
  return type;
}

}  // namespace

bool hidden_matrices(const nn::Parameter& p) { return p.shape().rank() == 2 && !p.table() && !p.bias(); }

Muon::Muon(std::span<const nn::Parameter> parameters, const MuonOptions& options) : Optimizer("muon", parameters), options_(options) {
  check<ConfigError>(options.momentum >= 0 && options.momentum < 1, "[muon] momentum is ", options.momentum, ", not in [0, 1)");
  check<ConfigError>(options.lr > 0, "[muon] lr is ", options.lr, ": AdamW's follows it in the ratio of the two, so it is ",
                     "positive");
  if (const auto& dtype = options.compute_dtype)
    check<ConfigError>(*dtype == kF32 || *dtype == kBF16 || *dtype == kF64, "[muon] products in ", *dtype, ": f32, bf16 and f64 have the "
                       "range for squares of small gradients");
  check<ConfigError>(options.orthogonalize.steps > 0, "[muon] ", options.orthogonalize.steps,
                     " Newton-Schulz steps: at least one");
  for (const ShardState& all : detail::flat_shards("muon", parameters)) {
    std::vector<const nn::Parameter*> of_leaf(all.unit->leaves().size());
    for (const nn::Parameter& p : parameters)
      if (p.unit() == all.unit) of_leaf[p.index()] = &p;
    std::vector<Matrix> matrices;
    std::vector<int> leaves, others;
    for (const int leaf : all.leaves) {
      const nn::Parameter& p = *of_leaf[leaf];
      if (p.numel() == 0 || !options.matrices(p)) {
        others.push_back(leaf);
        continue;
      }
      matrices.push_back(matrix_of(p));
      leaves.push_back(leaf);
    }
    if (!leaves.empty())
      add_shard(all, std::move(matrices), std::move(leaves), detail::factors_of("muon", *all.unit, parameters, options.factors));
    if (!others.empty())
      add_shard(all, {}, std::move(others), detail::factors_of("muon", *all.unit, parameters, options.adamw.factors));
  }
  choose_owners(bundles_);
}

void Muon::add_shard(const ShardState& all, std::vector<Matrix> matrices, std::vector<int> leaves,
                     std::span<const kernels::Segment> of_leaf) {
  ShardState shard{all.unit, all.buffer, std::move(leaves), {}, {}, {}, {}};
  bundles_.push_back(make_bundle(all, std::move(matrices), shard));
  Bundle& bundle = bundles_.back();
  std::vector<kernels::Segment> segments;
  for (const StatePart& part : shard.parts)
    segments.push_back(detail::segment_of(of_leaf[part.piece.leaf], 0, part.piece.runs.numel()));
  const Device where = all.flat().shard.device();
  shard.segments = detail::segment_table(segments, where);
  if (!bundle.matrices.empty()) {  // nor does the momentum decay: its scalars say so
    const bool alike = std::ranges::all_of(segments, [](const kernels::Segment& s) { return s.lr == 1; });
    for (kernels::Segment& s : segments) s.lr = 1;
    bundle.whole = alike ? shard.segments : detail::segment_table(segments, where);
  }
  shard.names = bundle.matrices.empty() ? std::vector<std::string>{"m", "v"} : std::vector<std::string>{"momentum"};
  const StateOptions& state = bundle.matrices.empty() ? options_.adamw.state : options_.state;
  for (size_t s = 0; s < shard.names.size(); ++s) shard.state.push_back(detail::zero_state(bundle.at_rest, where, state));
  shards().push_back(std::move(shard));
}

std::vector<double> Muon::scalars(const StepOptions& step_options, int64_t step) const {
  const double lr = step_options.lr.value_or(options_.lr);
  std::vector<double> s = detail::adamw_scalars(options_.adamw, lr * (options_.adamw.lr / options_.lr), step);
  const auto append = [&s, step](double rate, double momentum, double decay) {
    s.resize(s.size() + kSgdScalars, 1.0);
    double* sgd = &s[s.size() - kSgdScalars];
    sgd[kSgdLearningRate] = rate, sgd[kSgdMomentum] = momentum, sgd[kSgdWeightDecay] = decay;
    sgd[kSgdStep] = static_cast<double>(step);
  };
  append(-1.0, options_.momentum, 0.0);
  append(lr, 0.0, options_.weight_decay);
  return s;
}

const Bundle& Muon::bundle_of(const ShardState& shard) const {
  return bundles_[static_cast<size_t>(&shard - shards().data())];
}

void Muon::update(ShardState& shard, const Tensor& scalars) {
  const MuonOps::Parts attrs{bundle_of(shard).parts};
  apply_step(MuonOps::adamw(), &attrs, shard, scalars);
}

void Muon::update_all(std::span<ShardState* const> work, const Tensor& scalars) {
  std::vector<Tensor> held(bundles_.size());  // by owners
  std::vector<int> bundles;
  for (ShardState* shard : work) {
    const PathScope path(shard->unit->name());
    const Bundle& bundle = bundle_of(*shard);
    name_leaves(*shard);
    if (bundle.matrices.empty()) {
      update(*shard, scalars);
      continue;
    }
    bundles.push_back(static_cast<int>(&bundle - bundles_.data()));
    held[static_cast<size_t>(bundles.back())] = redistribute(direction(*shard, bundle, scalars), bundle.owned.layout);
  }
  const auto [batches, is_new] = batches_.try_emplace(bundles);
  if (is_new) batches->second = batches_of(bundles_, bundles);
  for (const Batch& batch : batches->second) orthogonalize_batch(batch, held);
  for (const int i : bundles) {
    const auto at = static_cast<size_t>(i);
    move(shards()[at], bundles_[at], std::exchange(held[at], Tensor()), scalars);
  }
}

// In the order of the shard or, with a secondary axis, of its group's.
Tensor Muon::direction(ShardState& shard, const Bundle& bundle, const Tensor& scalars) const {
  const FlatBuffer& b = shard.flat();
  const Tensor& momentum = shard.state[0];
  if (Recording* r = Recording::current()) r->leaf(bundle.whole, "muon.whole segments of " + b.name);
  std::vector<Tensor> inputs{b.grad, momentum, bundle.whole, scalars};
  if (b.grad_scale) inputs.push_back(b.grad_scale);
  if (b.found_inf) inputs.push_back(b.found_inf);
  const OutputSpec specs[] = {{.type = with_dtype(momentum.type(), b.dtype)}, {.type = momentum.type(), .into = momentum}};
  const MuonOps::Parts attrs{bundle.parts, options_.nesterov};
  Tensor d = apply_typed(MuonOps::momentum(), &attrs, inputs, specs)[0];
  if (options_.compute_dtype && *options_.compute_dtype != d.dtype()) d = cast(d, *options_.compute_dtype);
  if (!bundle.slices) return d;
  d = redistribute(d, bundle.joined.layout.with(bundle.axis, d.layout()[bundle.axis]));
  const MuonOps::Slices slices{bundle.slices};
  return apply_to(MuonOps::join(), &slices, std::span(&d, 1), with_dtype(bundle.joined, d.dtype()));
}

void Muon::move(ShardState& shard, const Bundle& bundle, Tensor d, const Tensor& scalars) const {
  const PathScope path(shard.unit->name());
  d = redistribute(d, bundle.joined.layout);
  const Tensor& param = shard.flat().shard;
  std::vector<Tensor> inputs{param, d, shard.segments, scalars};
  if (const Tensor& found_inf = shard.flat().found_inf) inputs.push_back(found_inf);
  const OutputSpec spec{.type = param.type(), .into = param};
  const MuonOps::Parts attrs{bundle.parts, 0, bundle.before};
  apply_typed(MuonOps::step(), &attrs, inputs, std::span(&spec, 1));
}

// In place.
void Muon::orthogonalize_batch(const Batch& batch, std::vector<Tensor>& held) const {
  const std::string name = str("matrices ", batch.rows, " x ", batch.cols);
  const PathScope path(name);
  std::vector<Tensor> inputs;
  std::vector<OutputSpec> outputs;
  for (const int i : batch.bundles) {
    inputs.push_back(held[static_cast<size_t>(i)]);
    outputs.push_back({.type = inputs.back().type(), .into = inputs.back()});
  }
  const DType dtype = inputs[0].dtype();
  const MuonOps::Own own{batch.own};
  const MuonOps::Blocks blocks{batch.cut.value_or(OwnershipMap())};
  Tensor x = apply_to(MuonOps::stack(), &own, inputs, with_dtype(batch.stacked, dtype));
  x = redistribute(x, batch.shared.layout);
  if (batch.cut) x = apply_to(MuonOps::assemble(), &blocks, std::span(&x, 1), with_dtype(batch.matrices, dtype));
  x = orthogonalize(x, options_.orthogonalize) * factor(options_.scale, batch.rows, batch.cols);
  if (batch.cut) x = apply_to(MuonOps::take_apart(), &blocks, std::span(&x, 1), with_dtype(batch.shared, dtype));
  inputs.insert(inputs.begin(), redistribute(x, batch.stacked.layout));
  const Tensors done = apply_typed(MuonOps::unstack(), &own, inputs, outputs);
  for (size_t i = 0; i < batch.bundles.size(); ++i) held[static_cast<size_t>(batch.bundles[i])] = done[i];
}

}  // namespace sheaf::optim
