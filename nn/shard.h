// shard(): makes chosen modules units, whose parameters are gathered, reduced and updated together. materialize(): creates the units,
// their memory and the initial values.
//
// shard() marks modules, and tells attention in how many units its heads are sharded; it may be called bottom-up with options per
// unit: an inner call claims its module's parameters, the outer call makes the remaining ones the root unit. materialize() then gives
// every leaf to the lowest unit that contains all of its uses (a tied weight to the common ancestor), and all units one gather
// schedule.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/device_mesh.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/nn/layers/context_region.h"
#include "sheaf/nn/module.h"

namespace sheaf {

namespace nn {

/// Which modules below the sharded one become separate units. Modules that an inner shard() has claimed are unchanged, including
/// their submodules. ConfigError if none is chosen by type or by a predicate: without a policy there is one unit.
class UnitPolicy {
 public:
  using Predicate = std::function<bool(Module& module, const std::string& path)>;
  /// None: one unit.
  UnitPolicy() = default;
  /// Those for which the predicate holds; `path` is relative to the sharded module.
  UnitPolicy(Predicate predicate) : predicate_(std::move(predicate)) {}  // NOLINT: a lambda is a policy
  /// Those at these paths; ConfigError for a path that does not exist.
  static UnitPolicy at(std::vector<std::string> paths);
  /// In post-order, a module becomes a unit when its parameters not yet claimed reach this many elements.
  static UnitPolicy of_at_least(int64_t parameters);

 private:
  friend struct UnitMarker;
  template <class... M>
  friend UnitPolicy units_of();
  Predicate predicate_;
  std::vector<const std::type_info*> types_;  ///< that the predicate asks for
  std::vector<std::string> paths_;
  int64_t minimum_ = -1;
};

/// Every module of one of these types (or derived from one).
template <class... M>
UnitPolicy units_of() {
  static_assert(sizeof...(M) > 0);
  UnitPolicy policy([](Module& m, const std::string&) { return ((dynamic_cast<M*>(&m) != nullptr) || ...); });
  policy.types_ = {&typeid(M)...};
  return policy;
}
inline UnitPolicy units_at(std::vector<std::string> paths) { return UnitPolicy::at(std::move(paths)); }
inline UnitPolicy units_of_at_least(int64_t parameters) { return UnitPolicy::of_at_least(parameters); }
inline UnitPolicy units_where(UnitPolicy::Predicate predicate) { return UnitPolicy(std::move(predicate)); }

}  // namespace nn

/// A strategy, or its name ("full_shard"); an unknown name is a ConfigError.
struct StrategyChoice {
  Strategy value;
  StrategyChoice(Strategy s) : value(s) {}                                 // NOLINT
  StrategyChoice(std::string_view name) : value(strategy_from(name)) {}    // NOLINT
  StrategyChoice(const char* name) : value(strategy_from(name)) {}         // NOLINT
  StrategyChoice(const std::string& name) : value(strategy_from(name)) {}  // NOLINT
};

struct ShardOptions {
  std::string axis = "data";  ///< the mesh axis over which the strategy shards, and which shards the batch
  /// A mesh axis that also shards the batch, but along which the model is replicated (hybrid sharding, HSDP): the strategy applies
  /// within a group of ranks along `axis`, and gradients are also summed over the groups. "": no such axis.
  std::string replica_axis = "";
  /// The groups' copies are secondary shards (hpZ; Megatron's HFSDP): masters, gradients and optimizer states are also sharded over
  /// `replica_axis` (without one, over `context_axis`, or `expert_axis`), and each group gathers its copy, in the compute dtype, once
  /// a step.
  bool secondary = false;
  /// The mesh axis that shards parameters with a cut (nn::Parameter::set_cut: heads of attention, hidden units of MLPs, the
  /// vocabulary), the tensors computed from them, and in between each sequence of the batch: tensor and sequence parallelism. A
  /// rank's part of a cut parameter is sharded further over `axis`; gradients of the others are summed over both. "": none.
  std::string tensor_axis = "";
  /// The mesh axis that shards each sequence of the batch (context parallelism). The model is replicated along it as along
  /// replica_axis, unless it is `axis` itself. It precedes the tensor axis, which shards a rank's tokens further. "": none.
  std::string context_axis = "";
  /// How its ranks communicate in attention. For all_gather, tokens are best sharded by OwnershipMap::from_both_ends.
  nn::ContextComm context_comm = nn::ContextComm::all_to_all;
  /// The mesh axis that shards the batch and the experts of mixtures (nn::Experts; expert parallelism). An expert is on one of its
  /// ranks, sharded further over `axis`; along it the rest of the model is replicated as along replica_axis, unless it is `axis`
  /// itself. Experts are then sharded over another axis, along which gradients are sums: the context axis, or one without another
  /// role, of size 1 if necessary. "": none.
  std::string expert_axis = "";
  /// A chain of the mesh (MeshSpec::Axis::chain) whose ranks are pipeline stages, to which units are assigned in order; modules in no
  /// stage are replicated there. A unit's module moves its arguments to its stage. "": none.
  std::string stage_axis = "";
  /// The stage of a unit's module, or -1 for none. Absent: StageCut assigns the units in their order.
  std::function<int(const nn::Module& module, const std::string& path)> stage_of = {};
  /// Runs of units per stage (interleaved pipelines): the units, in their order, are assigned to the stages in this many rounds. The
  /// axis is a ring (MeshSpec::Axis::ring). Not together with stage_of, which assigns all units itself.
  int64_t stage_runs = 1;
  nn::UnitPolicy units = {};  ///< which modules below become separate units
  StrategyChoice strategy = Strategy::full_shard;
  int64_t prefetch_bytes = -1;  ///< prefetched bytes, for the whole model; -1: a unit, see GatherSchedule
  /// Parameters are cast to it and gathered in it, so that activations have it too: bf16 for mixed precision, or f16, whose gradients
  /// underflow unless the loss is scaled (optim::LossScaler). Masters, gradients and the optimizer stay in the parameters' own dtype
  /// (f32). Absent: no cast.
  std::optional<DType> compute_dtype = std::nullopt;
  /// Gradients are sent between ranks in it, to be reduced: bf16 halves the bytes (f16 ends at 65,504, and underflows as above). In
  /// each reduction (one a step with zero1, one a micro-batch with other strategies) a rank's share is rounded to it once, and so is
  /// the sum, which is computed in f32, except by NCCL. Gradients are stored in the parameters' own dtype. Absent: no cast.
  std::optional<DType> reduce_dtype = std::nullopt;
  /// Parameters of two or more dimensions, except biases (Parameter::bias()), are gathered in blocks of 64 int8 codes with a scale,
  /// 8.25 bits an element, and the dequantized values are used in compute (ZeRO++'s qwZ, https://arxiv.org/abs/2306.10209). Masters
  /// are unchanged. Nothing is sent in blocks if `axis` has one rank, nor are copies along a secondary axis.
  bool gather_int8 = false;
  /// Gradients are sent between ranks in such blocks (after ZeRO++'s qgZ), rounded stochastically, so that the expected value is
  /// exact, and summed in f32. Each axis along which gradients are summed rounds them once, and once more if the sum has to be whole
  /// on all its ranks (replicate, replicas). Not together with reduce_dtype.
  bool reduce_int8 = false;
  /// Parameters begin on whole blocks of 64 elements in a unit's buffers, as optim::DiLoCo's int8 moves require.
  bool whole_blocks = false;
  /// On a GPU masters and gradients are kept in host memory (FSDP2's CPUOffloadPolicy, DeepSpeed's offload_param). A rank's part of a
  /// unit is copied to the GPU before it is gathered, concurrently with compute, and is freed with the gathered values; so it is on a
  /// single rank. Reduced gradients are sent to the host, and accumulate there; sums over further axes follow the last micro-batch.
  /// The strategy must shard; on CPUs nothing changes.
  bool offload = false;
};

/// Marks `module` and those below it that options.units choose as units over an axis of `mesh`. `Mesh{}` keeps the same
/// units on one rank without a mesh. Before materialize(); throws ConfigError for a module already marked, an unknown
/// axis or path, or an axis of several ranks that the options do not name.
void shard(nn::Module& module, const Mesh& mesh, const ShardOptions& options = {});

struct MaterializeOptions {
  uint64_t seed = 0;
  std::optional<DType> dtype = std::nullopt;  ///< of all floating leaves, in place of their own: f64 for checking
  bool values = true;  ///< false: zeros, if all of them will be read from a file (drawing 1e9 normals takes seconds)
};

/// Creates the units and allocates memory on `device` for what this rank owns, filled from the counter-based generator keyed by
/// (seed, name, flat index): the same values, bit for bit, at any world size and for any strategy. On Device::meta() everything has
/// its type and no values. Without a shard() before it, the model is one unit on one rank. Parameters frozen for good in units with a
/// narrower compute_dtype get that dtype. Throws ConfigError for parameters that no unit claims although parts are sharded over
/// several ranks.
void materialize(nn::Module& module, Device device = default_device(), const MaterializeOptions& options = {});

/// The schedule that the units of a materialized model share: prefetch budget, gathered bytes, mispredictions.
GatherSchedule& gather_schedule(nn::Module& module);
/// The units of a materialized model in the order of their modules, the root first.
std::vector<std::shared_ptr<Unit>> units(nn::Module& module);
/// Throws ConfigError if `module` is a part of a model with parameters in units around it: "[who] ...: `act` the whole model, or ...".
void expect_own_units(const char* who, const char* act, nn::Module& module);
/// The device on which a materialized model computes.
Device device_of(nn::Module& module);

}  // namespace sheaf
