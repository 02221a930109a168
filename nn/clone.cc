// A second model like a first one.
#include <typeinfo>

#include "sheaf/core/transfer.h"
#include "sheaf/nn/lora.h"
#include "sheaf/nn/shard.h"
#include "sheaf/nn/unit_mark.h"

namespace sheaf::nn {

std::string_view name_within(const Module& module, std::string_view name) {
  const std::string& path = module.path();
  if (path.empty() || !name.starts_with(path)) return name;
  if (name.size() == path.size()) return "";
  return name[path.size()] == '.' ? name.substr(path.size() + 1) : name;
}

void copy_model(Module& source, Module& target) {
  copy_lora(source, target);
  const auto from = source.named_modules(), to = target.named_modules();
  const auto old_leaves = source.parameters(), new_leaves = target.parameters();
  const auto old_buffers = source.buffers(), new_buffers = target.buffers();
  const auto refuse = [&](const std::string& what) {
    fail<ConfigError>("[clone] the new ", target.type_name(), " differs from the old one: ", what);
  };
  if (from.size() != to.size()) refuse("other modules");
  if (old_leaves.size() != new_leaves.size() || old_buffers.size() != new_buffers.size()) refuse("other leaves");
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i].first != to[i].first || typeid(*from[i].second) != typeid(*to[i].second)) refuse("'" + to[i].first + "'");
    to[i].second->take_settings(*from[i].second);
    ModuleAccess::mark(*to[i].second) = ModuleAccess::mark(*from[i].second);
    ModuleAccess::set_training(*to[i].second, from[i].second->training());
    ModuleAccess::recompute(*to[i].second) = ModuleAccess::recompute(*from[i].second);
    ModuleAccess::call_placements(*to[i].second) = ModuleAccess::call_placements(*from[i].second);
  }
  expect_own_units("clone", "clone", source);
  Device device;
  bool materialized = false;
  for (size_t i = 0; i < old_leaves.size(); ++i) {
    const Parameter &a = old_leaves[i], &b = new_leaves[i];
    if (!(a.shape() == b.shape())) refuse("'" + b.name() + "'");
    b.state().settings() = a.state().settings();
    if (!a.unit()) continue;
    materialized = true;
    device = a.unit()->buffers()[0].shard.device();
  }
  for (size_t i = 0; i < old_buffers.size(); ++i) {
    new_buffers[i].state().dtype = old_buffers[i].state().dtype;
    if (const Tensor& value = old_buffers[i].state().value) materialized = true, device = value.device();
  }
  if (!materialized) return;
  materialize(target, device);
  if (device.is_meta()) return;
  const auto old_units = units(source), new_units = units(target);
  for (size_t u = 0; u < old_units.size(); ++u)
    for (size_t b = 0; b < old_units[u]->buffers().size(); ++b) {
      const Tensor &from = old_units[u]->buffers()[b].shard, &to = new_units[u]->buffers()[b].shard;
      transfer(device, to.view().data, device, from.view().data, static_cast<size_t>(from.local_bytes()));
    }
  for (size_t i = 0; i < old_buffers.size(); ++i) assign(new_buffers[i], old_buffers[i].value());
}

}  // namespace sheaf::nn
