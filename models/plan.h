// Plan: one training step on the meta device, at any world size, before anything is allocated: its tape and the bytes
// it will take. The same code runs as in training; only kernels and communication are left out.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "sheaf/autograd/tape.h"
#include "sheaf/core/device.h"
#include "sheaf/core/memory_ledger.h"
#include "sheaf/distributed/machine.h"
#include "sheaf/distributed/world.h"
#include "sheaf/models/train_config.h"
#include "sheaf/models/training_step.h"

namespace sheaf::models {

struct Plan {
  Tape tape;                     ///< of a step in which prefetch knows the order (the second and later); with train.compile, of the
                           ///< program
  MemoryLedger::History memory;  ///< what was allocated and freed while each node was recorded; without a node, as in a program, dated -1
  MemoryLedger::Peak peak;       ///< requested from the allocator at the peak of such a step, on this rank
  MemoryLedger::Peak host_peak;  ///< of the host memory that a GPU uses in addition to its own (train.offload_...)
  Tape outer;                    ///< of an outer step, where there are islands
  int64_t parameters = 0;        ///< elements of the whole model
  int64_t trained = 0;           ///< of them those that are not frozen
  int64_t state_bytes = 0;       ///< masters and the optimizer's state on this rank, the outer one's included
  int64_t outer_state_bytes = 0;
  RankTimes times;                ///< how long its nodes take, if a machine was given; times.tape is not set
  std::vector<NodeId> turns;      ///< the first node of each turn of the rank's stage, and of the part after the last
  int64_t micro_batch_bytes = 0;  ///< the memory of the tokens of each micro-batch
};

/// The plan of rank `rank` of `world` on `device`, which need not exist here. `threads` is the number of compute threads per rank, on
/// which a CPU's workspaces depend; `comm` the kind of its communicators ("shm", "gloo", "local", "nccl"; within a job also
/// "shm+gloo", for the hosts of this job), on which their staging depends. Of a GPU's memory it counts what Sheaf allocates: the
/// driver and NCCL use more.
Plan plan_step(const TrainConfig& config, int64_t vocab, int rank, int world, int threads, const std::string& comm,
               Device device = {}, const Machine* machine = nullptr);
/// The same on a GPU, for a stand-in, with only the bytes of the peaks; `look` is called with it while the rank is joined to its
/// meshes.
Plan plan_stand_in(const TrainConfig& config, int64_t vocab, int rank, int world, const StandIn& stand_in,
                   const std::function<void(const Plan&)>& look);
/// Ranks with the largest peaks: the first of each pipeline stage, and its last if that is another.
std::vector<int> ranks_that_hold_most(const TrainConfig& config, int world);
constexpr int64_t kNoRecompute = -1;
/// Replaces "fit" by its result: `blocks` whole blocks, or kNoRecompute.
void set_fitted(TrainConfig& config, int64_t blocks);
/// With train.recompute "fit" the configuration that it becomes, else `config`: "none", or "selective" with the fewest whole
/// blocks that keep the peaks of the first and the last rank within sharding.memory_budget. Arguments as above. ConfigError
/// without a budget, OutOfMemory if even all blocks are not enough.
TrainConfig fit_recompute(const TrainConfig& config, int64_t vocab, int world, int threads, const std::string& comm,
                          Device device = {});
/// plan_step().peak.bytes of every rank.
std::vector<int64_t> plan_peaks(const TrainConfig& config, int64_t vocab, int world, int threads,
                                const std::string& comm, Device device = {});
/// plan_step().peak of rank 0 and, until `time` has passed, of the ranks after it.
std::vector<MemoryLedger::Peak> plan_peaks_within(std::chrono::seconds time, const TrainConfig& config, int64_t vocab, int world, int threads,
                                                  const std::string& comm, Device device = {});

/// Throws OutOfMemory if a step's use of host memory cannot fit: on CPUs if the peaks of all ranks of this host together are more
/// than the host, or this process's control group, has; on GPUs if their offloaded memory is. Call it before anything is allocated:
/// afterwards the system would kill the process. `config` as fit_recompute() has returned it: each plan would fit it again.
void check_memory(const TrainConfig& config, int64_t vocab, const World& world);

}  // namespace sheaf::models
