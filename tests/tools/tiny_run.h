// What the tests of the command train: a small model, on a corpus in a separate folder.
#pragma once

#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf::testing {

/// With 3,000 bytes of text in corpus.txt.
struct CorpusFolder : ScratchFolder {
  CorpusFolder() { std::ofstream(*this / "corpus.txt") << sample_text(3000); }
  /// The options for the data and the output folder.
  Words data(const std::string& out) const {
    return {"--data.corpus", *this / "corpus.txt", "--output.folder", *this / out, "--generate.tokens", "2"};
  }
  Metrics metrics(const std::string& out) const { return read_metrics(*this / out + "/metrics.jsonl"); }
};

inline const Words kTinyRun = {"--model.layers", "3", "--model.heads", "2", "--model.width", "16", "--model.context", "16",
                               "--train.steps", "5", "--train.batch", "5", "--train.warmup", "0", "--train.eval_every", "2",
                               "--train.eval_tokens", "150", "--train.save_every", "2"};

/// "… <before> 123 …" → 123, at the first occurrence from `from` on.
inline int64_t number_after(const std::string& text, const std::string& before, size_t from = 0) {
  const size_t at = text.find(before, from);
  if (at == std::string::npos) {
    ADD_FAILURE() << "no '" << before << "' in " << text;
    return -1;
  }
  return std::stoll(text.substr(at + before.size()));
}

}  // namespace sheaf::testing
