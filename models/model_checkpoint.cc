#include "sheaf/models/model_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/parallel.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/transfer.h"
#include "sheaf/nn/block_piece.h"
#include "sheaf/nn/lora.h"
#include "sheaf/nn/shard.h"
#include "sheaf/nn/state_dict.h"

namespace sheaf::models {
namespace {

void check_modules(nn::Module& module, const PrefixedModules& also, const optim::DiLoCo* outer) {
  const auto expect_whole = [](nn::Module& m) { expect_own_units("checkpoint", "save or load", m); };
  expect_whole(module);
  for (size_t i = 0; i < also.size(); ++i) {
    const std::string& prefix = also[i].prefix;
    check<ConfigError>(also[i].module, "[checkpoint] '", prefix, "' is the prefix of no module");
    check<ConfigError>(!prefix.empty() && !prefix.starts_with("optimizer."), "[checkpoint] '", prefix, "' as the prefix of a ",
                       also[i].module->type_name(), ": its tensors would pass for those of the model or its optimizers");
    for (size_t j = 0; j < i; ++j)
      check<ConfigError>(also[j].prefix != prefix, "[checkpoint] two modules have the prefix '", prefix, "'");
    check<ConfigError>(!outer, "[checkpoint] '", prefix, "': beside a model that islands train there are no further modules");
    expect_whole(*also[i].module);
  }
}

void expect_optimizers(const Optimizers& optimizers) {
  for (const optim::Optimizer* optimizer : optimizers) check<ConfigError>(optimizer != nullptr, "[checkpoint] an optimizer is null");
}

std::vector<nn::StatePiece> all_pieces(nn::Module& module, const Optimizers& optimizers, const optim::DiLoCo* outer,
                                       const PrefixedModules& also) {
  check_modules(module, also, outer);
  expect_optimizers(optimizers);
  if (outer) return nn::state_pieces(module, optimizers, *outer);
  std::vector<nn::StatePiece> pieces = nn::state_pieces(module);
  for (const auto& [prefix, other] : also)
    for (nn::StatePiece& p : nn::state_pieces(*other)) {
      p.name = prefix + p.name;
      pieces.push_back(std::move(p));
    }
  std::unordered_map<const Unit*, std::string> prefixes;  // models that are saved together may have parameters of the same names
  for (const auto& unit : distinct_units(module.parameters())) prefixes[unit.get()] = "";
  for (const auto& [prefix, other] : also)
    for (const auto& unit : distinct_units(other->parameters())) prefixes[unit.get()] = prefix;
  const auto prefix_of = [&](const Unit& unit) {
    check<ConfigError>(prefixes.contains(&unit), "[checkpoint] an optimizer's unit '", path_label(unit.group_name()),
                       "' is neither this model's nor that of a module in `also`: its state would have no parameters");
    return prefixes.at(&unit);
  };
  for (optim::Optimizer* optimizer : optimizers)
    for (nn::StatePiece& p : nn::state_pieces(*optimizer, prefix_of)) pieces.push_back(std::move(p));
  return pieces;
}

// The tensor that holds a step count of one of the optimizers.
std::string count_name(size_t optimizer, std::string_view count) {
  return optimizer == 0 ? str("optimizer.", count) : str("optimizer.", optimizer, ".", count);
}
std::string steps_name(size_t optimizer) { return count_name(optimizer, "steps"); }
std::string applied_name(size_t optimizer) { return count_name(optimizer, "applied_steps"); }

// A loss scaler's: f32 [] and i64 [3].
constexpr const char* kFactor = "optimizer.loss_scaler.factor";
constexpr const char* kCounts = "optimizer.loss_scaler.counts";

// A few numbers, which rank 0 saves.
template <class T>
CheckpointPiece small_piece(std::string name, DType dtype, const Shape& shape, std::vector<T> values) {
  const auto kept = std::make_shared<std::vector<T>>(std::move(values));
  const bool first = RankContext::current().rank == 0;
  return {std::move(name), dtype, shape, first ? Runs::of({0, shape.numel()}) : Runs(), kept->data(), kept};
}

void load_scaler(Checkpoint& checkpoint, optim::LossScaler& scaler) {
  float factor = 0;
  int64_t counts[3] = {};
  checkpoint.read(kFactor, 0, 1, &factor);
  checkpoint.read(kCounts, 0, 3, counts);
  scaler.set_state({factor, counts[0], counts[1], counts[2]});
}

}  // namespace

CheckpointGroup checkpoint_group(nn::Module& module, World& world, const optim::DiLoCo* outer, const PrefixedModules& also) {
  check_modules(module, also, outer);
  for (const PrefixedModule& other : also) checkpoint_group(*other.module, world);
  const auto all = units(module);
  const int islands = outer ? outer->islands() : 1;
  const auto is_shared = [&](const auto& unit) { return unit->mesh() && unit->mesh()->num_ranks() * islands == world.size(); };
  if (world.size() > 1 && std::ranges::none_of(all, is_shared))
    fail<ConfigError>("[checkpoint] the world has ", world.size(), " ranks, but this ", module.type_name(), " is not "
                      "shared among them: call shard(model, mesh) before materialize()");
  return checkpoint_group(world);
}

CheckpointGroup checkpoint_group(World& world) {
  CheckpointGroup group;
  group.rank = world.rank();
  group.world = world.size();
  if (world.size() == 1) return group;
  Communicator* lane = &world.communicator();
  // Ranks wait for the one whose disk is slowest, or that has most to write or to check.
  group.all_true = [lane](bool mine) {
    int32_t value = mine;
    lane->next_call_has_no_deadline();
    lane->all_reduce(&value, 1, kI32, Reduction::min, "checkpoint").sync();
    return value != 0;
  };
  group.of_first = [lane](int64_t mine) {
    lane->next_call_has_no_deadline();
    lane->broadcast(&mine, sizeof mine, 0, "checkpoint").sync();
    return mine;
  };
  return group;
}

void wait_for_all(World& world) { checkpoint_group(world).all_true(true); }

char* HostCopy::reserve(size_t bytes) {
  if (bytes > bytes_) {
    data_.reset();  // so that both never exist at once
    bytes_ = 0;
    data_ = std::make_unique_for_overwrite<char[]>(bytes);
    bytes_ = bytes;
  }
  return data_.get();
}

std::vector<CheckpointPiece> checkpoint_pieces(nn::Module& module, const Optimizers& optimizers,
                                               const SaveOptions& options, HostCopy* copy) {
  std::vector<CheckpointPiece> out;
  const std::vector<nn::StatePiece> pieces = all_pieces(module, optimizers, options.outer, options.also);
  const auto bytes_of = [](const nn::StatePiece& p) {
    return p.owner ? static_cast<size_t>(p.runs.numel()) * size_of(p.dtype) : 0;
  };
  constexpr size_t kAlign = 64;
  const auto room = [](size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; };
  size_t all = 0;
  for (const nn::StatePiece& p : pieces) all += room(bytes_of(p));
  char* into = copy ? copy->reserve(all) : nullptr;
  for (const nn::StatePiece& p : pieces) {
    out.push_back({p.name, p.dtype, p.shape, p.owner ? p.runs : Runs(), p.data, nullptr});
    CheckpointPiece& piece = out.back();
    const size_t bytes = bytes_of(p);
    if (bytes == 0 || (p.device.is_cpu() && !copy)) continue;
    if (!copy) {
      std::shared_ptr<char[]> host(new char[bytes]);
      piece.data = host.get();
      transfer(Device::cpu(), host.get(), p.device, p.data, bytes);
      piece.keep = std::move(host);
      continue;
    }
    piece.data = into;
    if (p.device.is_cpu())
      parallel_for(static_cast<int64_t>(bytes), 1 << 20, [&](int64_t begin, int64_t end) {
        std::memcpy(into + begin, static_cast<const char*>(p.data) + begin, static_cast<size_t>(end - begin));
      });
    else
      transfer(Device::cpu(), into, p.device, p.data, bytes);
    into += room(bytes);
  }
  for (size_t i = 0; i < optimizers.size(); ++i) {
    out.push_back(small_piece<int64_t>(steps_name(i), kI64, {}, {optimizers[i]->steps()}));
    if (const auto applied = optimizers[i]->applied_steps())
      out.push_back(small_piece<int64_t>(applied_name(i), kI64, {}, {*applied}));
  }
  if (options.scaler) {
    const optim::LossScaler::State s = options.scaler->state();
    out.push_back(small_piece<float>(kFactor, kF32, {}, {static_cast<float>(s.factor)}));
    out.push_back(small_piece<int64_t>(kCounts, kI64, {3}, {s.good_steps, s.lost_steps, s.skipped_steps}));
  }
  return out;
}

namespace {

// Parameters that are frozen for good are saved as stored, which may be in the compute dtype: other runs may compute with them in
// another, or train them in f32. Trained parameters are never rounded.
bool converts(const nn::Parameter& p, DType saved, DType wanted) {
  const auto is_at_most_f32 = [](DType d) { return d == kF32 || d == kBF16 || d == kF16; };
  return is_at_most_f32(saved) && is_at_most_f32(wanted) && (wanted == kF32 || !p.trainable());
}

// Values saved by other runs may be stored in blocks here.
bool quantizes(const nn::StatePiece& p, DType saved, const Shape& shape) {
  return p.blocks && saved != kF64 && is_floating(saved) && shape == values_shape(p.shape, *p.blocks);
}

void convert(DType from_dtype, const void* from, DType to_dtype, void* to, int64_t count) {
  visit_floating("checkpoint", from_dtype, [&]<class S>() {
    visit_floating("checkpoint", to_dtype, [&]<class D>() {
      for (int64_t i = 0; i < count; ++i)
        static_cast<D*>(to)[i] = static_cast<D>(static_cast<float>(static_cast<const S*>(from)[i]));
    });
  });
}

// Compares what a checkpoint contains with what a model and its optimizers need.
class Comparison {
 public:
  Comparison(const Checkpoint& checkpoint, nn::Module& module, const PrefixedModules& also) : checkpoint_(checkpoint) {
    for (const nn::Parameter& p : module.parameters()) parameters_[p.name()] = p;
    for (const auto& [prefix, other] : also)
      for (const nn::Parameter& p : other->parameters()) parameters_[prefix + p.name()] = p;
  }
  void needs(const nn::StatePiece& p) {
    const Checkpoint::TensorInfo& saved = checkpoint_.at(p.name);
    if (quantizes(p, saved.dtype, saved.shape)) needed_.insert(p.name);
    else needs(p.name, p.dtype, p.shape, p.blocks);
  }
  void needs(const std::string& name, DType dtype, const Shape& shape, std::optional<BlockFormat> blocks = {}) {
    needed_.insert(name);
    const Checkpoint::TensorInfo& saved = checkpoint_.at(name);
    const auto p = parameters_.find(name);
    const bool fits = saved.dtype == dtype || (p != parameters_.end() && converts(p->second, saved.dtype, dtype));
    if (!fits || !(saved.shape == shape))
      fail<CheckpointError>("[checkpoint] ", checkpoint_.path(), ": ", name, " is ", saved.dtype, saved.shape, ", the model has ", dtype, shape,
                            blocks ? str(": ", sheaf::name(*blocks), " blocks of ", values_shape(shape, *blocks)) : "");
  }
  /// The first tensor that nothing needs and that may not be `skipped`: null if there is none.
  template <class F>
  const std::string* left_over(F&& skipped) const {
    for (const auto& [name, info] : checkpoint_.tensors())
      if (!needed_.contains(name) && !skipped(name)) return &name;
    return nullptr;
  }

 private:
  const Checkpoint& checkpoint_;
  std::map<std::string, nn::Parameter> parameters_;
  std::set<std::string> needed_;
};

// Throws before anything is changed.
void check_state(const Checkpoint& checkpoint, nn::Module& module, std::span<const nn::StatePiece> pieces, size_t optimizers,
                 const LoadOptions& options) {
  const auto has = [&](const std::string& name) { return checkpoint.tensors().contains(name); };
  Comparison model(checkpoint, module, options.also);
  for (const nn::StatePiece& p : pieces) model.needs(p);
  for (size_t i = 0; i < optimizers; ++i) {
    model.needs(steps_name(i), kI64, {});
    if (has(applied_name(i))) model.needs(applied_name(i), kI64, {});
  }
  if (options.scaler && !has(kFactor))
    fail<CheckpointError>("[checkpoint] ", checkpoint.path(), " was saved without a loss scaler: load it without one, and the "
                          "scaler starts anew");
  if (!options.scaler && optimizers > 0 && has(kFactor))
    fail<CheckpointError>("[checkpoint] ", checkpoint.path(), " was saved with a loss scaler: load it with one "
                          "(LoadOptions::scaler)");
  if (options.scaler) model.needs(kFactor, kF32, {}), model.needs(kCounts, kI64, {3});
  const auto skipped = [&](const std::string& name) {
    return (optimizers == 0 && name.starts_with("optimizer.")) || (!options.passes_over.empty() && name.starts_with(options.passes_over));
  };
  if (const std::string* name = model.left_over(skipped))
    fail<CheckpointError>("[checkpoint] ", checkpoint.path(), ": the model has no ", *name);
}

// Host memory for one piece after the other.
struct Staging {
  std::vector<char> values, as_saved;
};

void fill_piece(const nn::StatePiece& p, Checkpoint& checkpoint, Staging& staging) {
  const Checkpoint::TensorInfo& saved = checkpoint.at(p.name);
  const auto read = [&](const Runs& runs, DType dtype, void* to) {
    if (saved.dtype == dtype) return checkpoint.read(p.name, runs, to);
    staging.as_saved.resize(static_cast<size_t>(runs.numel()) * size_of(saved.dtype));
    checkpoint.read(p.name, runs, staging.as_saved.data());
    convert(saved.dtype, staging.as_saved.data(), dtype, to, runs.numel());
  };
  if (quantizes(p, saved.dtype, saved.shape)) {
    nn::BlockPiece piece(p.name, *p.blocks, p.runs);
    read(piece.elements(), kF32, piece.values().data());
    piece.store(p.device, p.data);
  } else if (p.device.is_cpu()) {
    read(p.runs, p.dtype, p.data);
  } else {
    staging.values.resize(static_cast<size_t>(p.runs.numel()) * size_of(p.dtype));
    read(p.runs, p.dtype, staging.values.data());
    transfer(p.device, p.data, Device::cpu(), staging.values.data(), staging.values.size());
  }
}

}  // namespace

void load_state(Checkpoint& checkpoint, nn::Module& module, const Optimizers& optimizers, const LoadOptions& options) {
  std::vector<nn::StatePiece> pieces = all_pieces(module, optimizers, options.outer, options.also);
  if (options.outer && optimizers.empty())  // no island has parameters of its own there: all go on from those that they agreed on
    for (nn::StatePiece& p : nn::state_pieces(module)) pieces.push_back(std::move(p));
  if (optimizers.empty())
    std::erase_if(pieces, [&](const nn::StatePiece& p) { return nn::is_lora(p.name) && !checkpoint.tensors().contains(p.name); });
  check_state(checkpoint, module, pieces, optimizers.size(), options);
  Staging staging;
  for (const nn::StatePiece& p : pieces)
    if (p.runs.numel() > 0) fill_piece(p, checkpoint, staging);
  for (size_t i = 0; i < optimizers.size(); ++i) {
    int64_t steps = 0;
    checkpoint.read(steps_name(i), 0, 1, &steps);
    optimizers[i]->set_steps(steps);
    if (!checkpoint.tensors().contains(applied_name(i))) continue;
    checkpoint.read(applied_name(i), 0, 1, &steps);
    optimizers[i]->set_applied_steps(steps);
  }
  if (options.scaler) load_scaler(checkpoint, *options.scaler);
}

void save_checkpoint(const std::string& folder, int64_t step, nn::Module& module, const Optimizers& optimizers,
                     World& world, const SaveOptions& options) {
  expect_no_recording("save_checkpoint");
  const CheckpointGroup group = checkpoint_group(module, world, options.outer, options.also);
  save_checkpoint(folder, step, checkpoint_pieces(module, optimizers, options), options.state, options.keep, group, options.warn,
                  options.abandoned);
}

std::optional<LoadedCheckpoint> load_checkpoint(const std::string& folder, nn::Module& module,
                                                const Optimizers& optimizers, World& world,
                                                const LoadOptions& options) {
  expect_no_recording("load_checkpoint");
  const CheckpointGroup group = checkpoint_group(module, world, options.outer, options.also);
  std::optional<Checkpoint> checkpoint;
  if (options.step) checkpoint = Checkpoint::open_step(folder, *options.step, group);
  else checkpoint = Checkpoint::open_newest(folder, options.warn, group);
  if (!checkpoint) return std::nullopt;
  load_state(*checkpoint, module, optimizers, options);
  wait_for_all(world);
  return LoadedCheckpoint{checkpoint->path(), checkpoint->step(), checkpoint->state()};
}

}  // namespace sheaf::models
