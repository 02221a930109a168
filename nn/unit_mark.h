// The mark that shard() leaves on a module for materialize(), and the access of both to a module's private members.
#pragma once

#include <string>

#include "sheaf/distributed/unit.h"
#include "sheaf/nn/module.h"

namespace sheaf::nn {

struct Module::UnitMark : UnitOptions {
  int64_t prefetch_bytes = -1;
};

struct ModuleAccess {
  static std::shared_ptr<const Module::UnitMark>& mark(Module& m) { return m.mark_; }
  static std::shared_ptr<Unit>& unit(Module& m) { return m.unit_; }
  static std::shared_ptr<GatherSchedule>& schedule(Module& m) { return m.schedule_; }
  /// Some SHEAF_FIELDS leads to this module, at this path of the whole model.
  static void list(Module& m, const std::string& path) {
    m.path_ = path;
    m.listed_ = true;
  }
  static bool is_listed(const Module& m) { return m.listed_; }
  static void set_training(Module& m, bool on) { m.training_ = on; }
  static std::optional<RecomputeOptions>& recompute(Module& m) { return m.recompute_; }
  static std::vector<CallPlacements>& call_placements(Module& m) { return m.call_placements_; }
};

}  // namespace sheaf::nn
