// Tokenizers, token files and samplers.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "sheaf/core/file.h"
#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/corpus.h"
#include "sheaf/models/token_file.h"
#include "sheaf/models/training_windows.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/validation_sets.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string data_error(const std::function<void()>& f) { return message_of<DataError>(ExitCode::kData, f); }

TEST(Tokenizer, CharactersInOrderOfCodePoints) {
  const auto tokenizer = make_char_tokenizer("hé\xF0\x9F\x98\x80llo\n\u20ac");
  EXPECT_EQ(tokenizer->vocab_size(), 7);
  EXPECT_THAT(tokenizer->encode("\nhé€\xF0\x9F\x98\x80"), ElementsAre(0, 1, 4, 5, 6));
  const std::string text = "oh\nllé\xF0\x9F\x98\x80";
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  const auto again = tokenizer_from_json(Json::parse(tokenizer->to_json().dump(), "t"));
  EXPECT_EQ(again->encode(text), tokenizer->encode(text));
  EXPECT_EQ(again->vocab_size(), 7);
}

TEST(Tokenizer, CharacterErrorsNameCharacterAndOffset) {
  const auto tokenizer = make_char_tokenizer("abc");
  EXPECT_THAT(data_error([&] { tokenizer->encode("abé", "the prompt"); }),
              HasSubstr("the prompt: character \"é\" (U+00E9) at offset 2 is not in the vocabulary of 3"));
  EXPECT_THAT(data_error([&] { tokenizer->encode("ab\xff", "x"); }), HasSubstr("byte 0xff at offset 2 is not valid"));
  EXPECT_THAT(data_error([&] { make_char_tokenizer("ab\xe2\x82", "f.txt"); }), HasSubstr("f.txt: byte 0xe2 at offset 2"));
  EXPECT_THAT(data_error([&] { make_char_tokenizer("", "f.txt"); }), HasSubstr("f.txt is empty"));
  const int32_t bad[] = {0, 3};
  EXPECT_THAT(data_error([&] { tokenizer->decode(bad); }), HasSubstr("token 3"));
  // Overlong forms, surrogates and points beyond Unicode are not UTF-8.
  for (const char* text : {"\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\x80", "\xc3"}) {
    EXPECT_THAT(data_error([&] { make_char_tokenizer(text); }), HasSubstr("offset 0 is not valid UTF-8"));
  }
}

TEST(Tokenizer, BytesEncodeAnything) {
  const auto tokenizer = make_byte_tokenizer();
  std::string all(256, '\0');
  std::iota(all.begin(), all.end(), '\0');
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(all)), all);
  EXPECT_EQ(tokenizer->encode("\xff")[0], 255);
  EXPECT_EQ(tokenizer_from_json(tokenizer->to_json())->kind(), "byte");
}

TEST(Tokenizer, SavedOnesAreChecked) {
  const auto load = [&](const std::string& text) {
    return data_error([&] { tokenizer_from_json(Json::parse(text, "'t.json'")); });
  };
  EXPECT_THAT(load(R"({"kind":"bpe"})"), HasSubstr("unknown kind \"bpe\""));
  EXPECT_THAT(load(R"({"kind":"char"})"), HasSubstr("characters"));
  EXPECT_THAT(load(R"({"kind":"char","characters":"aa"})"), HasSubstr("ascending order at offset 1"));
  EXPECT_THAT(load(R"({"kind":"char","characters":""})"), HasSubstr("empty"));
  EXPECT_THAT(load("{"), HasSubstr("t.json': not valid JSON"));
}

class TokenFiles : public ::testing::Test {
 protected:
  ScratchFolder folder;
  const std::string path = folder / "train.bin";
  std::vector<int32_t> read(const Tokens& tokens, int64_t begin, int64_t count) {
    std::vector<int32_t> out(static_cast<size_t>(count));
    tokens.copy(begin, count, out.data());
    return out;
  }
};

TEST_F(TokenFiles, RoundTripNarrowAndWide) {
  const std::vector<int32_t> ids = {0, 5, 99, 3};
  for (int64_t vocab : {100, 65536, 65537, 200'000}) {
    write_token_file(path, ids, vocab);
    EXPECT_EQ(File::open(path).size(), 1024 + 4 * (vocab > 65536 ? 4 : 2));
    const Tokens tokens = Tokens::open(path, vocab);
    EXPECT_EQ(tokens.size(), 4);
    EXPECT_EQ(read(tokens, 0, 4), ids);
    EXPECT_THAT(read(tokens.slice(1, 3), 0, 2), ElementsAre(5, 99));
    const uint32_t plain[] = {0, 5, 99, 3};
    const std::string_view bytes(reinterpret_cast<const char*>(plain), sizeof plain);
    EXPECT_EQ(tokens.check_all(), digest_of_text(bytes).xxh3);
  }
}

TEST_F(TokenFiles, RawFilesOfNanoGpt) {
  const uint16_t raw[] = {1, 2, 65535};
  write_file(path, std::string_view(reinterpret_cast<const char*>(raw), 6));
  EXPECT_THAT(read(Tokens::open(path, 65536), 0, 3), ElementsAre(1, 2, 65535));
  const Tokens bounded = Tokens::open(path, 50257);
  EXPECT_THAT(read(bounded, 0, 2), ElementsAre(1, 2));
  EXPECT_THAT(data_error([&] { bounded.check_all(); }), HasSubstr("token 65535 at position 2 is outside"));
  EXPECT_THAT(data_error([&] { read(bounded.slice(1, 3), 0, 2); }), HasSubstr("train.bin': token 65535 at position 2"));
  EXPECT_THAT(data_error([&] { read(Tokens::open(path, 65535), 2, 1); }), HasSubstr("outside the vocabulary of 65535"));
  EXPECT_THAT(data_error([&] { read(bounded, 2, 2); }), HasSubstr("of 3 asked for"));
}

TEST_F(TokenFiles, IdsOutsideTheVocabularyAreFoundAtAnyPlace) {
  for (int64_t vocab : {10'000, 70'000}) {
    for (int64_t bad : {0, 1, 255, 256, 511, 700, 999}) {
      std::vector<int32_t> ids(1000, 7);
      ids[static_cast<size_t>(bad)] = ids.back() = static_cast<int32_t>(vocab) - 1;
      write_token_file(path, ids, vocab);
      EXPECT_EQ(read(Tokens::open(path, vocab), 0, 1000), ids);
      const Tokens tokens = Tokens::open(path, vocab - 1);
      for (int64_t begin : {int64_t{0}, bad / 2, bad})
        EXPECT_THAT(data_error([&] { read(tokens, begin, 1000 - begin); }), HasSubstr(str("at position ", bad, " is outside")));
      EXPECT_EQ(read(tokens, 0, bad), std::vector<int32_t>(static_cast<size_t>(bad), 7));
      EXPECT_THAT(data_error([&] { tokens.check_all(1000); }), HasSubstr(str("at position ", bad, " is outside")));
      EXPECT_THAT(data_error([&] { tokens.check_all(100); }), HasSubstr("is outside the vocabulary"));
    }
  }
}

/// `counts` numbers from 0 on, file by file, with the three formats in turn: train_000.bin, train_001.bin, ...
void write_parts(const ScratchFolder& folder, const std::vector<int64_t>& counts) {
  int32_t next = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    std::vector<int32_t> ids(static_cast<size_t>(counts[i]));
    std::iota(ids.begin(), ids.end(), next);
    next += static_cast<int32_t>(counts[i]);
    char name[32];
    std::snprintf(name, sizeof name, "train_%03d.bin", static_cast<int>(i));
    if (i % 3 < 2) {
      write_token_file(folder / name, ids, i % 3 ? 70'000 : 60'000);
    } else {
      const std::vector<uint16_t> raw(ids.begin(), ids.end());
      write_file(folder / name, std::string_view(reinterpret_cast<const char*>(raw.data()), 2 * raw.size()));
    }
  }
}

TEST_F(TokenFiles, LongOnesAreHashedByBlocksOfAnyFiles) {
  write_parts(folder, {5, 1, 7, 2, 40, 1, 1, 3});
  const Tokens many = Tokens::open(folder / "train_*.bin", 100);
  for (int64_t block : {1, 7, 59, 60, 61}) {
    std::string digests;
    for (int64_t begin = 0; begin < 60; begin += block) digests += many.slice(begin, std::min<int64_t>(60, begin + block)).check_all();
    EXPECT_EQ(many.check_all(block), block < 60 ? digest_of_text(digests).xxh3 : digests) << block;
  }
}

TEST_F(TokenFiles, BadFiles) {
  const auto reason = [&](const std::string& content) {
    write_file(path, content);
    return data_error([&] { Tokens::open(path, 100); });
  };
  EXPECT_THAT(reason(""), HasSubstr("is empty"));
  EXPECT_THAT(reason("abc"), HasSubstr("not a whole number"));
  write_token_file(path, std::vector<int32_t>{1, 2, 3}, 100);
  const std::string good = File::open(path).read_all();
  EXPECT_THAT(reason(good.substr(0, good.size() - 2)), HasSubstr("says 3 tokens, the file holds 2"));
  EXPECT_THAT(reason(good + "xx"), HasSubstr("says 3 tokens, the file holds 4"));
  EXPECT_THAT(reason(good + "x"), HasSubstr("not a whole number"));
  EXPECT_THAT(reason(good.substr(0, 100)), HasSubstr("100 bytes are shorter than its header"));
  std::string version = good;
  version[4] = 9;
  EXPECT_THAT(reason(version), HasSubstr("unknown version 9"));
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "none", 100); }), HasSubstr("No such file"));
  EXPECT_THAT(data_error([&] { write_token_file(path, std::vector<int32_t>{1, 100}, 100); }),
              HasSubstr("token 100 at position 1"));
  EXPECT_THAT(data_error([&] { write_token_file(path, std::vector<int32_t>{-1}, 100); }), HasSubstr("token -1"));
}

TEST_F(TokenFiles, ManyAreOneFileWithTheTokensOfAll) {
  write_parts(folder, {5, 1, 7, 2, 40, 1, 1, 3});
  write_file(folder / "train_0.txt", "no tokens");
  std::vector<int32_t> ids(60);
  std::iota(ids.begin(), ids.end(), 0);
  write_token_file(path, ids, 100);
  const Tokens one = Tokens::open(path, 100), many = Tokens::open(folder / "train_*.bin", 100);
  EXPECT_EQ(one.num_files(), 1);
  EXPECT_EQ(many.num_files(), 8);
  EXPECT_EQ(many.name(), folder / "train_*.bin");
  EXPECT_EQ(many.size(), 60);
  for (int64_t begin = 0; begin <= 60; ++begin) {
    for (int64_t end = begin; end <= 60; ++end) {
      const std::vector<int32_t> expected(ids.begin() + begin, ids.begin() + end);
      EXPECT_EQ(read(many, begin, end - begin), expected);
      const Tokens part = many.slice(begin, end);
      EXPECT_EQ(part.check_all(), one.slice(begin, end).check_all());
      if (end - begin >= 3) {
        EXPECT_EQ(read(part.slice(1, end - begin), 1, end - begin - 2), read(one, begin + 2, end - begin - 2));
      }
    }
  }
  EXPECT_EQ(many.check_all(), one.check_all());
  EXPECT_THAT(data_error([&] { read(many, 59, 2); }), HasSubstr("train_*.bin': tokens 59 to 61 of 60 asked for"));
  EXPECT_THAT(data_error([&] { many.slice(0, 61); }), HasSubstr("slice 0 to 61 of 60"));

  std::vector<int32_t> a(32), b(32), targets_a(32), targets_b(32);
  for (int64_t first = 0; first < 100; first += 4) {
    TrainingWindows(one, 8, 3).fill(first, 4, a.data(), targets_a.data());
    TrainingWindows(many, 8, 3).fill(first, 4, b.data(), targets_b.data());
    EXPECT_EQ(a, b);
    EXPECT_EQ(targets_a, targets_b);
  }
  for (int64_t first = 0; first < 9; first += 4) {
    EXPECT_EQ(SequentialWindows(one, 8).fill(first, 4, a.data(), targets_a.data()),
              SequentialWindows(many, 8).fill(first, 4, b.data(), targets_b.data()));
    EXPECT_EQ(a, b);
    EXPECT_EQ(targets_a, targets_b);
  }
}

TEST_F(TokenFiles, PatternsAreTheShells) {
  write_parts(folder, {1, 1, 1, 1});
  const auto files = [&](const std::string& pattern) {
    const Tokens tokens = Tokens::open(folder / pattern, 100);
    return read(tokens, 0, tokens.size());
  };
  EXPECT_THAT(files("train_*.bin"), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(files("train_00[13].bin"), ElementsAre(1, 3));
  EXPECT_THAT(files("train_00[!13].bin"), ElementsAre(0, 2));
  EXPECT_THAT(files("train_?02*"), ElementsAre(2));
  // In byte order: capitals before small letters, 10 before 9.
  for (const char* name : {"b_9.bin", "a_9.bin", "a_10.bin", "B_1.bin"}) {
    write_token_file(folder / name, std::vector<int32_t>{name[0], name[2]}, 256);
  }
  const Tokens tokens = Tokens::open(folder / "[aBb]_*", 256);
  EXPECT_THAT(read(tokens, 0, 8), ElementsAre('B', '1', 'a', '1', 'a', '9', 'b', '9'));
  // If a file has the pattern as its name, that file is used.
  write_token_file(folder / "train_*.bin", std::vector<int32_t>{77}, 100);
  EXPECT_THAT(files("train_*.bin"), ElementsAre(77));
  EXPECT_THAT(files("train_[*].bin"), ElementsAre(77));
}

TEST_F(TokenFiles, ErrorsOfManyNameTheOne) {
  write_parts(folder, {5, 3, 4});
  const std::string all = folder / "train_*.bin";
  const Tokens bounded = Tokens::open(all, 10);  // 0 1 2 3 4 | 5 6 7 | 8 9 10 11
  EXPECT_THAT(data_error([&] { bounded.check_all(); }),
              HasSubstr("train_002.bin': token 10 at position 2 is outside the vocabulary of 10"));
  EXPECT_THAT(data_error([&] { read(bounded.slice(6, 12), 0, 6); }), HasSubstr("train_002.bin': token 10 at position 2"));
  EXPECT_EQ(read(bounded, 0, 10).back(), 9);
  const auto reason = [&](const std::string& content) {
    write_file(folder / "train_001.bin", content);
    return data_error([&] { Tokens::open(all, 100); });
  };
  EXPECT_THAT(reason(""), HasSubstr("train_001.bin' is empty"));
  EXPECT_THAT(reason("abc"), HasSubstr("train_001.bin': 3 bytes are not a whole number"));
  std::filesystem::remove(folder / "train_001.bin");
  std::filesystem::create_directory(folder / "train_001.bin");
  EXPECT_THAT(data_error([&] { Tokens::open(all, 100); }), HasSubstr("train_001.bin': it is a folder"));
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "val_*.bin", 100); }),
              ::testing::EndsWith("[tokens] no file matches '" + (folder / "val_*.bin") + "'"));
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "none/*.bin", 100); }),
              HasSubstr("no file matches '" + (folder / "none/*.bin") + "': No such file"));
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "[", 100); }), HasSubstr("no file matches"));
}

// As many files as a large corpus has, each of them mapped, none of them open.
TEST_F(TokenFiles, MoreThanAProcessMayOpen) {
  rlimit usual{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &usual), 0);
  const rlimit few{64, usual.rlim_max};
  write_parts(folder, std::vector<int64_t>(200, 3));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const Tokens tokens = Tokens::open(folder / "train_*.bin", 600);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &usual), 0);
  EXPECT_EQ(tokens.num_files(), 200);
  EXPECT_EQ(read(tokens, 598, 2), (std::vector<int32_t>{598, 599}));
}

// Byte offsets beyond 2^31 and 2^32; the file is sparse and takes a few blocks of disk.
TEST_F(TokenFiles, LargerThanFourGibibytes) {
  const int64_t count = int64_t{5} << 29;  // 5 GiB
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  const uint16_t mark = 7;
  if (ftruncate(fd, count * 2) != 0 || pwrite(fd, &mark, 2, (count - 1) * 2) != 2) {
    close(fd);
    GTEST_SKIP() << "the file system takes no sparse file of 5 GiB";
  }
  close(fd);
  const Tokens tokens = Tokens::open(path, 100);
  EXPECT_EQ(tokens.size(), count);
  EXPECT_THAT(read(tokens, count - 2, 2), ElementsAre(0, 7));
  const TrainingWindows windows(tokens, 4, 1);
  int64_t highest = 0;
  for (int64_t i = 0; i < 200; ++i) highest = std::max(highest, windows.start(i));
  EXPECT_GT(highest, int64_t{2} << 30);
}

TEST(Corpus, TextIsSplitAtTheTail) {
  ScratchFolder folder;
  write_file(folder / "a.txt", "abcdefghijabcdefghij");
  const Corpus corpus = load_text_corpus(folder / "a.txt", "char", 0.1);
  EXPECT_EQ(corpus.vocab, 10);
  EXPECT_EQ(corpus.train.size(), 18);
  EXPECT_EQ(corpus.val.size(), 2);
  int32_t tail[2];
  corpus.val.sets()[0].tokens.copy(0, 2, tail);
  EXPECT_THAT(tail, ElementsAre(8, 9));
  EXPECT_EQ(load_text_corpus(folder / "a.txt", "byte", 0.5).vocab, 256);
  EXPECT_THAT(data_error([&] { load_text_corpus(folder / "a.txt", "char", 0.01); }), HasSubstr("too few"));
  EXPECT_THAT(data_error([&] { load_text_corpus(folder / "none", "char", 0.1); }), HasSubstr("No such file"));
  EXPECT_THROW(load_text_corpus(folder / "a.txt", "bpe", 0.1), ConfigError);
  write_file(folder / "b.txt", "abc\xff");
  EXPECT_THAT(data_error([&] { load_text_corpus(folder / "b.txt", "char", 0.1); }),
              HasSubstr("b.txt': byte 0xff at offset 3"));
}

Tokens counting(int64_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  return Tokens::from_ids(ids, n, "counting");
}

TEST(SequentialWindows, EveryTargetCountsOnce) {
  for (int64_t n : {2, 8, 9, 10, 16, 17, 18, 100}) {
    const SequentialWindows windows(counting(n), 8);
    EXPECT_EQ(windows.num_targets(), n - 1);
    // Batches of three windows, as on a rank, including one window beyond the last.
    std::vector<int32_t> inputs(3 * 8), targets(3 * 8);
    std::multiset<int32_t> seen;
    int64_t counted = 0;
    for (int64_t first = 0; first <= windows.num_windows(); first += 3) {
      counted += windows.fill(first, 3, inputs.data(), targets.data());
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i] == kIgnoreIndex) continue;
        EXPECT_EQ(targets[i], inputs[i] + 1);
        seen.insert(targets[i]);
      }
    }
    EXPECT_EQ(counted, n - 1);
    EXPECT_EQ(seen.size(), static_cast<size_t>(n - 1));
    EXPECT_EQ(std::set<int32_t>(seen.begin(), seen.end()).size(), seen.size());
  }
}

// Its bytes could be read as tokens.
TEST(Tokens, ATextIsNoTokenFile) {
  const ScratchFolder folder;
  for (const char* name : {"a.jsonl", "a.txt", "a.parquet"}) {
    write_file(folder / name, "{\"text\": \"ab\"}");
    EXPECT_THAT(data_error([&] { Tokens::open(folder / name, 65536); }), HasSubstr("is no token file: `sheaf tokenize` makes one of texts"));
  }
}

TEST(ValidationSets, OneOrSeveralByNames) {
  const ScratchFolder folder;
  for (const char* name : {"a.bin", "b1.bin", "b2.bin", "x=y.bin"})
    write_token_file(folder / name, std::vector<int32_t>{1, 2, 3, static_cast<int32_t>(name[1])}, 200);
  const ValidationSets one = ValidationSets::open(folder / "b*.bin", 200);
  ASSERT_EQ(one.sets().size(), 1u);
  EXPECT_EQ(one.sets()[0].name, "");
  EXPECT_EQ(one.size(), 8);
  EXPECT_EQ(one.check_all(), Tokens::open(folder / "b*.bin", 200).check_all());
  EXPECT_EQ(ValidationSets::open(folder / "x=y.bin", 200).size(), 4) << "a file that has that name";

  const std::string text = " web=" + folder / "b*.bin" + "  chat-1=" + folder / "a.bin";
  const ValidationSets two = ValidationSets::open(text, 200);
  ASSERT_EQ(two.sets().size(), 2u);
  EXPECT_EQ(two.sets()[0].name, "web");
  EXPECT_EQ(two.sets()[0].tokens.size(), 8);
  EXPECT_EQ(two.sets()[1].name, "chat-1");
  EXPECT_EQ(two.size(), 12);
  EXPECT_NE(two.check_all(), ValidationSets::open("web=" + folder / "b*.bin" + " chat=" + folder / "a.bin", 200).check_all());

  std::vector<Validation> all = validations(two, 3, 0);
  ASSERT_EQ(all.size(), 2u);
  all[0].loss = 1, all[1].loss = 2;  // of 7 and of 3 targets
  EXPECT_DOUBLE_EQ(mean_loss(all), 1.3);
  EXPECT_EQ(validations(two, 3, 2)[0].windows.num_targets(), 2);

  const auto refused = [&](const std::string& sets) {
    return message_of<ConfigError>(ExitCode::kConfig, [&] { ValidationSets::open(sets, 200); });
  };
  EXPECT_THAT(refused("a=" + folder / "a.bin" + " a=" + folder / "a.bin"), HasSubstr("two validation sets have the name 'a'"));
  EXPECT_THAT(refused("a=" + folder / "a.bin" + " b"), HasSubstr("validation sets are names and files"));
  EXPECT_THAT(refused("a=" + folder / "a.bin" + " =b"), HasSubstr("found '=b'"));
  EXPECT_THAT(data_error([&] { ValidationSets::open("a=" + folder / "none.bin", 200); }), HasSubstr("none.bin"));
}

TEST(ValidationSets, ExamplesEndAlike) {
  const ScratchFolder folder;
  for (const int32_t end : {2, 3}) {
    TokenFileWriter writer(folder / (std::to_string(end) + ".bin"), 10, end);
    writer.write_examples(std::vector<MarkedToken>{5, 6, static_cast<MarkedToken>(end)});
    writer.finish();
  }
  write_token_file(folder / "text.bin", std::vector<int32_t>{1, 2, 3}, 10);
  const std::string text = "t=" + folder / "text.bin";
  EXPECT_EQ(ValidationSets::open(text, 10).example_end(), std::nullopt);
  EXPECT_EQ(ValidationSets::open(text + " a=" + folder / "2.bin", 10).example_end(), 2);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig,
                                      [&] { ValidationSets::open(text + " a=" + folder / "2.bin" + " b=" + folder / "3.bin", 10).example_end(); }),
              HasSubstr("2.bin' end with token 2, those of '"));
}

TEST(SequentialWindows, LimitAndPadding) {
  const SequentialWindows windows(counting(100), 8, 10);
  EXPECT_EQ(windows.num_windows(), 2);
  EXPECT_EQ(windows.num_targets(), 10);
  std::vector<int32_t> inputs(16), targets(16);
  EXPECT_EQ(windows.fill(1, 2, inputs.data(), targets.data()), 2);
  EXPECT_THAT(targets, ElementsAre(9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  EXPECT_THAT(inputs, ElementsAre(8, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(SequentialWindows(counting(100), 8, 1000).num_targets(), 99);
  EXPECT_THAT(data_error([] { SequentialWindows(counting(1), 8); }), HasSubstr("nothing to predict"));
}

}  // namespace
}  // namespace sheaf::models
