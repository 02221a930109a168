// Files in the published formats of byte-pair tokenizers, and possible errors in them: a DataError that says where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "sheaf/core/file.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/byte_alphabet.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kFolder = "tests/models/bpe/";

std::string data_error(const std::function<void()>& f) { return message_of<DataError>(ExitCode::kData, f); }

std::string all_bytes() {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  return bytes;
}

TEST(ByteAlphabet, HasACharacterForEachByte) {
  EXPECT_EQ(bytes_to_alphabet(" the\n"), "ĠtheĊ");
  EXPECT_EQ(bytes_to_alphabet("é\xad"), "Ã©Ń");
  EXPECT_EQ(bytes_to_alphabet(all_bytes()).size(), 94u + 2 * 162);
  EXPECT_EQ(alphabet_to_bytes(bytes_to_alphabet(all_bytes())), all_bytes());
  for (const char* text : {"a b", "a\n", "\x7f", "\u00a0", "\u00ad", "\u0144", "€", "\xc4", "\xff"}) {
    EXPECT_THAT(data_error([&] { alphabet_to_bytes(text); }), HasSubstr("stands for no byte")) << text;
  }
}

class BpeFiles : public ::testing::Test {
 protected:
  ScratchFolder folder;

  /// GPT-2's format with a vocabulary of the bytes and `more` (JSON members), and these merges.
  std::string gpt2_error(const std::string& more, const std::string& merges) {
    Json::Object vocabulary;
    for (int byte = 0; byte < 256; ++byte) {
      const char text = static_cast<char>(byte);
      vocabulary.emplace_back(bytes_to_alphabet({&text, 1}), byte);
    }
    std::string json = Json(vocabulary).dump();
    json.pop_back();
    return gpt2_error_of(json + more + "}", merges);
  }
  std::string gpt2_error_of(const std::string& vocabulary, const std::string& merges) {
    write_file(folder / "encoder.json", vocabulary);
    write_file(folder / "vocab.bpe", merges);
    return data_error([&] { load_gpt2_tokenizer(folder.path()); });
  }
  std::string llama3_error(const std::string& text) {
    write_file(folder / "tokenizer.model", text);
    return data_error([&] { load_llama3_tokenizer(folder.path()); });
  }
};

TEST_F(BpeFiles, UnderHuggingFacesNamesToo) {
  std::filesystem::copy_file(kFolder + "encoder.json", folder / "vocab.json");
  EXPECT_THAT(data_error([&] { load_gpt2_tokenizer(folder.path()); }), HasSubstr("vocab.bpe': No such file"));
  std::filesystem::copy_file(kFolder + "vocab.bpe", folder / "merges.txt");
  EXPECT_EQ(load_gpt2_tokenizer(folder.path())->to_json(), load_gpt2_tokenizer(kFolder)->to_json());
  EXPECT_THAT(data_error([&] { load_gpt2_tokenizer(folder / "none"); }), HasSubstr("none/encoder.json': No such file"));
  EXPECT_THAT(data_error([&] { load_llama3_tokenizer(folder / "none"); }), HasSubstr("tokenizer.model': No such file"));
}

TEST_F(BpeFiles, VocabulariesOfGpt2) {
  EXPECT_EQ(gpt2_error(R"(,"ab":256,"<|endoftext|>":257)", "#version: 0.2\na b\n"), "no exception");
  EXPECT_EQ(gpt2_error(R"(,"ab":256)", "a b\r\n\r\n"), "no exception");
  EXPECT_EQ(gpt2_error("", ""), "no exception");
  EXPECT_THAT(gpt2_error_of("{\"a\":0", ""), HasSubstr("encoder.json': not valid JSON at byte"));
  EXPECT_THAT(gpt2_error_of("[\"a\"]", ""), AllOf(HasSubstr("encoder.json"), HasSubstr("expected an object")));
  EXPECT_THAT(gpt2_error_of("{\"a\":\"x\"}", ""), HasSubstr("expected an integer"));
  EXPECT_THAT(gpt2_error_of("{\"a\":0,\"a\":1}", ""), HasSubstr("duplicate key \"a\""));
  EXPECT_THAT(gpt2_error_of("{}", ""), HasSubstr("a vocabulary of 0"));
  EXPECT_THAT(gpt2_error_of("{\"a\":0,\"b\":1}", ""), HasSubstr("the byte 0 is not in the vocabulary"));
  EXPECT_THAT(gpt2_error_of("{\"\":0}", ""), HasSubstr("token 0 has 0 bytes"));
  EXPECT_THAT(gpt2_error(R"(,"a b":256)", ""), AllOf(HasSubstr("encoder.json"), HasSubstr("\"a b\" has a character")));
  EXPECT_THAT(gpt2_error(R"(,"ab":255)", ""), HasSubstr("encoder.json': [tokenizer] two tokens have the id 255"));
  EXPECT_THAT(gpt2_error(R"(,"ab":257)", ""), HasSubstr("id 257 among 257 tokens: the ids must be 0 to 256"));
  EXPECT_THAT(gpt2_error(R"(,"ab":-1)", ""), HasSubstr("id -1 among"));
  EXPECT_THAT(gpt2_error(R"(,"ab":9223372036854775807)", ""), HasSubstr("id 9223372036854775807 among"));
  EXPECT_THAT(gpt2_error(",\"" + std::string(5000, 'a') + "\":256", ""), HasSubstr("token 256 has 5000 bytes"));
}

TEST_F(BpeFiles, MergesOfGpt2) {
  EXPECT_THAT(gpt2_error(R"(,"ab":256)", "#version: 0.2\na b\na q c\n"),
              HasSubstr("vocab.bpe' line 3: expected two tokens and a space between them, found \"a q c\""));
  EXPECT_THAT(gpt2_error(R"(,"ab":256)", "a b\nab\n"), HasSubstr("line 2: expected two tokens"));
  EXPECT_THAT(gpt2_error(R"(,"ab":256)", "a b\nab xy\n"), AllOf(HasSubstr("line 2: \"xy\" is not in"), HasSubstr("encoder")));
  EXPECT_THAT(gpt2_error(R"(,"ab":256)", "a \n"), HasSubstr("line 1: \"\" is not in"));
  EXPECT_THAT(gpt2_error(R"(,"ab":256)", "a b\na c\n"), HasSubstr("merge 1 makes \"ac\", which is no token"));
  EXPECT_THAT(gpt2_error(R"(,"ab":256)", "a b\na b\n"), HasSubstr("merge 1 of \"ab\" stands there twice"));
  EXPECT_THAT(gpt2_error(R"(,"ab":256)", "\xff b\n"), HasSubstr("line 1"));
}

TEST_F(BpeFiles, RanksOfLlama3) {
  const std::string good = File::open(kFolder + "tokenizer.model").read_all();
  EXPECT_EQ(llama3_error(good), "no exception");
  const auto and_line = [&](const std::string& line) { return llama3_error(good + line + "\n"); };
  EXPECT_EQ(and_line("enp6eg== 956"), "no exception");
  EXPECT_THAT(llama3_error(""), HasSubstr("tokenizer.model': [tokenizer] the byte 0 is not in the vocabulary"));
  EXPECT_THAT(llama3_error("YQ== 0\n"), HasSubstr("the byte 0 is not in the vocabulary"));
  EXPECT_THAT(and_line("enp6eg=="), HasSubstr("tokenizer.model' line 957: expected base64, a space and a rank"));
  for (const char* line : {"enp6eg== ", "enp6eg== x", "enp6eg== 1x", "enp6eg==  956", "enp6eg== 99999999999999999999"})
    EXPECT_THAT(and_line(line), HasSubstr("expected base64, a space and a rank")) << line;
  for (const char* line : {"enp6e 956", "en!6eg== 956", "=np6eg== 956", "e=p6 956", "\xff\xff\xff\xff 956"})
    EXPECT_THAT(and_line(line), HasSubstr("line 957: not base64")) << line;
  EXPECT_THAT(and_line(" 956"), HasSubstr("token 956 has 0 bytes"));
  EXPECT_THAT(and_line("enp6eg== 957"), HasSubstr("id 957 among 957 tokens"));
  EXPECT_THAT(and_line("enp6eg== 955"), HasSubstr("two tokens have the id 955"));
  EXPECT_THAT(and_line("YQ== 956"), HasSubstr("are the same, \"a\""));
  EXPECT_THAT(and_line("PHxlb3RfaWR8Pg== 956"), HasSubstr("are the same, \"<|eot_id|>\""));
}

TEST_F(BpeFiles, OfACheckpoint) {
  const auto reason = [](const std::string& json) {
    return data_error([&] { tokenizer_from_json(Json::parse(json, "t")); });
  };
  EXPECT_THAT(reason(R"({"kind":"gpt2"})"), HasSubstr("lacks the field 'tokens'"));
  EXPECT_THAT(reason(R"({"kind":"gpt2","tokens":"a b"})"), HasSubstr("lacks the field 'merges'"));
  EXPECT_THAT(reason(R"({"kind":"gpt2","tokens":"a b","merges":"a"})"), HasSubstr("not pairs"));
  EXPECT_THAT(reason(R"({"kind":"gpt2","tokens":"a b","merges":"a c"})"), HasSubstr("a merge of \"c\""));
  EXPECT_THAT(reason(R"({"kind":"gpt2","tokens":"a  b","merges":""})"), HasSubstr("token 1 has 0 bytes"));
  EXPECT_THAT(reason(R"({"kind":"gpt2","tokens":"a a","merges":""})"), HasSubstr("tokens 0 and 1 are the same"));
  EXPECT_THAT(reason(R"({"kind":"llama3","tokens":"a\nb"})"), HasSubstr("stands for no byte"));
  EXPECT_THAT(reason(R"({"kind":"llama3","tokens":[]})"), HasSubstr("expected a string"));
}

}  // namespace
}  // namespace sheaf::models
