#include "sheaf/nn/trainable_units.h"

#include <algorithm>
#include <unordered_map>

#include "sheaf/distributed/unit.h"

namespace sheaf::nn {

std::vector<std::shared_ptr<Unit>> trainable_units(std::string_view who, std::span<const Parameter> parameters) {
  std::vector<std::shared_ptr<Unit>> out = distinct_units(parameters);
  std::unordered_map<const Unit*, std::vector<bool>> given;
  for (const auto& unit : out) given[unit.get()].assign(unit->leaves().size(), false);
  for (const Parameter& p : parameters) given[p.unit().get()][p.index()] = true;
  std::erase_if(out, [&](const std::shared_ptr<Unit>& unit) {
    bool any = false;
    for (size_t i = 0; i < unit->leaves().size(); ++i) {
      const LeafSpec& leaf = unit->leaves()[i];
      any = any || leaf.trainable;
      if (leaf.trainable && !given[unit.get()][i])
        fail<ConfigError>("[", who, "] '", leaf.name, "' is in one unit with parameters that are given, but is not "
                          "among them; give all of a unit, make units of those that are given (ShardOptions::units), or freeze() it "
                          "before materialize()");
    }
    return !any;
  });
  return out;
}

std::string difference_of_units(const Module& first, std::span<const std::shared_ptr<Unit>> units, const Module& second,
                                std::span<const std::shared_ptr<Unit>> others) {
  if (units.size() != others.size()) return str(others.size(), " units, not ", units.size());
  for (size_t u = 0; u < units.size(); ++u) {
    Unit &a = *units[u], &b = *others[u];
    const std::string unit = str("unit '", path_label(a.name()), "'");
    if (name_within(first, a.name()) != name_within(second, b.name()) || a.buffers().size() != b.buffers().size())
      return unit + " is another, or has others that are frozen";
    const auto same = [&](int i, int j) {
      const LeafSpec &p = a.leaves()[static_cast<size_t>(i)], &q = b.leaves()[static_cast<size_t>(j)];
      return name_within(first, p.name) == name_within(second, q.name) && p.shape == q.shape;
    };
    for (size_t i = 0; i < a.buffers().size(); ++i) {
      const FlatBuffer &x = a.buffers()[i], &y = b.buffers()[i];
      if (!(x.shard.type() == y.shard.type())) return str(unit, " has ", y.shard.type(), ", not ", x.shard.type());
      if (!std::ranges::equal(x.leaves, y.leaves, same)) return str(unit, " has other parameters, or others are frozen");
    }
  }
  return "";
}

void reduce_waiting(std::span<const std::shared_ptr<Unit>> units) {
  for (size_t i = 0; i < units.size(); ++i) {
    units[i]->reduce_waiting();
    if (i > 0) units[i - 1]->complete_reduction();  // as in a backward, only a few of them are in flight at a time
  }
  if (!units.empty()) units.back()->complete_reduction();
}

}  // namespace sheaf::nn
