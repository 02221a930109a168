#include "sheaf/models/generate.h"

#include <algorithm>
#include <optional>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/in_turn.h"
#include "sheaf/models/chat_format.h"
#include "sheaf/models/choose_token.h"
#include "sheaf/models/drafter.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/saved_model.h"
#include "sheaf/models/utf8.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

void check_chat(const GenerateConfig& config) {
  if (!config.system.empty() && config.chat.empty())
    fail<ConfigError>("[generate] generate.system is for a chat (generate.chat)");
  if (!config.chat.empty() && config.special_tokens)
    fail<ConfigError>("[generate] generate.special_tokens: what is said in a chat makes no special tokens: its format does");
}

// The conversation so far.
std::vector<int32_t> encode_chat(const Tokenizer& tokenizer, const GenerateConfig& config, const std::vector<Message>& said,
                                 const std::string& origin) {
  std::vector<Message> messages;
  if (!config.system.empty()) messages.push_back({"system", config.system});
  messages.insert(messages.end(), said.begin(), said.end());
  return ChatFormat(config.chat, tokenizer).encode_prompt(messages, origin);
}

}  // namespace

std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const GenerateConfig& config) {
  if (config.prompt.empty()) fail<ConfigError>("[generate] generate.prompt is empty: give at least one character");
  check_chat(config);
  const bool is_given = config.prompt != GenerateConfig{}.prompt;
  check<ConfigError>(config.chat.empty() || is_given, "[generate] generate.chat: what does the user say? Give generate.prompt");
  try {
    return encode_prompt(tokenizer, config, Json(config.prompt), "generate.prompt");
  } catch (const DataError&) {
    if (is_given) throw;
    return {0};
  }
}

std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const GenerateConfig& config, const Json& said, const std::string& origin) {
  check_chat(config);
  if (said.is_array()) {
    check<ConfigError>(!config.chat.empty(), "[generate] ", origin, " has messages, which are for a chat: give generate.chat, its format");
    const std::vector<Message> messages = messages_of(said, origin, "the prompt");
    check<DataError>(!messages.empty(), "[generate] ", origin, ": the prompt has no messages");
    return encode_chat(tokenizer, config, messages, origin);
  }
  check<DataError>(said.is_string(), "[generate] ", origin, ": the prompt is neither a text nor a list of messages");
  const std::string& text = said.as_string();
  check<DataError>(!text.empty(), "[generate] ", origin, ": the prompt is empty");
  if (!config.chat.empty()) return encode_chat(tokenizer, config, {{"user", text}}, origin);
  return config.special_tokens ? tokenizer.encode_special(text, Tokenizer::Place::first, origin) : tokenizer.encode(text, origin);
}

std::vector<int32_t> ends_of(const Tokenizer& tokenizer, const GenerateConfig& config, std::span<const int32_t> further) {
  std::vector<int32_t> ends;
  if (!config.end_token.empty()) {
    const auto end = tokenizer.special_token(config.end_token);
    if (!end)
      fail<ConfigError>("[generate] generate.end_token: the tokenizer (", tokenizer.kind(), ") has no special token ",
                        config.end_token);
    ends.push_back(*end);
  }
  if (config.ignore_end_of_text) return ends;  // a token requested by name is not an end of text
  if (const auto end = tokenizer.end_of_text()) ends.push_back(*end);
  ends.insert(ends.end(), further.begin(), further.end());
  if (!config.chat.empty()) ends.push_back(ChatFormat(config.chat, tokenizer).end_of_turn());
  return ends;
}

std::vector<int32_t> generate(Decoder& model, const std::vector<int32_t>& prompt, int64_t context, int64_t vocab,
                              const GenerateConfig& config, const std::function<void(int32_t)>& emit,
                              std::span<const int32_t> ends) {
  if (prompt.empty()) fail<ConfigError>("[generate] the prompt is empty: give at least one token");
  check<ConfigError>(context > 0 && vocab > 0, "[generate] context ", context, ", vocab ", vocab, ": both must be positive");
  const nn::EvalScope evaluation(model);
  const Device device = device_of(model);
  const DeviceScope scope(device);
  std::vector<int32_t> tokens = prompt;
  const int64_t capacity = std::min(context, static_cast<int64_t>(prompt.size()) + std::min(context, config.tokens));
  nn::KeyValueCache cache(capacity);
  Drafter drafter(model, config.drafts, capacity, vocab);
  std::vector<int32_t> drafts;
  const auto made = [&] { return std::ssize(tokens) - std::ssize(prompt); };
  for (int64_t pass = 0; made() < config.tokens; ++pass) {
    const int64_t have = std::ssize(tokens), length = std::min(context, have);
    // When the window slides, every token in it has another position, and other keys and values: everything is recomputed.
    if (have > context) cache.clear();
    const int64_t unread = length - cache.length();
    std::optional<CollectivesInTurn> in_turn;
    const bool may_draft = drafter.most() > 0 && have < context;
    if (pass < 2 || may_draft) in_turn.emplace();  // kernels of many tokens, then of one; of drafts, of any number
    std::vector<int32_t> next_tokens(tokens.end() - unread, tokens.end());
    next_tokens.insert(next_tokens.end(), drafts.begin(), drafts.end());
    const Tensor input = Tensor::from(next_tokens, {1, std::ssize(next_tokens)}).to(device);
    Tensor x, logits;  // of everything read, and after the last token and the drafts
    if (may_draft) x = model.read(input, cache), logits = model.logits_behind(slice(x, 1, unread - 1, x.size(1)));
    else logits = model.next_logits(input, cache);
    const std::vector<double> rows = logits.to_vector<double>();
    // A draft that the model itself chooses has been read already.
    int64_t right = 0;
    for (bool goes_on = true; goes_on;) {
      const auto row = rows.begin() + right * logits.size(-1);
      const std::vector<double> last(row, row + std::min(vocab, logits.size(-1)));
      const int32_t next = choose_token(last, config, /*sample=*/0, made(), prompt.size());
      if (std::ranges::find(ends, next) != ends.end()) return {tokens.begin() + std::ssize(prompt), tokens.end()};
      tokens.push_back(next);
      if (emit) emit(next);
      goes_on = right < std::ssize(drafts) && drafts[static_cast<size_t>(right)] == next;
      right += goes_on;
    }
    cache.shorten(length + right);
    drafts.clear();
    // Everything read must fit into the context, and more tokens must be requested than drafted.
    const int64_t room = std::min(context - std::ssize(tokens), config.tokens - made() - 1);
    if (x && room > 0) drafts = drafter.draft(slice(x, 1, 0, unread + right), tokens, room);
  }
  return {tokens.begin() + std::ssize(prompt), tokens.end()};
}

namespace {

// Its weights are not trained, and are stored in the dtype in which they are read.
std::unique_ptr<Decoder> model_of(const SavedModel& saved, const std::string& dtype) {
  auto model = make_language_model(saved.model, saved.vocab, /*frozen=*/true);
  shard(*model, Mesh{}, {.compute_dtype = compute_dtype_from("generate", dtype)});
  return model;
}

}  // namespace

void begin_as_text(std::vector<int32_t>& prompt, const GenerateConfig& config, std::span<const int32_t> before) {
  if (config.chat.empty() && !config.special_tokens) prompt.insert(prompt.begin(), before.begin(), before.end());
}

void generate_from_folder(const std::string& folder, const GenerateConfig& config, Device device,
                          const std::function<void(const std::string&)>& emit) {
  SavedModel saved = open_saved_model("generate", folder);
  saved.model.mtp_layers = std::min(saved.model.mtp_layers, config.drafts);
  saved.quantize("generate", config.quantize);
  saved.expect_tokenizer("[generate] ");
  const Tokenizer& tokenizer = *saved.text.tokenizer;
  std::vector<int32_t> prompt = encode_prompt(tokenizer, config);
  const std::string shown = tokenizer.decode(prompt);
  begin_as_text(prompt, config, saved.text.before);
  const std::vector<int32_t> ends = ends_of(tokenizer, config, saved.text.ends);
  const auto length = static_cast<int64_t>(prompt.size());
  if (!config.chat.empty() && length >= saved.model.context)
    fail<ConfigError>("[generate] the conversation has ", length, " tokens, the model's context ", saved.model.context,
                      ": nothing of it may be left out");
  if (length > saved.model.context)
    warn_on_stderr(str("the prompt has ", length, " tokens, the model's context ", saved.model.context,
                       ": only its last are read"));
  const auto model = model_of(saved, config.dtype);
  materialize(*model, device, {.values = false});
  saved.load(*model);
  Utf8Assembler text;
  emit(text.add(shown));
  generate(*model, prompt, saved.model.context, tokenizer.vocab_size(), config,
           [&](int32_t token) { emit(text.add(tokenizer.decode_more(std::span(&token, 1)))); }, ends);
  emit(text.finish());
}

}  // namespace sheaf::models
