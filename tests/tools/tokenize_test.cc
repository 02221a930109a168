// `sheaf tokenize` writes what training reads, and runs on byte-pair tokens resume and generate from their folder alone.
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/token_file.h"
#include "sheaf/models/utf8.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;
using testing::run_sheaf;

using testing::operator+;
using testing::Words;

const std::string kBpe = "tests/models/bpe";

struct Folder : ScratchFolder {
  Folder() {
    write("a.txt", testing::sample_text(20000));
    write("b.txt", testing::sample_text(3000) + "é \xff.");
    std::filesystem::create_directory(*this / "bpe");
    for (const char* name : {"encoder.json", "vocab.bpe", "tokenizer.model"})
      std::filesystem::copy_file(kBpe + "/" + name, *this / ("bpe/" + std::string(name)));
    std::filesystem::copy_file("tests/models/huggingface/mistral.json", *this / "bpe/tokenizer.json");
  }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(*this / name, std::ios::binary) << text;
    return *this / name;
  }
  Outcome tokenize(const Words& files, const std::string& tokenizer = "gpt2", const Words& more = {}) const {
    Words words = {"tokenize"};
    for (const std::string& file : files) words.push_back(*this / file);
    words = words + Words{"--tokenizer", tokenizer};
    if (tokenizer != "byte") words = words + Words{"--tokenizer-folder", *this / "bpe"};
    return run_sheaf(words + more);
  }
  Words train(const Words& data) const {
    const Words small = {"--model.layers", "1", "--model.heads", "2", "--model.width", "16", "--model.context", "16",
                         "--train.batch", "4", "--train.warmup", "0", "--train.schedule", "constant", "--quiet"};
    return Words{"train", "--output.folder", *this / "out"} + data + small;
  }
};

std::vector<int32_t> read(const std::string& path, int64_t vocab) {
  const models::Tokens tokens = models::Tokens::open(path, vocab);
  std::vector<int32_t> ids(static_cast<size_t>(tokens.size()));
  tokens.copy(0, tokens.size(), ids.data());
  return ids;
}

TEST(Tokenize, WritesDocumentsWithTheirEnds) {
  const Folder f;
  const std::shared_ptr<const models::Tokenizer> tokenizers[] = {models::load_gpt2_tokenizer(kBpe),
                                                                 models::load_llama3_tokenizer(kBpe),
                                                                 models::load_huggingface_tokenizer(f / "bpe")};
  for (const auto& tokenizer : tokenizers) {
    for (const char* threads : {"1", "3"}) {
      const Outcome r = f.tokenize({"a.txt", "b.txt", "out.bin"}, std::string(tokenizer->kind()), {"--threads", threads});
      ASSERT_EQ(r.code, 0) << r.err;
      std::vector<int32_t> expected;
      for (const char* name : {"a.txt", "b.txt"}) {
        const auto ids = tokenizer->encode(File::open(f / name).read_all());
        expected.insert(expected.end(), ids.begin(), ids.end());
        expected.push_back(*tokenizer->end_of_text());
      }
      EXPECT_EQ(read(f / "out.bin", tokenizer->vocab_size()), expected);
      EXPECT_THAT(r.out, HasSubstr(str("out.bin: ", expected.size(), " tokens (", tokenizer->kind(), ") of 2 documents")));
      EXPECT_THAT(r.err, HasSubstr("b.txt' is not UTF-8 at byte 3003"));
    }
  }
  ASSERT_EQ(f.tokenize({"a.txt", "out.bin"}, "byte").code, 0);
  EXPECT_EQ(read(f / "out.bin", 256).size(), 20000u);
  expect_refused(f.tokenize({"a.txt", "out.bin"}, "byte", {"--tokenizer-folder", f / "bpe"}), 64, "--tokenizer byte has no files");
  for (const auto& entry : std::filesystem::directory_iterator(f.path()))
    EXPECT_THAT(entry.path().string(), ::testing::Not(HasSubstr(".tmp")));
}

// JSON lines are separate documents.
TEST(Tokenize, TakesJsonLines) {
  const Folder f;
  std::string all;
  Words texts;
  for (int i = 0; i < 200; ++i) {
    const std::string text = testing::sample_text(20 + 7 * i);
    all += Json(Json::Object{{"id", i}, {"content", text}}).dump() + "\n\n";
    texts.push_back(std::to_string(i) + ".txt");
    f.write(texts.back(), text);
  }
  f.write("all.jsonl", all), f.write("all.json", all);
  ASSERT_EQ(f.tokenize(texts + Words{"texts.bin"}).code, 0);
  const Outcome r = f.tokenize({"all.jsonl", "lines.bin"}, "gpt2", {"--field", "content", "--threads", "2"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr(" of 200 documents, "));
  EXPECT_EQ(read(f / "lines.bin", 957), read(f / "texts.bin", 957));
  ASSERT_EQ(f.tokenize({"all.json", "again.bin"}, "gpt2", {"--field", "content", "--jsonl"}).code, 0);
  EXPECT_EQ(read(f / "again.bin", 957), read(f / "texts.bin", 957));
  expect_refused(f.tokenize({"all.jsonl", "new.bin"}), 65, "line 1 of '" + (f / "all.jsonl") + "': no member \"text\"");
  expect_refused(f.tokenize({"all.json", "new.bin"}, "gpt2", {"--field", "content"}), 64, "--field content: no text is JSON lines");
  f.write("none.jsonl", "\n\n");
  expect_refused(f.tokenize({"none.jsonl", "new.bin"}), 65, "none.jsonl' has no documents");
  expect_refused(f.tokenize({"all.json", "none.jsonl", "new.bin"}, "gpt2", {"--field", "content", "--jsonl"}), 65, "none.jsonl' has no documents");
  EXPECT_FALSE(std::filesystem::exists(f / "new.bin"));
}

TEST(Tokenize, SaysWhatIsWrong) {
  const Folder f;
  expect_refused(f.tokenize({"a.txt"}), 64, "name at least one text and, last, the file to write");
  expect_refused(f.tokenize({"a.txt", "b.txt"}), 64, "b.txt' exists and is no token file");
  expect_refused(run_sheaf({"tokenize", f / "a.txt", "-", "--tokenizer", "byte"}), 64, "cannot be written to standard output");
  ASSERT_EQ(run_sheaf({"tokenize", f / "a.txt", f / "a.bin", "--tokenizer", "byte"}).code, 0);
  const std::string before = File::open(f / "a.bin").read_all();
  expect_refused(run_sheaf({"tokenize", f / "./a.bin", f / "a.bin", "--tokenizer", "byte"}), 64, "a.bin' is also among the texts");
  EXPECT_EQ(File::open(f / "a.bin").read_all(), before);
  expect_refused(f.tokenize({"a.txt", "out.bin"}, "char"), 64, "unknown tokenizer 'char'");
  expect_refused(run_sheaf({"tokenize", f / "a.txt", f / "out.bin", "--tokenizer", "llama3"}), 64, "tokenizer.model");
  expect_refused(f.tokenize({"none.txt", "out.bin"}), 65, "none.txt': No such file");
  f.write("empty.txt", "");
  expect_refused(f.tokenize({"a.txt", "empty.txt", "out.bin"}), 65, "empty.txt' is empty");
  expect_refused(f.tokenize({"a.txt", "no/out.bin"}), 74, "no/out.bin");
  expect_refused(run_sheaf({"tokenize", f / "a.txt", "", "--tokenizer", "byte"}), 74, "'' cannot be the name of a file");
  expect_refused(f.tokenize({"a.txt", "out.bin"}, "gpt2", {"--threads", "0"}), 64, "--threads");
  f.write("bpe/tokenizer.json", R"({"model":{"type":"WordPiece"}})");
  expect_refused(f.tokenize({"a.txt", "out.bin"}, "huggingface"), 65, "tokenizer.json': model.type is \"WordPiece\": Sheaf knows BPE");
  f.write("bpe/vocab.bpe", "q q\n");
  expect_refused(f.tokenize({"a.txt", "out.bin"}), 65, "merge 0 makes \"qq\", which is no token");
  f.write("bpe/encoder.json", "{");
  expect_refused(f.tokenize({"a.txt", "out.bin"}), 65, "encoder.json': not valid JSON");
  EXPECT_FALSE(std::filesystem::exists(f / "out.bin"));
}

TEST(Tokenize, RunsGoOnAndGenerateWithoutTheFiles) {
  for (const bool token_files : {false, true}) {
    const Folder f;
    Words data = {"--data.tokenizer", "gpt2", "--data.tokenizer_folder", f / "bpe"};
    if (token_files) {
      ASSERT_EQ(f.tokenize({"a.txt", "train.bin"}).code, 0);
      ASSERT_EQ(f.tokenize({"b.txt", "val.bin"}).code, 0);
      data = data + Words{"--data.train_file", f / "train.bin", "--data.val_file", f / "val.bin"};
    } else {
      data = data + Words{"--data.corpus", f / "a.txt"};
    }
    const Outcome trained = run_sheaf(f.train(data + Words{"--train.steps", "2"}));
    ASSERT_EQ(trained.code, 0) << trained.err;
    std::filesystem::remove_all(f / "bpe");
    const Outcome on = run_sheaf({"train", "--resume", "--output.folder", f / "out", "--train.steps", "3", "--generate.tokens", "60"});
    EXPECT_EQ(on.code, 0) << on.err;
    EXPECT_EQ(models::valid_utf8_prefix(on.out), on.out.size());
    // The barely trained model samples from all tokens, including those of single bytes.
    const Outcome sample = run_sheaf({"generate", f / "out", "--generate.tokens", "200", "--generate.prompt", "é"});
    EXPECT_EQ(sample.code, 0) << sample.err;
    EXPECT_THAT(sample.out, AllOf(::testing::StartsWith("é"), HasSubstr("\ufffd")));
    EXPECT_EQ(models::valid_utf8_prefix(sample.out), sample.out.size());
  }
}

// The tokenizer says which token ends a document; if there is none, nothing is separated.
TEST(Tokenize, DocumentsAreSeparated) {
  const Folder f;
  f.write("c.txt", "A short one.");
  ASSERT_EQ(f.tokenize({"c.txt", "c.txt", "c.txt", "c.txt", "c.txt", "c.txt", "train.bin"}).code, 0);
  ASSERT_EQ(f.tokenize({"c.txt", "c.txt", "c.txt", "c.txt", "val.bin"}).code, 0);
  const Words data = {"--data.tokenizer", "gpt2", "--data.tokenizer_folder", f / "bpe", "--data.train_file", f / "train.bin",
                      "--data.val_file", f / "val.bin", "--train.steps", "3"};
  const auto losses = [&](const std::string& out, const Words& more) {
    const Outcome r = run_sheaf(f.train(data + more + Words{"--output.folder", f / out}));
    EXPECT_EQ(r.code, 0) << r.err;
    return testing::read_metrics(f / out + "/metrics.jsonl").at(3);
  };
  std::set<int32_t> known;
  for (const char* file : {"train.bin", "val.bin"})
    for (const int32_t id : read(f / file, 957)) known.insert(id);
  int32_t unknown = 0;
  while (known.contains(unknown)) ++unknown;
  const auto packed = losses("packed", {}), apart = losses("apart", {"--data.separate_documents", "true"}),
             by_hand = losses("by_hand", {"--data.separate_documents", "true", "--data.end_of_text", "956"}),
             other = losses("other", {"--data.separate_documents", "true", "--data.end_of_text", std::to_string(unknown)});
  for (const char* field : {"loss", "val_loss"}) {
    EXPECT_NE(packed.at(field), apart.at(field)) << field;
    EXPECT_EQ(by_hand.at(field), apart.at(field)) << field;
    EXPECT_EQ(other.at(field), packed.at(field)) << field << ": no token is that";
  }
  std::filesystem::remove_all(f / "bpe");
  const Outcome on = run_sheaf({"train", "--resume", "--output.folder", f / "apart"});
  EXPECT_EQ(on.code, 0) << on.err;
  const Outcome tape = run_sheaf({"tape", "--model.vocab", "957", "--data.separate_documents", "true"});
  EXPECT_EQ(tape.code, 0) << tape.err;
  EXPECT_THAT(tape.out, HasSubstr("document_begins"));
}

// A text that is read in several parts has one beginning.
TEST(Tokenize, PartsOfALongTextGoOn) {
  const Folder f;
  std::string text;
  while (text.size() < 9'000'000) text += " In the  beginning God\ncreated";
  f.write("long.txt", text);
  std::filesystem::copy_file("tests/models/huggingface/llama2.json", f / "bpe/tokenizer.json",
                             std::filesystem::copy_options::overwrite_existing);
  const Outcome r = f.tokenize({"long.txt", "out.bin"}, "huggingface", {"--threads", "1"});
  ASSERT_EQ(r.code, 0) << r.err;
  const auto tokenizer = models::load_huggingface_tokenizer(f / "bpe");
  std::vector<int32_t> expected = tokenizer->encode(text);
  expected.push_back(*tokenizer->end_of_text());
  EXPECT_TRUE(read(f / "out.bin", tokenizer->vocab_size()) == expected);
}

// The printed sample begins with the prompt, and its first word is not cut off.
TEST(Tokenize, SamplesOfTokensWithASpaceBeforeATextBeginWithThePrompt) {
  const Folder f;
  const Outcome trained = run_sheaf(f.train({"--data.corpus", f / "a.txt", "--data.tokenizer", "huggingface", "--data.tokenizer_folder",
                                             f / "bpe", "--train.steps", "2"}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  std::filesystem::remove_all(f / "bpe");
  const Outcome sample = run_sheaf({"generate", f / "out", "--generate.tokens", "200", "--generate.prompt", "In the beginning"});
  EXPECT_EQ(sample.code, 0) << sample.err;
  ASSERT_THAT(sample.out, ::testing::StartsWith("In the beginning"));
  EXPECT_THAT(sample.out.substr(std::string("In the beginning").size()), HasSubstr(" ")) << "of which each token has one";
  EXPECT_EQ(run_sheaf({"train", "--resume", "--output.folder", f / "out", "--train.steps", "3"}).code, 0);
}

int pending_files(const Folder& f) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(f.path()))
    count += entry.path().filename().string().starts_with("out.bin.tmp-");
  return count;
}

// A signal to stop leaves no pending file; after a kill, the next run removes it.
TEST(Tokenize, ASignalLeavesNoPendingFile) {
  const Folder f;
  std::string text = testing::sample_text(1 << 20);
  for (int i = 0; i < 6; ++i) text += text;
  f.write("long.txt", text);
  for (const int signal : {SIGTERM, SIGINT, SIGKILL}) {
    testing::SheafProcess process({"tokenize", f / "long.txt", f / "out.bin", "--tokenizer", "gpt2", "--tokenizer-folder", f / "bpe",
                                   "--threads", "1"});
    while (process.running() && pending_files(f) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(process.pid(), signal);
    const Outcome r = process.wait();
    EXPECT_EQ(r.code, 128 + signal) << r.err;
    EXPECT_EQ(pending_files(f), signal == SIGKILL ? 1 : 0);
    EXPECT_FALSE(std::filesystem::exists(f / "out.bin"));
    if (signal != SIGKILL) {
      EXPECT_THAT(r.err, HasSubstr("out.bin' is not written"));
    }
  }
  f.write("out.bin.tmp-notes", "somebody's");
  EXPECT_EQ(f.tokenize({"a.txt", "out.bin"}).code, 0);
  EXPECT_EQ(pending_files(f), 1) << "not a name of ours";
}

// No input arrives, and the pipe does not end.
TEST(Tokenize, ASignalEndsTheWaitingForStandardInput) {
  const Folder f;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int kept = dup(STDIN_FILENO);
  dup2(ends[0], STDIN_FILENO);
  testing::SheafProcess process({"tokenize", "-", f / "out.bin", "--tokenizer", "gpt2", "--tokenizer-folder", f / "bpe",
                                 "--threads", "1"});
  dup2(kept, STDIN_FILENO);
  while (process.running() && pending_files(f) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it is waiting now
  kill(process.pid(), SIGTERM);
  const Outcome r = process.wait();
  EXPECT_EQ(r.code, 128 + SIGTERM) << r.err;
  EXPECT_THAT(r.err, HasSubstr("out.bin' is not written"));
  EXPECT_EQ(pending_files(f), 0);
  close(kept), close(ends[0]), close(ends[1]);
}

TEST(Tokenize, OptionsOfTraining) {
  const Folder f;
  expect_refused(run_sheaf(f.train({"--data.corpus", f / "a.txt", "--data.tokenizer", "gpt2"})), 64,
                 "data.tokenizer gpt2 needs data.tokenizer_folder");
  expect_refused(run_sheaf(f.train({"--data.corpus", f / "a.txt", "--data.tokenizer_folder", f / "bpe"})), 64,
                 "'data.tokenizer_folder' would change nothing");
  const Words gpt2 = {"--data.corpus", f / "a.txt", "--data.tokenizer", "gpt2", "--data.tokenizer_folder", f / "bpe"};
  expect_refused(run_sheaf(f.train(gpt2 + Words{"--model.vocab", "956"})), 64, "vocab 956 is smaller than the tokenizer's 957");
  const Outcome tape = run_sheaf({"tape", "--data.tokenizer", "llama3", "--data.tokenizer_folder", f / "bpe"});
  EXPECT_THAT(tape.out, HasSubstr("f32[1212,128]"));
  std::filesystem::remove(f / "bpe/encoder.json");
  expect_refused(run_sheaf(f.train(gpt2)), 65, "encoder.json': No such file");
}

// Prompts and answers, from JSON lines to a model's output: tokenizing, training and planning agree on what is trained on.
TEST(Tokenize, ExamplesAreTrainedPlannedAndAnswered) {
  const Folder f;
  std::string lines;
  for (int i = 0; i < 300; ++i) {
    const char c = static_cast<char>('a' + i % 6);
    lines += str("{\"prompt\": \"", std::string(1 + static_cast<size_t>(i % 3), c), " is\", \"completion\": \" ", c, c, "\"}\n");
  }
  f.write("train.jsonl", lines);
  const Outcome r = f.tokenize({"train.jsonl", "train.bin"}, "gpt2", {"--prompt-field", "prompt"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, AllOf(HasSubstr(" tokens (gpt2) of 300 examples, "), HasSubstr(" of them learned, ")));
  const models::Tokens tokens = models::Tokens::open(f / "train.bin", 1 << 20);
  EXPECT_EQ(tokens.example_end(), models::load_gpt2_tokenizer(kBpe)->end_of_text());

  const Words data = {"--data.train_file", f / "train.bin", "--data.val_file", f / "train.bin"};
  const Words named = data + Words{"--data.tokenizer", "gpt2", "--data.tokenizer_folder", f / "bpe"};
  Words run = f.train(named);
  std::erase(run, "--quiet");
  const Words more = {"--train.steps", "120", "--train.lr", "1e-2", "--model.context", "24", "--train.save_every", "60"};
  const Outcome trained = run_sheaf(run + more);
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_THAT(trained.out, AllOf(HasSubstr("  300 examples in "), HasSubstr(" % full, "), HasSubstr(" % of their tokens are learned\n")));
  EXPECT_THAT(trained.out, AllOf(HasSubstr("(equal)"), Not(HasSubstr("DIFFERENT")), HasSubstr("(nats per token that is learned, ")));
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const std::string answer = run_sheaf({"generate", f / "out", "--generate.prompt", "bb is", "--generate.temperature", "0",
                                          "--generate.dtype", dtype}).out;
    EXPECT_EQ(answer, "bb is bb\n") << dtype << ": it ends where the answer does";
  }

  // Interrupted half-way, it is the same run.
  const testing::Metrics whole = testing::read_metrics(f / "out/metrics.jsonl");
  EXPECT_NEAR(std::stod(whole.at(1).at("loss")), std::log(957.0), 0.5) << "the mean over what is learned, of weights as they are drawn";
  std::filesystem::remove_all(f / "out/checkpoints/step-120");
  ASSERT_EQ(run_sheaf(run + more + Words{"--resume"}).code, 0);
  testing::expect_same_curve(testing::read_metrics(f / "out/metrics.jsonl"), whole, "resumed");

  // A plan reads the file, if it exists.
  const Words sizes = {"--model.layers", "1", "--model.heads", "2", "--model.width", "16", "--model.context", "16", "--model.vocab", "957"};
  const Outcome with = run_sheaf(Words{"tape"} + data + sizes), without = run_sheaf(Words{"tape"} + sizes);
  ASSERT_EQ(with.code, 0) << with.err;
  EXPECT_THAT(with.out, HasSubstr("document_begins"));
  EXPECT_THAT(without.out, Not(HasSubstr("document_begins")));
  // Also where it is mixed with one that does not say what it holds.
  f.write("plain.bin", std::string(64, '\0'));
  const Outcome mixed = run_sheaf(Words{"tape", "--data.train_file", "0.5 " + f / "plain.bin" + " 0.5 " + f / "train.bin", "--data.val_file",
                                       f / "plain.bin"} + sizes);
  ASSERT_EQ(mixed.code, 0) << mixed.err;
  EXPECT_THAT(mixed.out, HasSubstr("document_begins"));
}

TEST(Tokenize, ConversationsAndTheirSpecialTokens) {
  const Folder f;
  Json json = Json::parse(File::open("tests/models/huggingface/gpt2.json").read_all(), "gpt2.json");
  Json::Array added = json.at("added_tokens").as_array();
  for (const char* content : {"<|im_start|>", "<|im_end|>"}) {
    Json token = added[0];
    token.set("id", static_cast<int64_t>(420 + added.size())).set("content", content);
    added.push_back(token);
  }
  json.set("added_tokens", added);
  f.write("bpe/tokenizer.json", json.dump());
  f.write("chat.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}, {\"role\": \"assistant\", \"content\": \"Yo\"}]}\n");
  const Outcome r = f.tokenize({"chat.jsonl", "chat.bin"}, "huggingface", {"--chat", "chatml"});
  ASSERT_EQ(r.code, 0) << r.err;
  const auto tokenizer = models::load_huggingface_tokenizer(f / "bpe");
  EXPECT_EQ(read(f / "chat.bin", 500),
            tokenizer->encode_special("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|endoftext|>"));

  const Words data = {"--data.train_file", f / "chat.bin", "--data.val_file", f / "chat.bin", "--data.tokenizer", "huggingface",
                      "--data.tokenizer_folder", f / "bpe"};
  const Outcome trained = run_sheaf(f.train(data) + Words{"--train.steps", "150", "--train.lr", "1e-2", "--model.context", "40"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  const Words asks = {"generate", f / "out", "--generate.prompt", "Hi", "--generate.temperature", "0"};
  const std::string asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(run_sheaf(asks + Words{"--generate.chat", "chatml"}).out, asked + "Yo\n") << "it ends with the turn";
  EXPECT_THAT(run_sheaf(asks + Words{"--generate.chat", "chatml", "--generate.ignore_end_of_text", "true"}).out,
              ::testing::StartsWith(asked + "Yo<|im_end|>"));
  EXPECT_THAT(run_sheaf(asks + Words{"--generate.chat", "chatml", "--generate.system", "Be good."}).out,
              ::testing::StartsWith("<|im_start|>system\nBe good.<|im_end|>\n" + asked));
  EXPECT_THAT(run_sheaf({"generate", f / "out", "--generate.prompt", asked, "--generate.special_tokens", "true", "--generate.temperature", "0"}).out,
              ::testing::StartsWith(asked + "Yo<|im_end|>"));
  expect_refused(run_sheaf(asks + Words{"--generate.chat", "llama3"}), 64, "no special token <|begin_of_text|>");
  f.write("asked.jsonl", "{\"said\": \"Hi\"}\n{\"said\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"id\": 7}\n");
  const Words many = {"generate", f / "out", "--prompts", f / "asked.jsonl", "--prompt-field", "said", "--output", f / "answers.jsonl",
                      "--field", "answer", "--generate.temperature", "0", "--generate.chat", "chatml"};
  ASSERT_EQ(run_sheaf(many).code, 0);
  EXPECT_EQ(File::open(f / "answers.jsonl").read_all(),
            "{\"said\":\"Hi\",\"answer\":\"Yo\",\"ended\":true}\n"
            "{\"said\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"id\":7,\"answer\":\"Yo\",\"ended\":true}\n");
  EXPECT_EQ(run_sheaf({"generate", f / "out", "--generate.prompt", asked, "--generate.special_tokens", "true", "--generate.end_token",
                       "<|im_end|>", "--generate.temperature", "0"}).out, asked + "Yo\n");
  expect_refused(run_sheaf(asks + Words{"--generate.end_token", "<|none|>"}), 64, "no special token <|none|>");
  expect_refused(run_sheaf({"generate", f / "out", "--generate.chat", "chatml"}), 64, "what does the user say?");
  expect_refused(run_sheaf(asks + Words{"--generate.system", "Be good."}), 64, "generate.system is for a chat");
  expect_refused(run_sheaf(asks + Words{"--generate.chat", "chatml", "--generate.special_tokens", "true"}), 64, "generate.special_tokens");
}

TEST(Tokenize, ExamplesThatAreNone) {
  const Folder f;
  f.write("good.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
  f.write("bad.jsonl", "\n{\"prompt\": \"a\"}\n");
  const auto tokenize = [&](const Words& files, const Words& more) { return f.tokenize(files, "gpt2", more); };
  const Words asks = {"--prompt-field", "prompt"};
  expect_refused(tokenize({"good.jsonl", "bad.jsonl", "out.bin"}, asks), 65, Words{"line 2 of '", "bad.jsonl'", "completion"});
  EXPECT_FALSE(std::filesystem::exists(f / "out.bin"));
  expect_refused(tokenize({"a.txt", "out.bin"}, asks), 64, "examples are JSON lines, and '");
  expect_refused(tokenize({"good.jsonl", "out.bin"}, {"--special-tokens"}), 64, "are for examples");
  expect_refused(tokenize({"good.jsonl", "out.bin"}, {"--chat", "chatml"}), 64, "no special token <|im_start|>");
  expect_refused(tokenize({"good.jsonl", "out.bin"}, asks + Words{"--chat", "chatml"}), 64, "either prompts with answers or conversations");
  f.write("blank.jsonl", "\n\n");
  expect_refused(tokenize({"blank.jsonl", "out.bin"}, asks), 65, "has no examples");
  expect_refused(tokenize({"good.jsonl", "blank.jsonl", "out.bin"}, asks), 65, "blank.jsonl' has no examples");

  ASSERT_EQ(tokenize({"good.jsonl", "one.bin"}, asks).code, 0);
  const std::string one = f / "one.bin";
  const auto train = [&](const Words& more) {
    return run_sheaf(f.train({"--data.train_file", one, "--data.val_file", one, "--model.vocab", "1000"}) + more);
  };
  expect_refused(train({"--data.separate_documents", "true", "--data.end_of_text", "7"}), 64,
                 Words{"documents end with token 7, the examples of '", "with token 956"});
  models::write_token_file(f / "text.bin", std::vector<int32_t>(200, 5), 1000);
  const Words plain = {"--data.train_file", f / "text.bin"}, apart = {"--data.separate_documents", "true"};
  const Words named = {"--data.tokenizer", "gpt2", "--data.tokenizer_folder", f / "bpe", "--train.steps", "1"};
  expect_refused(train(plain), 64, Words{"one.bin' holds examples, which are kept apart; ", "give data.separate_documents true"});
  expect_refused(train(plain + apart + Words{"--data.end_of_text", "5"}), 64, "documents end with token 5, the examples of '");
  EXPECT_EQ(train(plain + apart + named + Words{"--output.folder", f / "fine"}).code, 0);
  f.write("vain.jsonl", "{\"prompt\": \"\", \"completion\": \"\"}\n{\"prompt\": \"\", \"completion\": \"a b\"}\n");
  EXPECT_THAT(tokenize({"vain.jsonl", "vain.bin"}, asks).err, HasSubstr("of 1 of 2 examples nothing is learned: training leaves them out"));
  expect_refused(train({"--model.vocab", "900"}), 65, "which is outside the vocabulary of 900");
  f.write("long.jsonl", "{\"prompt\": \"" + testing::sample_text(400) + "\", \"completion\": \"b\"}\n");
  std::string text = File::open(f / "long.jsonl").read_all();
  std::replace(text.begin(), text.end() - 1, '\n', ' ');
  f.write("long.jsonl", text);
  ASSERT_EQ(tokenize({"long.jsonl", "long.bin"}, asks).code, 0);
  expect_refused(train({"--data.train_file", f / "long.bin"}), 65, "in none of 1 example is anything to learn within a context of 16");
}

}  // namespace
}  // namespace sheaf
