#include "sheaf/models/published_weights.h"

#include <algorithm>
#include <set>

#include "sheaf/autograd/recording.h"
#include "sheaf/core/json.h"
#include "sheaf/core/transfer.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/presets.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_names.h"
#include "sheaf/nn/state_dict.h"

namespace sheaf::models {
namespace {

constexpr int64_t kChunk = 1 << 16;  // elements read at a time
constexpr int64_t kPanel = 16;       // columns of ours transposed at a time: a cache line of f32

/// Where a tensor of the table is in the files.
struct Source {
  const SafetensorsFile* file = nullptr;
  std::string name;  ///< there
  DType dtype = kF32;

  /// Elements [begin, end) of its flat index.
  template <class T>
  void read(int64_t begin, int64_t end, T* out) const {
    if (dtype == dtype_of<T>) return file->read(name, begin, end, out);
    visit_floating("weights", dtype, [&]<class S>() {
      std::vector<S> chunk(static_cast<size_t>(std::min(end - begin, kChunk)));
      for (int64_t at = begin; at < end; at += kChunk) {
        const int64_t count = std::min(end - at, kChunk);
        file->read(name, at, at + count, chunk.data());
        for (int64_t i = 0; i < count; ++i)
          if constexpr (std::is_same_v<S, double>) out[at - begin + i] = static_cast<T>(chunk[i]);
          else out[at - begin + i] = static_cast<T>(static_cast<float>(chunk[i]));
      }
    });
  }
};

/// Elements [begin, end) of the flat index of `t` as ours is laid out, counted from its first row.
template <class T>
void read_rows(const Source& source, const PublishedTensor& t, int64_t begin, int64_t end, T* out) {
  if (!t.transposed) return source.read(begin, end, out);
  // A column of ours is a row of the file, of which we want the rows of ours that lie in [begin, end).
  const int64_t columns = t.row_size(), rows = t.rows();
  const auto first_row_at = [&](int64_t flat, int64_t column) { return (flat - column + columns - 1) / columns; };
  const int64_t most = end / columns - begin / columns + 1;
  std::vector<T> panel(static_cast<size_t>(kPanel * most));
  for (int64_t from = 0; from < columns; from += kPanel) {
    const int64_t width = std::min(kPanel, columns - from);
    int64_t low[kPanel], high[kPanel];
    for (int64_t j = 0; j < width; ++j) {
      low[j] = first_row_at(begin, from + j);
      high[j] = first_row_at(end, from + j);
      if (low[j] < high[j]) source.read((from + j) * rows + low[j], (from + j) * rows + high[j], &panel[j * most]);
    }
    for (int64_t row = low[width - 1]; row < high[0]; ++row)  // the first column begins latest, and ends latest
      for (int64_t j = 0; j < width; ++j)
        if (low[j] <= row && row < high[j]) out[row * columns + from + j - begin] = panel[j * most + row - low[j]];
  }
}

class Loader {
 public:
  Loader(const PublishedFiles& files, const ModelConfig& model) : files_(files) {
    const auto table = published_tensors(model);
    const std::string_view prefix = published_prefix(model);
    const auto& there = files.tensors();
    // Files of the model without its head, as GPT-2's are, have no prefix.
    const bool prefixed = std::any_of(there.begin(), there.end(), [&](const auto& t) { return t.first.starts_with(prefix); });
    const auto file_name = [&](const std::string& name) {
      return !prefixed && name.starts_with(prefix) ? name.substr(prefix.size()) : name;
    };
    std::set<std::string, std::less<>> known;
    for (const PublishedTensor& t : table) {
      const std::string name = file_name(t.name);
      known.insert(name);
      parts_[t.own].push_back({t, find(t, name)});
    }
    for (const auto& [name, file] : there)
      if (!known.contains(name) && !is_redundant(model, name) &&
          (prefixed || !is_redundant(model, std::string(prefix) + name)))
        fail<CheckpointError>("[weights] '", file->path(), "': ", json_string(name), " ", file->at(name).dtype,
                              file->at(name).shape, " is nothing that this ", model.type, " of ", model.layers,
                              " layers has");
  }

  /// Refuses what fill() could not fill.
  void check(const nn::StatePiece& piece) const {
    const auto found = parts_.find(piece.name);
    if (found == parts_.end()) fail<ConfigError>("[weights] no published weights have the model's ", piece.name);
    if (piece.dtype != kF32 && piece.dtype != kF64)
      fail<ConfigError>("[weights] ", piece.name, " is ", piece.dtype, "; weights go to parameters in f32 or f64");
    for (const auto& [t, source] : found->second)
      if (source.dtype == kF64 && piece.dtype == kF32)
        fail<CheckpointError>("[weights] '", source.file->path(), "': ", json_string(source.name), " is f64, which ",
                              piece.name, ", f32, does not hold");
  }

  /// The piece's own elements into `out`; returns the bytes read.
  template <class T>
  int64_t fill(const nn::StatePiece& piece, T* out) const {
    int64_t bytes = 0;
    for (const auto& [t, source] : parts_.at(piece.name)) {
      const int64_t start = t.first_row * t.row_size(), stop = start + t.rows() * t.row_size();
      const int64_t begin = std::max(piece.interval.begin, start), end = std::min(piece.interval.end, stop);
      if (begin >= end) continue;
      read_rows(source, t, begin - start, end - start, out + (begin - piece.interval.begin));
      bytes += (end - begin) * static_cast<int64_t>(size_of(source.dtype));
    }
    return bytes;
  }

 private:
  Source find(const PublishedTensor& t, const std::string& name) const {
    const auto found = files_.tensors().find(name);
    if (found == files_.tensors().end())
      fail<CheckpointError>("[weights] '", files_.path(), "' has no ", json_string(name), " ", t.shape, ", of which the "
                            "model's ", t.own, " is made");
    const SafetensorsEntry& entry = found->second->at(name);
    Shape expected = t.shape;
    if (t.more_rows && entry.shape.rank() == expected.rank()) expected[0] = std::max(expected[0], entry.shape[0]);
    const auto refuse = [&](const auto&... parts) {
      fail<CheckpointError>("[weights] '", found->second->path(), "': ", json_string(name), " is ", entry.dtype,
                            entry.shape, "; ", parts...);
    };
    if (!(entry.shape == expected)) refuse("the model's ", t.own, " asks for ", t.shape, t.more_rows ? " or more rows" : "");
    if (!is_floating(entry.dtype)) refuse("weights are f32, f16 or bf16");
    return {found->second, name, entry.dtype};
  }

  const PublishedFiles& files_;
  std::map<std::string, std::vector<std::pair<PublishedTensor, Source>>, std::less<>> parts_;  // by our name
};

}  // namespace

ModelConfig model_config(nn::Module& model) {
  if (const auto* gpt = dynamic_cast<const Gpt*>(&model)) return resolved(options_of(gpt->config));
  if (const auto* llama = dynamic_cast<const Llama*>(&model)) return resolved(options_of(llama->config));
  fail<ConfigError>("[weights] published weights are for Gpt and Llama, not for ", model.type_name());
}

void check_weights(const PublishedFiles& files, const ModelConfig& model) {
  if (const std::string file = published_config_file(files.path()); !file.empty())
    check_published_shape(model, read_published_config(file), file);
  const Loader loader(files, model);
}

int64_t load_weights(nn::Module& model, const PublishedFiles& files) {
  if (Recording::current()) fail<LifetimeError>("[load_weights] not inside a recording: end it by recording.take()");
  const ModelConfig config = model_config(model);
  check_weights(files, config);
  const Loader loader(files, config);
  const std::vector<nn::StatePiece> pieces = nn::state_pieces(model);
  for (const nn::StatePiece& piece : pieces) loader.check(piece);
  int64_t bytes = 0;
  std::vector<char> host;
  for (const nn::StatePiece& piece : pieces) {
    if (piece.interval.size() == 0) continue;
    if (!piece.device.is_cpu()) host.resize(static_cast<size_t>(piece.interval.size()) * size_of(piece.dtype));
    void* out = piece.device.is_cpu() ? piece.data : host.data();
    bytes += piece.dtype == kF64 ? loader.fill(piece, static_cast<double*>(out)) : loader.fill(piece, static_cast<float*>(out));
    if (!piece.device.is_cpu()) transfer(piece.device, piece.data, Device::cpu(), host.data(), host.size());
  }
  return bytes;
}

int64_t load_weights(nn::Module& model, const std::string& path) {
  return load_weights(model, PublishedFiles::open(path));
}

}  // namespace sheaf::models
