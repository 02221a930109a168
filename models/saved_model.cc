#include "sheaf/models/saved_model.h"

#include <memory>
#include <utility>

#include "sheaf/core/file.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_weights.h"
#include "sheaf/models/run_state.h"

namespace sheaf::models {
namespace {

// Tokens can be evaluated without it, so it is no error until something needs it.
void read_text(SavedModel& out, const std::string& folder, const std::string& fits = {}) {
  try {
    PublishedText text = read_published_text(folder);
    if (const int64_t known = text.tokenizer->least_vocab(); !fits.empty() && known > out.vocab)
      fail<ConfigError>(fits, ": the tokenizer has ", known, " tokens, the model ", out.vocab);
    out.text = std::move(text);
  } catch (const Error&) {
    out.unreadable = std::current_exception();
  }
}

SavedModel from_run(const char* who, const std::string& folder, const CheckpointGroup& group) {
  CheckpointGroup reader = group;
  reader.others_may_remove = true;
  auto checkpoint = Checkpoint::open_newest(checkpoints_in(folder), warn_on_stderr, reader);
  if (!checkpoint)
    fail<CheckpointError>("[", who, "] no checkpoint in ", folder, "/checkpoints, and no published weights (config.json) in ", folder);
  const RunState state = RunState::from_json(checkpoint->state());
  SavedModel out{.model = state.model, .vocab = state.vocab, .text = {.tokenizer = state.tokenizer}, .origin = checkpoint->path()};
  out.digest = checkpoint->digest();
  const std::string config = state.weights ? published_config_file(state.weights->path) : "";
  if (!state.tokenizer && !config.empty() && has_published_text(parent_of(config))) {
    // It reads text as it was tokenized for training: if it started from published weights, by their tokenizer.
    read_text(out, parent_of(config));
  } else if (!state.tokenizer) {
    out.no_tokenizer =
        str("the run was trained on token files, without data.tokenizer gpt2, llama3, huggingface or byte",
            state.weights ? str(", and there is none in '", state.weights->path, "', from where it started") : "", ": it has no tokenizer");
  }
  if (state.weights && !state.weights->before.empty()) out.text.before = state.weights->before;
  if (state.model.end_of_text >= 0) out.text.ends.push_back(static_cast<int32_t>(state.model.end_of_text));
  out.load = [opened = std::make_shared<Checkpoint>(std::move(*checkpoint))](Decoder& model) {
    load_state(*opened, model, {}, {.passes_over = "mtp_layers."});
  };
  return out;
}

SavedModel from_published(const char* who, const std::string& folder) {
  const auto files = std::make_shared<PublishedFiles>(PublishedFiles::open(folder));
  const std::string config = published_config_file(folder), beside = parent_of(config);
  SavedModel out{.model = read_published_config(config), .origin = files->path(), .digest = files->digest()};
  out.vocab = out.model.vocab;
  if (has_published_text(beside)) {
    read_text(out, beside, str("[", who, "] '", folder, "'"));
  } else {
    out.no_tokenizer = str("'", beside, "' has neither tokenizer.json nor GPT-2's vocab.json and merges.txt");
  }
  out.model.mtp_layers = num_mtp_layers(*files, out.model);
  check_weights(*files, out.model);
  out.load = [files](Decoder& model) { load_weights(model, *files); };
  return out;
}

}  // namespace

void SavedModel::quantize(const char* who, const std::string& format) {
  if (format == "none" || format == model.quantize) return;
  check<ConfigError>(model.quantize == "none", "[", who, "] quantize ", format, ": the weights in '", origin, "' rest in ",
                     model.quantize, " blocks");
  model.quantize = format;
}

void SavedModel::expect_tokenizer(const std::string& who) const {
  if (text.tokenizer) return;
  if (unreadable) std::rethrow_exception(unreadable);
  fail<ConfigError>(who, no_tokenizer);
}

bool has_published_weights(const std::string& folder) {
  return !path_exists(checkpoints_in(folder)) && !published_config_file(folder).empty();
}

SavedModel open_saved_model(const char* who, const std::string& folder, const CheckpointGroup& group) {
  return has_published_weights(folder) ? from_published(who, folder) : from_run(who, folder, group);
}

}  // namespace sheaf::models
