#include "sheaf/models/published_text.h"

#include <cstdint>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/published_config.h"

namespace sheaf::models {
namespace {

Json read_json(const std::string& path) { return Json::parse(File::open<DataError>(path).read_all(), str("'", path, "'")); }

int32_t id_of(const Json& id) {
  const int64_t value = id.as_int();
  check<DataError>(value >= 0 && value <= INT32_MAX, value, " is no id of a token");
  return static_cast<int32_t>(value);
}

/// The ids that a post-processor puts before a text.
std::vector<int32_t> tokens_before(const Json& processor) {
  std::vector<int32_t> ids;
  if (processor.is_null()) return ids;
  const std::string& type = processor.at("type").as_string();
  if (type == "TemplateProcessing") {  // "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": ..}, ..]
    for (const Json& piece : processor.at("single").as_array()) {
      const Json* special = piece.find("SpecialToken");
      if (!special) break;  // the text
      // "special_tokens": {"<s>": {"ids": [1], ..}}
      for (const Json& id : processor.at("special_tokens").at(special->at("id").as_string()).at("ids").as_array()) ids.push_back(id_of(id));
    }
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {  // "cls": ["<s>", 1]
    const Json::Array& cls = processor.at("cls").as_array();
    check<DataError>(cls.size() == 2, "cls is not a token and its id");
    ids.push_back(id_of(cls[1]));
  } else if (type == "Sequence") {
    for (const Json& one : processor.at("processors").as_array()) {
      const std::vector<int32_t> more = tokens_before(one);  // each puts its own before what is there
      ids.insert(ids.begin(), more.begin(), more.end());
    }
  } else {
    check<DataError>(type == "ByteLevel", "it is of the type ", json_string(type), ", which is not known");
  }
  return ids;
}

std::vector<int32_t> end_ids(const Json& file) {
  const Json* const value = find_published(file, "eos_token_id");
  if (!value || value->is_null()) return {};
  if (value->is_int()) return {id_of(*value)};
  std::vector<int32_t> ids;
  for (const Json& id : value->as_array()) ids.push_back(id_of(id));
  return ids;
}

// Other models have a vocab.json and merges.txt, too, whose texts are cut into words by another pattern.
void expect_gpt2(const std::string& folder) {
  const std::string file = folder + "/config.json";
  if (!path_exists(file)) return;
  const Json config = read_json(file);
  if (const Json* const type = config.find("model_type"); type && !(*type == Json("gpt2")))
    fail<ConfigError>("[tokenizer] '", folder, "' has no tokenizer.json, and its vocab.json and merges.txt are of a ", type->dump(), ", not of a gpt2");
}

}  // namespace

bool has_published_text(const std::string& folder) {
  return path_exists(folder + "/tokenizer.json") || path_exists(folder + "/merges.txt") || path_exists(folder + "/vocab.bpe");
}

PublishedText read_published_text(const std::string& folder) {
  PublishedText out;
  if (const std::string file = folder + "/tokenizer.json"; path_exists(file)) {
    const Json json = read_json(file);
    out.tokenizer = make_huggingface_tokenizer(json, str("'", file, "'"));
    try {
      if (const Json* const processor = json.find("post_processor")) out.before = tokens_before(*processor);
      for (const int32_t id : out.before)
        check<DataError>(id < out.tokenizer->vocab_size(), "it puts the token ", id, " before a text, of a vocabulary of ", out.tokenizer->vocab_size());
    } catch (const DataError& error) {
      fail<DataError>("[tokenizer] '", file, "': post_processor: ", error.what());
    }
  } else if (has_published_text(folder)) {
    expect_gpt2(folder);
    out.tokenizer = load_gpt2_tokenizer(folder);
  } else {
    fail<ConfigError>("[tokenizer] '", folder, "' has neither tokenizer.json nor GPT-2's vocab.json and merges.txt");
  }
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::string path = folder + "/" + name;
    if (!out.ends.empty() || !path_exists(path)) continue;
    try {
      out.ends = end_ids(read_json(path));
    } catch (const DataError& error) {
      fail<DataError>("[tokenizer] '", path, "': eos_token_id: ", error.what());
    }
  }
  return out;
}

}  // namespace sheaf::models
