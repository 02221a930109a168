#include "sheaf/nn/layers/context_region.h"

#include "sheaf/autograd/recording.h"
#include "sheaf/core/error.h"

namespace sheaf::nn {

ContextRegion::ContextRegion(const Tensor& x, const OwnershipMap& heads) {
  const Layout& outside = x.layout();
  Layout inside = outside;
  bool cuts = false;
  int tensor_axis = -1;
  for (int a = 0; a < outside.num_axes(); ++a)
    if (outside[a].is_shard(heads.dim())) tensor_axis = a;
  for (int a = 0; a < outside.num_axes(); ++a) {
    if (!outside[a].is_shard(1)) continue;
    const int64_t units = heads.is_parts() ? heads.granule() : x.size(heads.dim()) / heads.granule();
    check_shares(PathScope::current(), units, *outside.mesh(), a, tensor_axis);
    inside[a] = Placement::shard(heads.inner());
    cuts = true;
  }
  if (!cuts) return;
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

void ContextRegion::check_shares(const std::string& path, int64_t units, const MeshSpec& mesh, int context_axis,
                                 int tensor_axis) {
  const int64_t at_least = tensor_axis < 0 ? units : units / mesh.size(tensor_axis);
  if (mesh.size(context_axis) <= at_least) return;
  fail<ConfigError>("[attention] '", path, "': the ", mesh.size(context_axis), " ranks of context axis '",
                    mesh.name(context_axis), "' cannot share ", units, " key heads",
                    tensor_axis < 0 ? "" : str(", of which a rank of tensor axis '", mesh.name(tensor_axis), "' has as few as ",
                                               at_least),
                    "; at most ", at_least, " can");
}

}  // namespace sheaf::nn
