#include "sheaf/models/corpus.h"

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"

namespace sheaf::models {

std::vector<Tokens> Corpus::sequences() const {
  std::vector<Tokens> all;
  for (const TokenMixture::Source& s : train.sources()) all.push_back(s.tokens);
  for (const ValidationSets::Set& s : val.sets()) all.push_back(s.tokens);
  return all;
}

namespace {

std::string read_text(const std::string& path) {
  std::string text = File::open<DataError>(path).read_all();
  check<DataError>(!text.empty(), "[corpus] '", path, "' is empty");
  return text;
}

Tokens tokens_of(const std::string& text, const std::string& path, const Tokenizer& tokenizer) {
  return Tokens::from_ids(tokenizer.encode(text, str("'", path, "'")), tokenizer.vocab_size(), path);
}

}  // namespace

Tokens load_text(const std::string& path, const Tokenizer& tokenizer) { return tokens_of(read_text(path), path, tokenizer); }

// Without a tokenizer: one of the text's characters.
Corpus load_text_corpus(const std::string& path, std::shared_ptr<const Tokenizer> tokenizer, double val_fraction) {
  const std::string origin = str("'", path, "'"), text = read_text(path);
  Corpus corpus;
  corpus.tokenizer = tokenizer ? std::move(tokenizer) : make_char_tokenizer(text, origin);
  corpus.vocab = corpus.tokenizer->vocab_size();
  const Tokens all = tokens_of(text, path, *corpus.tokenizer);
  const auto cut = static_cast<int64_t>(static_cast<double>(all.size()) * (1.0 - val_fraction));
  check<DataError>(cut >= 2 && all.size() - cut >= 2, "[corpus] ", origin, ": ", all.size(),
                   " tokens are too few to hold out a share of ", val_fraction);
  corpus.train = all.slice(0, cut);
  corpus.val = all.slice(cut, all.size());
  return corpus;
}

Corpus load_text_corpus(const std::string& path, const std::string& tokenizer, double val_fraction,
                        const std::string& tokenizer_folder) {
  return load_text_corpus(path, tokenizer == "char" ? nullptr : open_tokenizer(tokenizer, tokenizer_folder), val_fraction);
}

Corpus load_corpus(const DataConfig& data, int64_t vocab, std::shared_ptr<const Tokenizer> saved) {
  if (data.train_file.empty() && data.corpus.empty())
    fail<ConfigError>("[data] nothing to train on: give data.corpus, or data.train_file and data.val_file");
  if (data.train_file.empty()) {
    if (saved) return load_text_corpus(data.corpus, std::move(saved), data.val_fraction);
    return load_text_corpus(data.corpus, data.tokenizer, data.val_fraction, data.tokenizer_folder);
  }
  Corpus corpus;
  if (is_published(data.tokenizer) || data.tokenizer == "byte") {
    corpus.tokenizer = saved ? std::move(saved) : open_tokenizer(data.tokenizer, data.tokenizer_folder);
    if (vocab == 0) vocab = corpus.tokenizer->vocab_size();
  }
  if (vocab <= 0) fail<ConfigError>("[data] token files need model.vocab, or data.tokenizer gpt2, llama3, huggingface or byte");
  corpus.train = TokenMixture::open(data.train_file, vocab);
  corpus.val = ValidationSets::open(data.val_file, vocab);
  corpus.vocab = vocab;
  return corpus;
}

}  // namespace sheaf::models
