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
                          "among them; give all of a unit, or freeze() it before materialize()");
    }
    return !any;
  });
  return out;
}

void reduce_waiting(std::span<const std::shared_ptr<Unit>> units) {
  for (size_t i = 0; i < units.size(); ++i) {
    units[i]->reduce_waiting();
    if (i > 0) units[i - 1]->complete_reduction();  // as in a backward, only a few of them are in flight at a time
  }
  if (!units.empty()) units.back()->complete_reduction();
}

}  // namespace sheaf::nn
