#include "sheaf/models/checkpoint.h"

#include <set>

#include "sheaf/core/transfer.h"
#include "sheaf/nn/state_dict.h"

namespace sheaf::models {
namespace {

std::vector<nn::StatePiece> all_pieces(nn::Module& module, optim::Optimizer* optimizer) {
  std::vector<nn::StatePiece> pieces = nn::state_pieces(module);
  if (!optimizer) return pieces;
  for (nn::StatePiece& p : nn::state_pieces(*optimizer)) pieces.push_back(std::move(p));
  return pieces;
}

}  // namespace

std::vector<CheckpointPiece> checkpoint_pieces(nn::Module& module, optim::Optimizer* optimizer) {
  std::vector<CheckpointPiece> out;
  for (const nn::StatePiece& p : all_pieces(module, optimizer)) {
    out.push_back({p.name, p.dtype, p.shape, p.owner ? p.interval : Interval{}, p.data, nullptr});
    CheckpointPiece& piece = out.back();
    const size_t bytes = static_cast<size_t>(piece.interval.size()) * size_of(p.dtype);
    if (p.device.is_cpu() || bytes == 0) continue;
    std::shared_ptr<char[]> host(new char[bytes]);
    transfer(Device::cpu(), host.get(), p.device, p.data, bytes);
    piece.data = host.get();
    piece.keep = std::move(host);
  }
  return out;
}

void load_state(Checkpoint& checkpoint, nn::Module& module, optim::Optimizer* optimizer) {
  std::set<std::string> wanted;
  const std::vector<nn::StatePiece> pieces = all_pieces(module, optimizer);
  for (const nn::StatePiece& p : pieces) {
    wanted.insert(p.name);
    const Checkpoint::TensorInfo& saved = checkpoint.at(p.name);
    if (saved.dtype != p.dtype || !(saved.shape == p.shape))
      fail<CheckpointError>("[checkpoint] ", checkpoint.path(), ": ", p.name, " is ", saved.dtype, saved.shape,
                            ", the model has ", p.dtype, p.shape);
  }
  for (const auto& [name, info] : checkpoint.tensors())
    if (!wanted.contains(name) && (optimizer || !name.starts_with("optimizer.")))
      fail<CheckpointError>("[checkpoint] ", checkpoint.path(), ": the model has no ", name);
  std::vector<char> host;
  for (const nn::StatePiece& p : pieces) {
    if (p.interval.size() == 0) continue;
    if (!p.device.is_cpu()) host.resize(static_cast<size_t>(p.interval.size()) * size_of(p.dtype));
    checkpoint.read(p.name, p.interval.begin, p.interval.end, p.device.is_cpu() ? p.data : host.data());
    if (!p.device.is_cpu()) transfer(p.device, p.data, Device::cpu(), host.data(), host.size());
  }
  if (optimizer) optimizer->set_steps(checkpoint.step());
}

}  // namespace sheaf::models
