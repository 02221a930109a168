#include "sheaf/models/step_inputs.h"

#include <algorithm>

#include "sheaf/core/transfer.h"
#include "sheaf/nn/layers/context_region.h"

namespace sheaf::models {

StepInputs::StepInputs(const TrainConfig& config, const Mesh& mesh, Device device, int64_t scalars)
    : scalar_count_(scalars), seed_(config.train.seed) {
  const int64_t rows = config.train.batch, parts = config.train.micro_batches;
  Layout tokens(mesh.spec, Placement::shard(0));
  for (int a = 0; a < tokens.num_axes(); ++a)
    if (mesh.spec->name(a) == "context" || mesh.spec->name(a) == "model") tokens[a] = Placement::shard(1);
  if (mesh.spec->has_axis("context") && nn::context_comm_from(config.sharding.context_comm) == nn::ContextComm::all_gather) {
    const int a = mesh.spec->axis("context");
    tokens[a] = Placement::shard(OwnershipMap::from_both_ends(1, config.model.context, mesh.spec->size(a)));
  }
  Layout targets = tokens;
  if (mesh.spec->has_axis("stage")) {
    const int axis = mesh.spec->axis("stage");
    tokens[axis] = Placement::on(0), targets[axis] = Placement::on(mesh.spec->size(axis) - 1);
  }
  for (int64_t i = 0; i < parts; ++i) {
    const Shape shape{rows * (i + 1) / parts - rows * i / parts, config.model.context};
    samples_.push_back({{kI32, shape, tokens}, {kI32, shape, targets}});
  }
  device_ = make(device);
  host_ = device.is_cuda() ? make(Device::cpu()) : device_;
}

namespace {

int64_t aligned_bytes(const Type& type) {
  constexpr int64_t kAlign = 256;
  const int64_t size = type.local_shape().numel() * static_cast<int64_t>(size_of(type.dtype));
  return (size + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

int64_t StepInputs::bytes_of_micro_batch(int64_t i) const {
  const MicroBatch& part = device_.micro_batches[static_cast<size_t>(i)];
  return aligned_bytes(part.tokens.type()) + aligned_bytes(part.targets.type()) + aligned_bytes(part.random_state.type());
}

int64_t StepInputs::num_rows() const {
  int64_t rows = 0;
  for (const Samples& part : samples_) rows += part.tokens.shape[0];
  return rows;
}

StepInputs::Block StepInputs::make(Device device) const {
  std::vector<std::pair<Tensor*, Type>> parts;
  Block block;
  block.micro_batches.resize(samples_.size());
  for (size_t i = 0; i < samples_.size(); ++i) {
    MicroBatch& part = block.micro_batches[i];
    parts.emplace_back(&part.tokens, samples_[i].tokens);
    parts.emplace_back(&part.targets, samples_[i].targets);
    parts.emplace_back(&part.random_state, Type{kI64, {3}, {}});
  }
  Tensor numbers;
  parts.emplace_back(&numbers, Type{kF64, {scalar_count_ + 1}, {}});

  int64_t bytes = 0;
  std::vector<int64_t> offsets;
  for (const auto& [tensor, type] : parts) {
    offsets.push_back(bytes);
    bytes += aligned_bytes(type);
  }
  const MemoryUse use(HeldFor::inputs, "", "");
  block.bytes = Tensor::empty({kU8, {bytes}, {}}, device);
  for (size_t i = 0; i < parts.size(); ++i)
    *parts[i].first = Tensor::view_into(block.bytes, parts[i].second, offsets[i]);
  block.scalars = Tensor::view_into(block.bytes, {kF64, {scalar_count_}, {}}, offsets.back());
  block.num_targets = Tensor::view_into(block.bytes, {kF64, {}, {}}, offsets.back() + scalar_count_ * int64_t{sizeof(double)});
  return block;
}

void StepInputs::write_samples(int64_t first, const FillBatch& fill) {
  for (const MicroBatch& part : host_.micro_batches) {
    fill_block(first, fill, part.tokens, part.targets);
    first += part.tokens.size(0);
  }
}

void StepInputs::send() {
  if (device_.bytes.device().is_cuda())
    transfer(device_.bytes.device(), device_.bytes.view().data, Device::cpu(), host_.bytes.view().data,
             static_cast<size_t>(host_.bytes.local_bytes()));
}

void StepInputs::set_samples(int64_t first, const FillBatch& fill) {
  if (device_.bytes.device().is_meta()) return;
  write_samples(first, fill);
  send();
}

void StepInputs::set_step(int64_t step, int64_t first, const FillBatch& fill, const std::vector<double>& scalars,
                          double targets) {
  if (device_.bytes.device().is_meta()) return;
  write_samples(first, fill);
  for (const MicroBatch& part : host_.micro_batches) {
    int64_t* state = part.random_state.view().as<int64_t>();
    state[0] = seed_, state[1] = step, state[2] = first;
    first += part.tokens.size(0);
  }
  std::ranges::copy(scalars, host_.scalars.view().as<double>());
  *host_.num_targets.view().as<double>() = targets;
  send();
}

}  // namespace sheaf::models
