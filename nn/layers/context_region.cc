#include "sheaf/nn/layers/context_region.h"

#include "sheaf/autograd/recording.h"
#include "sheaf/core/error.h"

namespace sheaf::nn {

namespace {
// The mesh axes that shard dimension `dim`.
std::vector<int> axes_that_cut(const Layout& l, int dim) {
  std::vector<int> axes;
  for (int a = 0; a < l.num_axes(); ++a)
    if (l[a].is_shard(dim)) axes.push_back(a);
  return axes;
}
}  // namespace

static Layout with_whole_sequences(const Tensor& x) {
  Layout whole = x.layout();
  for (const int a : axes_that_cut(whole, 1)) whole[a] = Placement::replicate();
  return whole;
}

Tensor whole_sequences(const Tensor& x) { return redistribute(x, with_whole_sequences(x)); }
Tensor whole_keys_values(const Tensor& x, int64_t readers) { return redistribute_in_heads(x, with_whole_sequences(x), readers); }

ContextComm context_comm_from(std::string_view name) {
  if (name == "all_to_all") return ContextComm::all_to_all;
  if (name == "all_gather") return ContextComm::all_gather;
  fail<ConfigError>("[context] ranks send each other sequences by 'all_to_all' or 'all_gather', not '", name, "'");
}

ContextRegion::ContextRegion(const Type& x, const OwnershipMap& heads) {
  const Layout& outside = x.layout;
  const std::vector<int> shared = axes_that_cut(outside, 1);
  if (shared.empty()) return;
  const int64_t units = heads.is_parts() ? heads.granule() : x.shape[heads.dim()] / heads.granule();
  copies(PathScope::current(), units, 1, *outside.mesh(), shared, axes_that_cut(outside, heads.dim()));
  outside_ = inside_ = outside;
  for (const int a : shared) inside_[a] = Placement::shard(heads.inner());
}

OutputLayout ContextRegion::output_layout(const OwnershipMap& heads) {
  return [this, heads](const Type& x) {
    *this = ContextRegion(x, heads);
    return inside_.mesh() ? inside_ : x.layout;
  };
}

Tensor ContextRegion::leave(const Tensor& y, bool in_pieces) const {
  if (!inside_.mesh()) return y;
  Layout to = y.layout();
  for (int a = 0; a < to.num_axes(); ++a)
    if (!(inside_[a] == outside_[a])) to[a] = outside_[a];
  return in_pieces ? redistribute_in_pieces(y, to) : redistribute(y, to);
}

int64_t ContextRegion::copies(const std::string& path, int64_t units, int64_t most, const MeshSpec& mesh,
                              const std::vector<int>& axes, const std::vector<int>& before) {
  int64_t have = units, ranks = 1;  // the fewest that the axes before leave a rank
  std::string others;
  const auto cut_by = [&](int axis) {
    have /= mesh.size(axis);
    others += str(others.empty() ? "" : " and ", "'", mesh.name(axis), "'");
  };
  for (const int a : before) cut_by(a);
  for (const int a : axes) ranks *= mesh.size(a);
  if (have == 0 && !before.empty()) return most;  // these axes leave ranks without any, and report it themselves
  for (int64_t times = 1; times <= most; ++times)
    if (most % times == 0 && have * times >= ranks) return times;
  have *= most;
  for (const int a : axes) {
    if (mesh.size(a) > have)
      fail<ConfigError>("[attention] '", path_label(path), "': the ", mesh.size(a), " ranks of context axis '", mesh.name(a), "' cannot share ",
                        units * most, " heads", most > 1 ? str(" that read ", units, " key heads") : "",
                        others.empty() ? "" : str(", of which a rank of axis ", others, " has as few as ", have), "; at most ", have,
                        " can, but any number where they send each other keys and values (context_comm all_gather)");
    cut_by(a);
  }
  return most;
}

int64_t ContextRegion::copies(const Type& x, int64_t units, int64_t most) {
  const std::vector<int> shared = axes_that_cut(x.layout, 1);
  return shared.empty() ? 1 : copies(PathScope::current(), units, most, *x.layout.mesh(), shared, axes_that_cut(x.layout, 2));
}

}  // namespace sheaf::nn
