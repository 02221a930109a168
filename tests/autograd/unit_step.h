// A small recorded step with units: two layers and a root whose table is used at both ends (tied), fully sharded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/distributed/unit.h"

namespace sheaf::testing {

class UnitStep {
 public:
  UnitStep(World& world, Strategy strategy) : mesh_(world.mesh({{"data", world.size()}}).spec) {
    schedule_ = std::make_shared<GatherSchedule>(0);
    const auto unit = [&](const std::string& name, std::vector<LeafSpec> leaves) {
      units_.push_back(std::make_shared<Unit>(name, std::move(leaves), UnitOptions{.mesh = mesh_, .strategy = strategy},
                                              schedule_));
      units_.back()->allocate(Device::cpu());
    };
    unit("", {{"table", {5, 3}}});
    for (const char* name : {"blocks.0", "blocks.1"})
      unit(name, {{std::string(name) + ".weight", {3, 3}}, {std::string(name) + ".bias", {3}}});
  }

  /// Forward and backward on a batch of 7 rows, cut over the ranks.
  Tape record() {
    const Type type{kF32, {7, 5}, Layout(mesh_, Placement::shard(0))};
    const Tensor x = full_of(type, 0.5);
    Recording recording;
    units_[0]->enter();
    Tensor h = matmul(x, units_[0]->value(0));
    for (size_t i = 1; i < units_.size(); ++i) {
      const PathScope path(units_[i]->name());
      units_[i]->enter();
      h = tanh(linear(h, units_[i]->value(0), units_[i]->value(1)));
      units_[i]->leave();
    }
    const Tensor loss = sum(matmul(h, transpose(units_[0]->value(0), 0, 1)));
    units_[0]->leave();
    recording.backward(loss);
    return recording.take();
  }

 private:
  const MeshSpec* mesh_;
  std::shared_ptr<GatherSchedule> schedule_;
  std::vector<std::shared_ptr<Unit>> units_;
};

/// The step's tape on every rank.
inline std::vector<Tape> unit_step_tapes(int ranks, Strategy strategy = Strategy::full_shard) {
  std::vector<Tape> tapes(static_cast<size_t>(ranks));
  run_local(ranks, [&](World& world) {
    UnitStep step(world, strategy);
    tapes[static_cast<size_t>(world.rank())] = step.record();
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  return tapes;
}

}  // namespace sheaf::testing
