#include "sheaf/tools/export_companions.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/file.h"
#include "sheaf/models/published_config.h"

namespace sheaf::tools {
namespace {

// The folder of the weights that the run started from; "" if it did not start from weights, or they no longer exist.
std::string published_folder(const models::RunState& state) {
  if (!state.weights) return "";
  const std::string& path = state.weights->path;
  const std::string folder = std::filesystem::is_directory(path) ? path : parent_of(path);
  return path_exists(folder + "/config.json") ? folder : "";
}

Json ends(const models::RunState& state) {
  Json::Array ids;
  if (state.tokenizer)
    if (const auto end = state.tokenizer->end_of_text()) ids.push_back(int64_t{*end});
  const Json of_documents = state.model.end_of_text;
  if (state.model.end_of_text >= 0 && std::ranges::find(ids, of_documents) == ids.end()) ids.push_back(of_documents);
  return ids.empty() ? Json() : ids.size() == 1 ? ids[0] : Json(ids);
}

}  // namespace

std::string published_like(const models::RunState& state) {
  const std::string from = published_folder(state);
  return from.empty() ? "" : models::published_type(from + "/config.json");
}

void export_config(const models::RunState& state, const models::ModelConfig& model, DType dtype, const std::string& folder) {
  models::ModelConfig exported = model;
  Json theirs;
  if (const std::string from = published_folder(state); !from.empty()) {
    const std::string path = from + "/config.json";
    theirs = Json::parse(File::open<DataError>(path).read_all(), str("'", path, "'"));
    const Json* const length = models::find_published(theirs, "max_position_embeddings");
    if (length && length->is_int() && model.type != "gpt2") exported.context = std::max(exported.context, length->as_int());
  }
  Json config = models::published_config(exported, dtype, published_like(state));
  config.set("eos_token_id", ends(state));
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
    if (const Json* value = theirs.is_null() ? nullptr : models::find_published(theirs, key); value && !value->is_null())
      config.set(key, *value);
  replace_file(folder + "/config.json", config.dump() + "\n");
}

namespace {

// Writes what belongs next to the weights besides config.json, and reports it. `written` receives the names of the files.
std::string write_companions(const models::RunState& state, const std::string& folder, std::vector<std::string>& written) {
  const std::string from = published_folder(state);
  const std::string missing = state.weights && from.empty() ? str(", without what was next to '", state.weights->path, "', which is no longer there") : "";
  if (!from.empty()) {
    std::vector<std::string> names = {"generation_config.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json"};
    // Without a tokenizer of its own the run's tokens are from elsewhere, made with its weights' tokenizer.
    if (!state.tokenizer) names.insert(names.end(), {"tokenizer.json", "vocab.json", "merges.txt"});
    for (const std::string& name : names) {
      const std::string path = from + "/" + name;
      if (!path_exists(path)) continue;
      replace_file(folder + "/" + name, File::open<DataError>(path).read_all());
      written.push_back(name);
    }
  }
  const bool copied = !written.empty();
  if (copied && (!state.tokenizer || state.tokenizer->kind() != "huggingface")) return ", and what was next to the published weights";
  if (!state.tokenizer) return missing;
  if (state.tokenizer->kind() != "huggingface") return str(missing, ", without a tokenizer (the run's, ", state.tokenizer->kind(), ", is no tokenizer.json)");
  replace_file(folder + "/tokenizer.json", state.tokenizer->to_json().at("file").dump() + "\n");
  written.push_back("tokenizer.json");
  if (std::ranges::find(written, "tokenizer_config.json") == written.end()) {
    Json config = Json::Object{{"tokenizer_class", "PreTrainedTokenizerFast"}};
    if (const auto end = state.tokenizer->end_of_text()) config.set("eos_token", Json(state.tokenizer->decode({&*end, 1})));
    replace_file(folder + "/tokenizer_config.json", config.dump() + "\n");
    written.push_back("tokenizer_config.json");
  }
  return str(missing, ", and its tokenizer.json", copied ? ", with what was next to the published weights" : "");
}

}  // namespace

std::string export_tokenizer(const models::RunState& state, const std::string& folder) {
  std::vector<std::string> written;
  std::string said = write_companions(state, folder, written);
  // They may be of another run, whose export this one replaces, or the user's own: they stay.
  std::string others;
  for (const char* name : kCompanions)
    if (path_exists(folder + "/" + name) && std::ranges::find(written, name) == written.end()) others += (others.empty() ? "" : ", ") + str(name);
  if (!others.empty()) said += str(", next to ", others, " from before, which may not fit them");
  return said;
}

}  // namespace sheaf::tools
