#include "sheaf/models/run_state.h"

namespace sheaf::models {
namespace {

// The options that decide values, once, for writing, reading and comparing.
template <class Model, class F>
void for_each_model_option(Model& m, F&& f) {
  f("model.type", m.type);
  f("model.layers", m.layers);
  f("model.heads", m.heads);
  f("model.kv_heads", m.kv_heads);
  f("model.width", m.width);
  f("model.mlp_width", m.mlp_width);
  f("model.context", m.context);
  f("model.bias", m.bias);
  f("model.tie_embeddings", m.tie_embeddings);
  f("model.dropout", m.dropout);
  f("model.rope_theta", m.rope_theta);
  f("model.norm_eps", m.norm_eps);
}

template <class Train, class F>
void for_each_train_option(Train& t, F&& f) {
  f("train.steps", t.steps);
  f("train.batch", t.batch);
  f("train.seed", t.seed);
  f("train.lr", t.lr);
  f("train.min_lr", t.min_lr);
  f("train.warmup", t.warmup);
  f("train.schedule", t.schedule);
  f("train.weight_decay", t.weight_decay);
  f("train.beta1", t.beta1);
  f("train.beta2", t.beta2);
  f("train.eps", t.eps);
  f("train.clip", t.clip);
}

void get(const Json& j, bool& out) { out = j.as_bool(); }
void get(const Json& j, int64_t& out) { out = j.as_int(); }
void get(const Json& j, double& out) { out = j.as_double(); }
void get(const Json& j, std::string& out) { out = j.as_string(); }

}  // namespace

Json RunState::to_json() const {
  Json json;
  json.set("step", step).set("vocab", vocab);
  Json options;
  const auto put = [&](const char* key, const auto& value) { options.set(key, Json(value)); };
  for_each_model_option(model, put);
  for_each_train_option(train, put);
  json.set("options", options);
  json.set("tokenizer", tokenizer ? tokenizer->to_json() : Json());
  if (!product_choices.empty()) json.set("product_choices", product_choices);
  return json;
}

RunState RunState::from_json(const Json& json) {
  RunState s;
  try {
    s.step = json.at("step").as_int();
    s.vocab = json.at("vocab").as_int();
    const Json& options = json.at("options");
    const auto take = [&](const char* key, auto& value) { get(options.at(key), value); };
    for_each_model_option(s.model, take);
    for_each_train_option(s.train, take);
    if (const Json& t = json.at("tokenizer"); !t.is_null()) s.tokenizer = tokenizer_from_json(t);
    if (const Json* choices = json.find("product_choices")) s.product_choices = choices->as_string();
  } catch (const DataError& e) {
    fail<CheckpointError>("[checkpoint] its state cannot be read: ", e.what());
  }
  return s;
}

void check_resumable(const RunState& saved, const TrainConfig& config, int64_t vocab, const Tokenizer* tokenizer) {
  const auto differs = [](const std::string& key, const std::string& was, const std::string& is) {
    throw Error(ExitCode::kResumeMismatch,
                str("[resume] ", key, " was ", was, " in the checkpoint and is ", is, " now; continue with the same "
                    "options, or start a new run in another output folder"));
  };
  if (saved.vocab != vocab) differs("the vocabulary", str(saved.vocab), str(vocab));
  const auto described = [](const Tokenizer* t) { return t ? t->to_json().dump() : std::string("that of token files"); };
  if (const std::string was = described(saved.tokenizer.get()), is = described(tokenizer); was != is)
    differs("the tokenizer", was, is);
  Json now;
  const auto put = [&](const char* key, const auto& value) { now.set(key, Json(value)); };
  for_each_model_option(config.model, put);
  for_each_train_option(config.train, put);
  const auto compare = [&](const char* key, const auto& value) {
    if (std::string_view(key) == "train.steps" && config.train.schedule == "constant") return;
    if (!(Json(value) == now.at(key))) differs(key, Json(value).dump(), now.at(key).dump());
  };
  for_each_model_option(saved.model, compare);
  for_each_train_option(saved.train, compare);
}

}  // namespace sheaf::models
