#include "sheaf/models/evaluate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "sheaf/distributed/agreement.h"
#include "sheaf/distributed/in_turn.h"
#include "sheaf/models/corpus.h"
#include "sheaf/models/document_separator.h"
#include "sheaf/models/evaluation.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/saved_model.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

constexpr int64_t kUsualContext = 4096;  // models that read more are seldom asked for it, and it takes long

// The tokens to validate on alone.
Corpus corpus_of(const DataConfig& data, const SavedModel& saved) {
  Corpus corpus;
  corpus.tokenizer = saved.text.tokenizer;
  corpus.vocab = saved.vocab;
  if (!data.val_file.empty()) {
    corpus.val = ValidationSets::open(data.val_file, saved.vocab);
  } else if (!data.corpus.empty()) {
    check<ConfigError>(corpus.tokenizer != nullptr, "[evaluate] data.corpus '", data.corpus, "': ", saved.no_tokenizer);
    corpus.val = load_text_corpus(data.corpus, corpus.tokenizer, data.val_fraction).val;
  }
  return corpus;
}

// By the data and, for a run, as it was trained.
void keep_documents_apart(TrainConfig& config, const Corpus& corpus) {
  DataConfig& data = config.data;
  const bool trained_so = config.model.end_of_text >= 0;
  if (trained_so) data.end_of_text = config.model.end_of_text;
  data.separate_documents |= trained_so || corpus.val.example_end().has_value();
  data.end_of_text = separator_of(config, corpus);
}

}  // namespace

EvaluationReport evaluate_folder(const std::string& folder, TrainConfig config, World& world, Device device, const EvaluateOptions& options) {
  SavedModel saved = open_saved_model("evaluate", folder, checkpoint_group(world));
  DataConfig& data = config.data;
  if (!saved.text.tokenizer && is_published(data.tokenizer)) saved.text.tokenizer = open_tokenizer(data.tokenizer, data.tokenizer_folder);
  config.model = saved.model;
  config.model.vocab = saved.vocab;
  EvaluationReport report{.model = saved.origin};
  report.context = options.context > 0 ? options.context : std::min(config.model.context, kUsualContext);
  check<ConfigError>(report.context <= config.model.context, "[evaluate] windows of ", report.context, " tokens: the model's context is ",
                     config.model.context);
  const Corpus corpus = corpus_of(data, saved);
  const bool validates = !corpus.val.sets().empty();
  check<ConfigError>(validates || !data.choices.empty(), "[evaluate] nothing to evaluate on: give data.val_file or data.choices");
  if (validates) report.validation = validations(corpus.val, report.context, config.train.eval_tokens);
  if (!data.choices.empty()) {
    check<ConfigError>(corpus.tokenizer != nullptr, "[evaluate] data.choices: ", saved.no_tokenizer);
    report.questions = open_choices(data.choices, *corpus.tokenizer, saved.text.before, report.context, config.train.eval_questions);
  }
  keep_documents_apart(config, corpus);
  std::string questions;
  for (const ChoiceQuestions& q : report.questions) questions += q.digest();
  require_agreement(world, "data", {{"what to validate on", validates ? str(corpus.val.size(), " tokens, XXH3 ", corpus.val.check_all()) : "none"},
                                    {"data.choices", questions.empty() ? "none" : questions}});

  const DeviceScope scope(device);
  ShardedModel sharded = sharded_model(config, saved.vocab, world, {.frozen = true});
  materialize(*sharded.model, device, {.values = false});
  saved.load(*sharded.model);
  sharded.model->eval();
  for (const nn::Parameter& p : sharded.model->parameters()) report.parameters += p.shape().numel();

  config.model.context = report.context;  // of what goes through the model, which stays as it is
  if (validates) {
    StepInputs inputs(config, sharded.mesh, device, 0);
    for (Validation& v : report.validation) {
      const CollectivesInTurn in_turn;
      v.loss = mean_loss(sharded, inputs, config.train.batch, v.windows);
      check<NonFiniteError>(std::isfinite(v.loss), "[evaluate] the loss", v.name.empty() ? "" : " of " + v.name, " is ", v.loss);
    }
  }
  for (const ChoiceQuestions& q : report.questions) report.accuracies.push_back(q.accuracy(log_likelihoods(sharded, config, device, q)));
  return report;
}

}  // namespace sheaf::models
