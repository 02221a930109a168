#include "sheaf/nn/load_tensors.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "sheaf/autograd/recording.h"
#include "sheaf/core/json.h"
#include "sheaf/core/safetensors.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/nn/fill_pieces.h"

namespace sheaf::nn {
namespace {

class Files {
 public:
  explicit Files(const std::vector<std::string>& paths) {
    files_.reserve(paths.size());  // tensors_ points there
    for (const std::string& path : paths) {
      const SafetensorsFile& file = files_.emplace_back(SafetensorsFile::open(path));
      for (const auto& [name, entry] : file.tensors())
        if (const auto [at, first] = tensors_.emplace(name, &file); !first)
          fail<CheckpointError>("[load_tensors] ", json_string(name), " is in '", at->second->path(), "' and in '", path, "'");
    }
  }

  /// The file of a tensor that these pieces can be filled from.
  const SafetensorsFile& holder(const std::string& tensor, const StatePiece& piece) const {
    const DType dtype = piece.blocks ? kF32 : piece.dtype;
    const Shape shape = piece.blocks ? values_shape(piece.shape, *piece.blocks) : piece.shape;
    const auto found = tensors_.find(tensor);
    if (found == tensors_.end())
      fail<CheckpointError>("[load_tensors] ", json_string(tensor), ", for the model's '", piece.name, "' ", dtype, shape, ", is not in ", paths());
    const SafetensorsEntry& entry = found->second->at(tensor);
    const bool converts = is_floating(entry.dtype) && is_floating(dtype), fits = converts || (entry.dtype == dtype && !entry.e4m3);
    if (!(entry.shape == shape) || !fits)
      fail<CheckpointError>("[load_tensors] '", found->second->path(), "': ", json_string(tensor), " is ",
                            entry.e4m3 ? "F8_E4M3" : sheaf::name(entry.dtype), entry.shape, ", the model's '", piece.name, "' ", dtype, shape);
    return *found->second;
  }
  const std::map<std::string, const SafetensorsFile*>& tensors() const { return tensors_; }

 private:
  std::string paths() const {
    std::string out;
    for (const SafetensorsFile& file : files_) out += str(out.empty() ? "'" : ", '", file.path(), "'");
    return out.empty() ? "any file, as none is given" : out;
  }

  std::vector<SafetensorsFile> files_;
  std::map<std::string, const SafetensorsFile*> tensors_;
};

/// One parameter or buffer, and where its values come from.
struct Load {
  std::span<const StatePiece> pieces;
  std::string tensor;
  const SafetensorsFile* file;

  int64_t run() const {
    const DType stored = file->at(tensor).dtype;
    const auto fetch = [&](int64_t begin, int64_t end, void* to) { file->read(tensor, begin, end, to); };
    int64_t elements = 0;
    if (is_floating(stored)) {
      elements = fill_pieces(pieces, [&]<class T>(std::span<const WantedValues<T>> wanted) {
        int64_t read = 0;
        for (const auto& [runs, out] : wanted) {
          if (runs.numel() == 0) continue;
          for (int64_t k = 0; k < runs.count; ++k) read_values(stored, runs[k].begin, 1, runs.size, out + k * runs.size, fetch);
          read += runs.numel();
        }
        return read;
      });
    } else {
      for (const StatePiece& p : pieces) {  // as they are
        if (p.runs.numel() == 0) continue;
        const auto each = static_cast<int64_t>(size_of(p.dtype));
        std::vector<char> host(static_cast<size_t>(p.runs.numel() * each));
        for (int64_t k = 0; k < p.runs.count; ++k) fetch(p.runs[k].begin, p.runs[k].end, host.data() + k * p.runs.size * each);
        transfer(p.device, p.data, Device::cpu(), host.data(), host.size());
        elements += p.runs.numel();
      }
    }
    return elements * static_cast<int64_t>(size_of(stored));
  }
};

void check_memory(Module& model) {
  const auto check_device = [](const std::string& name, Device device) {
    check<LifetimeError>(!device.is_meta(), "[load_tensors] '", name, "' is on meta, where it has no values");
  };
  for (const auto& unit : distinct_units(model.parameters()))
    for (const FlatBuffer& b : unit->buffers()) check_device(unit->leaves()[static_cast<size_t>(b.leaves[0])].name, b.shard.device());
  for (const Buffer& b : model.buffers()) check_device(b.name(), b.value().device());
}

}  // namespace

LoadedTensors load_tensors(Module& model, const std::vector<std::string>& files, const TensorNames& name_of) {
  expect_no_recording("load_tensors");
  check_memory(model);
  const std::vector<StatePiece> all = state_pieces(model);
  const Files there(files);
  LoadedTensors out;
  std::map<std::string, std::string> wanted;
  const auto ask = [&](const std::string& name) {
    if (auto tensor = name_of(name)) wanted.emplace(name, *std::move(tensor));
    else out.kept.push_back(name);
  };
  for (const Parameter& p : model.parameters()) ask(p.name());
  for (const Buffer& b : model.buffers()) ask(b.name());

  std::vector<Load> loads;
  std::set<std::string> used;
  std::span<const StatePiece> rest = all;
  while (!rest.empty()) {
    const StatePiece& first = rest[0];
    const auto other = std::ranges::find_if(rest, [&](const StatePiece& p) { return p.name != first.name; });
    const auto pieces = rest.first(static_cast<size_t>(other - rest.begin()));
    rest = rest.subspan(pieces.size());
    const auto found = wanted.find(first.name);  // a part of a model may share its units with others
    if (found == wanted.end()) continue;
    loads.push_back({pieces, found->second, &there.holder(found->second, first)});
    used.insert(found->second);
  }
  for (const Load& load : loads) out.bytes += load.run();
  for (const auto& [name, file] : there.tensors())
    if (!used.contains(name)) out.unused.push_back(name);
  return out;
}

}  // namespace sheaf::nn
