// `sheaf train-tokenizer` learns a vocabulary that is used to tokenize texts, to train models and to print samples.
#include <chrono>
#include <csignal>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;
using testing::run_sheaf;
using testing::operator+;
using testing::Words;

struct Folder : ScratchFolder {
  Folder() {
    std::filesystem::copy_file("tests/models/bpe_trainer/text.txt", *this / "a.txt");
    write_file(*this / "b.txt", testing::sample_text(3000) + "é \xff.");
  }
  Outcome learn(const Words& files, const Words& more = {}) const {
    Words words = {"train-tokenizer"};
    for (const std::string& file : files) words.push_back(*this / file);
    return run_sheaf(words + more);
  }
  std::string read(const std::string& name) const { return File::open(*this / name).read_all(); }
  std::vector<std::string> names_in(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(*this / folder)) names.push_back(entry.path().filename());
    return names;
  }
};

TEST(TrainTokenizer, WritesTheFileOfItsPeer) {
  const Folder f;
  const std::string golden = "tests/models/bpe_trainer/";
  ASSERT_EQ(f.learn({"a.txt", "own/tokenizer.json"}, {"--vocab", "700"}).code, 0);
  const auto same = [&](const char* name) {
    return Json::parse(f.read("own/tokenizer.json"), "ours") == Json::parse(File::open(golden + name).read_all(), name);
  };
  EXPECT_TRUE(same("llama3.json"));
  const Outcome r = f.learn({"a.txt", "own/tokenizer.json"},
                            {"--vocab", "1000", "--pattern", "gpt2", "--min-frequency", "1", "--special", "<s>", "--special",
                             "</s>", "--special", "<|im start|>", "--special", "<é>"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_TRUE(same("gpt2.json"));
  EXPECT_THAT(r.out, HasSubstr("own/tokenizer.json: 1000 tokens of 1 text, "));
  EXPECT_EQ(r.err, "");
  EXPECT_THAT(f.names_in("own"), ::testing::ElementsAre("tokenizer.json"));
}

// No word spans two documents.
TEST(TrainTokenizer, TakesJsonLines) {
  const Folder f;
  std::string lines;
  Words texts;
  for (int i = 0; i < 50; ++i) {
    const std::string text = testing::sample_text(20 + 37 * i);
    lines += Json(Json::Object{{"text", text}}).dump() + "\n";
    texts.push_back(std::to_string(i) + ".txt");
    write_file(f / texts.back(), text);
  }
  write_file(f / "all.jsonl", lines);
  ASSERT_EQ(f.learn(texts + Words{"one/tokenizer.json"}, {"--vocab", "290", "--min-frequency", "1"}).code, 0);
  const Outcome r = f.learn({"all.jsonl", "two/tokenizer.json"}, {"--vocab", "290", "--min-frequency", "1"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(f.read("two/tokenizer.json"), f.read("one/tokenizer.json"));
}

TEST(TrainTokenizer, OrderAndThreadsDoNotMatter) {
  const Folder f;
  const Outcome one = f.learn({"a.txt", "b.txt", "one/tokenizer.json"}, {"--vocab", "500", "--threads", "1"});
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_THAT(one.err, HasSubstr("b.txt' is not UTF-8 at byte 3003; such bytes join nothing"));
  ASSERT_EQ(f.learn({"b.txt", "a.txt", "two/tokenizer.json"}, {"--vocab", "500", "--threads", "3"}).code, 0);
  EXPECT_TRUE(f.read("one/tokenizer.json") == f.read("two/tokenizer.json"));
}

// The tokens that the weights in `published` put before texts are also put before prompts of questions, which may then be empty: also in
// runs that start from them, whichever tokenizer setting is used, and when the weights are gone.
void expect_texts_before_questions(const Folder& f, const Words& train, const Words& tokenizer) {
  write_file(f / "q.jsonl", R"({"prompt": "", "choices": ["In the", "beginning"], "answer": 0})");
  const Words asked = {"--data.choices", f / "q.jsonl"};
  const auto evaluate = [&](const char* folder) { return run_sheaf(Words{"evaluate", f / folder} + asked); };
  expect_refused(evaluate("out"), 65, "line 1 of '" + (f / "q.jsonl") + "': the prompt is empty");
  EXPECT_EQ(evaluate("published").code, 0);
  const bool files = std::ranges::find(train, "--data.train_file") != train.end();
  for (const bool own : {true, false}) {
    if (!own && !files) continue;
    for (const char* left : {"tuned", "gone"}) std::filesystem::remove_all(f / left);
    const Words tune =
        train + (own ? tokenizer : Words{}) + Words{"--model.weights", f / "published", "--output.folder", f / "tuned", "--train.steps", "1"};
    const Outcome tuned = run_sheaf(tune + asked);
    ASSERT_EQ(tuned.code, 0) << tuned.err;
    EXPECT_EQ(evaluate("tuned").code, 0);
    std::filesystem::rename(f / "published", f / "gone");
    const Outcome later = evaluate("tuned"), resumed = run_sheaf(tune + asked + Words{"--resume"});
    if (own) {
      EXPECT_EQ(later.code, 0) << later.err;
      EXPECT_EQ(resumed.code, 0) << resumed.err;
    } else {
      expect_refused(later, 64, "there is none in '" + (f / "published") + "', from where it started");
      expect_refused(resumed, 64, "nor is there a tokenizer in '" + (f / "published") + "'");
    }
    std::filesystem::rename(f / "gone", f / "published");
  }
}

TEST(TrainTokenizer, FromATextToAModel) {
  const Folder f;
  ASSERT_EQ(f.learn({"a.txt", "own/tokenizer.json"}, {"--vocab", "400"}).code, 0);
  const Words tokenizer = {"--data.tokenizer", "huggingface", "--data.tokenizer_folder", f / "own"};
  for (const char* name : {"train.bin", "val.bin"}) {
    const Outcome r = run_sheaf({"tokenize", f / "a.txt", f / name, "--tokenizer", "huggingface", "--tokenizer-folder",
                                 f / "own"});
    ASSERT_EQ(r.code, 0) << r.err;
  }
  const Words small = {"train", "--output.folder", f / "out", "--model.layers", "1", "--model.heads", "2",
                       "--model.width", "16", "--model.context", "16", "--train.batch", "4", "--train.warmup", "0",
                       "--train.schedule", "constant", "--train.steps", "2", "--quiet"};
  const Words text = {"--data.corpus", f / "a.txt"};
  const Words files = {"--data.train_file", f / "train.bin", "--data.val_file", f / "val.bin"};
  for (const Words& data : {text, files}) {
    const Outcome trained = run_sheaf(small + data + tokenizer);
    ASSERT_EQ(trained.code, 0) << trained.err;
    const Outcome sample = run_sheaf({"generate", f / "out", "--generate.tokens", "20", "--generate.prompt",
                                      "In the beginning"});
    ASSERT_EQ(sample.code, 0) << sample.err;
    EXPECT_THAT(sample.out, ::testing::StartsWith("In the beginning"));
    const Outcome exported = run_sheaf({"export", f / "out", f / "published", "--format", "huggingface"});
    ASSERT_EQ(exported.code, 0) << exported.err;
    EXPECT_THAT(exported.out, HasSubstr("and its tokenizer.json"));
    EXPECT_TRUE(models::load_huggingface_tokenizer(f / "published")->to_json() ==
                models::load_huggingface_tokenizer(f / "own")->to_json());
    EXPECT_EQ(f.read("published/tokenizer_config.json"),
              "{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"eos_token\":\"<|endoftext|>\"}\n");
    const auto generate = [&](const char* folder, const Words& more) {
      const Outcome r = run_sheaf(Words{"generate", f / folder, "--generate.tokens", "20"} + more);
      EXPECT_EQ(r.code, 0) << r.err;
      return r.out;
    };
    const Words prompt = {"--generate.prompt", "In the beginning"};
    EXPECT_EQ(generate("published", prompt), sample.out) << "the weights alone";
    // The tokens that its post-processor puts before a text are read, and not printed.
    const std::string plain = f.read("published/tokenizer.json");
    ASSERT_THAT(plain, Not(HasSubstr("post_processor")));
    const auto put_before = [&](const std::string& token) {
      const std::string single = R"([{"SpecialToken":{"id":")" + token + R"(","type_id":0}},{"Sequence":{"id":"A","type_id":0}}])";
      write_file(f / "published/tokenizer.json", R"({"post_processor":{"type":"Sequence","processors":[{"type":"ByteLevel"},)"
              R"({"type":"TemplateProcessing","single":)" + single + R"(,"special_tokens":{"<|endoftext|>":{"ids":[0]}}}]},)" + plain.substr(1));
    };
    put_before("<|endoftext|>");
    const Words rendered = {"--generate.prompt", "<|endoftext|>In the beginning", "--generate.special_tokens", "true"};
    const std::string with_begin = generate("published", prompt);
    EXPECT_EQ("<|endoftext|>" + with_begin, generate("out", rendered));
    EXPECT_EQ("<|endoftext|>" + with_begin, generate("published", rendered)) << "which has it already";
    EXPECT_NE(with_begin, sample.out);
    const auto processed = [&](const std::string& processor) {
      write_file(f / "published/tokenizer.json", R"({"post_processor":)" + processor + "," + plain.substr(1));
    };
    processed(R"({"type":"RobertaProcessing","sep":["<|endoftext|>",0],"cls":["<|endoftext|>",0],"trim_offsets":true,"add_prefix_space":false})");
    EXPECT_EQ(generate("published", prompt), with_begin);
    processed(R"({"type":"Magic"})");
    expect_refused(run_sheaf(Words{"generate", f / "published"} + prompt), 65, "post_processor: it is of the type \"Magic\", which is not known");
    put_before("<|endoftext|>");
    // They take room in the context.
    const Words full = {"--generate.prompt", std::string(16, '~'), "--generate.tokens", "1"};
    EXPECT_EQ(run_sheaf(Words{"generate", f / "out"} + full).err, "");
    EXPECT_THAT(run_sheaf(Words{"generate", f / "published"} + full).err, HasSubstr("the prompt has 17 tokens, the model's context 16"));
    expect_texts_before_questions(f, small + data, tokenizer);
    put_before("<s>");
    expect_refused(run_sheaf(Words{"generate", f / "published"} + prompt), 65,
                   "published/tokenizer.json': post_processor: [json] lacks the field '<s>'");
    write_file(f / "published/tokenizer.json", R"({"post_processor":{"type":"TemplateProcessing","single":[1]},)" + plain.substr(1));
    expect_refused(run_sheaf(Words{"generate", f / "published"} + prompt), 65, "published/tokenizer.json': post_processor: [json] expected an object");
    // It ends at the end tokens of the model's files, here any token.
    write_file(f / "published/tokenizer.json", plain);
    std::string ends;
    for (int id = 0; id < 400; ++id) ends += str(id ? "," : "", id);
    write_file(f / "published/generation_config.json", "{\"eos_token_id\": [" + ends + "]}");
    EXPECT_EQ(generate("published", prompt), "In the beginning\n");
    EXPECT_EQ(generate("published", prompt + Words{"--generate.ignore_end_of_text", "true"}), sample.out);
    write_file(f / "published/generation_config.json", "{\"eos_token_id\": \"x\"}");
    expect_refused(run_sheaf(Words{"generate", f / "published"} + prompt), 65, "published/generation_config.json': eos_token_id: ");
    write_file(f / "published/generation_config.json", "{\"eos_token_id\": [4294967296]}");  // token 0, in 32 bits
    expect_refused(run_sheaf(Words{"generate", f / "published"} + prompt), 65, "generation_config.json': eos_token_id: 4294967296 is no id of a token");
    std::filesystem::remove(f / "published/tokenizer.json");
    expect_refused(run_sheaf({"generate", f / "published"}), 64, "has neither tokenizer.json nor GPT-2's vocab.json and merges.txt");
    std::filesystem::remove_all(f / "published");
    std::filesystem::remove_all(f / "out");
  }
}

TEST(TrainTokenizer, SaysWhatIsWrong) {
  const Folder f;
  const std::string out = "own/tokenizer.json";
  expect_refused(f.learn({"a.txt"}), 64, "name at least one text and, last, the file to write");
  expect_refused(f.learn({"a.txt", "b.txt"}), 64, "name the file to write last, FOLDER/tokenizer.json, not '");
  expect_refused(f.learn({"a.txt", out}, {"--vocab", "256"}), 64, "256 bytes and 1 special token are 257 already");
  expect_refused(f.learn({"a.txt", out}, {"--vocab", "many"}), 64, "--vocab");
  expect_refused(f.learn({"a.txt", out}, {"--pattern", "bert"}), 64, "unknown pattern 'bert'");
  expect_refused(f.learn({"a.txt", out}, {"--min-frequency", "0"}), 64, "a minimal frequency of 0");
  expect_refused(f.learn({"a.txt", out}, {"--special", "a"}), 64, "or is what a byte is called");
  expect_refused(f.learn({"a.txt", out}, {"--threads", "0"}), 64, "--threads");
  EXPECT_FALSE(std::filesystem::exists(f / "own")) << "options are looked at first";
  write_file(f / "tokenizer.json", "what was there");
  expect_refused(f.learn({"none.txt", "tokenizer.json"}), 65, "none.txt': No such file");
  write_file(f / "empty.txt", "");
  expect_refused(f.learn({"a.txt", "empty.txt", "tokenizer.json"}), 65, "empty.txt' is empty");
  expect_refused(f.learn({"b.txt", "tokenizer.json"}), 65, "make a vocabulary of 291 tokens, not of 32768");
  EXPECT_EQ(f.read("tokenizer.json"), "what was there");
  expect_refused(f.learn({"a.txt", "b.txt/tokenizer.json"}, {"--vocab", "300"}), 74, "b.txt");
  std::filesystem::create_directories(f / out);
  expect_refused(f.learn({"a.txt", out}, {"--vocab", "300"}), 74, "own/tokenizer.json' is a folder");
}

// Whether a process has a handler for a signal.
bool handles(pid_t pid, int signal) {
  std::ifstream status(str("/proc/", pid, "/status"));
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigCgt:")) return std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1;
  return false;
}

// A signal to stop leaves the existing files.
TEST(TrainTokenizer, ASignalStopsIt) {
  const Folder f;
  std::string text = testing::sample_text(1 << 20);
  for (int i = 0; i < 7; ++i) text += text;
  write_file(f / "long.txt", text);
  write_file(f / "tokenizer.json", "what was there");
  for (const int signal : {SIGTERM, SIGINT}) {
    testing::SheafProcess process({"train-tokenizer", f / "long.txt", f / "tokenizer.json", "--threads", "1"});
    while (process.running() && !handles(process.pid(), signal)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(process.pid(), signal);
    const Outcome r = process.wait();
    EXPECT_EQ(r.code, 128 + signal) << r.err;
    EXPECT_THAT(r.err, HasSubstr(str("tokenizer.json' is not written: signal ", signal, " asked to stop")));
    EXPECT_EQ(f.read("tokenizer.json"), "what was there");
  }
}

}  // namespace
}  // namespace sheaf
