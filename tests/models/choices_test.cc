// Multiple-choice questions: how they are read, and which answers are correct.
#include "sheaf/models/choices.h"

#include <cmath>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Folder : ScratchFolder {
  std::string write(const std::string& text, const std::string& name = "questions.jsonl") const {
    std::ofstream(*this / name) << text;
    return *this / name;
  }
};

const std::shared_ptr<const Tokenizer> kBytes = make_byte_tokenizer();

ChoiceQuestions read(const std::string& text, int64_t context = 100, int64_t most = 0, std::vector<int32_t> before = {}) {
  const Folder folder;
  return ChoiceQuestions("", folder.write(text), *kBytes, {.before = std::move(before), .context = context, .most = most});
}

template <class E = DataError>
std::string refusal(const std::string& text) {
  try {
    read(text);
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

// The text of a row, with | before the scored part.
std::string shown(const ChoiceRow& row) {
  const std::span<const int32_t> tokens = row.tokens;
  const auto begin = static_cast<size_t>(row.begin);
  return kBytes->decode(tokens.first(begin)) + "|" + kBytes->decode(tokens.subspan(begin));
}

TEST(Choices, ContinueThePromptBehindABlank) {
  const ChoiceQuestions q = read(
      "{\"prompt\": \"He says\", \"choices\": [\"yes\", \" n\xc3\xb6\", \"\\nwell\"], \"answer\": 1, \"id\": 123456789012345678901234567890}\n"
      "\n"
      "{\"prompt\": \"A \\n\", \"choices\": [\"b\", \" cd\"], \"answer\": 0}\n");
  ASSERT_EQ(q.questions().size(), 2);
  EXPECT_EQ(q.questions()[0].first, 0);
  EXPECT_EQ(q.questions()[0].count, 3);
  EXPECT_EQ(q.questions()[0].answer, 1);
  EXPECT_EQ(q.questions()[1].first, 3);
  EXPECT_EQ(q.questions()[1].count, 2);
  EXPECT_EQ(q.questions()[1].answer, 0);
  EXPECT_EQ(q.questions()[1].line, 3);
  std::vector<std::string> texts;
  std::vector<int64_t> characters;
  for (const ChoiceRow& row : q.rows()) texts.push_back(shown(row)), characters.push_back(row.characters);
  EXPECT_THAT(texts, ElementsAre("He says| yes", "He says| n\xc3\xb6", "He says|\nwell", "A| \nb", "A| \n cd"));
  EXPECT_THAT(characters, ElementsAre(3, 3, 5, 1, 3));
}

TEST(Choices, AreReadAsHellaSwagHasThem) {
  const std::string line =
      R"({"ind": 24, "activity_label": "Roof shingle removal", "ctx_a": "A man.", "ctx": "A man. he", "split": "val", "label": )";
  const ChoiceQuestions number = read(line + R"(3, "endings": ["is", "was", "has", "had"]})"),
                        text = read(line + R"("3", "endings": ["is", "was", "has", "had"]})");
  for (const ChoiceQuestions* q : {&number, &text}) {
    EXPECT_EQ(q->questions()[0].answer, 3);
    EXPECT_EQ(shown(q->rows()[3]), "A man. he| had");
  }
  EXPECT_EQ(number.digest(), text.digest());
  // If there is a prompt, it is the question; a context in addition to it is just one more member.
  EXPECT_EQ(shown(read(R"({"ctx": "x", "prompt": "a", "choices": ["b", "c"], "answer": 0})").rows()[0]), "a| b");
}

TEST(Choices, WhatStandsBeforeATextStandsBeforeAPrompt) {
  const ChoiceQuestions q = read(R"({"prompt": "a", "choices": ["b", "c"], "answer": 0})", 100, 0, {7, 9});
  EXPECT_THAT(q.rows()[1].tokens, ElementsAre(7, 9, 'a', ' ', 'c'));
  EXPECT_EQ(q.rows()[1].begin, 3);
  // Then a prompt may be empty.
  EXPECT_EQ(read(R"({"prompt": "", "choices": ["b", "c"], "answer": 0})", 100, 0, {7}).rows()[0].begin, 1);
}

// Some tokenizers put a space behind an added token, which may be the prompt's end.
TEST(Choices, ContinueBehindAnAddedTokenAsInAWholeText) {
  const Folder folder;
  for (const char* name : {"llama2", "mistral", "always", "phrases", "gemma"}) {
    const std::string path = str("tests/models/huggingface/", name, ".json");
    const auto tokenizer = make_huggingface_tokenizer(Json::parse(File::open(path).read_all(), path), path);
    for (const std::string prompt : {"In the<think>", "In the"}) {
      const Json line = Json::Object{{"prompt", prompt}, {"choices", Json::Array{"God", "said"}}, {"answer", 0}};
      const ChoiceQuestions q("", folder.write(line.dump()), *tokenizer, {.context = 100});
      EXPECT_EQ(q.rows()[0].tokens, tokenizer->encode(prompt + " God")) << name;
      EXPECT_EQ(q.rows()[1].tokens, tokenizer->encode(prompt + " said")) << name;
    }
  }
}

// The last target needs no position in the window.
TEST(Choices, OfWhatIsTooLongTheBeginningIsLeftOut) {
  const std::string line = R"({"prompt": "abc", "choices": ["d", "defghi"], "answer": 0})";
  const ChoiceQuestions q = read(line, 4), whole = read(line, 9);
  EXPECT_EQ(shown(q.rows()[0]), "abc| d");
  EXPECT_EQ(q.num_shortened(), 1);
  EXPECT_EQ(shown(q.rows()[1]), "e|fghi") << "the first one is not predicted";
  EXPECT_EQ(whole.num_shortened(), 0);
  EXPECT_EQ(shown(whole.rows()[1]), "abc| defghi");
}

TEST(Choices, TheFirstOnesOnlyIfAskedFor) {
  const std::string text =
      "{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n{\"prompt\": \"d\", \"choices\": [\"e\", \"f\"], \"answer\": 1}\n";
  EXPECT_EQ(read(text, 10, 1).questions().size(), 1);
  EXPECT_EQ(read(text, 10, 2).questions().size(), 2);
  EXPECT_EQ(read(text, 10, 3).questions().size(), 2);
  EXPECT_NE(read(text, 10, 1).digest(), read(text, 10).digest());
}

TEST(Choices, OfTheLargestLikelihoodIsChosen) {
  const Folder folder;
  const std::string q_path = folder.write(
      "{\"prompt\": \"a\", \"choices\": [\"b\", \"cdef\"], \"answer\": 0}\n"
      "{\"prompt\": \"a\", \"choices\": [\"b\", \"cdef\"], \"answer\": 1}\n"
      "{\"prompt\": \"a\", \"choices\": [\"b\", \"c\", \"d\"], \"answer\": 1}\n");
  const ChoiceQuestions q("", q_path, *kBytes, {});
  // By sums the first choice of both questions, by characters the second.
  const std::vector<double> x = {-2, -4, -2, -4, -3, -1, -2};
  EXPECT_DOUBLE_EQ(q.accuracy(x).accuracy, 2.0 / 3);       // right, wrong, right
  EXPECT_DOUBLE_EQ(q.accuracy(x).accuracy_norm, 2.0 / 3);  // wrong, right, right
  const std::vector<double> y = {-2, -9, -2, -9, -3, -1, -2};
  EXPECT_DOUBLE_EQ(q.accuracy(y).accuracy, 2.0 / 3);
  EXPECT_DOUBLE_EQ(q.accuracy(y).accuracy_norm, 1.0 / 3 + 1.0 / 3);
  // Of equal scores the first one wins.
  EXPECT_DOUBLE_EQ(q.accuracy(std::vector<double>(7, -1)).accuracy, 1.0 / 3);
  EXPECT_DOUBLE_EQ(q.accuracy(std::vector<double>(7, -INFINITY)).accuracy, 1.0 / 3);
  std::vector<double> nan = x;
  nan[5] = NAN;
  try {
    q.accuracy(nan);
    FAIL() << "no error";
  } catch (const NonFiniteError& error) {
    EXPECT_STREQ(error.what(), str("[choices] line 3 of '", q_path, "': the likelihood of choice 1 is nan").c_str());
  }
  EXPECT_THROW(q.accuracy(std::vector<double>(6)), ShapeError);
}

TEST(Choices, AreSaidInALine) {
  EXPECT_EQ(accuracy_line("hellaswag", {0.28549, 0.3}), "accuracy of hellaswag 0.2855, norm 0.3000");
  EXPECT_EQ(accuracy_line("", {1, 0}), "accuracy 1.0000, norm 0.0000");
}

TEST(Choices, WhatIsMalformedIsRefusedByItsLine) {
  const std::string good = "{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n";
  EXPECT_THAT(refusal(good + "\n{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"]}"), HasSubstr("line 3 of '"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"]}"), HasSubstr("member \"answer\": it is not there, or null"));
  EXPECT_THAT(refusal("{\"ctx\": \"a\", \"label\": 0}"), HasSubstr("member \"endings\": it is not there"));
  EXPECT_THAT(refusal("[1]"), HasSubstr("member \"prompt\": it is not there"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\"], \"answer\": 0}"), HasSubstr("two choices at least, not 1"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 2}"), HasSubstr("answer 2 is none of 2 choices"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": \"B\"}"), HasSubstr("member \"answer\": \"B\" is no number"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": \"\"}"), HasSubstr("member \"answer\": \"\" is no number"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0.5}"), HasSubstr("member \"answer\""));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": \"b\", \"answer\": 0}"), HasSubstr("member \"choices\""));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\", 3], \"answer\": 0}"), HasSubstr("member \"choices\""));
  EXPECT_THAT(refusal("{\"prompt\": 1, \"choices\": [\"b\", \"c\"], \"answer\": 0}"), HasSubstr("member \"prompt\""));
  EXPECT_THAT(refusal("{\"prompt\": \"\", \"choices\": [\"b\", \"c\"], \"answer\": 0}"), HasSubstr("the prompt is empty"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\": [\"b\", \"\"], \"answer\": 0}"), HasSubstr("a choice is empty"));
  EXPECT_THAT(refusal("{\"prompt\": \"a\", \"choices\""), HasSubstr("line 1"));
  EXPECT_THAT(refusal("\x1f\x8b\x08 compressed"), HasSubstr("is gzip"));
  EXPECT_THAT(refusal("\n\n"), HasSubstr("has no questions"));
}

TEST(Choices, SetsHaveNames) {
  const Folder folder;
  const std::string a = folder.write("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n", "a.jsonl");
  const std::string b = folder.write("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 1}\n", "b.jsonl");
  const auto open = [&](const std::string& text) { return open_questions(text, *kBytes, {.context = 2}); };
  const auto two = open("one=" + a + " two=" + b);
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].questions.name(), "one");
  EXPECT_EQ(two[1].questions.name(), "two");
  EXPECT_EQ(open(a).at(0).questions.name(), "");
  EXPECT_THROW(open("one=" + a + " one=" + a), ConfigError);
  EXPECT_THROW(open(folder / "none"), DataError);
  EXPECT_EQ(digest_of({}), "none");
  EXPECT_NE(digest_of(two), digest_of(open("one=" + a + " two=" + a)));
  EXPECT_NE(digest_of(two), digest_of(open("one=" + a + " three=" + b)));
  EXPECT_EQ(questions_line(two[0].questions), "1 question of one");
  const ChoiceQuestions cut("", a, *kBytes, {.context = 1});
  EXPECT_EQ(questions_line(cut), "1 question; 2 of their 2 choices do not fit into a window, and lose their beginnings");
}

TEST(Choices, AModelKnowsAllTokens) {
  const Folder folder;
  const std::string a = folder.write("{\"prompt\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\n");
  ChoiceQuestions("", a, *kBytes, {.vocab = 256});
  try {
    ChoiceQuestions("", a, *kBytes, {.vocab = 255});
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the tokenizer has 256 tokens, the model 255"));
  }
}

}  // namespace
}  // namespace sheaf::models
