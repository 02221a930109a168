#include "sheaf/models/document_separator.h"

namespace sheaf::models {
namespace {

// The token that ends a document.
int64_t end_of_text_of(const TrainConfig& config, const Tokenizer* tokenizer) {
  const DataConfig& data = config.data;
  int64_t id = data.end_of_text;
  if (id < 0 && tokenizer) id = tokenizer->end_of_text().value_or(-1);
  if (id < 0)
    fail<ConfigError>("[data] data.separate_documents: which token ends a document is not known: ",
                      tokenizer ? str("data.tokenizer ", tokenizer->kind(), " has none") : "the token files do not say it",
                      "; give its id, data.end_of_text");
  if (id >= config.model.vocab)
    fail<ConfigError>("[data] data.end_of_text ", id, " is no token of a vocabulary of ", config.model.vocab);
  return id;
}

}  // namespace

int64_t separator_of(const TrainConfig& config, const Corpus& corpus) {
  const DataConfig& data = config.data;
  const std::vector<Tokens> all = corpus.sequences();
  const std::optional<int32_t> end = common_example_end(all);
  if (!end) return data.separate_documents ? end_of_text_of(config, corpus.tokenizer.get()) : -1;
  const Tokens* text = nullptr;
  const Tokens* examples = nullptr;
  for (const Tokens& tokens : all) (tokens.example_end() ? examples : text) = &tokens;
  if (!data.separate_documents && !corpus.train.example_end())
    fail<ConfigError>("[data] '", examples->name(), "' holds examples, which are kept apart; so that what the model is trained on is, too, ",
                      "give data.separate_documents true");
  if (!data.separate_documents || (!text && data.end_of_text < 0)) return *end;
  const int64_t of_text = end_of_text_of(config, corpus.tokenizer.get());
  if (of_text != *end)
    fail<ConfigError>("[data] data.separate_documents: documents end with token ", of_text, ", the examples of '", examples->name(),
                      "' with token ", *end, ": tokenize them with the same --end-token");
  return of_text;
}

}  // namespace sheaf::models
