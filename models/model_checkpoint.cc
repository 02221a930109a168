#include "sheaf/models/model_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

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

std::vector<nn::StatePiece> all_pieces(nn::Module& module, const Optimizers& optimizers, const optim::DiLoCo* outer) {
  if (outer) return nn::state_pieces(module, optimizers, *outer);
  std::vector<nn::StatePiece> pieces = nn::state_pieces(module);
  for (optim::Optimizer* optimizer : optimizers)
    for (nn::StatePiece& p : nn::state_pieces(*optimizer)) pieces.push_back(std::move(p));
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

void check_outside(const char* who) {
  if (Recording::current()) fail<LifetimeError>("[", who, "] not inside a recording: end it by recording.take()");
}

CheckpointGroup checkpoint_group(nn::Module& module, World& world, const optim::DiLoCo* outer) {
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
  group.barrier = [lane] { lane->barrier("checkpoint").sync(); };
  group.all_true = [lane](bool mine) {
    int32_t value = mine;
    lane->all_reduce(&value, 1, kI32, Reduction::min, "checkpoint").sync();
    return value != 0;
  };
  return group;
}

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
  const std::vector<nn::StatePiece> pieces = all_pieces(module, optimizers, options.outer);
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

}  // namespace

void load_state(Checkpoint& checkpoint, nn::Module& module, const Optimizers& optimizers, const LoadOptions& options) {
  optim::LossScaler* const scaler = options.scaler;
  std::set<std::string> wanted;
  std::vector<nn::StatePiece> pieces = all_pieces(module, optimizers, options.outer);
  if (optimizers.empty())
    std::erase_if(pieces, [&](const nn::StatePiece& p) { return nn::is_lora(p.name) && !checkpoint.tensors().contains(p.name); });
  std::map<std::string, nn::Parameter> parameters;
  for (const nn::Parameter& p : module.parameters()) parameters[p.name()] = p;
  const auto check_saved = [&](const std::string& name, DType dtype, const Shape& shape, std::optional<BlockFormat> blocks = {}) {
    wanted.insert(name);
    const Checkpoint::TensorInfo& saved = checkpoint.at(name);
    const auto p = parameters.find(name);
    const bool fits = saved.dtype == dtype || (p != parameters.end() && converts(p->second, saved.dtype, dtype));
    if (!fits || !(saved.shape == shape))
      fail<CheckpointError>("[checkpoint] ", checkpoint.path(), ": ", name, " is ", saved.dtype, saved.shape,
                            ", the model has ", dtype, shape, blocks ? str(": ", sheaf::name(*blocks), " blocks of ", values_shape(shape, *blocks)) : "");
  };
  for (const nn::StatePiece& p : pieces) {
    const Checkpoint::TensorInfo& saved = checkpoint.at(p.name);
    if (quantizes(p, saved.dtype, saved.shape)) wanted.insert(p.name);
    else check_saved(p.name, p.dtype, p.shape, p.blocks);
  }
  const auto has = [&](const std::string& name) { return checkpoint.tensors().contains(name); };
  for (size_t i = 0; i < optimizers.size(); ++i) {
    check_saved(steps_name(i), kI64, {});
    if (has(applied_name(i))) check_saved(applied_name(i), kI64, {});
  }
  if (scaler && !has(kFactor))
    fail<CheckpointError>("[checkpoint] ", checkpoint.path(), " was saved without a loss scaler: load it without one, and the "
                          "scaler starts anew");
  if (!scaler && !optimizers.empty() && has(kFactor))
    fail<CheckpointError>("[checkpoint] ", checkpoint.path(), " was saved with a loss scaler: load it with one "
                          "(LoadOptions::scaler)");
  if (scaler) check_saved(kFactor, kF32, {}), check_saved(kCounts, kI64, {3});
  for (const auto& [name, info] : checkpoint.tensors())
    if (!wanted.contains(name) && (!optimizers.empty() || !name.starts_with("optimizer.")) &&
        (options.passes_over.empty() || !name.starts_with(options.passes_over)))
      fail<CheckpointError>("[checkpoint] ", checkpoint.path(), ": the model has no ", name);
  std::vector<char> host, as_saved;
  for (const nn::StatePiece& p : pieces) {
    const int64_t count = p.runs.numel();
    if (count == 0) continue;
    if (const Checkpoint::TensorInfo& saved = checkpoint.at(p.name); quantizes(p, saved.dtype, saved.shape)) {
      nn::BlockPiece piece(p.name, *p.blocks, p.runs);
      as_saved.resize(piece.values().size() * size_of(saved.dtype));
      checkpoint.read(p.name, piece.elements(), as_saved.data());
      convert(saved.dtype, as_saved.data(), kF32, piece.values().data(), std::ssize(piece.values()));
      piece.store(p.device, p.data);
      continue;
    }
    if (!p.device.is_cpu()) host.resize(static_cast<size_t>(count) * size_of(p.dtype));
    void* const to = p.device.is_cpu() ? p.data : host.data();
    if (const DType saved = checkpoint.at(p.name).dtype; saved == p.dtype) {
      checkpoint.read(p.name, p.runs, to);
    } else {
      as_saved.resize(static_cast<size_t>(count) * size_of(saved));
      checkpoint.read(p.name, p.runs, as_saved.data());
      convert(saved, as_saved.data(), p.dtype, to, count);
    }
    if (!p.device.is_cpu()) transfer(p.device, p.data, Device::cpu(), host.data(), host.size());
  }
  for (size_t i = 0; i < optimizers.size(); ++i) {
    int64_t steps = 0;
    checkpoint.read(steps_name(i), 0, 1, &steps);
    optimizers[i]->set_steps(steps);
    if (!has(applied_name(i))) continue;
    checkpoint.read(applied_name(i), 0, 1, &steps);
    optimizers[i]->set_applied_steps(steps);
  }
  if (scaler) load_scaler(checkpoint, *scaler);
}

void save_checkpoint(const std::string& folder, int64_t step, nn::Module& module, const Optimizers& optimizers,
                     World& world, const SaveOptions& options) {
  check_outside("save_checkpoint");
  const CheckpointGroup group = checkpoint_group(module, world, options.outer);
  save_checkpoint(folder, step, checkpoint_pieces(module, optimizers, options), options.state, options.keep, group);
}

std::optional<LoadedCheckpoint> load_checkpoint(const std::string& folder, nn::Module& module,
                                                const Optimizers& optimizers, World& world,
                                                const LoadOptions& options) {
  check_outside("load_checkpoint");
  std::optional<Checkpoint> checkpoint = Checkpoint::open_newest(folder, options.warn ? options.warn : warn_on_stderr,
                                                                checkpoint_group(module, world, options.outer));
  if (!checkpoint) return std::nullopt;
  load_state(*checkpoint, module, optimizers, options);
  return LoadedCheckpoint{checkpoint->path(), checkpoint->step(), checkpoint->state()};
}

}  // namespace sheaf::models
