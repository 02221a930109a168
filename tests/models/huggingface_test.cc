// Tokenizers from tokenizer.json, against the ids of Hugging Face's package (huggingface/make).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

const char* const kBytes[] = {"gpt2", "llama3", "qwen3", "nemo", "o200k"};
const char* const kCharacters[] = {"llama2", "mistral", "always", "phrases", "gemma"};

Json file_of(const std::string& name) {
  const std::string path = "tests/models/huggingface/" + name + ".json";
  return Json::parse(File::open(path).read_all(), path);
}
std::shared_ptr<const Tokenizer> tokenizer_of(const std::string& name) {
  return make_huggingface_tokenizer(file_of(name), name);
}

std::vector<std::string> all_names() {
  std::vector<std::string> names(std::begin(kBytes), std::end(kBytes));
  names.insert(names.end(), std::begin(kCharacters), std::end(kCharacters));
  return names;
}

// Text of everything that the formats distinguish, and with `bytes` also invalid UTF-8.
std::string random_text(std::mt19937& random, int pieces, bool bytes) {
  static const std::vector<std::string> kPieces = {
      " ",  "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "'s", "'LL", "the", " of", "God",     "1",  "23", "٣",
      "!",  "/",  "...", "\u0301", "é",    "e\u0301", "你好", "。",     "🙂", "שלום", "a",  "Z",   "-",  "<think>", "<tool>", "<tools>", "!\n/",
      "</s>", "\u1161", "\u1100", "<"};
  std::string text;
  for (int i = 0; i < pieces; ++i) {
    if (bytes && random() % 8 == 0) text += static_cast<char>(random());
    else text += kPieces[random() % kPieces.size()];
  }
  return text;
}

TEST(HuggingFace, GivesTheIdsOfItsPackage) {
  const Json golden = file_of("golden");
  EXPECT_GT(golden.as_array().size(), 50u);
  for (const std::string& name : all_names()) {
    const auto tokenizer = tokenizer_of(name);
    for (const Json& entry : golden.as_array()) {
      const std::string& text = entry.at("text").as_string();
      std::vector<int32_t> expected;
      for (const Json& id : entry.at(name).as_array()) expected.push_back(static_cast<int32_t>(id.as_int()));
      EXPECT_EQ(tokenizer->encode(text), expected) << name << ": " << json_string(text);
      const Json* decoded = entry.find(name + " decoded");
      EXPECT_EQ(tokenizer->decode(expected), decoded ? decoded->as_string() : text) << name;
    }
  }
}

// Texts in which special tokens may be written by name (huggingface/make_special).
TEST(HuggingFace, SpecialTokensByTheirNames) {
  const Json golden = file_of("special");
  EXPECT_GT(golden.as_array().size(), 30u);
  for (const std::string& name : all_names()) {
    const auto tokenizer = tokenizer_of(name);
    int differ = 0;
    for (const Json& entry : golden.as_array()) {
      const std::string& text = entry.at("text").as_string();
      std::vector<int32_t> expected;
      for (const Json& id : entry.at(name).as_array()) expected.push_back(static_cast<int32_t>(id.as_int()));
      EXPECT_EQ(tokenizer->encode_special(text), expected) << name << ": " << json_string(text);
      differ += tokenizer->encode(text) != expected;
    }
    if (name == "o200k") continue;  // has none
    EXPECT_GT(differ, 5) << name;
    EXPECT_EQ(tokenizer->special_token("the"), std::nullopt);
    EXPECT_EQ(tokenizer->special_token("<think>"), std::nullopt) << "an added token that any text makes";
    EXPECT_EQ(tokenizer->special_token("<none>"), std::nullopt);
    EXPECT_EQ(tokenizer->special_token(""), std::nullopt);
    const auto end = tokenizer->end_of_text();
    ASSERT_TRUE(end.has_value()) << name;
    EXPECT_EQ(tokenizer->special_token(tokenizer->decode(std::span(&*end, 1))), end);
  }
}

// No space is put before a continuation of a text.
TEST(HuggingFace, SpecialTokensInTextsThatGoOn) {
  for (const std::string& name : all_names()) {
    const auto tokenizer = tokenizer_of(name);
    EXPECT_EQ(tokenizer->encode_special("God said", Tokenizer::Place::within), tokenizer->encode_more("God said")) << name;
    EXPECT_EQ(tokenizer->encode_special("God said"), tokenizer->encode("God said")) << name;
  }
}

TEST(HuggingFace, SpecialTokensThatAreFoundOtherwiseThanByTheirNamesAlone) {
  Json json = file_of("gpt2");
  Json::Array added = json.at("added_tokens").as_array();
  added[0].set("rstrip", true);
  json.set("added_tokens", added);
  const auto tokenizer = make_huggingface_tokenizer(json, "here");
  EXPECT_EQ(tokenizer->encode("<|endoftext|> a"), tokenizer_of("gpt2")->encode("<|endoftext|> a"));
  EXPECT_THAT([&] { tokenizer->encode_special("<|endoftext|> a", Tokenizer::Place::first, "line 3"); },
              ::testing::ThrowsMessage<DataError>(::testing::HasSubstr("line 3: \"<|endoftext|>\" has rstrip in tokenizer.json: Sheaf finds")));
  // In the package Prepend changes such a token's own content, too: it is found as "\u2581<s>".
  for (const std::string name : {"llama2", "gemma", "mistral", "qwen3"}) {
    json = file_of(name);
    added = json.at("added_tokens").as_array();
    added[0].set("normalized", true);
    json.set("added_tokens", added);
    const auto normalized = make_huggingface_tokenizer(json, "here");
    const std::string text = added[0].at("content").as_string() + " God";
    EXPECT_EQ(normalized->encode(text), tokenizer_of(name)->encode(text)) << name;
    if (name == "mistral" || name == "qwen3") {
      EXPECT_EQ(normalized->encode_special(text), tokenizer_of(name)->encode_special(text)) << name;
    } else {
      EXPECT_THAT([&] { normalized->encode_special(text); }, ::testing::ThrowsMessage<DataError>(::testing::HasSubstr(" has normalized in")));
    }
  }
}

// An added token may be one of the vocabulary, even that of a byte, of which other characters are made: then it is shown as that, as by
// the package.
TEST(HuggingFace, AddedTokensThatAreTokensOfBytes) {
  const auto with_added = [](const std::string& name, const std::string& content) {
    Json json = file_of(name);
    Json::Array added = json.at("added_tokens").as_array();
    const Json id = json.at("model").at("vocab").at(content);
    added.push_back(Json::Object{{"id", id}, {"content", content}, {"special", false}, {"normalized", false}});
    return make_huggingface_tokenizer(json.set("added_tokens", added), "here");
  };
  const auto bytes = with_added("gpt2", "£");  // which stands for the byte 0xA3
  const std::string text = "ã 飣";
  EXPECT_EQ(bytes->decode(bytes->encode(text)), text);
  EXPECT_EQ(bytes->encode("£").size(), 1u);
  EXPECT_EQ(bytes->decode(bytes->encode("£")), "\xa3");
  const auto characters = with_added("llama2", "<0x0D>");
  EXPECT_EQ(characters->decode(characters->encode("a\rb")), "a\rb");
}

// Without normalization, any bytes survive encoding and decoding.
TEST(HuggingFace, LosesNothing) {
  std::mt19937 random(1);
  for (const std::string name : {"gpt2", "llama3", "nemo", "o200k", "llama2", "phrases", "gemma"}) {
    const auto tokenizer = tokenizer_of(name);
    for (int i = 0; i < 300; ++i) {
      const std::string text = random_text(random, i, true);
      // After an added token these tokenizers put a space, which decoding does not remove.
      if ((name == "llama2" || name == "phrases") && text.find("<think>") != std::string::npos) continue;
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << name;
    }
    std::string noise(100'000, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(noise)), noise) << name;
  }
}

TEST(HuggingFace, TextsMayBeCutAndThreadsDoNotMatter) {
  std::mt19937 random(3);
  for (const std::string& name : all_names()) {
    const auto tokenizer = tokenizer_of(name);
    size_t cuts = 0;
    for (int i = 0; i < 300; ++i) {
      const std::string text = random_text(random, 60, i % 2);
      const auto whole = tokenizer->encode(text);
      for (size_t at = 0; at < text.size();) {
        at = tokenizer->cut(text, at + 1);
        cuts += at < text.size();
        auto parts = tokenizer->encode(std::string_view(text).substr(0, at));
        const auto rest = tokenizer->encode_more(std::string_view(text).substr(at));
        parts.insert(parts.end(), rest.begin(), rest.end());
        ASSERT_EQ(parts, whole) << name << ": " << json_string(text) << " at " << at;
      }
    }
    EXPECT_GT(cuts, 1000u) << name;
    const std::string large = random_text(random, 1'000'000, true);
    RankContext context;
    const RankScope scope(context);
    context.threads = 1;
    const auto alone = tokenizer->encode(large);
    context.threads = 5;
    EXPECT_TRUE(tokenizer->encode(large) == alone) << name;
  }
}

// Tokens of characters: between two that no token has side by side, so that a text in Chinese is more than one word.
TEST(HuggingFace, TextsWithoutSpacesMayBeCut) {
  for (const char* name : kCharacters) {
    const auto tokenizer = tokenizer_of(name);
    const auto cut = [&](std::string_view text, size_t at) { return tokenizer->cut(text, at); };
    EXPECT_EQ(cut("漢字仮名", 1), 3u) << name;
    EXPECT_EQ(cut("漢字仮名", 4), 6u) << name;
    EXPECT_EQ(cut("世界世界", 1), 6u) << name << " has 世界";
    EXPECT_EQ(cut("漢<think>字", 4), 13u) << name << ": not in a token that is added, nor where it ends";
    EXPECT_EQ(cut("\xe4\xb8漢", 1), 2u) << name;
  }
  EXPECT_EQ(tokenizer_of("llama2")->cut("a a\nx", 2), 3u);
  EXPECT_EQ(tokenizer_of("phrases")->cut("He the", 2), 6u) << "has a token \"e the\"";
}

// The time for a word must not grow with the square of its length, nor the depth of a search with its length.
TEST(HuggingFace, LongWords) {
  for (const std::string& name : all_names()) {
    const auto tokenizer = tokenizer_of(name);
    for (const char* piece : {"a", "the", " ", "\n", "\t ", "1", "!", "漢", "\u3000", "\xff", "<", "<think>", "e\u0301", "\u0301"}) {
      std::string text;
      while (text.size() < 1'000'000) text += piece;
      EXPECT_GT(tokenizer->encode(text).size(), 1u) << piece;
    }
  }
}

TEST(HuggingFace, TokensOfAGenerationAreShownAsTheyCome) {
  for (const std::string& name : all_names()) {
    const auto tokenizer = tokenizer_of(name);
    const std::string text = "In the beginning  God\n created été.";
    const std::vector<int32_t> ids = tokenizer->encode(text);
    std::string shown = tokenizer->decode(std::span(ids).first(3));
    for (size_t i = 3; i < ids.size(); ++i) shown += tokenizer->decode_more({&ids[i], 1});
    EXPECT_EQ(shown, name == "always" ? " " + text : text) << name;
    const int32_t beyond = static_cast<int32_t>(tokenizer->vocab_size());
    EXPECT_THROW(tokenizer->decode({&beyond, 1}), DataError);
  }
}

TEST(HuggingFace, SpecialTokens) {
  const std::map<std::string, std::string> ends = {{"gpt2", "<|endoftext|>"}, {"llama3", "<|end_of_text|>"}, {"qwen3", "<|endoftext|>"},
                                                   {"nemo", "</s>"}, {"llama2", "</s>"}};
  for (const auto& [name, end] : ends) {
    const auto tokenizer = tokenizer_of(name);
    const auto id = tokenizer->end_of_text();
    ASSERT_TRUE(id) << name;
    EXPECT_EQ(tokenizer->decode({&*id, 1}), end);
    EXPECT_THAT(tokenizer->encode(end), ::testing::Not(::testing::Contains(*id)));
  }
  EXPECT_FALSE(tokenizer_of("o200k")->end_of_text());
  const auto qwen = tokenizer_of("qwen3");
  EXPECT_THAT(qwen->encode("<think>"), ::testing::SizeIs(1)) << "added, but not special";
}

TEST(HuggingFace, AreSavedWithARun) {
  for (const std::string& name : all_names()) {
    const auto tokenizer = tokenizer_of(name);
    const auto again = tokenizer_from_json(Json::parse(tokenizer->to_json().dump(), "saved"));
    EXPECT_TRUE(again->to_json() == tokenizer->to_json());
    EXPECT_EQ(again->kind(), "huggingface");
    const std::string text = " In the \u212b<think> beginning  </s>";
    EXPECT_EQ(again->encode(text), tokenizer->encode(text));
  }
}

}  // namespace
}  // namespace sheaf::models
