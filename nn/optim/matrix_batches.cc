#include "sheaf/nn/optim/matrix_batches.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "sheaf/core/interned.h"
#include "sheaf/core/rank_context.h"

namespace sheaf::optim {
namespace {

constexpr size_t kBundlesOfBatch = 48;        // a node has at most 64 inputs
constexpr int64_t kBatch = int64_t{1} << 24;  // elements that a rank orthogonalises at once, if these are several matrices

int64_t overlap(const Interval& a, const Interval& b) {
  return std::max<int64_t>(std::min(a.end, b.end) - std::max(a.begin, b.begin), 0);
}

int size_of_axis(const MeshSpec* mesh, int axis) { return mesh && axis >= 0 ? mesh->size(axis) : 1; }
int coordinate(const MeshSpec* mesh, int axis) {
  return mesh && axis >= 0 ? RankContext::current().coordinate(mesh, axis) : 0;
}

Shape block_of(const Shape& shape, const OwnershipMap& cut, int rank, int ranks) {
  Shape block = shape;
  block[cut.dim()] = cut.owned_size(rank, ranks, shape);
  return block;
}
int64_t largest_block(const Shape& shape, const OwnershipMap& cut, int ranks) {
  int64_t largest = 0;
  for (int r = 0; r < ranks; ++r) largest = std::max(largest, block_of(shape, cut, r, ranks).numel());
  return largest;
}

// The axis that shards masters already sharded by another.
int secondary_axis(const Unit& unit, const Layout& masters, int tensor_axis) {
  for (int a = 0; a < masters.num_axes(); ++a)
    if (a != unit.axis() && a != tensor_axis && a != unit.stage_axis() && masters[a].is_shard() && masters.mesh()->size(a) > 1) return a;
  return -1;
}

// Whole on every rank; for a stage, on the stage's ranks.
Layout whole_in(const MeshSpec* mesh, const Stage& stage) {
  Layout layout(mesh, Placement::invariant());
  if (stage.axis >= 0) layout[stage.axis] = Placement::on(stage.index);
  return layout;
}

// Some leaves of a flat buffer: their offsets in it, and their elements in each of its equal slices.
struct Chosen {
  std::vector<int> leaves;
  std::vector<Interval> where;
  int64_t slice;  // elements of one

  Chosen(const Unit& unit, const FlatBuffer& b, const std::vector<int>& which, int slices, int tensor_ranks)
      : slice(b.layout.total / slices) {
    for (size_t i = 0; i < b.leaves.size(); ++i) {
      if (std::ranges::find(which, b.leaves[i]) == which.end()) continue;
      const LeafSpec& leaf = unit.leaves()[b.leaves[i]];
      const int64_t size = b.cut ? largest_block(leaf.shape, *leaf.cut, tensor_ranks) : leaf.shape.numel();
      leaves.push_back(b.leaves[i]);
      where.push_back({b.layout.offsets[i], b.layout.offsets[i] + size});
    }
  }
  Interval bounds(int64_t i) const { return {i * slice, (i + 1) * slice}; }
  int64_t total() const { return held({0, INT64_MAX}, where.size()); }
  int64_t held(int64_t i) const { return held(bounds(i), where.size()); }
  int64_t held(const Interval& here, size_t first_leaves) const {
    int64_t n = 0;
    for (size_t i = 0; i < first_leaves; ++i) n += overlap(where[i], here);
    return n;
  }
  // The offset of element `from` of this leaf's part of slice i, among all chosen elements of the slice.
  int64_t position(int64_t i, int leaf, int64_t from) const {
    const auto nth = static_cast<size_t>(std::ranges::find(leaves, leaf) - leaves.begin());
    return held(bounds(i), nth) + from - std::max<int64_t>(where[nth].begin - bounds(i).begin, 0);
  }
};

}  // namespace

int64_t Matrix::cost() const {
  int64_t sum = 0;
  for (const MatrixPart& p : parts) {
    const int64_t less = std::min(p.rows, p.cols), more = std::max(p.rows, p.cols);
    sum += less * less * (2 * more + less);
  }
  return sum;
}

Matrix matrix_of(const nn::Parameter& p) {
  if (p.shape().rank() != 2)
    fail<ConfigError>("[muon] '", p.name(), "' ", p.shape(), ": what is orthogonalised has two dimensions ",
                      "(MuonOptions::matrices)");
  const int tensor_axis = p.cut_axis(), ranks = size_of_axis(p.unit()->mesh(), tensor_axis),
            rank = coordinate(p.unit()->mesh(), tensor_axis);
  const OwnershipMap cut = p.cut() && (p.cut()->is_parts() || tensor_axis >= 0) ? *p.cut() : OwnershipMap::even(0);
  const int dim = cut.dim();
  const int64_t columns = block_of(p.shape(), cut, rank, ranks)[1];
  Matrix m{.leaf = p.index(), .parts = {}, .room = largest_block(p.shape(), cut, ranks)};
  std::vector<int64_t> sizes = {p.shape()[dim]};
  if (cut.is_parts()) sizes = cut.sizes();
  else if (tensor_axis < 0 && !p.matrices().empty()) sizes = p.matrices();
  int64_t at = 0;  // rows, or columns, of the block
  for (const int64_t size : sizes) {
    Shape shape = p.shape();
    shape[dim] = size;
    if (size == 0) continue;
    const OwnershipMap own = cut.is_parts() ? OwnershipMap::even(dim, size / cut.granule()) : cut;
    m.parts.push_back({shape[0], shape[1], own, dim == 0 ? at * columns : at, columns});
    at += own.owned_size(rank, ranks, shape);
  }
  return m;
}

Bundle make_bundle(const ShardState& all, std::vector<Matrix> matrices, ShardState& shard) {
  const Unit& unit = *all.unit;
  const FlatBuffer& b = all.flat();
  const MeshSpec* mesh = unit.mesh();
  Bundle out;
  out.matrices = std::move(matrices);
  out.axis = mesh ? unit.axis() : -1;
  out.tensor_axis = b.cut ? unit.cut_axis(b.leaves[0]) : -1;
  if (size_of_axis(mesh, unit.stage_axis()) > 1) out.stage = {unit.stage_axis(), unit.stage()};
  const Layout& masters = b.shard.layout();
  const bool sharded = mesh && masters[out.axis].is_shard();
  const int secondary = secondary_axis(unit, masters, out.tensor_axis), tensor_ranks = size_of_axis(mesh, out.tensor_axis);
  const int ranks = sharded ? mesh->size(out.axis) : 1, groups = size_of_axis(mesh, secondary);
  const Chosen chosen(unit, b, shard.leaves, ranks * groups, tensor_ranks);
  const int first = (sharded ? coordinate(mesh, out.axis) : 0) * groups, mine = first + coordinate(mesh, secondary);

  std::vector<int64_t> parts, sizes, slices;
  for (const auto& [piece, from] : all.parts) {
    if (std::ranges::find(shard.leaves, piece.leaf) == shard.leaves.end()) continue;
    const int64_t at = chosen.position(mine, piece.leaf, from);
    shard.parts.push_back({piece, at});
    parts.insert(parts.end(), {from, at, piece.runs.numel()});
  }
  out.parts = interned(parts);
  for (int i = 0; i < ranks * groups; ++i) slices.push_back(chosen.held(i));
  for (auto slice = slices.begin(); slice != slices.end(); slice += groups)
    sizes.push_back(std::accumulate(slice, slice + groups, int64_t{0}));

  Layout layout = whole_in(mesh, out.stage);
  const Shape blocks = b.cut ? Shape{tensor_ranks} : Shape{};
  const int dim = blocks.rank();
  if (b.cut) layout[out.tensor_axis] = Placement::shard(0);
  if (sharded) layout[out.axis] = Placement::shard(OwnershipMap::uneven(dim, sizes));
  out.joined = {b.dtype, blocks, layout};
  out.joined.shape.push_back(chosen.total());
  out.at_rest = out.owned = out.joined;
  if (secondary >= 0) {
    out.at_rest.shape = blocks;
    out.at_rest.shape.push_back(ranks), out.at_rest.shape.push_back(groups * *std::ranges::max_element(slices));
    out.at_rest.layout[out.axis] = Placement::shard(dim), out.at_rest.layout[secondary] = Placement::shard(dim + 1);
    out.slices = interned(std::vector<int64_t>(slices.begin() + first, slices.begin() + first + groups));
    out.before = std::accumulate(slices.begin() + first, slices.begin() + mine, int64_t{0});
  }
  return out;
}

// Equally costly matrices keep their order.
void choose_owners(std::span<Bundle> bundles) {
  std::vector<std::pair<Matrix*, const Bundle*>> all;
  for (Bundle& bundle : bundles)
    for (Matrix& m : bundle.matrices) all.emplace_back(&m, &bundle);
  std::ranges::stable_sort(all, std::greater<>(), [](const auto& entry) { return entry.first->cost(); });
  std::map<std::tuple<const MeshSpec*, int, int>, std::vector<int64_t>> loads;
  for (const auto& [m, bundle] : all) {
    const MeshSpec* mesh = bundle->joined.layout.mesh();
    if (!mesh) continue;
    std::vector<int64_t>& load = loads[{mesh, bundle->axis, bundle->stage.index}];
    load.resize(static_cast<size_t>(mesh->size(bundle->axis)));
    const auto least = std::ranges::min_element(load);
    *least += m->cost();
    m->owner = static_cast<int>(least - load.begin());
  }
  for (Bundle& bundle : bundles) {
    if (bundle.matrices.empty() || bundle.axis < 0) continue;
    std::vector<int64_t> sizes;
    std::vector<int> owners;
    for (const Matrix& m : bundle.matrices) sizes.push_back(m.room), owners.push_back(m.owner);
    const int dim = bundle.joined.shape.rank() - 1;
    bundle.owned.layout[bundle.axis] = Placement::shard(OwnershipMap::by_owner(dim, sizes, owners));
  }
}

namespace {

struct Member {
  int bundle;
  const MatrixPart* part;
  int owner;
  int64_t begin;  // where its parameter begins in the owner's values
};

// Matrices that may be in the same batch.
struct Kind {
  const MeshSpec* mesh;
  int axis, tensor_axis;
  Stage stage;
  DType dtype;
  int64_t rows, cols;
  OwnershipMap cut;
  size_t wave;  // of bundles
  bool operator==(const Kind&) const = default;
};

Batch make_batch(const Kind& kind, const std::vector<Member>& members) {
  const auto k = static_cast<int64_t>(members.size());
  Batch out{.rows = kind.rows, .cols = kind.cols};
  const int me = coordinate(kind.mesh, kind.axis), tensor_ranks = size_of_axis(kind.mesh, kind.tensor_axis);
  const Shape shape{kind.rows, kind.cols},
      mine = block_of(shape, kind.cut, coordinate(kind.mesh, kind.tensor_axis), tensor_ranks);
  std::vector<int64_t> own, per_rank(static_cast<size_t>(size_of_axis(kind.mesh, kind.axis)), 0);
  for (const Member& m : members) {
    auto at = std::ranges::find(out.bundles, m.bundle);
    if (at == out.bundles.end()) at = out.bundles.insert(at, m.bundle);
    ++per_rank[static_cast<size_t>(m.owner)];
    if (m.owner == me)
      own.insert(own.end(), {at - out.bundles.begin(), m.begin + m.part->begin, mine[0], mine[1], m.part->stride});
  }
  out.own = interned(own);

  out.matrices = {kind.dtype, {k, kind.rows, kind.cols}, whole_in(kind.mesh, kind.stage)};
  out.stacked = out.matrices;
  if (kind.tensor_axis >= 0) {
    out.cut = kind.cut;
    out.stacked.shape = {tensor_ranks, k, largest_block(shape, kind.cut, tensor_ranks)};
    out.stacked.layout[kind.tensor_axis] = Placement::shard(0);
  }
  const int dim = out.cut ? 1 : 0;
  if (kind.axis >= 0) {
    out.stacked.layout[kind.axis] = Placement::shard(OwnershipMap::uneven(dim, per_rank));
    out.matrices.layout[kind.axis] = Placement::shard(OwnershipMap::uneven(0, per_rank));
  }
  out.shared = out.stacked;
  for (int a = 0; a < out.stacked.layout.num_axes(); ++a) {
    if (a == kind.axis || a == kind.stage.axis || kind.mesh->size(a) == 1) continue;
    out.shared.layout[a] = Placement::shard(OwnershipMap::even(dim).inner());
    out.matrices.layout[a] = Placement::shard(OwnershipMap::even(0).inner());
  }
  return out;
}

}  // namespace

std::vector<Batch> batches_of(std::span<const Bundle> all, const std::vector<int>& bundles) {
  std::vector<std::pair<Kind, std::vector<Member>>> kinds;
  for (size_t i = 0; i < bundles.size(); ++i) {
    const Bundle& b = all[static_cast<size_t>(bundles[i])];
    const MeshSpec* mesh = b.joined.layout.mesh();
    std::vector<int64_t> at(static_cast<size_t>(size_of_axis(mesh, b.axis)), 0);
    for (const Matrix& m : b.matrices) {
      int64_t& begin = at[static_cast<size_t>(m.owner)];
      for (const MatrixPart& p : m.parts) {
        const Kind kind{mesh, b.axis, b.tensor_axis, b.stage, b.joined.dtype, p.rows, p.cols,
                        b.tensor_axis >= 0 ? p.cut : OwnershipMap::even(0), i / kBundlesOfBatch};
        auto it = std::ranges::find(kinds, kind, [](const auto& entry) { return entry.first; });
        if (it == kinds.end()) it = kinds.insert(it, {kind, {}});
        it->second.push_back({bundles[i], &p, m.owner, begin});
      }
      begin += m.room;
    }
  }
  std::vector<Batch> out;
  for (const auto& [kind, members] : kinds) {
    int64_t at_once = std::max<int64_t>(kBatch / (kind.rows * kind.cols), 1);
    for (int a = 0; kind.mesh && a < kind.mesh->num_axes(); ++a)
      if (a != kind.axis && a != kind.stage.axis) at_once *= kind.mesh->size(a);
    std::vector<std::vector<Member>> rounds;
    std::map<int, int64_t> of_owner;
    for (const Member& m : members) {
      const auto round = static_cast<size_t>(of_owner[m.owner]++ / at_once);
      rounds.resize(std::max(rounds.size(), round + 1));
      rounds[round].push_back(m);
    }
    for (const std::vector<Member>& round : rounds) out.push_back(make_batch(kind, round));
  }
  return out;
}

}  // namespace sheaf::optim
