#include "sheaf/nn/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/interned.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/optimizer.h"

namespace sheaf::optim {
namespace {

using namespace kernels::cpu;  // the order of the scalars

// Those of AdamW, of the momentum and of the step, one after another.
constexpr int kOfMomentum = kAdamWScalars, kOfStep = kOfMomentum + int{kSgdScalars};

constexpr size_t kMatricesOfBundle = 48;  // a node has at most 64 inputs

// [Note: parts] Parameters of one kind are chosen from a flat shard: the state has them alone, side by side. A table says
// for each piece where it starts in the shard and in the state, and its elements.
struct PartsAttrs {
  const std::vector<int64_t>* parts;
  int64_t nesterov = 0;
};

View part_of(const View& v, int64_t begin, int64_t count) {
  return View::dense(v.as<char>() + begin * static_cast<int64_t>(size_of(v.dtype)), v.dtype, {count});
}

// f(where in the shard, where in the state, elements, the segment's row)
template <class F>
void for_each_part(const PartsAttrs& a, const View& segments, F&& f) {
  const std::vector<int64_t>& table = *a.parts;
  for (size_t i = 0; i < table.size(); i += 3) {
    const View segment = View::dense(part_of(segments, static_cast<int64_t>(i), 3).data, kI64, {1, 3});
    f(table[i], table[i + 1], table[i + 2], segment);
  }
}

// gradient, momentum, segments, scalars [, clip scale] -> direction, momentum in place: SGD's step from 0 with rate -1.
struct MomentumStep {
  static constexpr const char* kName = "momentum";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = PartsAttrs;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View scalars = part_of(c.input(3), kOfMomentum, kSgdScalars), clip = detail::optional_input(c, 4);
    SHEAF_ON_DEVICE(stream, fill, c.output(0), 0.0);
    for_each_part(a, c.input(2), [&](int64_t from, int64_t at, int64_t n, const View& segment) {
      SHEAF_ON_DEVICE(stream, sgd, part_of(c.output(0), at, n), part_of(c.input(0), from, n), part_of(c.output(1), at, n),
                      segment, scalars, a.nesterov != 0, clip);
    });
  }
  static void describe(const Attrs& a, std::string& out) { out += a.nesterov ? "nesterov" : ""; }
};

// parameters, direction, segments, scalars -> parameters, in place.
struct MuonStep {
  static constexpr const char* kName = "muon";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = PartsAttrs;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View scalars = part_of(c.input(3), kOfStep, kSgdScalars);
    for_each_part(a, c.input(2), [&](int64_t to, int64_t at, int64_t n, const View& segment) {
      SHEAF_ON_DEVICE(stream, sgd, part_of(c.output(0), to, n), part_of(c.input(1), at, n), View{}, segment, scalars, false,
                      View{});
    });
  }
};

// parameters, gradient, m, v, segments, scalars [, clip scale] -> parameters, m, v, in place.
struct AdamWOfParts {
  static constexpr const char* kName = "adamw";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = PartsAttrs;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View scalars = part_of(c.input(5), 0, kAdamWScalars), clip = detail::optional_input(c, 6);
    for_each_part(a, c.input(4), [&](int64_t to, int64_t at, int64_t n, const View& segment) {
      SHEAF_ON_DEVICE(stream, adamw, part_of(c.output(0), to, n), part_of(c.input(1), to, n), part_of(c.output(1), at, n),
                      part_of(c.output(2), at, n), segment, scalars, clip);
    });
  }
};

// What owners hold, [n] -> the same, and in it each matrix [1, M, N]: rows of a cut that has one.
struct Matrices {
  static constexpr const char* kName = "matrices";
  using Attrs = NoAttrs;
};

// Matrices, in any order of memory -> what owners hold, [n].
struct Flatten {
  static constexpr const char* kName = "flatten";
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    const Stream stream = c.stream();
    int64_t at = 0;
    for (int i = 0; i < c.num_inputs(); ++i) {
      const View x = c.input(i);
      const View to = part_of(c.output(0), at, x.numel());
      if (x.numel() > 0) SHEAF_ON_DEVICE(stream, copy, x, View::dense(to.data, x.dtype, x.shape));
      at += x.numel();
    }
  }
};

// The axis that cuts the masters of a buffer, or that it is replicated along; -1 without a mesh.
int axis_of(const Unit& unit, const FlatBuffer& b) {
  const LeafSpec& leaf = unit.leaves()[b.leaves[0]];
  const int tensor_axis = unit.cut_axis(b.leaves[0]);
  if (tensor_axis >= 0 && unit.mesh()->size(tensor_axis) > 1)
    fail<ConfigError>("[muon] '", leaf.name, "' ", leaf.shape, " is cut over tensor axis '", unit.mesh()->name(tensor_axis),
                      "': Muon takes parameters that are whole there; sharding over '", unit.mesh()->name(unit.axis()),
                      "' and replicas go with it, or use AdamW");
  const Layout& layout = b.shard.layout();
  int axis = -1;
  for (int a = 0; a < layout.num_axes(); ++a) {
    if (a == tensor_axis || !layout[a].is_shard()) continue;
    if (axis >= 0 || !(layout[a].map().is_flat() || b.cut))
      fail<ConfigError>("[muon] unit '", path_label(unit.name()), "' is ", b.shard.type(), ": Muon takes masters that one axis ",
                        "of the mesh cuts, flat: no secondary shards");
    axis = a;
  }
  return axis >= 0 || !unit.mesh() ? axis : unit.axis();
}

// How the masters' cut cuts these parameters side by side. A tensor axis of one rank cuts nothing.
Layout layout_at_rest(const Unit& unit, const FlatBuffer& b, int axis,
                      const std::vector<std::pair<int64_t, int64_t>>& begin_and_size) {
  Layout layout = b.shard.layout();
  if (b.cut) layout[unit.cut_axis(b.leaves[0])] = Placement::invariant();
  if (axis < 0 || !layout[axis].is_shard()) return layout;
  const int ranks = layout.mesh()->size(axis);
  std::vector<int64_t> sizes;
  for (int r = 0; r < ranks; ++r) {
    const Interval mine = layout[axis].map().owned(r, ranks, b.shard.shape());
    int64_t own = 0;
    for (const auto& [begin, size] : begin_and_size)
      own += std::max<int64_t>(std::min(begin + size, mine.end) - std::max(begin, mine.begin), 0);
    sizes.push_back(own);
  }
  layout[axis] = Placement::shard(OwnershipMap::uneven(0, sizes));
  return layout;
}

// Multiplications of an iteration, the same for all but a factor.
int64_t cost(const Muon::Matrix& m) {
  int64_t sum = 0;
  for (const int64_t cols : m.columns) {
    const int64_t less = std::min(m.rows, cols), more = std::max(m.rows, cols);
    sum += less * less * (2 * more + less);
  }
  return sum;
}

// The matrices of a parameter, in its order of memory: parts of its rows are one after another, parts of its columns not.
void append_matrices(const nn::Parameter& p, std::vector<Muon::Matrix>& out) {
  if (p.shape().rank() != 2)
    fail<ConfigError>("[muon] '", p.name(), "' ", p.shape(), ": what is orthogonalised has two dimensions ",
                      "(MuonOptions::matrices)");
  const int64_t rows = p.shape()[0], cols = p.shape()[1];
  const bool parts = p.cut() && p.cut()->is_parts();
  const std::vector<int64_t> sizes = parts ? p.cut()->sizes() : std::vector<int64_t>{rows};
  if (parts && p.cut()->dim() == 1) return out.push_back({p.index(), rows, cols, sizes});
  for (const int64_t size : sizes)
    if (size > 0) out.push_back({p.index(), size, cols, {cols}});
}

double factor(MuonScale scale, int64_t rows, int64_t cols) {
  const auto m = static_cast<double>(rows), n = static_cast<double>(cols);
  return scale == MuonScale::match_rms ? 0.2 * std::sqrt(std::max(m, n)) : std::sqrt(std::max(1.0, m / n));
}

}  // namespace

bool hidden_matrices(const nn::Parameter& p) { return p.shape().rank() == 2 && !p.table(); }

Muon::Muon(std::span<const nn::Parameter> parameters, const MuonOptions& options) : Optimizer("muon"), options_(options) {
  check<ConfigError>(options.momentum >= 0 && options.momentum < 1, "[muon] momentum is ", options.momentum, ", not in [0, 1)");
  check<ConfigError>(options.lr > 0, "[muon] lr is ", options.lr, ": AdamW's follows it in the ratio of the two, so it is ",
                     "positive");
  check<ConfigError>(options.orthogonalize.steps > 0, "[muon] ", options.orthogonalize.steps,
                     " Newton-Schulz steps: at least one");
  for (const ShardState& all : detail::flat_shards("muon", parameters)) {
    const FlatBuffer& b = all.flat();
    axis_of(*all.unit, b);  // refuses before anything is made
    std::vector<const nn::Parameter*> of_leaf(all.unit->leaves().size());
    for (const nn::Parameter& p : parameters)
      if (p.unit() == all.unit) of_leaf[p.index()] = &p;
    const std::vector<bool> decays = detail::chosen(*all.unit, parameters, options.decays),
                            adamw_decays = detail::chosen(*all.unit, parameters, options.adamw.decays);
    std::vector<Matrix> matrices;
    std::vector<int> leaves, others;
    for (const int leaf : all.leaves) {
      const nn::Parameter& p = *of_leaf[leaf];
      if (p.numel() == 0 || !options.matrices(p)) {
        others.push_back(leaf);
        continue;
      }
      std::vector<Matrix> of_this;
      append_matrices(p, of_this);
      if (const size_t parts = std::max(of_this.size(), p.cut() && p.cut()->is_parts() ? p.cut()->sizes().size() : 0);
          parts > kMatricesOfBundle)
        fail<ConfigError>("[muon] '", p.name(), "' ", p.shape(), " has ", parts, " parts; at most ", kMatricesOfBundle);
      if (!leaves.empty() && matrices.size() + of_this.size() > kMatricesOfBundle)
        add_shard(all, std::exchange(matrices, {}), std::exchange(leaves, {}), decays);
      leaves.push_back(leaf);
      matrices.insert(matrices.end(), of_this.begin(), of_this.end());
    }
    if (!leaves.empty()) add_shard(all, std::move(matrices), std::move(leaves), decays);
    if (!others.empty()) add_shard(all, {}, std::move(others), adamw_decays);
  }
  choose_owners();
}

void Muon::add_shard(const ShardState& all, std::vector<Matrix> matrices, std::vector<int> leaves,
                     const std::vector<bool>& decays) {
  const FlatBuffer& b = all.flat();
  Bundle bundle;
  bundle.matrices = std::move(matrices);
  bundle.axis = axis_of(*all.unit, b);
  std::vector<std::pair<int64_t, int64_t>> begin_and_size;
  int64_t total = 0;
  for (size_t i = 0; i < b.leaves.size(); ++i) {
    if (std::ranges::find(leaves, b.leaves[i]) == leaves.end()) continue;
    begin_and_size.emplace_back(b.layout.offsets[i], all.unit->leaves()[b.leaves[i]].shape.numel());
    total += begin_and_size.back().second;
  }
  bundle.at_rest = layout_at_rest(*all.unit, b, bundle.axis, begin_and_size);
  ShardState shard{all.unit, all.buffer, std::move(leaves), {}, {}, {}, {}};
  std::vector<int64_t> parts, segments;
  int64_t at = 0;
  for (const auto& [piece, from] : all.parts) {
    if (std::ranges::find(shard.leaves, piece.leaf) == shard.leaves.end()) continue;
    const int64_t n = piece.runs.numel();
    shard.parts.push_back({piece, at});
    parts.insert(parts.end(), {from, at, n});
    segments.insert(segments.end(), {0, n, decays[piece.leaf]});
    at += n;
  }
  bundle.parts = interned(parts);
  shard.segments = detail::segment_table(segments, b.shard.device());
  shard.names = bundle.matrices.empty() ? std::vector<std::string>{"m", "v"} : std::vector<std::string>{"momentum"};
  const DeviceScope device(b.shard.device());
  for (size_t s = 0; s < shard.names.size(); ++s) shard.state.push_back(full_of({b.dtype, {total}, bundle.at_rest}, 0.0));
  shards().push_back(std::move(shard));
  bundles_.push_back(std::move(bundle));
}

// The costliest first, to who has the least to do; of equals in their order. See [Note: matrices on one rank].
void Muon::choose_owners() {
  std::vector<std::pair<Matrix*, const Bundle*>> all;
  for (Bundle& bundle : bundles_)
    for (Matrix& m : bundle.matrices) all.emplace_back(&m, &bundle);
  std::ranges::stable_sort(all, std::greater<>(), [](const auto& entry) { return cost(*entry.first); });
  std::map<std::pair<const MeshSpec*, int>, std::vector<int64_t>> loads;
  for (const auto& [m, bundle] : all) {
    const MeshSpec* mesh = bundle->at_rest.mesh();
    if (!mesh) continue;
    std::vector<int64_t>& load = loads[{mesh, bundle->axis}];
    load.resize(static_cast<size_t>(mesh->size(bundle->axis)));
    const auto least = std::ranges::min_element(load);
    *least += cost(*m);
    m->owner = static_cast<int>(least - load.begin());
  }
  for (Bundle& bundle : bundles_) {
    bundle.owned = bundle.at_rest;
    if (bundle.matrices.empty() || bundle.axis < 0) continue;
    std::vector<int64_t> sizes;
    std::vector<int> owners;
    for (const Matrix& m : bundle.matrices) sizes.push_back(m.rows * m.cols), owners.push_back(m.owner);
    bundle.owned[bundle.axis] = Placement::shard(OwnershipMap::by_owner(0, sizes, owners));
  }
}

std::vector<double> Muon::scalars(const StepOptions& step_options, int64_t step) const {
  const double lr = step_options.lr.value_or(options_.lr);
  std::vector<double> s = detail::adamw_scalars(options_.adamw, lr * (options_.adamw.lr / options_.lr), step);
  const auto append = [&s](double rate, double momentum, double decay) {
    s.resize(s.size() + kSgdScalars, 1.0);
    double* sgd = &s[s.size() - kSgdScalars];
    sgd[kSgdLearningRate] = rate, sgd[kSgdMomentum] = momentum, sgd[kSgdWeightDecay] = decay;
  };
  append(-1.0, options_.momentum, 0.0);
  append(lr, 0.0, options_.weight_decay);
  return s;
}

void Muon::update(ShardState& shard, const Tensor& scalars, const Tensor& clip_scale) {
  const PartsAttrs attrs{bundles_[static_cast<size_t>(&shard - shards().data())].parts};
  detail::apply_step(op_def<AdamWOfParts>(), &attrs, shard, scalars, clip_scale);
}

void Muon::update_all(std::span<ShardState* const> work, const Tensor& scalars) {
  struct Direction {
    ShardState* shard;
    const Bundle* bundle;
    Tensor value;
  };
  std::vector<Direction> directions;
  for (ShardState* shard : work) {
    const PathScope path(shard->unit->name());
    const Bundle& bundle = bundles_[static_cast<size_t>(shard - shards().data())];
    name_leaves(*shard);
    if (bundle.matrices.empty()) update(*shard, scalars, shard->flat().grad_scale);
    else directions.push_back({shard, &bundle, redistribute(direction(*shard, bundle, scalars), bundle.owned)});
  }
  for (Direction& d : directions) d.value = orthogonal(*d.shard, *d.bundle, d.value);
  for (Direction& d : directions) {
    const PathScope path(d.shard->unit->name());
    d.value = redistribute(d.value, d.bundle->at_rest);
    const Tensor& param = d.shard->flat().shard;
    const Tensor inputs[] = {param, d.value, d.shard->segments, scalars};
    const OutputSpec spec{param.type(), param, -1, 0};
    const PartsAttrs attrs{d.bundle->parts};
    apply_typed(op_def<MuonStep>(), &attrs, inputs, std::span(&spec, 1));
    d.value = Tensor();
  }
}

// As the shard has it.
Tensor Muon::direction(ShardState& shard, const Bundle& bundle, const Tensor& scalars) const {
  const FlatBuffer& b = shard.flat();
  const Tensor& momentum = shard.state[0];
  std::vector<Tensor> inputs{b.grad, momentum, shard.segments, scalars};
  if (b.grad_scale) inputs.push_back(b.grad_scale);
  const OutputSpec specs[] = {{momentum.type(), {}, -1, 0}, {momentum.type(), momentum, -1, 0}};
  const PartsAttrs attrs{bundle.parts, options_.nesterov};
  const Tensor d = apply_typed(op_def<MomentumStep>(), &attrs, inputs, specs)[0];
  return options_.compute_dtype && *options_.compute_dtype != d.dtype() ? cast(d, *options_.compute_dtype) : d;
}

// As owners have it.
Tensor Muon::orthogonal(const ShardState& shard, const Bundle& bundle, const Tensor& directions) const {
  const Layout& owned = bundle.owned;
  const int me = bundle.axis < 0 ? 0 : RankContext::current().coordinate(owned.mesh(), bundle.axis);
  std::vector<OutputSpec> specs{{directions.type(), directions, -1, 0}};
  int64_t at = 0;
  for (const Matrix& m : bundle.matrices) {
    Type type{directions.dtype(), {1, m.rows, m.cols}, owned};
    if (owned.mesh()) {
      std::vector<int64_t> rows(static_cast<size_t>(owned.mesh()->size(bundle.axis)), 0);
      rows[static_cast<size_t>(m.owner)] = 1;
      type.layout[bundle.axis] = Placement::shard(OwnershipMap::uneven(0, rows));
    }
    specs.push_back({type, {}, 0, at});
    if (m.owner == me) at += m.rows * m.cols * static_cast<int64_t>(size_of(type.dtype));
  }
  Tensors views;
  {
    const PathScope path(shard.unit->name());
    views = apply_typed(op_def<Matrices>(), nullptr, std::span(&directions, 1), specs);
  }
  std::vector<Tensor> results;
  for (size_t i = 0; i < bundle.matrices.size(); ++i) {
    const Matrix& m = bundle.matrices[i];
    const PathScope path(shard.unit->leaves()[m.leaf].name);
    std::vector<Tensor> parts = split(views[i + 1], m.columns, 2);
    for (Tensor& x : parts) x = orthogonalize(x, options_.orthogonalize) * factor(options_.scale, m.rows, x.size(2));
    results.push_back(parts.size() == 1 ? parts[0] : concat(parts, 2));
  }
  const PathScope path(shard.unit->name());
  const OutputSpec spec{directions.type(), {}, -1, 0};
  return apply_typed(op_def<Flatten>(), nullptr, results, std::span(&spec, 1))[0];
}

}  // namespace sheaf::optim
