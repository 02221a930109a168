#include "sheaf/models/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/file.h"
#include "sheaf/core/random.h"
#include "sheaf/distributed/in_turn.h"
#include "sheaf/models/chat_format.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_text.h"
#include "sheaf/models/published_weights.h"
#include "sheaf/models/run_state.h"
#include "sheaf/models/utf8.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

// Draws from softmax(logits / temperature), restricted to the top_k likeliest, and of these to as few as make up top_p of their
// probability (Holtzman et al., https://arxiv.org/abs/1904.09751); `u` is uniform in [0, 1).
int32_t choose(const std::vector<double>& logits, const GenerateConfig& config, double u) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  if (config.temperature <= 0) return *std::min_element(ids.begin(), ids.end(), likelier);
  const auto all = static_cast<int64_t>(ids.size()), kept = config.top_k > 0 ? std::min(config.top_k, all) : all;
  std::partial_sort(ids.begin(), ids.begin() + kept, ids.end(), likelier);
  ids.resize(static_cast<size_t>(kept));
  std::vector<double> weights;
  for (int32_t id : ids) weights.push_back(std::exp((logits[id] - logits[ids[0]]) / config.temperature));
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (config.top_p < 1) {
    const double enough = config.top_p * total;
    size_t count = 0;
    for (total = 0; count < ids.size() && (count == 0 || total < enough); ++count) total += weights[count];
    ids.resize(count);
  }
  double left = u * total;
  for (size_t i = 0; i < ids.size(); ++i)
    if ((left -= weights[i]) < 0) return ids[i];
  return ids.back();
}

}  // namespace

std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const GenerateConfig& config) {
  if (config.prompt.empty()) fail<ConfigError>("[generate] generate.prompt is empty: give at least one character");
  if (!config.system.empty() && config.chat.empty())
    fail<ConfigError>("[generate] generate.system is for a chat (generate.chat)");
  if (!config.chat.empty()) {
    if (config.special_tokens)
      fail<ConfigError>("[generate] generate.special_tokens: what is said in a chat makes no special tokens: its format does");
    if (config.prompt == GenerateConfig{}.prompt)
      fail<ConfigError>("[generate] generate.chat: what does the user say? Give generate.prompt");
    std::vector<Message> messages;
    if (!config.system.empty()) messages.push_back({"system", config.system});
    messages.push_back({"user", config.prompt});
    return ChatFormat(config.chat, tokenizer).encode_prompt(messages);
  }
  try {
    return config.special_tokens ? tokenizer.encode_special(config.prompt, true, "generate.prompt")
                                 : tokenizer.encode(config.prompt, "generate.prompt");
  } catch (const DataError&) {
    if (config.prompt != GenerateConfig{}.prompt) throw;
    return {0};
  }
}

std::vector<int32_t> ends_of(const Tokenizer& tokenizer, const GenerateConfig& config, int64_t end_of_document) {
  std::vector<int32_t> ends;
  if (!config.end_token.empty()) {
    const auto end = tokenizer.special_token(config.end_token);
    if (!end) fail<ConfigError>("[generate] generate.end_token: the tokenizer (", tokenizer.kind(), ") has no special token ", config.end_token);
    ends.push_back(*end);
  }
  if (config.ignore_end_of_text) return {};
  if (const auto end = tokenizer.end_of_text()) ends.push_back(*end);
  if (end_of_document >= 0) ends.push_back(static_cast<int32_t>(end_of_document));
  if (!config.chat.empty()) ends.push_back(ChatFormat(config.chat, tokenizer).end_of_turn());
  return ends;
}

std::vector<int32_t> generate(Decoder& model, const std::vector<int32_t>& prompt, int64_t context, int64_t vocab,
                              const GenerateConfig& config, const std::function<void(int32_t)>& emit, std::span<const int32_t> ends) {
  if (prompt.empty()) fail<ConfigError>("[generate] the prompt is empty: give at least one token");
  model.eval();
  const Device device = units(model).at(0)->buffers().at(0).shard.device();
  const DeviceScope scope(device);
  std::vector<int32_t> tokens = prompt, out;
  const Key key = key_of("generate", static_cast<uint64_t>(config.seed));
  const auto uniform = [&](int64_t i) { return static_cast<double>(random_u64(key, i) >> 11) * 0x1p-53; };
  nn::KeyValueCache cache(std::min(context, static_cast<int64_t>(prompt.size()) + std::min(context, config.tokens)));
  for (int64_t i = 0; i < config.tokens; ++i) {
    const int64_t have = static_cast<int64_t>(tokens.size()), length = std::min(context, have);
    // When the window slides, every token in it has another position, and other keys and values: all is computed again.
    if (have > context) cache.clear();
    const int64_t unread = length - cache.length();
    std::optional<CollectivesInTurn> in_turn;
    if (i < 2) in_turn.emplace();  // kernels of many tokens, then of one
    const std::vector<int32_t> next_tokens(tokens.end() - unread, tokens.end());
    const Tensor logits = model.next_logits(Tensor::from(next_tokens, {1, unread}).to(device), cache);
    std::vector<double> last = logits.to_vector<double>();
    last.resize(static_cast<size_t>(std::min(vocab, logits.size(-1))));
    const int32_t next = choose(last, config, uniform(i));
    if (std::ranges::find(ends, next) != ends.end()) break;
    tokens.push_back(next);
    out.push_back(next);
    if (emit) emit(next);
  }
  return out;
}

namespace {

/// A model that is there, and what it reads and writes.
struct Source {
  ModelConfig model;
  int64_t vocab = 0;
  std::shared_ptr<const Tokenizer> tokenizer = nullptr;
  std::vector<int32_t> before = {}, ends = {};  // of a text, beside what the configuration says
  std::function<void(Decoder&)> load = {};
};

Source from_run(const std::string& folder) {
  auto checkpoint = Checkpoint::open_newest(folder + "/checkpoints", warn_on_stderr);
  if (!checkpoint) fail<CheckpointError>("[generate] no checkpoint in ", folder, "/checkpoints, and no published weights (config.json) in ", folder);
  const RunState state = RunState::from_json(checkpoint->state());
  if (!state.tokenizer)
    fail<ConfigError>("[generate] the run was trained on token files, without data.tokenizer gpt2, llama3 or huggingface: ",
                      "it has no tokenizer");
  Source out{.model = state.model, .vocab = state.vocab, .tokenizer = state.tokenizer};
  if (state.model.end_of_text >= 0) out.ends.push_back(static_cast<int32_t>(state.model.end_of_text));
  out.load = [opened = std::make_shared<Checkpoint>(std::move(*checkpoint))](Decoder& model) { load_state(*opened, model, {}); };
  return out;
}

Source from_published(const std::string& folder) {
  Source out{.model = read_published_config(published_config_file(folder))};
  out.vocab = out.model.vocab;
  PublishedText text = read_published_text(folder);
  out.tokenizer = std::move(text.tokenizer), out.before = std::move(text.before), out.ends = std::move(text.ends);
  if (out.tokenizer->vocab_size() > out.vocab)
    fail<ConfigError>("[generate] '", folder, "': the tokenizer has ", out.tokenizer->vocab_size(), " tokens, the model ", out.vocab);
  const auto files = std::make_shared<PublishedFiles>(PublishedFiles::open(folder));
  check_weights(*files, out.model);
  out.load = [files](Decoder& model) { load_weights(model, *files); };
  return out;
}

}  // namespace

void generate_from_folder(const std::string& folder, const GenerateConfig& config, Device device,
                          const std::function<void(const std::string&)>& emit) {
  const bool published = !path_exists(folder + "/checkpoints") && !published_config_file(folder).empty();
  const Source source = published ? from_published(folder) : from_run(folder);
  const Tokenizer& tokenizer = *source.tokenizer;
  std::vector<int32_t> prompt = encode_prompt(tokenizer, config);
  std::vector<int32_t> ends = ends_of(tokenizer, config);
  if (!config.ignore_end_of_text) ends.insert(ends.end(), source.ends.begin(), source.ends.end());
  const auto length = static_cast<int64_t>(prompt.size());
  if (!config.chat.empty() && length >= source.model.context)
    fail<ConfigError>("[generate] the conversation has ", length, " tokens, the model's context ", source.model.context,
                      ": nothing of it may be left out");
  const auto model = make_language_model(source.model, source.vocab);
  materialize(*model, device);
  source.load(*model);
  Utf8Assembler text;
  emit(text.add(tokenizer.decode(prompt)));
  // What is rendered has what stands before a text.
  if (config.chat.empty() && !config.special_tokens) prompt.insert(prompt.begin(), source.before.begin(), source.before.end());
  generate(*model, prompt, source.model.context, tokenizer.vocab_size(), config,
           [&](int32_t token) { emit(text.add(tokenizer.decode_more(std::span(&token, 1)))); }, ends);
  emit(text.finish());
}

}  // namespace sheaf::models
