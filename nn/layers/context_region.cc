#include "sheaf/nn/layers/context_region.h"

#include "sheaf/autograd/recording.h"
#include "sheaf/core/error.h"

namespace sheaf::nn {

ContextRegion::ContextRegion(const Tensor& x, const OwnershipMap& heads) {
  const Layout& outside = x.layout();
  std::vector<int> cutting;  // axes that cut heads
  for (int a = 0; a < outside.num_axes(); ++a)
    if (outside[a].is_shard(heads.dim())) cutting.push_back(a);
  Layout inside = outside;
  for (int a = 0; a < outside.num_axes(); ++a) {
    if (!outside[a].is_shard(1)) continue;
    const int64_t units = heads.is_parts() ? heads.granule() : x.size(heads.dim()) / heads.granule();
    check_shares(PathScope::current(), units, *outside.mesh(), a, cutting);
    inside[a] = Placement::shard(heads.inner());
    cutting.push_back(a);
  }
  if (inside == outside) return;
  outside_ = outside;
  inside_ = inside;
}

Tensor ContextRegion::leave(const Tensor& y) const {
  if (!inside_.mesh()) return y;
  Layout to = y.layout();
  for (int a = 0; a < to.num_axes(); ++a)
    if (!(inside_[a] == outside_[a])) to[a] = outside_[a];
  return redistribute(y, to);
}

void ContextRegion::check_shares(const std::string& path, int64_t units, const MeshSpec& mesh, int axis,
                                 const std::vector<int>& before) {
  int64_t at_least = units;
  std::string others;
  for (const int a : before) {
    at_least /= mesh.size(a);
    others += str(others.empty() ? "" : " and ", "'", mesh.name(a), "'");
  }
  if (mesh.size(axis) <= at_least) return;
  fail<ConfigError>("[attention] '", path, "': the ", mesh.size(axis), " ranks of context axis '", mesh.name(axis),
                    "' cannot share ", units, " key heads",
                    before.empty() ? "" : str(", of which a rank of axis ", others, " has as few as ", at_least), "; at most ",
                    at_least, " can");
}

}  // namespace sheaf::nn
