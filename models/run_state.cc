#include "sheaf/models/run_state.h"

#include <algorithm>
#include <iterator>

#include "sheaf/models/model_fields.h"
#include "sheaf/models/token_file.h"

namespace sheaf::models {
namespace {

template <class Train, class F>
void for_each_train_option(Train&& t, F&& f) {
  f("train.steps", t.steps);
  f("train.batch", t.batch);
  f("train.seed", t.seed);
  f("train.lr", t.lr);
  f("train.lr_factors", t.lr_factors);
  f("train.min_lr", t.min_lr);
  f("train.warmup", t.warmup);
  f("train.schedule", t.schedule);
  f("train.decay_start", t.decay_start);
  f("train.decay_end", t.decay_end);
  f("train.optimizer", t.optimizer);
  f("train.momentum", t.momentum);
  f("train.weight_decay", t.weight_decay);
  f("train.weight_decay_factors", t.weight_decay_factors);
  f("train.beta1", t.beta1);
  f("train.beta2", t.beta2);
  f("train.eps", t.eps);
  f("train.clip", t.clip);
  f("train.z_loss", t.z_loss);
  f("train.dtype", t.dtype);
  f("train.state_dtype", t.state_dtype);
  f("train.fp8", t.fp8);
  f("train.islands", t.islands);
  if (t.islands > 1) {
    f("train.inner_steps", t.inner_steps);
    f("train.outer_lr", t.outer_lr);
    f("train.outer_momentum", t.outer_momentum);
    f("train.outer_dtype", t.outer_dtype);
  }
  if (t.dtype == "f16") f("train.loss_scale_interval", t.loss_scale_interval);
}

// Options that all checkpoints have; others were added later, and their absence means the default.
bool is_in_all(std::string_view key) {
  constexpr std::string_view kKeys[] = {
      "model.type", "model.layers", "model.heads", "model.kv_heads", "model.width", "model.mlp_width", "model.context", "model.bias",
      "model.tie_embeddings", "model.dropout", "model.rope_theta", "model.norm_eps", "train.steps", "train.batch", "train.seed", "train.lr",
      "train.min_lr", "train.warmup", "train.schedule", "train.weight_decay", "train.beta1", "train.beta2", "train.eps", "train.clip",
      "train.inner_steps", "train.outer_lr", "train.outer_momentum", "train.outer_dtype", "train.loss_scale_interval"};
  return std::ranges::find(kKeys, key) != std::end(kKeys);
}

// The options that affect values, for writing, reading and comparing.
template <class Model, class Train, class F>
void for_each_option(Model&& model, Train&& train, F&& f) {
  for_each_model_field([&](const char* key, auto& field) { f(str("model.", key), field); }, model);
  for_each_train_option(train, f);
  // The loss for balance multiplies two means over a micro-batch.
  if (model.experts > 0 && model.aux_loss != 0) f("train.micro_batches", train.micro_batches);
}

void get(const Json& j, bool& out) { out = j.as_bool(); }
void get(const Json& j, int64_t& out) { out = j.as_int(); }
void get(const Json& j, double& out) { out = j.as_double(); }
void get(const Json& j, std::string& out) { out = j.as_string(); }

// An unknown option is an error: the model or the training would silently be another one.
void read_options(const Json& options, RunState& s) {
  std::vector<std::string_view> unknown;
  for (const auto& [name, value] : options.as_object()) unknown.push_back(name);
  for_each_option(s.model, s.train, [&](const std::string& key, auto& value) {
    const std::string_view name = options.find(key) ? std::string_view(key) : earlier_name(key);
    if (!is_in_all(key) && !options.find(name)) return;
    get(options.at(name), value);
    std::erase(unknown, name);
  });
  if (!unknown.empty()) fail<DataError>("this version of Sheaf does not know its option '", unknown[0], "'");
}

Json to_json(const SplitState& s) { return Json::Object{{"tokens", s.tokens}, {"xxh3", s.xxh3}, {"of_blocks", s.of_blocks}}; }
SplitState split_of(const Json& json) {
  const Json* const of_blocks = json.find("of_blocks");
  return {json.at("tokens").as_int(), json.at("xxh3").as_string(), of_blocks && of_blocks->as_bool()};
}

}  // namespace

Json RunState::to_json() const {
  Json json;
  json.set("step", step).set("vocab", vocab);
  Json options;
  for_each_option(model, train, [&](const std::string& key, const auto& value) { options.set(key, Json(value)); });
  json.set("options", options);
  json.set("tokenizer", tokenizer ? tokenizer->to_json() : Json());
  if (train_data && val_data)
    json.set("data", Json::Object{{"val_fraction", val_fraction},
                                  {"order", order},
                                  {"train", models::to_json(*train_data)},
                                  {"val", models::to_json(*val_data)}});
  json.set("positions_of_documents", positions_of_documents);
  if (weights) {
    Json::Array before(weights->before.begin(), weights->before.end());
    json.set("weights", Json::Object{{"path", weights->path}, {"xxh3", weights->xxh3}, {"before", std::move(before)}});
  }
  if (best) json.set("best", Json::Object{{"step", best->step}, {"val_loss", best->val_loss}, {"targets", best->targets}});
  if (!product_choices.empty()) json.set("product_choices", product_choices);
  return json;
}

RunState RunState::from_json(const Json& json) {
  RunState s;
  try {
    s.step = json.at("step").as_int();
    s.vocab = json.at("vocab").as_int();
    s.train.dtype.clear();
    s.train.micro_batches = 0;
    read_options(json.at("options"), s);
    if (const Json& t = json.at("tokenizer"); !t.is_null()) s.tokenizer = tokenizer_from_json(t);
    if (const Json* data = json.find("data")) {
      s.val_fraction = data->at("val_fraction").as_double();
      if (const Json* order = data->find("order")) s.order = order->as_string();
      s.train_data = split_of(data->at("train"));
      s.val_data = split_of(data->at("val"));
    }
    const Json* const positions = json.find("positions_of_documents");
    s.positions_of_documents = positions && positions->as_bool();
    if (const Json* weights = json.find("weights")) {
      s.weights = {weights->at("path").as_string(), weights->at("xxh3").as_string()};
      if (const Json* before = weights->find("before"))
        for (const Json& id : before->as_array()) s.weights->before.push_back(static_cast<int32_t>(id.as_int()));
    }
    if (const Json* best = json.find("best")) {
      s.best = {best->at("step").as_int(), best->at("val_loss").as_double()};
      if (const Json* targets = best->find("targets")) s.best->targets = targets->as_int();
    }
    if (const Json* choices = json.find("product_choices")) s.product_choices = choices->as_string();
  } catch (const DataError& e) {
    fail<CheckpointError>("[checkpoint] its state cannot be read: ", e.what());
  }
  return s;
}

namespace {

[[noreturn]] void differs(std::string_view what, const std::string& was, const std::string& is,
                          const std::string& advice = "continue with the same options and data") {
  throw Error(ExitCode::kResumeMismatch, str("[resume] ", what, " was ", was, " in the checkpoint and is ", is, " now; ", advice,
                                             ", or start a new run in another output folder"));
}

std::string described(const Tokenizer* t) {
  return t ? str(json_string(t->kind()), " of ", t->vocab_size(), " tokens") : std::string("that of token files");
}

// Vocabularies may be long: both sizes and the first token that differs are enough.
void check_tokenizer(const Tokenizer* saved, const Tokenizer* now) {
  std::string was = described(saved), is = described(now);
  if (was == is) {
    if (!saved || saved->to_json() == now->to_json()) return;
    for (int32_t id = 0; id < saved->vocab_size(); ++id) {
      const std::string old_text = saved->decode({&id, 1}), new_text = now->decode({&id, 1});
      if (old_text == new_text) continue;
      was += str(", token ", id, " being ", json_string(old_text), ",");
      is += str(", token ", id, " being ", json_string(new_text), ",");
      break;
    }
  }
  differs("the tokenizer", was, is);
}

std::string described(const WeightsState& s) { return str("'", s.path, "' with XXH3 ", s.xxh3); }
std::string described(const SplitState& s) { return str(s.tokens, " tokens with XXH3 ", s.xxh3); }

bool same(const SplitState& saved, const SplitState& now) {
  const bool comparable = saved.of_blocks == now.of_blocks || now.tokens <= kDigestBlock;
  return saved.tokens == now.tokens && (!comparable || saved.xxh3 == now.xxh3);
}

}  // namespace

void check_resumable(const RunState& saved, const RunState& now) {
  if (saved.vocab != now.vocab) differs("the vocabulary", str(saved.vocab), str(now.vocab));
  check_tokenizer(saved.tokenizer.get(), now.tokenizer.get());
  Json options;
  for_each_option(resolved(now.model), resolved(now.train), [&](const std::string& key, const auto& value) { options.set(key, Json(value)); });
  const OptimizationConfig was = resolved(saved.train);
  const auto compare = [&](std::string_view key, const auto& value) {
    if (key == "train.steps") return;  // affects at most where the decay ends
    if (key == "train.dtype" && saved.train.dtype.empty()) return;
    if (key == "train.micro_batches" && saved.train.micro_batches == 0) return;
    if (Json(value) == options.at(key)) return;
    if (key == "train.decay_end" && was.decay_start >= was.decay_end) return;  // it was all warm-up
    if (key == "train.decay_end" && saved.train.decay_end == 0 && now.train.decay_end == 0)
      differs("train.decay_end, by default train.steps,", Json(value).dump(), options.at(key).dump(),
              str("give --train.decay_end ", Json(value).dump(), " to change the number of steps alone"));
    differs(key == "train.decay_end"     ? "train.decay_end, by default train.steps,"
            : key == "model.end_of_text" ? "the token that keeps documents apart (data.separate_documents; -1: they are not)"
                                         : key,
            Json(value).dump(), options.at(key).dump());
  };
  for_each_option(resolved(saved.model), was, compare);
  if (saved.model.type == "gpt2" && saved.model.end_of_text >= 0 && !saved.positions_of_documents)
    differs("a learned position", "counted from the window's first token", "counted from the document's");
  if (now.weights && !saved.weights) differs("model.weights", "empty: the run started from random weights", now.weights->path);
  if (now.weights && saved.weights->xxh3 != now.weights->xxh3)
    differs("model.weights", described(*saved.weights), described(*now.weights));
  if (saved.order != now.order) differs("data.order", json_string(saved.order), json_string(now.order));
  if (!saved.train_data || !saved.val_data || !now.train_data || !now.val_data) return;
  if (saved.val_fraction != now.val_fraction)
    differs("data.val_fraction", json_number(saved.val_fraction), json_number(now.val_fraction));
  if (!same(*saved.train_data, *now.train_data))
    differs("the training data", described(*saved.train_data),
            described(*now.train_data) + (saved.train_data->tokens == now.train_data->tokens ? " (of a mixture, weights count, too)" : ""));
  if (!same(*saved.val_data, *now.val_data))
    differs("the validation data", described(*saved.val_data), described(*now.val_data));
}

}  // namespace sheaf::models
