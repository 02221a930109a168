#include "sheaf/models/published_weights.h"

#include <algorithm>
#include <set>

#include "sheaf/autograd/recording.h"
#include "sheaf/core/json.h"
#include "sheaf/models/matrix_blocks.h"
#include "sheaf/models/model_options.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_names.h"
#include "sheaf/models/published_source.h"
#include "sheaf/nn/fill_pieces.h"
#include "sheaf/nn/lora.h"

namespace sheaf::models {
namespace {

constexpr int64_t kPanel = 16;  // columns of ours transposed at a time: a cache line of f32

/// A block of ours, with rows relative to those in the tensor of the table, and the memory that holds it.
template <class T>
struct Wanted {
  MatrixBlock block;
  T* out;
};

/// For a tensor stored like ours: rows, or a part of each. Returns the elements read.
template <class T>
int64_t read_rows(const PublishedSource& source, int64_t row_size, const std::vector<Wanted<T>>& wanted) {
  int64_t read = 0;
  for (const auto& [block, out] : wanted) {
    const bool whole = block.columns == row_size;
    for (int64_t r = 0; r < (whole ? 1 : block.rows); ++r) {
      const int64_t begin = (block.row + r) * row_size + block.column;
      source.read(begin, begin + (whole ? block.rows : 1) * block.columns, out + block.at + r * block.columns);
    }
    read += block.numel();
  }
  return read;
}

/// For adjacent blocks of a tensor whose rows are columns of ours, `height` elements each: of each such row, the elements from the
/// first to the last needed one are read at once. Returns the elements read.
template <class T>
int64_t read_transposed(const PublishedSource& source, int64_t height, std::span<const Wanted<T>> wanted) {
  int64_t read = 0, top = height, bottom = 0, left = INT64_MAX, right = 0;
  for (const auto& [block, out] : wanted) {
    top = std::min(top, block.row), bottom = std::max(bottom, block.row + block.rows);
    left = std::min(left, block.column), right = std::max(right, block.column + block.columns);
  }
  const int64_t most = bottom - top;
  std::vector<T> panel(static_cast<size_t>(kPanel * most));
  for (int64_t from = left; from < right; from += kPanel) {
    const int64_t to = std::min(from + kPanel, right);
    int64_t low[kPanel];
    for (int64_t column = from; column < to; ++column) {
      int64_t& first = low[column - from] = bottom;
      int64_t end = top;
      for (const auto& [block, out] : wanted)
        if (block.column <= column && column < block.column + block.columns)
          first = std::min(first, block.row), end = std::max(end, block.row + block.rows);
      if (first >= end) continue;
      source.read(column * height + first, column * height + end, &panel[(column - from) * most]);
      read += end - first;
    }
    for (const auto& [block, out] : wanted) {
      const int64_t begin = std::max(from, block.column), end = std::min(to, block.column + block.columns);
      for (int64_t row = block.row; row < block.row + block.rows; ++row)
        for (int64_t column = begin; column < end; ++column)
          out[block.at_of(row, column)] = panel[(column - from) * most + row - low[column - from]];
    }
  }
  return read;
}

template <class T>
int64_t read_blocks(const PublishedSource& source, std::vector<Wanted<T>> wanted) {
  const PublishedTensor& t = source.tensor;
  if (!t.transposed) return read_rows(source, t.row_size(), wanted);
  std::ranges::sort(wanted, {}, [](const Wanted<T>& w) { return w.block.row; });
  int64_t read = 0;
  for (auto first = wanted.begin(); first != wanted.end();) {
    int64_t bottom = first->block.row;
    auto last = first;
    for (; last != wanted.end() && last->block.row <= bottom; ++last)
      bottom = std::max(bottom, last->block.row + last->block.rows);
    read += read_transposed<T>(source, t.rows(), {first, last});
    first = last;
  }
  return read;
}

using Tensors = std::map<std::string, const SafetensorsFile*, std::less<>>;

/// The files' names of the table's tensors. Files of a model without its head, such as GPT-2's, lack the table's prefix; those of a
/// model that also reads images have a longer one for the text model.
struct FileNames {
  std::string_view prefix;    ///< in the table
  std::string there, head;    ///< in the files, where the head may have one, too
  bool among_others = false;  ///< in a model of images, tensors with other prefixes do not belong to the text model

  FileNames(const Tensors& tensors, const ModelConfig& model) : prefix(published_prefix(model)) {
    const auto begin_with = [&](std::string_view text) {
      return std::ranges::any_of(tensors, [&](const auto& t) { return t.first.starts_with(text); });
    };
    const std::string_view newer = "model.language_model.", older = "language_model.model.";  // since version 5 of transformers, and before
    if (model.type == "llama" && begin_with(newer)) there = newer, among_others = true;
    else if (model.type == "llama" && begin_with(older)) there = older, head = "language_model.", among_others = true;
    else if (begin_with(prefix)) there = prefix;
  }

  std::string of(std::string_view name) const {
    return name.starts_with(prefix) ? there + std::string(name.substr(prefix.size())) : head + std::string(name);
  }
  /// The inverse, for tensors with such a name; else "".
  std::string back(std::string_view name) const {
    if (name.starts_with(head + "lm_head.")) return std::string(name.substr(head.size()));
    if (name.starts_with(there)) return std::string(prefix) + std::string(name.substr(there.size()));
    return among_others ? "" : std::string(name);
  }
};

class Loader {
 public:
  Loader(const PublishedFiles& files, const ModelConfig& model) : files_(files) {
    const Tensors& there = files.tensors();
    const FileNames names(there, model);
    std::set<std::string, std::less<>> known;
    const auto has_mtp = [&](int64_t k) { return model.experts && there.contains(names.of(mtp_mark(model.layers + k))); };
    for (const PublishedTensor& t : published_tensors(model, PublishedForm::of(there))) {
      if (t.repeats || (t.mtp_layer >= 0 && !has_mtp(t.mtp_layer))) continue;
      const PublishedSource& source = parts_[t.own].emplace_back(find(t, names.of(t.name)));
      known.insert(source.name);
      if (source.scales_file) known.insert(source.scales);
    }
    const auto is_of_mtp = [&](const std::string& name) {
      for (int64_t k = 0; has_mtp(k); ++k)
        if (name.starts_with(names.of(str(names.prefix, "layers.", model.layers + k, '.')))) return true;
      return false;
    };
    for (const auto& [name, file] : there) {
      const std::string own = names.back(name);
      if (own == "lm_head.weight" && model.tie_embeddings) check_tied(name);
      if (!own.empty() && !known.contains(name) && !is_of_mtp(name) && !is_redundant(model, own))
        fail<CheckpointError>("[weights] '", file->path(), "': ", json_string(name), " ", file->at(name).dtype,
                              file->at(name).shape, " is nothing that this ", model.type, " of ", model.layers,
                              " layers has");
    }
  }

  bool has(const std::string& name) const { return parts_.contains(name); }
  /// Refuses pieces that fill() could not fill.
  void check(const nn::StatePiece& piece) const {
    const auto found = parts_.find(piece.name);
    if (found == parts_.end()) fail<ConfigError>("[weights] no published weights have the model's ", piece.name);
    if (!is_floating(piece.dtype) && !piece.blocks) fail<ConfigError>("[weights] ", piece.name, " is ", piece.dtype, "; weights are floating");
    for (const PublishedSource& source : found->second)
      if (source.dtype == kF64 && piece.dtype != kF64)
        fail<CheckpointError>("[weights] '", source.file->path(), "': ", json_string(source.name), " is f64, which ",
                              piece.name, ", ", piece.dtype, ", does not hold");
  }

  /// Fills the pieces of one parameter; returns the bytes read.
  int64_t fill(std::span<const nn::StatePiece> pieces) const {
    return nn::fill_pieces(pieces, [&]<class T>(std::span<const nn::WantedValues<T>> values) { return read(pieces[0].name, values); });
  }

 private:
  /// Reads elements of a parameter to where they are stored, contiguously.
  template <class T>
  int64_t read(const std::string& name, std::span<const nn::WantedValues<T>> values) const {
    int64_t bytes = 0;
    for (const PublishedSource& source : parts_.at(name)) {
      const PublishedTensor& t = source.tensor;
      const MatrixBlock rows{t.first_row, t.rows(), 0, t.row_size()};
      std::vector<Wanted<T>> wanted;
      for (const auto& [runs, out] : values)
        for (const MatrixBlock& block : blocks_of(runs, t.row_size())) {
          const MatrixBlock both = overlap(block, rows);
          if (both.numel() == 0) continue;
          const int64_t at = block.at_of(both.row, both.column);
          wanted.push_back({{both.row - t.first_row, both.rows, both.column, both.columns, at}, out});
        }
      bytes += source.bytes(read_blocks(source, std::move(wanted)));
    }
    return bytes;
  }

  // A head in the files of a model with tied embeddings: a copy of the embedding, or config.json does not match the weights. Compares
  // both ends.
  void check_tied(const std::string& head) const {
    const PublishedSource& table = parts_.at(parts_.contains("wte.weight") ? "wte.weight" : "embedding.weight").front();
    const SafetensorsFile& file = *files_.tensors().at(head);
    const SafetensorsEntry &a = file.at(head), &b = table.file->at(table.name);
    const int64_t count = a.shape.numel(), looked = std::min<int64_t>(count, 2048);
    const auto elements = [&](const SafetensorsFile& of, const std::string& name, int64_t begin) {
      std::vector<char> bytes(static_cast<size_t>(looked) * size_of(of.at(name).dtype));
      of.read(name, begin, begin + looked, bytes.data());
      return bytes;
    };
    const auto differ = [&](int64_t begin) { return elements(file, head, begin) != elements(*table.file, table.name, begin); };
    if (a.shape == b.shape && (a.dtype != b.dtype || !(differ(0) || differ(count - looked)))) return;
    fail<CheckpointError>("[weights] '", file.path(), "': ", json_string(head), " is not ", json_string(table.name),
                          ", though config.json has them tied "
                          "(tie_word_embeddings)");
  }
  PublishedSource find(const PublishedTensor& t, const std::string& name) const {
    if (t.mxfp4) return find_mxfp4(t, name);
    const auto [file, entry] = find(t, name, t.shape, [](const SafetensorsEntry& e) { return is_floating(e.dtype) || e.e4m3; },
                                    "weights are f32, f16, bf16 or F8_E4M3");
    if (!entry->e4m3) return {t, file, name, entry->dtype};
    const std::string config = published_config_file(files_.path());
    const Fp8Block block = config.empty() ? Fp8Block{} : published_fp8_block(config);
    const std::string scales = name + "_scale_inv";
    Shape shape = t.shape;
    if (shape.rank() < 2)
      fail<CheckpointError>("[weights] '", file->path(), "': ", json_string(name), " is F8_E4M3", shape, "; of matrices alone blocks have scales");
    for (auto [dim, size] : {std::pair(shape.rank() - 2, block.rows), std::pair(shape.rank() - 1, block.columns)})
      shape[dim] = (shape[dim] + size - 1) / size;
    const auto* const scales_file = find(t, scales, shape, [](const SafetensorsEntry& e) { return is_floating(e.dtype); },
                                         str("scales of blocks of ", block.rows, " x ", block.columns, " are f32, f16 or bf16")).first;
    return {t, file, name, kF32, scales_file, scales, block};
  }
  PublishedSource find_mxfp4(const PublishedTensor& t, const std::string& name) const {
    const int64_t row = t.shape[2], blocks = row / kMxfp4Block;
    if (row % kMxfp4Block != 0)
      fail<CheckpointError>("[weights] '", files_.path(), "': ", json_string(name), " is in MXFP4, in blocks of ", kMxfp4Block,
                            ", and rows of the model's ", t.own, " have ", row, " elements");
    const Shape scales{t.shape[0], t.shape[1], blocks};
    const std::string name_blocks = name + "_blocks", name_scales = name + "_scales";
    const auto bytes = [&](const std::string& part, const Shape& shape) {
      return find(t, part, shape, [](const SafetensorsEntry& e) { return e.dtype == kU8 && !e.e4m3; }, "MXFP4 is bytes").first;
    };
    return {t, bytes(name_blocks, {scales[0], scales[1], blocks, kMxfp4Block / 2}), name_blocks, kF32, bytes(name_scales, scales), name_scales};
  }
  /// A tensor of this shape that `takes` accepts.
  std::pair<const SafetensorsFile*, const SafetensorsEntry*> find(const PublishedTensor& t, const std::string& name, const Shape& shape,
                                                                  bool (*takes)(const SafetensorsEntry&), const std::string& reason) const {
    const auto found = files_.tensors().find(name);
    if (found == files_.tensors().end())
      fail<CheckpointError>("[weights] '", files_.path(), "' has no ", json_string(name), " ", shape, ", of which the "
                            "model's ", t.own, " is made");
    const SafetensorsEntry& entry = found->second->at(name);
    Shape expected = shape;
    if (t.more_rows && entry.shape.rank() == expected.rank()) expected[0] = std::max(expected[0], entry.shape[0]);
    const auto refuse = [&](const auto&... parts) {
      fail<CheckpointError>("[weights] '", found->second->path(), "': ", json_string(name), " is ",
                            entry.e4m3 ? "F8_E4M3" : sheaf::name(entry.dtype), entry.shape, "; ", parts...);
    };
    if (!(entry.shape == expected)) refuse("the model's ", t.own, " asks for ", shape, t.more_rows ? " or more rows" : "");
    if (!takes(entry)) refuse(reason);
    return {found->second, &entry};
  }

  const PublishedFiles& files_;
  std::map<std::string, std::vector<PublishedSource>, std::less<>> parts_;  // by our name
};

}  // namespace

ModelConfig model_config(nn::Module& model) {
  if (const auto* gpt = dynamic_cast<const Gpt*>(&model)) return resolved(options_of(gpt->config));
  if (const auto* llama = dynamic_cast<const Llama*>(&model)) return resolved(options_of(llama->config));
  fail<ConfigError>("[weights] published weights are for Gpt and Llama, not for ", model.type_name());
}

int64_t num_mtp_layers(const PublishedFiles& files, const ModelConfig& model) {
  int64_t k = 0;
  while (publishes_mtp(model) && files.tensors().contains(mtp_mark(model.layers + k))) ++k;
  return k;
}

void check_weights(const PublishedFiles& files, const ModelConfig& model) {
  if (const std::string file = published_config_file(files.path()); !file.empty())
    check_published_shape(model, read_published_config(file), file);
  const Loader loader(files, model);
}

int64_t fill_weights(std::span<const nn::StatePiece> all, const PublishedFiles& files, const ModelConfig& model) {
  const Loader loader(files, model);
  std::vector<nn::StatePiece> published;  // adapters, and MTP layers that the files lack, keep their initial values
  std::ranges::copy_if(all, std::back_inserter(published), [&](const nn::StatePiece& p) {
    return !nn::is_lora(p.name) && (loader.has(p.name) || !p.name.starts_with("mtp_layers."));
  });
  std::span<const nn::StatePiece> pieces = published;
  for (const nn::StatePiece& piece : pieces) loader.check(piece);
  int64_t bytes = 0;
  while (!pieces.empty()) {
    const nn::StatePiece& first = pieces[0];
    const auto other = std::ranges::find_if(pieces, [&](const nn::StatePiece& p) { return p.name != first.name; });
    const auto own = pieces.first(static_cast<size_t>(other - pieces.begin()));
    bytes += loader.fill(own);
    pieces = pieces.subspan(own.size());
  }
  return bytes;
}

int64_t load_weights(nn::Module& model, const PublishedFiles& files) {
  expect_no_recording("load_weights");
  const ModelConfig config = model_config(model);
  for (const nn::Parameter& p : model.parameters())
    if (p.trainable() && p.dtype() != kF32 && p.dtype() != kF64)
      fail<ConfigError>("[weights] ", p.name(), " is trained and ", p.dtype(), "; weights go to masters in f32 or f64");
  check_weights(files, config);
  return fill_weights(nn::state_pieces(model), files, config);
}

int64_t load_weights(nn::Module& model, const std::string& path) {
  return load_weights(model, PublishedFiles::open(path));
}

}  // namespace sheaf::models
