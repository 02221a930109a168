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

/// The special tokens that a post-processor puts before a text.
std::vector<std::string> names_before(const Json& processor) {
  std::vector<std::string> names;
  if (processor.is_null()) return names;
  const std::string& type = processor.at("type").as_string();
  if (type == "TemplateProcessing") {  // "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": ..}, ..]
    for (const Json& piece : processor.at("single").as_array()) {
      const Json* special = piece.find("SpecialToken");
      if (!special) break;  // the text
      names.push_back(special->at("id").as_string());
    }
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    names.push_back(processor.at("cls").as_array().at(0).as_string());
  } else if (type == "Sequence") {
    for (const Json& one : processor.at("processors").as_array())
      if (names.empty()) names = names_before(one);
  } else {
    check<DataError>(type == "ByteLevel", "it is of the type ", json_string(type), ", which is not known");
  }
  return names;
}

std::vector<int32_t> tokens_before(const Json& file, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  const Json* const processor = file.find("post_processor");
  if (!processor) return ids;
  for (const std::string& name : names_before(*processor)) {
    const auto id = tokenizer.special_token(name);
    check<DataError>(id.has_value(), "it puts ", json_string(name), " before a text, which is no special token");
    ids.push_back(*id);
  }
  return ids;
}

int32_t end_id(const Json& id) {
  const int64_t value = id.as_int();
  check<DataError>(value >= 0 && value <= INT32_MAX, value, " is no id of a token");
  return static_cast<int32_t>(value);
}

std::vector<int32_t> end_ids(const Json& file) {
  const Json* const value = find_published(file, "eos_token_id");
  if (!value || value->is_null()) return {};
  if (value->is_int()) return {end_id(*value)};
  std::vector<int32_t> ids;
  for (const Json& id : value->as_array()) ids.push_back(end_id(id));
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
      out.before = tokens_before(json, *out.tokenizer);
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
