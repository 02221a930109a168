#include "sheaf/core/mesh.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>

#include "sheaf/core/placement.h"

namespace sheaf {

const MeshSpec* MeshSpec::intern(std::vector<Axis> axes) {
  if (axes.empty() || axes.size() > kMaxAxes) fail<ConfigError>("[mesh] needs 1 to ", kMaxAxes, " axes");
  for (const Axis& a : axes)
    if (a.size < 1) fail<ConfigError>("[mesh] axis ", a.name, " has size ", a.size);
  int64_t ranks = 1;
  for (const Axis& a : axes)
    if ((ranks *= a.size) > std::numeric_limits<int>::max()) fail<ConfigError>("[mesh] has more ranks than can be counted, of axis ", a.name, " on");
  for (size_t i = 0; i < axes.size(); ++i)  // communicators are named by them
    for (size_t j = 0; j <= i; ++j)
      if (axes[i].name.empty() || (i != j && axes[i].name == axes[j].name))
        fail<ConfigError>("[mesh] every axis has a name of its own, not '", axes[i].name, "'", i != j ? " twice" : "");
  static std::mutex mutex;
  static auto* specs = new std::vector<std::unique_ptr<MeshSpec>>;
  std::lock_guard lock(mutex);
  for (const auto& spec : *specs)
    if (spec->axes_ == axes) return spec.get();
  specs->emplace_back(new MeshSpec(std::move(axes)));
  return specs->back().get();
}

int MeshSpec::axis(const std::string& name) const {
  for (int i = 0; i < num_axes(); ++i)
    if (axes_[i].name == name) return i;
  fail<ConfigError>("[mesh] no axis '", name, "' in ", to_string());
}

bool MeshSpec::has_axis(const std::string& name) const {
  return std::ranges::any_of(axes_, [&](const Axis& a) { return a.name == name; });
}

int MeshSpec::num_ranks() const {
  int n = 1;
  for (const Axis& a : axes_) n *= a.size;
  return n;
}

std::string MeshSpec::to_string() const {
  std::string out = "(";
  for (const Axis& a : axes_) out += (out.size() > 1 ? ", " : "") + a.name + "=" + std::to_string(a.size);
  return out + ")";
}

}  // namespace sheaf
