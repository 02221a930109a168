// Bad input gives one clear line that says what is wrong and where, and the documented exit code, on one rank and on two.
#include <csignal>
#include <filesystem>
#include <fstream>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::Outcome;
using testing::run_sheaf;
using testing::SheafProcess;

using Words = std::vector<std::string>;

struct Folder : ScratchFolder {
  Folder() { write("corpus.txt", testing::sample_text(3000)); }
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(*this / name, std::ios::binary) << text;
    return *this / name;
  }
  /// A training command that would run without `more`; later options win.
  Words train(const Words& more) const {
    Words words = {"train", "--data.corpus", *this / "corpus.txt", "--output.folder",
                   *this / "out"};
    for (const char* w : {"--model.layers", "1", "--model.heads", "2", "--model.width", "16",
                          "--model.context", "16", "--train.steps", "4", "--train.batch", "4",
                          "--train.warmup", "0", "--generate.tokens", "3"})
      words.emplace_back(w);
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

void expect_line(const Outcome& r, int code, const Words& parts, const std::string& what) {
  SCOPED_TRACE(what);
  testing::expect_refused(r, code, parts);
}

/// The same on one rank and on two, where the launcher prints the line.
void expect_refused(const Words& arguments, int code, const Words& parts) {
  expect_line(run_sheaf(arguments), code, parts, "one rank");
  Words launched = parts;
  launched.push_back("sheaf launch: rank ");
  launched.push_back(" exited with code " + std::to_string(code) + ": [");
  expect_line(run_sheaf(testing::on_ranks(2, arguments)), code, launched, "two ranks");
}

TEST(BadInput, AModelThatTheHostCannotHold) {
  Folder f;
  expect_refused(f.train({"--model.width", "65536", "--model.layers", "50"}), 73,
                 {"a step's peak is", "run on this host, which may use", "train.batch"});
}

TEST(BadInput, Configuration) {
  Folder f;
  expect_refused(f.train({"--config", f / "none.toml"}), 64, {"none.toml", "No such file"});
  expect_refused(f.train({"--config", f.write("bad.toml", "[model]\nlayers = 2\nwidth = = 3\n")}),
                 64, {"bad.toml:3:"});
  expect_refused(f.train({"--config", f.write("key.toml", "[model]\n\nlayrs = 2\n")}), 64,
                 {"key.toml:3", "\"model.layrs\"", "did you mean \"model.layers\""});
  expect_refused(f.train({"--config", f.write("type.toml", "[train]\nlr = \"fast\"\n")}), 64,
                 {"type.toml:2", "'train.lr' takes a number, not \"fast\""});
  expect_refused(f.train({"--trian.steps", "3"}), 64,
                 {"command line", "did you mean \"train.steps\""});
  expect_refused(f.train({"--train.steps"}), 64, {"--train.steps lacks a value"});
  expect_refused(f.train({"--sharding.strategy", "fully"}), 64,
                 {"sharding.strategy", "full_shard", "\"fully\""});
  expect_refused(f.train({"--sharding.secondary", "true"}), 64,
                 {"sharding.secondary needs several groups of ranks: sharding.replicas, or sharding.experts or a "
                  "sharding.context"});
  expect_refused(f.train({"--sharding.replicas", "3"}), 64,
                 {"sharding.replicas 3: ", " cannot be divided into as many equal groups"});
  expect_refused(f.train({"--train.islands", "4"}), 64, {"train.islands 4: ", " cannot be divided into as many equal groups"});
  expect_refused(f.train({"--sharding.context", "3"}), 64, {"sharding.context 3: ", " cannot be divided into groups of so many"});
  expect_refused(f.train({"--sharding.tensor", "3"}), 64, {"sharding.tensor 3: ", " cannot be divided into groups of so many"});
  expect_refused(f.train({"--train.dtype", "fp16"}), 64, {"train.dtype", "f16", "\"fp16\""});
  expect_refused(f.train({"--train.loss_scale", "0.5"}), 64, {"'train.loss_scale' must be in [1, "});
  expect_refused(f.train({"--model.heads", "3"}), 64,
                 {"model.width 16 is not a multiple of model.heads 3"});
  expect_refused(f.train({"--data.corpus", ""}), 64, {"nothing to train on"});
  expect_refused(f.train({"--model.vocab", "5"}), 64, {"vocab 5 is smaller"});
  EXPECT_FALSE(std::filesystem::exists(f / "out"));
}

TEST(BadInput, Version) {
  const Outcome r = run_sheaf({"--version"});
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, ::testing::MatchesRegex(
                         "sheaf [0-9]+\\.[0-9]+\\.[0-9]+ \\(CPU(, CUDA| emulated)*\\)\n"));
}

TEST(BadInput, CommandLine) {
  Folder f;
  expect_line(run_sheaf({}), 64, {"a subcommand is missing; known: train, launch"}, "no subcommand");
  expect_line(run_sheaf({"trian"}), 64,
              {"unknown command 'trian'", "train, launch, generate, evaluate, export, tape"}, "unknown command");
  expect_line(run_sheaf({"train", "--threads-per-rank", "0"}), 64, {"--threads-per-rank"},
              "no threads");
  expect_line(run_sheaf({"launch", "--nproc-per-node", "2"}), 64, {"no command"}, "no command");
  expect_line(run_sheaf({"launch", "--nproc-per-node", "2", "--"}), 64, {"no command"},
              "no command behind --");
  expect_line(run_sheaf({"launch", "--nproc-per-node", "2", "--nodes", "2", "--", "true"}), 64,
              {"--nodes"}, "unknown option");
  expect_line(run_sheaf({"launch", "--nproc-per-node", "0", "--", "true"}), 64, {"0 processes"},
              "no ranks");
  expect_line(run_sheaf({"launch", "--", "true"}), 64, {"--nproc-per-node"}, "no number");
  expect_line(run_sheaf({"launch", "--nproc-per-node", "2", "--", "/no/such/program"}), 64,
              {"exited with code 64: cannot run /no/such/program: No such file"}, "no program");
  expect_line(run_sheaf({"tape", "--world", "2", "--rank", "2", "--model.vocab", "50"}), 64,
              {"--rank", "[0, 2)", "2"}, "rank");
  expect_line(run_sheaf({"tape", "--world", "0", "--model.vocab", "50"}), 64, {"--world"}, "world");
  expect_line(run_sheaf({"tape", "--world", "2"}), 64, {"--model.vocab"}, "no vocabulary");
  expect_line(run_sheaf({"tape", "--format", "xml", "--model.vocab", "50"}), 64,
              {"'xml'", "text, json, dot"}, "format");
  expect_line(run_sheaf({"generate", f / "none"}), 65, {"no checkpoint in " + f / "none"},
              "nothing trained");
}

// Values are values, and paths are paths, whatever they begin with.
TEST(BadInput, WordsThatLookLikeOptions) {
  Folder f;
  expect_line(run_sheaf({"generate", f / "none", "--generate.prompt", "-h"}), 65, {"no checkpoint in " + f / "none"}, "a prompt of -h");
  expect_line(run_sheaf({"generate", "--generate.prompt", "--output", f / "none"}), 65, {"no checkpoint in " + f / "none"}, "of an option's name");
  expect_line(run_sheaf({"evaluate", "--data.corpus", "c.txt", f / "none"}), 65, {"no checkpoint in " + f / "none"}, "a folder behind an option");
  expect_line(run_sheaf({"tokenize", "[none.txt]", f / "out.bin", "--tokenizer", "byte"}), 65, {"[none.txt]"}, "a path in brackets");
}

TEST(BadInput, FactorsOfParameters) {
  Folder f;
  for (const char* option : {"train.lr_factors", "train.weight_decay_factors"}) {
    const auto refused = [&](const char* text, const char* why) {
      expect_refused(f.train({str("--", option), text}), 64, {str("[train] ", option, " '", text, "': ", why)});
    };
    refused("0.5 *.nrm.*", "no parameter matches '*.nrm.*'; they are 'wte.weight' to ");
    refused("0.5", "factors, at least 0, and patterns of parameters in turn, \"0.1 wte.* 2 *.ln*\"; found '0.5'");
    refused("wte.weight=0.5", "factors, at least 0");
    refused("-1 *", "factors, at least 0");
    refused("nan *", "factors, at least 0");
    refused("1x *", "factors, at least 0");
  }
}

TEST(BadInput, Sampling) {
  Folder f;
  ASSERT_EQ(run_sheaf(f.train({"--generate.prompt", "the ", "--generate.tokens", "9"})).code, 0);
  const Outcome usual = run_sheaf({"generate", f / "out"});
  EXPECT_EQ(usual.code, 0) << usual.err;
  EXPECT_TRUE(usual.out.starts_with("the ")) << usual.out;
  EXPECT_EQ(usual.out.size(), 4u + 9 + 1);  // the run's own options
  EXPECT_EQ(run_sheaf({"generate", f / "out", "--generate.tokens", "2"}).out, usual.out.substr(0, 6) + "\n");
  EXPECT_THAT(run_sheaf(testing::on_ranks(2, {"generate", f / "out", "--generate.tokens", "2"})).err,
              HasSubstr("[generate] one prompt takes one process, and this is rank "));
  expect_line(run_sheaf({"generate", f / "out", "--model.layers", "99", "--train.lr", "7"}), 64,
              {"[generate] --model.layers is not for sampling"}, "a model's option");
}

TEST(BadInput, Environment) {
  Folder f;
  const Words train = f.train({});
  const auto with = [&](const Words& environment, const Words& parts) {
    expect_line(run_sheaf(train, environment), 64, parts, environment[0]);
  };
  with({"RANK=2", "WORLD_SIZE=2"}, {"RANK=2 is not below WORLD_SIZE=2"});
  with({"RANK=0", "WORLD_SIZE=two"}, {"WORLD_SIZE='two' is not a number"});
  with({"RANK=0", "WORLD_SIZE=0"}, {"WORLD_SIZE=0"});
  with({"RANK=0"}, {"RANK is set, but WORLD_SIZE is not"});
  with({"WORLD_SIZE=2"}, {"WORLD_SIZE is set, but RANK is not"});
  with({"RANK=0", "WORLD_SIZE=1", "SHEAF_TIMEOUT=soon"}, {"SHEAF_TIMEOUT='soon'"});
}

TEST(BadInput, Data) {
  Folder f;
  expect_refused(f.train({"--data.corpus", f / "none.txt"}), 65, {"none.txt", "No such file"});
  expect_refused(run_sheaf({"tape", "--data.corpus", f / "none.txt"}), 65, "none.txt', which does not exist: give --model.vocab N");
  expect_refused(f.train({"--data.corpus", f.path()}), 65, {f.path()});
  expect_refused(f.train({"--data.corpus", f.write("empty.txt", "")}), 65, {"empty.txt' is empty"});
  expect_refused(f.train({"--data.corpus", f.write("bytes.txt",
                                                   "abc\xff"
                                                   "def")}),
                 65, {"bytes.txt", "byte 0xff at offset 3 is not valid UTF-8"});
  expect_refused(f.train({"--data.corpus", f.write("short.txt", "abcdefghijkl")}), 65,
                 {"short.txt", "too few for a context of 16"});
  EXPECT_FALSE(std::filesystem::exists(f / "out"));
  std::string tokens(1000, '\0');  // 500 of 16 bits
  f.write("val.bin", tokens);
  tokens[2 * 321] = 77;
  f.write("train.bin", tokens);
  const Words files = {"--data.corpus",   "",           "--data.train_file", f / "train.bin",
                       "--data.val_file", f / "val.bin"};
  Words small = files;
  small.insert(small.end(), {"--model.vocab", "77"});
  expect_refused(f.train(small), 65, {"train.bin", "token 77 at position 321", "vocabulary of 77"});
  Words many = small;
  many.insert(many.end(), {"--data.train_file", f / "t*.bin"});
  expect_refused(f.train(many), 65, {"train.bin", "token 77 at position 321"});
  many.back() = f / "no*.bin";
  expect_refused(f.train(many), 65, {"[tokens] no file matches '" + f / "no*.bin'"});
  small.insert(small.end(), {"--model.vocab", "78", "--data.val_file", f.write("one.bin", "ab")});
  expect_refused(f.train(small), 65, {"one.bin", "1 tokens leave nothing to predict"});
  EXPECT_FALSE(std::filesystem::exists(f / "out"));  // detected before anything is written
  expect_refused(f.train(files), 64, {"token files need model.vocab"});
  // 32-bit tokens without a header, and any other file of even size, would be read as 16-bit tokens.
  Words large = files;
  large.insert(large.end(), {"--model.vocab", "128256"});
  expect_refused(f.train(large), 65, {"train.bin' has no header, so its tokens are of 16 bits, and the vocabulary has 128256"});
  std::filesystem::create_directory(f / "weights");
  Words bare = files;
  bare.insert(bare.end(), {"--model.weights", f / "weights"});
  expect_refused(f.train(bare), 64, {"weights' has neither model.safetensors"});
  // Which token ends a document.
  expect_refused(f.train({"--data.separate_documents", "true"}), 64,
                 {"which token ends a document is not known: data.tokenizer char has none; give its id, data.end_of_text"});
  Words unknown = files;
  unknown.insert(unknown.end(), {"--model.vocab", "78", "--data.separate_documents", "true"});
  expect_refused(f.train(unknown), 64, {"which token ends a document is not known: the token files do not say it"});
  unknown.insert(unknown.end(), {"--data.end_of_text", "78"});
  expect_refused(f.train(unknown), 64, {"data.end_of_text 78 is no token of a vocabulary of 78"});
  expect_refused(f.train({"--generate.prompt", "the Sea"}), 65,
                 {"generate.prompt", "\"S\" (U+0053) at offset 4"});
}

TEST(BadInput, OutputAndNumbers) {
  Folder f;
  // Root may write anywhere, but not create a folder below a file.
  expect_refused(f.train({"--output.folder", f / "corpus.txt/out"}), 74, {"corpus.txt/out"});
  const std::string long_name = f / std::string(300, 'x');
  expect_refused(f.train({"--output.folder", long_name}), 74, {long_name, "File name too long"});
  expect_refused(f.train({"--resume", "--output.folder", long_name}), 74, {long_name});
  expect_line(run_sheaf({"generate", long_name}), 74, {long_name}, "generate");
  std::filesystem::create_directory(f / "odd");
  f.write("odd/checkpoints", "");
  for (const char* how : {"--quiet", "--resume"})
    expect_refused(f.train({"--output.folder", f / "odd", how}), 74,
                   {f / "odd/checkpoints", "Not a directory"});
  // Other folders next to checkpoints do no harm.
  std::filesystem::remove(f / "odd/checkpoints");
  std::filesystem::create_directories(f / "odd/checkpoints/notes");
  EXPECT_EQ(run_sheaf(f.train({"--output.folder", f / "odd"})).code, 0);
  EXPECT_TRUE(std::filesystem::exists(f / "odd/checkpoints/notes"));
  expect_refused(f.train({"--train.lr", "1e6", "--train.steps", "50", "--train.log_every", "100"}),
                 75, {"step", "loss", "a smaller train.lr or train.clip may help"});
  // A saved step's loss is checked, too: the same step ends the run.
  const auto ends = [&](const char* log_every, const char* save_every) {
    const Outcome r = run_sheaf(f.train({"--train.lr", "1e6", "--train.steps", "50", "--train.log_every", log_every, "--train.save_every",
                                         save_every, "--output.folder", f / str("nan", log_every)}));
    EXPECT_EQ(r.code, 75);
    return r.err;
  };
  EXPECT_EQ(ends("1", "0"), ends("100", "1"));
  expect_refused(f.train({"--train.lr", "1e6", "--train.steps", "50", "--train.log_every", "100",
                          "--train.clip", "0"}),
                 75, {"a smaller train.lr or a train.clip above 0 may help"});
  // If losses are logged rarely, a validation ends the run earlier.
  expect_refused(f.train({"--train.lr", "1e6", "--train.steps", "5000", "--train.log_every", "5000", "--train.eval_every", "50"}), 75,
                 {"[train] step 50: validation loss nan"});
  // In f16 steps are skipped, at smaller and smaller scales, but not forever.
  expect_refused(f.train({"--train.lr", "1e6", "--train.steps", "50", "--train.dtype", "f16", "--train.log_every", "100"}),
                 75, {"[train] step 50: the gradient was not finite in ", " steps in a row, though the loss scale is at its minimum, 1;"});
  EXPECT_FALSE(std::filesystem::exists(f / "out/checkpoints"));  // for invalid numbers
}

/// Through a shell, so that `how` may close or limit the process's resources.
int in_shell(const Words& arguments, const std::string& how) {
  std::string line = how + " exec tools/sheaf";
  for (const std::string& word : arguments)
    if (word.find_first_of("<>&") == word.npos) line += " '" + word + "'";
    else line += " " + word;
  const int status = std::system(line.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// A file that is opened does not take the place of a closed standard descriptor: messages would be written to it.
TEST(BadInput, StandardDescriptorsThatAreClosed) {
  Folder f;
  const std::string out = f / "st.bin";
  EXPECT_EQ(in_shell({"tokenize", "-", out, "--tokenizer", "byte", "<&-", "2>/dev/null"}, ""), 74);
  EXPECT_FALSE(std::filesystem::exists(out));
  Words train = f.train({">&-", "2>&-"});
  EXPECT_EQ(in_shell(train, ""), 0);
  EXPECT_EQ(std::filesystem::file_size(f / "out/.lock"), 0u);
  for (const char* closed : {"<&-", ">&-"}) {
    EXPECT_EQ(in_shell(testing::on_ranks(2, f.train({"--resume", closed, "2>/dev/null"})), ""), 0) << closed;
  }
}

TEST(BadInput, AFileThatMayNotGrow) {
  Folder f;
  EXPECT_EQ(in_shell(f.train({"2>" + (f / "said")}), "ulimit -f 8;"), 74);
  std::ifstream said(f / "said");
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(said), {}), HasSubstr("File too large"));
}

// A failure to print is an error, but does not stop a run.
TEST(BadInput, StandardOutput) {
  Folder f;
  for (const Words& words : {Words{"tape", "--model.vocab", "50"}, f.train({"--print-config"}),
                             Words{"tape", "--help"}})
    expect_line(run_sheaf(words, {}, "/dev/full"), 74, {"cannot write to standard output: "},
                words[0]);
  const auto trains = [&](const Outcome& r, const std::string& reason) {
    expect_line(r, 0, {"sheaf: warning: [output]", reason, "training goes on"}, reason);
    EXPECT_TRUE(std::filesystem::exists(f / "out/checkpoints/step-4"));
  };
  trains(run_sheaf(f.train({}), {}, "/dev/full"), "No space left on device");
  expect_line(run_sheaf({"generate", f / "out", "--generate.tokens", "2"}, {}, "/dev/full"), 74,
              {"cannot write to standard output: No space left on device"}, "generate");

  std::filesystem::remove_all(f / "out");
  ASSERT_EQ(mkfifo((f / "pipe").c_str(), 0600), 0);
  const int reader = open((f / "pipe").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  SheafProcess job(f.train({}), {}, f / "pipe");
  close(reader);  // as `head` does
  trains(job.wait(), "Broken pipe");
}

TEST(BadInput, Resume) {
  Folder f;
  const Words more = {"--train.save_every", "2"};
  ASSERT_EQ(run_sheaf(f.train(more)).code, 0);
  expect_refused(f.train({}), 64, {"holds checkpoints of an earlier run", "--resume"});
  const auto resume = [&](Words words) {
    words.insert(words.begin(), "--resume");
    return f.train(words);
  };
  expect_refused(resume({"--model.layers", "2"}), 76,
                 {"model.layers was 1 in the checkpoint and is 2 now"});
  expect_refused(resume({"--train.lr", "0.5"}), 76,
                 {"train.lr was 0.001 in the checkpoint and is 0.5 now"});
  expect_refused(resume({"--data.tokenizer", "byte"}), 76, {"vocabulary"});
  std::string other = testing::sample_text(3000);
  for (char& c : other)
    if (c == 't') c = 'T';
  expect_refused(resume({"--data.corpus", f.write("other.txt", other)}), 76, {"tokenizer"});
  expect_refused(resume({"--train.dtype", "bf16"}), 76,
                 {"train.dtype was \"f32\" in the checkpoint and is \"bf16\" now"});
  expect_refused(resume({"--train.state_dtype", "bf16"}), 76,
                 {"train.state_dtype was \"f32\" in the checkpoint and is \"bf16\" now"});
  expect_refused(resume({"--train.dtype", "f16"}), 76,
                 {"train.dtype was \"f32\" in the checkpoint and is \"f16\" now"});
  expect_refused(resume({"--data.separate_documents", "true", "--data.end_of_text", "3"}), 76,
                 {"(data.separate_documents; -1: they are not) was -1 in the checkpoint and is 3 now"});
  expect_refused(resume({"--data.val_fraction", "0.2"}), 76,
                 {"data.val_fraction was 0.1 in the checkpoint and is 0.2 now"});
  other = testing::sample_text(3000);
  std::swap(other[0], other[1]);  // the same letters, equally often
  expect_refused(resume({"--data.corpus", f.write("other.txt", other)}), 76,
                 {"the training data was 2700 tokens with XXH3 "});
  other = testing::sample_text(3000);
  std::swap(other[2998], other[2999]);
  expect_refused(resume({"--data.corpus", f.write("other.txt", other)}), 76,
                 {"the validation data was 300 tokens with XXH3 "});
  std::filesystem::rename(f / "corpus.txt", f / "renamed.txt");
  EXPECT_EQ(run_sheaf(resume({"--data.corpus", f / "renamed.txt"})).code, 0);
  std::filesystem::rename(f / "renamed.txt", f / "corpus.txt");
  expect_line(run_sheaf({"generate", f / "out", "--generate.prompt", "the Sea"}), 65,
              {"generate.prompt", "\"S\" (U+0053) at offset 4"}, "prompt");

  for (const char* step : {"2", "4"}) {
    const std::string shard =
        f / "out/checkpoints/step-" + step + "/shard-00000-of-00001.safetensors";
    std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 9);
  }
  for (int world : {1, 2}) {
    const Outcome r = run_sheaf(testing::on_ranks(world, resume({})));
    EXPECT_EQ(r.code, 65) << r.err;
    EXPECT_THAT(testing::lines_of(r.err).back(),
                HasSubstr("no whole checkpoint is left in '" + f / "out/checkpoints"));
  }
  EXPECT_TRUE(std::filesystem::exists(f / "out/checkpoints/step-4"));  // nothing is deleted
}

TEST(BadInput, ResumingWhatIsNotThere) {
  Folder f;
  expect_line(run_sheaf({"train", "--resume", "--output.folder", f / "mien"}), 64,
              {"[train] --resume: there is no '", "mien/config.toml', and no options say what to train"}, "a slip");
}

TEST(BadInput, DeadPeer) {
  Folder f;
  for (int victim : {0, 1}) {
    std::filesystem::remove_all(f / "out");
    SheafProcess job(
        testing::on_ranks(2, f.train({"--train.steps", "1000000", "--train.eval_every", "0"})));
    while (job.running() && (!std::filesystem::exists(f / "out/metrics.jsonl") ||
                             testing::read_metrics(f / "out/metrics.jsonl").size() < 3)) {
    }
    ASSERT_EQ(job.ranks().size(), 2u);
    kill(job.ranks()[victim], SIGKILL);
    const Outcome r = job.wait();
    EXPECT_EQ(r.code, 72);
    const Words lines = testing::lines_of(r.err);
    ASSERT_EQ(lines.size(), 2u) << r.err;
    EXPECT_THAT(lines[0], HasSubstr("rank " + std::to_string(victim) + " failed: it died"));
    EXPECT_THAT(lines[1], HasSubstr("sheaf launch: rank " + std::to_string(victim) + " (pid "));
    EXPECT_THAT(lines[1], HasSubstr("was killed by signal 9"));
  }
}

}  // namespace
}  // namespace sheaf
