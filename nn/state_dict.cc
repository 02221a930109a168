#include "sheaf/nn/state_dict.h"

#include <set>

#include "sheaf/core/rank_context.h"
#include "sheaf/nn/shard.h"

namespace sheaf::nn {
namespace {

// Whether this rank is the one that saves a tensor of this layout.
bool owns(const Layout& layout) {
  for (int a = 0; a < layout.num_axes(); ++a)
    if (!layout[a].is_shard() && RankContext::current().coordinate(layout.mesh(), a) != 0) return false;
  return true;
}

// This rank's pieces of each of the leaves of a unit in `values`.
void append_pieces(const Unit& unit, const std::vector<int>& leaves, const std::vector<optim::StatePart>& parts,
                   const Tensor& values, const std::string& prefix, std::vector<StatePiece>& out) {
  const bool owner = owns(values.layout());
  char* data = values.view().as<char>();
  for (int leaf : leaves) {
    const LeafSpec& spec = unit.leaves()[leaf];
    const StatePiece none{prefix + spec.name, values.dtype(), spec.shape, {}, values.device(), nullptr, owner, spec.blocks};
    const size_t before = out.size();
    for (const auto& [piece, at] : parts) {
      if (piece.leaf != leaf) continue;
      out.push_back(none);
      out.back().runs = piece.runs;
      out.back().data = data + at * static_cast<int64_t>(size_of(values.dtype()));
    }
    if (out.size() == before) out.push_back(none);
  }
}

}  // namespace

std::vector<StatePiece> state_pieces(Module& module) {
  std::vector<StatePiece> out;
  for (const auto& unit : distinct_units(module.parameters())) {
    unit->close_for_change();
    for (const FlatBuffer& b : unit->buffers()) {
      std::vector<optim::StatePart> parts;
      for (const LocalPiece& piece : unit->pieces(b)) parts.push_back({piece, piece.shard_offset});
      append_pieces(*unit, b.leaves, parts, b.shard, "", out);
    }
  }
  const RankContext& context = RankContext::current();
  for (const Buffer& b : module.buffers()) {
    const Tensor value = b.value();
    out.push_back({b.name(), value.dtype(), value.shape(), Runs::of({0, value.numel()}), value.device(), value.view().data,
                   context.rank == 0});
  }
  return out;
}

std::vector<StatePiece> state_pieces(optim::Optimizer& optimizer, const std::function<std::string(const Unit&)>& prefix_of) {
  std::vector<StatePiece> out;
  for (const optim::ShardState& shard : optimizer.shards())
    for (size_t i = 0; i < shard.names.size(); ++i)
      append_pieces(*shard.unit, shard.leaves, shard.parts, shard.state[i],
                    str("optimizer.", shard.names[i], ".", prefix_of ? prefix_of(*shard.unit) : ""), out);
  return out;
}

std::vector<StatePiece> state_pieces(Module& module, const std::vector<optim::Optimizer*>& optimizers, const optim::DiLoCo& outer) {
  std::vector<StatePiece> out;
  std::set<std::string> trained;
  for (const optim::OuterShard& shard : outer.shards()) {
    const std::vector<int>& leaves = shard.flat().leaves;
    for (const int leaf : leaves) trained.insert(shard.unit->leaves()[static_cast<size_t>(leaf)].name);
    append_pieces(*shard.unit, leaves, shard.values.parts, shard.values.tensor, "", out);
    if (shard.momentum.tensor && !optimizers.empty())
      append_pieces(*shard.unit, leaves, shard.momentum.parts, shard.momentum.tensor, "optimizer.outer.momentum.", out);
  }
  const auto append_row = [&](StatePiece p) {
    const int64_t before = outer.island() * p.shape.numel();
    p.runs.begin += p.runs.numel() > 0 ? before : 0;
    p.shape.insert(0, outer.islands());
    out.push_back(std::move(p));
  };
  for (StatePiece& p : state_pieces(module)) {
    if (!trained.contains(p.name)) {  // the same on all islands
      p.owner &= outer.island() == 0;
      out.push_back(std::move(p));
    } else if (!optimizers.empty()) {
      p.name = "optimizer.inner." + p.name;
      append_row(std::move(p));
    }
  }
  for (optim::Optimizer* optimizer : optimizers)
    for (StatePiece& p : state_pieces(*optimizer)) append_row(std::move(p));
  return out;
}

}  // namespace sheaf::nn
