// Helpers shared by the tests of offloading: peaks of a step's memory on a GPU and on its host, and resuming.
#pragma once

#include <ostream>
#include <vector>

#include "sheaf/core/rank_context.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {

inline const Device kGpu = Device::cuda();

struct Peak {
  int64_t device, host;
  bool operator==(const Peak&) const = default;
};
inline std::ostream& operator<<(std::ostream& out, const Peak& p) { return out << p.device << " (" << p.host << ')'; }

/// Bytes of this rank, from reset() on.
class GpuMemory {
 public:
  GpuMemory() : device_(*RankContext::current().memory(kGpu)), host_(*RankContext::current().memory(kGpu, MemoryKind::host)) {}
  void reset() { device_.reset_peak(), host_.reset_peak(); }
  Peak peak() const { return {device_.stats().peak, host_.stats().peak}; }
  Peak live() const { return {device_.stats().live, host_.stats().live}; }

 private:
  Allocator &device_, &host_;
};

/// Peaks on each rank, once steps have settled.
inline std::vector<Peak> measured(const models::TrainConfig& config, int world) {
  std::vector<Peak> peaks(static_cast<size_t>(world));
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, kGpu);
    GpuMemory memory;
    for (int s = 0; s < (config.train.compile ? 4 : 2); ++s) {
      memory.reset();
      step.run(s, fill_tiny).loss.item();
    }
    peaks[static_cast<size_t>(w.rank())] = memory.peak();
  }, {.threads_per_rank = 1, .device = kGpu});
  return peaks;
}

inline std::vector<Peak> planned(const models::TrainConfig& config, int world) {
  std::vector<Peak> peaks;
  for (int rank = 0; rank < world; ++rank) {
    const models::Plan plan = models::plan_step(config, config.model.vocab, rank, world, 1, "local", kGpu);
    peaks.push_back({plan.peak.bytes, plan.host_peak.bytes});
  }
  return peaks;
}

/// EXPECTs that runs with and without the offloading that with(config, true) selects resume from each other's checkpoints, with equal
/// losses.
inline void expect_resumes_from_either(const models::TrainConfig& config, int world, models::TrainConfig (*with)(models::TrainConfig, bool)) {
  const TrainedRun expected = train_tiny(config, world, 6, {}, kGpu);
  for (const bool first : {false, true}) {
    const ScratchFolder folder;
    std::vector<float> losses;
    const auto run = [&](bool offload, int from, int to) {
      run_local(world, [&](World& w) {
        models::TrainingStep step(with(config, offload), config.model.vocab, w, kGpu);
        if (from > 0) {
          EXPECT_EQ(models::load_checkpoint(folder.path(), step.model(), {&step.optimizer()}, w).value().step, from);
        }
        for (int s = from; s < to; ++s) {
          const float loss = step.run(s, fill_tiny).loss.item();
          if (w.rank() == 0) losses.push_back(loss);
        }
        models::save_checkpoint(folder.path(), to, step.model(), {&step.optimizer()}, w);
      }, {.threads_per_rank = 1, .device = kGpu});
    };
    run(first, 0, 3);
    run(!first, 3, 6);
    EXPECT_EQ(losses, expected.losses);
  }
}

}  // namespace sheaf::testing
