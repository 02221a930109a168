#include "sheaf/models/evaluate_folder.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "sheaf/distributed/agreement.h"
#include "sheaf/models/corpus.h"
#include "sheaf/models/document_separator.h"
#include "sheaf/models/evaluation.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/saved_model.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

constexpr int64_t kUsualContext = 4096;  // models with longer contexts are seldom evaluated at them, and it takes long

// Only the tokens to validate on.
Corpus corpus_of(const DataConfig& data, const SavedModel& saved, bool whole_text) {
  Corpus corpus;
  corpus.tokenizer = saved.text.tokenizer;
  corpus.vocab = saved.vocab;
  if (!data.val_file.empty()) {
    corpus.val = ValidationSets::open(data.val_file, saved.vocab);
  } else if (!data.corpus.empty()) {
    saved.expect_tokenizer(str("[evaluate] data.corpus '", data.corpus, "': "));
    if (whole_text) corpus.val = load_text(data.corpus, *corpus.tokenizer);
    else corpus.val = load_text_corpus(data.corpus, corpus.tokenizer, data.val_fraction).val;
  }
  return corpus;
}

std::vector<AnsweredQuestions> questions_of(const TrainConfig& config, const SavedModel& saved, int64_t context) {
  if (config.data.choices.empty()) return {};
  saved.expect_tokenizer(str("[evaluate] data.choices '", config.data.choices, "': "));
  return open_questions(config.data.choices, *saved.text.tokenizer,
                        {.before = saved.text.before, .context = context, .vocab = saved.vocab, .most = config.train.eval_questions});
}

// For a model without a tokenizer.
void take_tokenizer(SavedModel& saved, const DataConfig& data) {
  if (data.tokenizer == DataConfig{}.tokenizer) return;
  check<ConfigError>(!saved.text.tokenizer, "[evaluate] data.tokenizer ", data.tokenizer, ": the model in '", saved.origin, "' has a tokenizer");
  saved.text.tokenizer = open_tokenizer(data.tokenizer, data.tokenizer_folder);
  check<ConfigError>(saved.text.tokenizer->least_vocab() <= saved.vocab, "[evaluate] data.tokenizer ", data.tokenizer, " has ",
                     saved.text.tokenizer->least_vocab(), " tokens, the model ", saved.vocab);
}

// As in training; or as for examples, if all evaluation data are examples; or as the options say.
void keep_documents_apart(TrainConfig& config, const Corpus& corpus) {
  DataConfig& data = config.data;
  const bool trained_so = config.model.end_of_text >= 0;
  check<ConfigError>(!trained_so || data.end_of_text < 0 || data.end_of_text == config.model.end_of_text, "[evaluate] data.end_of_text ",
                     data.end_of_text, ": documents of the run ended with token ", config.model.end_of_text);
  if (trained_so) data.end_of_text = config.model.end_of_text;
  const std::vector<Tokens> all = corpus.sequences();
  const bool are_examples = !all.empty() && std::ranges::all_of(all, [](const Tokens& t) { return t.example_end().has_value(); });
  data.separate_documents |= trained_so || are_examples;
  data.end_of_text = separator_of(config, corpus);
}

}  // namespace

EvaluationReport evaluate_folder(const std::string& folder, TrainConfig config, World& world, Device device,
                                 const EvaluateOptions& options) {
  // Before any call that requires all ranks to be in the same run.
  require_agreement(world, "model", {{"what is in the folder", has_published_weights(folder) ? "published weights" : "a run"}});
  SavedModel saved = open_saved_model("evaluate", folder, checkpoint_group(world));
  saved.model.mtp_layers = 0;  // nothing uses them
  take_tokenizer(saved, config.data);
  saved.quantize("evaluate", config.model.quantize);
  config.model = saved.model;
  config.model.vocab = saved.vocab;
  const int64_t context = options.context > 0 ? options.context : std::min(config.model.context, kUsualContext);
  check<ConfigError>(context <= config.model.context, "[evaluate] windows of ", context, " tokens: the model's context is ", config.model.context);
  const Corpus corpus = corpus_of(config.data, saved, options.whole_text);
  const bool validates = !corpus.val.sets().empty();
  check<ConfigError>(validates || !config.data.choices.empty(),
                     "[evaluate] nothing to evaluate on: give data.val_file, data.corpus or data.choices");
  keep_documents_apart(config, corpus);
  EvaluationReport report{.model = saved.origin, .context = context, .questions = questions_of(config, saved, context)};
  if (validates) report.validation = validations(corpus.val, context, config.train.eval_tokens);
  const std::string tokens = validates ? str(corpus.val.size(), " tokens with XXH3 ", corpus.val.check_all()) : "none";
  wait_for_all(world);  // each has read at the speed of its disk, as below
  require_agreement(world, "data", {{"the model", saved.digest, str("'", saved.origin, "' (XXH3 ", saved.digest, ")")},
                                    {"what to validate on", tokens},
                                    {"data.choices", digest_of(report.questions)},
                                    {"the token that keeps documents apart", str(config.data.end_of_text)}});

  const DeviceScope scope(device);
  const ShardedModel sharded = sharded_model(config, saved.vocab, world, {.frozen = true});
  materialize(*sharded.model, device, {.values = false});
  saved.load(*sharded.model);
  wait_for_all(world);
  sharded.model->eval();
  for (const nn::Parameter& p : sharded.model->parameters()) report.parameters += p.shape().numel();

  TrainConfig windows = config;  // with the windows' context; the model keeps its own
  windows.model.context = context;
  if (validates) {
    StepInputs inputs(windows, sharded.mesh, device, 0);
    bool first = true;
    for (Validation& v : report.validation) {
      v.loss = loss_over(v.windows, sharded, inputs, first);
      check<NonFiniteError>(std::isfinite(v.loss), "[evaluate] the loss", v.name.empty() ? "" : " of " + v.name, " is ", v.loss);
    }
  }
  bool first_questions = true;
  for (AnsweredQuestions& set : report.questions)
    set.accuracy = set.questions.accuracy(log_likelihoods(set.questions, sharded, windows, device, first_questions));
  return report;
}

}  // namespace sheaf::models
