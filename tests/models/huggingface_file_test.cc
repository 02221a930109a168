// tokenizer.json files that are wrong, or of tokenizers that Sheaf does not support: refused, and the message says which file and which
// key.
#include <cstdlib>
#include <filesystem>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <utf8proc.h>

#include "sheaf/core/file.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/nfc.h"
#include "sheaf/models/utf8.h"
#include "sheaf/models/word_pattern.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Json file_of(const std::string& name) {
  const std::string path = "tests/models/huggingface/" + name + ".json";
  return Json::parse(File::open(path).read_all(), path);
}

/// `json` with another value at "model.vocab" or the like; a number is an array index.
Json with(const Json& json, std::string_view path, const Json& value) {
  if (path.empty()) return value;
  const size_t dot = std::min(path.find('.'), path.size());
  const std::string key(path.substr(0, dot));
  const std::string_view rest = path.substr(std::min(dot + 1, path.size()));
  if (json.is_array()) {
    Json::Array out = json.as_array();
    Json& element = out.at(static_cast<size_t>(std::stoi(key)));
    element = with(element, rest, value);
    return out;
  }
  Json out = json;
  const Json* old = json.find(key);
  return out.set(key, with(old ? *old : Json(), rest, value));
}

std::string refused(const std::string& name, std::string_view path, const Json& value) {
  return message_of<DataError>(ExitCode::kData, [&] { make_huggingface_tokenizer(with(file_of(name), path, value), "F"); });
}

Json type(const char* name) { return Json::Object{{"type", name}}; }

TEST(HuggingFaceFile, NamesFileAndKey) {
  const ScratchFolder folder;
  const auto error = [&](const std::string& text) {
    write_file(folder / "tokenizer.json", text);
    return message_of<DataError>(ExitCode::kData, [&] { load_huggingface_tokenizer(folder.path()); });
  };
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { load_huggingface_tokenizer(folder.path()); }), HasSubstr("tokenizer.json': No such file"));
  EXPECT_THAT(error("{"), HasSubstr("tokenizer.json': not valid JSON"));
  EXPECT_THAT(error("[1]"), HasSubstr("tokenizer.json' is [1]: expected an object"));
  EXPECT_THAT(error("{}"), HasSubstr("tokenizer.json': model is missing"));
  EXPECT_THAT(error(R"({"model":{"type":"Unigram"}})"), HasSubstr("model.type is \"Unigram\": Sheaf knows BPE"));
  EXPECT_THAT(error(R"({"model":{"type":"BPE"}})"), HasSubstr("model.vocab is missing"));
  write_file(folder / "tokenizer.json", file_of("qwen3").dump());
  EXPECT_EQ(load_huggingface_tokenizer(folder.path())->vocab_size(), 429);
}

TEST(HuggingFaceFile, WhatSheafDoesNotKnowIsRefused) {
  for (const char* name : {"gpt2", "qwen3", "llama2", "mistral"}) {
    EXPECT_EQ(refused(name, "version", "2.0"), "no exception");
    EXPECT_EQ(refused(name, "post_processor", type("TemplateProcessing")), "no exception");
    EXPECT_THAT(refused(name, "new_key", 1), HasSubstr("F: new_key is 1: Sheaf does not know this key"));
    EXPECT_THAT(refused(name, "model.dropout", 0.1), HasSubstr("F: model.dropout is 0.1"));
    EXPECT_THAT(refused(name, "model.end_of_word_suffix", "</w>"), HasSubstr("model.end_of_word_suffix is \"</w>\""));
    EXPECT_THAT(refused(name, "model.continuing_subword_prefix", "##"), HasSubstr("model.continuing_subword_prefix is \"##\""));
    EXPECT_EQ(refused(name, "model.end_of_word_suffix", ""), "no exception");
    EXPECT_THAT(refused(name, "model.vocabulary", 1), HasSubstr("model.vocabulary is 1: Sheaf does not know this key"));
    EXPECT_THAT(refused(name, "normalizer", type("Lowercase")), HasSubstr("normalizer is {\"type\":\"Lowercase\"}: "));
    EXPECT_THAT(refused(name, "pre_tokenizer", type("Whitespace")), HasSubstr("pre_tokenizer is {\"type\":\"Whitespace\"}: "));
    EXPECT_THAT(refused(name, "decoder", type("WordPiece")), HasSubstr("decoder is {\"type\":\"WordPiece\"}: "));
    EXPECT_THAT(refused(name, "decoder", Json()), HasSubstr("decoder is missing"));
    EXPECT_THAT(refused(name, "decoder.type", 3), HasSubstr("decoder.type is 3: expected a string"));
  }
  EXPECT_THAT(refused("gpt2", "pre_tokenizer.add_prefix_space", true), HasSubstr("add_prefix_space must be false"));
  EXPECT_THAT(refused("gpt2", "pre_tokenizer.add_prefix_space", Json()), HasSubstr("add_prefix_space must be false"));
  EXPECT_THAT(refused("gpt2", "pre_tokenizer.use_regex", false), HasSubstr("pre_tokenizer is {"));
  EXPECT_THAT(refused("gpt2", "model.byte_fallback", true), HasSubstr("model.byte_fallback is true: the tokens are bytes"));
  const std::string split = "pre_tokenizer.pretokenizers.0.";
  EXPECT_THAT(refused("qwen3", split + "pattern.Regex", "\\p{L}+|."),
              HasSubstr("pre_tokenizer.pretokenizers[0].pattern.Regex is \"\\\\p{L}+|.\": Sheaf knows the patterns of GPT-2, Llama 3"));
  EXPECT_THAT(refused("qwen3", split + "pattern", Json::Object{{"String", " "}}), HasSubstr("pattern.String is \" \""));
  EXPECT_THAT(refused("qwen3", split + "behavior", "MergedWithNext"), HasSubstr("behavior is \"MergedWithNext\""));
  EXPECT_THAT(refused("qwen3", split + "invert", true), HasSubstr("behavior is \"Isolated\""));
  EXPECT_THAT(refused("qwen3", "pre_tokenizer.pretokenizers.1.use_regex", true), HasSubstr("pre_tokenizer.pretokenizers[1] is {"));
  EXPECT_THAT(refused("qwen3", "pre_tokenizer.pretokenizers.0", type("Digits")), HasSubstr("Sheaf knows Split here"));
  EXPECT_THAT(refused("qwen3", "normalizer", type("NFKC")), HasSubstr("before bytes Sheaf knows the normalizer NFC"));
  EXPECT_THAT(refused("qwen3", "added_tokens.4.lstrip", true), HasSubstr("added_tokens[4].lstrip is true: Sheaf finds tokens wherever"));
  EXPECT_EQ(refused("qwen3", "added_tokens.0.lstrip", true), "no exception") << "a special one is never found";
  EXPECT_THAT(refused("llama2", "model.byte_fallback", false), HasSubstr("without byte_fallback would lose those that are no token"));
  EXPECT_THAT(refused("llama2", "model.ignore_merges", true), HasSubstr("model.ignore_merges is true"));
  EXPECT_THAT(refused("llama2", "normalizer.normalizers.0.prepend", "_"), HasSubstr("normalizer.normalizers[0] is {"));
  EXPECT_THAT(refused("llama2", "normalizer.normalizers.1.content", "_"), HasSubstr("normalizer.normalizers[1].content is \"_\""));
  EXPECT_THAT(refused("llama2", "normalizer.normalizers.1.pattern", Json::Object{{"Regex", " "}}), HasSubstr("pattern.Regex is"));
  EXPECT_THAT(refused("llama2", "normalizer.normalizers.1", type("NFC")), HasSubstr("Sheaf knows, in this order, Prepend"));
  EXPECT_THAT(refused("llama2", "pre_tokenizer", file_of("mistral").at("pre_tokenizer")), HasSubstr("pre_tokenizer is {"));
  EXPECT_THAT(refused("llama2", "normalizer", Json()), HasSubstr("Sheaf knows tokens of characters with the pre_tokenizer Metaspace alone"));
  EXPECT_THAT(refused("mistral", "normalizer", type("NFC")), HasSubstr("normalizer is {\"type\":\"NFC\"}"));
  EXPECT_THAT(refused("mistral", "pre_tokenizer.prepend_scheme", "last"), HasSubstr("prepend_scheme is \"last\": Sheaf knows always"));
  EXPECT_THAT(refused("mistral", "pre_tokenizer.replacement", "_"), HasSubstr("pre_tokenizer.replacement is \"_\""));
  EXPECT_THAT(refused("mistral", "decoder.decoders.1", type("ByteLevel")),
              HasSubstr("decoder.decoders[1] is {\"type\":\"ByteLevel\"}: Sheaf knows ByteFallback here"));
  EXPECT_THAT(refused("mistral", "decoder.decoders.3.start", 2), HasSubstr("Sheaf knows start 1 and stop 0"));
  Json plain = file_of("mistral").at("added_tokens").as_array()[3];
  plain.set("normalized", true);
  EXPECT_EQ(refused("mistral", "added_tokens.3", plain), "no exception");
}

TEST(HuggingFaceFile, VocabulariesThatLie) {
  for (const char* name : {"gpt2", "llama2"}) {
    EXPECT_THAT(refused(name, "model.vocab.e", -1), HasSubstr("model.vocab.e is -1: the ids of"));
    EXPECT_THAT(refused(name, "model.vocab.e", int64_t{1} << 40), HasSubstr("the ids of"));
    EXPECT_THAT(refused(name, "model.vocab.e", "x"), HasSubstr("model.vocab.e is \"x\": expected an integer"));
    EXPECT_THAT(refused(name, "model.vocab.e", 7), HasSubstr("another token has the id 7"));
    EXPECT_THAT(refused(name, str("model.vocab.", std::string(4097, 'x')), 7), HasSubstr("a token has 1 to 4096 bytes"));
    EXPECT_THAT(refused(name, "model.vocab", Json::Array{}), HasSubstr("model.vocab is []: expected an object"));
    EXPECT_THAT(refused(name, "model.merges.0", "qq"), HasSubstr("model.merges[0] is \"qq\": expected two tokens and a space"));
    EXPECT_THAT(refused(name, "model.merges.0", "q q q"), HasSubstr("expected two tokens and a space"));
    EXPECT_THAT(refused(name, "model.merges.0", Json::Array{"q"}), HasSubstr("model.merges[0] is [\"q\"]: expected two tokens"));
    EXPECT_THAT(refused(name, "model.merges.0", Json::Array{"q", 1}), HasSubstr("model.merges[0][1] is 1: expected a string"));
    EXPECT_THAT(refused(name, "model.merges.0", "q \u2603"), HasSubstr("\"\u2603\" is not in model.vocab"));
    EXPECT_THAT(refused(name, "model.merges.0", "z z"), HasSubstr("F: model: [tokenizer] merge 0 makes \"zz\", which is no token"));
    EXPECT_THAT(refused(name, "model.merges.1", file_of(name).at("model").at("merges").as_array()[0]), HasSubstr("stands there twice"));
    EXPECT_THAT(refused(name, "added_tokens.0.content", ""), HasSubstr("added_tokens[0] is {"));
    EXPECT_THAT(refused(name, "added_tokens.0.id", 9999), HasSubstr("added_tokens[0].id is 9999"));
    EXPECT_THAT(refused(name, "added_tokens.0.trailing", 1), HasSubstr("added_tokens[0].trailing is 1: Sheaf does not know this key"));
  }
  EXPECT_THAT(refused("qwen3", "added_tokens.0.content", "<think>"), HasSubstr("added_tokens[4] is {"));
  EXPECT_THAT(refused("llama2", "added_tokens.0.id", 2), HasSubstr("added_tokens[0].id is 2: in model.vocab it is 0"));
  EXPECT_THAT(refused("llama2", "model.merges.0", "<0x41> e"), HasSubstr("of which one is no token of words"));
  Json::Object vocab;
  const Json json = file_of("llama2");
  for (const auto& [name, id] : json.at("model").at("vocab").as_object())
    vocab.emplace_back(name == "<0xC8>" ? "<0xZZ>" : name, id);
  EXPECT_THAT(refused("llama2", "model.vocab", vocab), HasSubstr("model.byte_fallback is true: model.vocab has no token of the byte 200"));
  const Json bytes = file_of("gpt2");
  vocab.clear();
  for (const auto& [name, id] : bytes.at("model").at("vocab").as_object()) vocab.emplace_back(name == "\u0100" ? "\u2603" : name, id);
  EXPECT_THAT(refused("gpt2", "model.vocab", vocab), AllOf(HasSubstr("model.vocab.\u2603 is "), HasSubstr("stands for no byte")));
}

TEST(HuggingFaceFile, NormalForms) {
  EXPECT_EQ(nfc("e\u0301 \u212b\u1112\u1161\u11ab q\u0307\u0323 \u0958 \U0001d15e"), "é Å\ud55c q\u0323\u0307 \u0915\u093c \U0001d157\U0001d165");
  EXPECT_EQ(nfc(std::string("a\0b", 3)), std::string("a\0b", 3));
  EXPECT_EQ(nfc(""), "");
  EXPECT_FALSE(may_change_in_nfc("plain é ʯ"));
  EXPECT_TRUE(may_change_in_nfc("\u0300"));
}

// As utf8proc's own function gives them, but for any run of marks, of which that one takes the square of the time: minutes for this one.
TEST(HuggingFaceFile, NormalFormsOfRunsOfMarks) {
  const auto expected = [](const std::string& text) {
    utf8proc_uint8_t* const made = utf8proc_NFC(reinterpret_cast<const utf8proc_uint8_t*>(text.c_str()));
    std::string out = reinterpret_cast<const char*>(made);
    std::free(made);
    return out;
  };
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (auto left = random() % 12; left > 0; --left) {
      constexpr uint32_t kFirst[] = {'a', 0xC0, 0x300, 0x340, 0x5B0, 0xF71, 0x1100, 0x1161, 0x11A8, 0x1E00, 0x1F80, 0xAC00};
      append_utf8(text, kFirst[random() % std::size(kFirst)] + random() % 32);
    }
    ASSERT_EQ(nfc(text), expected(text)) << json_string(text);
  }
  std::string cedillas, acutes, mixed = "x";
  for (int i = 0; i < 200'000; ++i) cedillas += "\u0327", acutes += "\u0301", mixed += "\u0301\u0327";
  EXPECT_TRUE(nfc(mixed) == "x" + cedillas + acutes);
}

}  // namespace
}  // namespace sheaf::models
