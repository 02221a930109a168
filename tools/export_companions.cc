#include "sheaf/tools/export_companions.h"

#include <algorithm>
#include <filesystem>
#include <vector>

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
  Json config = models::published_config(model, dtype, published_like(state));
  config.set("eos_token_id", ends(state));
  if (const std::string from = published_folder(state); !from.empty()) {
    const std::string path = from + "/config.json";
    const Json theirs = Json::parse(File::open<DataError>(path).read_all(), str("'", path, "'"));
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
      if (const Json* value = models::find_published(theirs, key)) config.set(key, *value);
    const char* const context = "max_position_embeddings";
    const Json* const length = models::find_published(theirs, context);
    if (length && length->is_int() && config.find(context) && length->as_int() > model.context) config.set(context, *length);
  }
  replace_file(folder + "/config.json", config.dump() + "\n");
}

std::string export_tokenizer(const models::RunState& state, const std::string& folder) {
  std::vector<std::string> copied;
  if (const std::string from = published_folder(state); !from.empty())
    for (const char* name : {"generation_config.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer_config.json"}) {
      const std::string path = from + "/" + name;
      if (!path_exists(path)) continue;
      replace_file(folder + "/" + name, File::open<DataError>(path).read_all());
      copied.push_back(name);
    }
  if (!state.tokenizer && !published_folder(state).empty()) {  // tokenized elsewhere, with its weights' tokenizer
    for (const char* name : {"tokenizer.json", "vocab.json", "merges.txt"}) {
      const std::string path = published_folder(state) + "/" + name;
      if (!path_exists(path)) continue;
      replace_file(folder + "/" + name, File::open<DataError>(path).read_all());
      copied.push_back(name);
    }
  }
  if (!copied.empty() && (!state.tokenizer || state.tokenizer->kind() != "huggingface")) return ", and what was next to the published weights";
  if (!state.tokenizer) return "";
  if (state.tokenizer->kind() != "huggingface") return str(", without a tokenizer (the run's, ", state.tokenizer->kind(), ", is no tokenizer.json)");
  replace_file(folder + "/tokenizer.json", state.tokenizer->to_json().at("file").dump() + "\n");
  if (std::ranges::find(copied, "tokenizer_config.json") == copied.end()) {
    Json config = Json::Object{{"tokenizer_class", "PreTrainedTokenizerFast"}};
    if (const auto end = state.tokenizer->end_of_text()) config.set("eos_token", Json(state.tokenizer->decode({&*end, 1})));
    replace_file(folder + "/tokenizer_config.json", config.dump() + "\n");
  }
  return str(", and its tokenizer.json", copied.empty() ? "" : ", with what was next to the published weights");
}

}  // namespace sheaf::tools
