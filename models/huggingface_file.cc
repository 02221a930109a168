#include "sheaf/models/huggingface_file.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "sheaf/models/bpe.h"
#include "sheaf/models/byte_alphabet.h"

namespace sheaf::models {
namespace {

// A value of the file and its path; null is treated as absent.
class Node {
 public:
  Node(const Json& json, std::string where, std::string key = "")
      : json_(&json), where_(std::move(where)), key_(std::move(key)) {}

  const Json& json() const { return *json_; }
  [[noreturn]] void refuse(std::string_view reason) const {
    std::string value = json_->dump();
    if (value.size() > 80) value = value.substr(0, 80) + "...";
    fail<DataError>("[tokenizer] ", where_, key_.empty() ? "" : ": ", key_, " is ", value, ": ", reason);
  }
  /// Every key of this object is one of these.
  const Node& only(std::initializer_list<std::string_view> keys) const {
    for (const auto& [key, value] : object())
      if (!value.is_null() && std::find(keys.begin(), keys.end(), key) == keys.end())
        child(key, value).refuse("Sheaf does not know this key");
    return *this;
  }
  std::optional<Node> find(const char* key) const {
    if (!json_->is_object()) refuse("expected an object");
    const Json* value = json_->find(key);
    return value && !value->is_null() ? std::optional(child(key, *value)) : std::nullopt;
  }
  Node at(const char* key) const {
    auto found = find(key);
    if (!found) fail<DataError>("[tokenizer] ", where_, ": ", key_, key_.empty() ? "" : ".", key, " is missing");
    return *found;
  }
  std::vector<Node> list() const {
    std::vector<Node> out;
    const Json::Array& values = as("an array", &Json::as_array);
    for (size_t i = 0; i < values.size(); ++i) out.emplace_back(values[i], where_, str(key_, "[", i, "]"));
    return out;
  }
  const std::string& text() const { return as("a string", &Json::as_string); }
  bool flag() const { return as("true or false", &Json::as_bool); }
  int64_t integer() const { return as("an integer", &Json::as_int); }
  const Json::Object& object() const { return as("an object", &Json::as_object); }

  /// A member of this object.
  Node child(const std::string& key, const Json& value) const {
    return {value, where_, key_.empty() ? key : str(key_, ".", key)};
  }

  bool flag(const char* key, bool otherwise) const {
    const auto found = find(key);
    return found ? found->flag() : otherwise;
  }
  std::string type() const { return at("type").text(); }
  /// Refuses a key with any other value.
  void must_be(const char* key, const Json& value, std::string_view reason) const {
    if (const auto found = find(key); found && !(found->json() == value)) found->refuse(reason);
  }

 private:
  template <class R>
  R as(const char* what, R (Json::*get)() const) const {
    try {
      return (json_->*get)();
    } catch (const DataError&) {
      refuse(str("expected ", what));
    }
  }

  const Json* json_;
  std::string where_, key_;
};

/// The steps of a normalizer, pre-tokenizer or decoder: itself, or the members of a Sequence, in order.
std::vector<Node> steps_of(const std::optional<Node>& node, const char* members) {
  if (!node) return {};
  if (node->type() != "Sequence") return {*node};
  std::vector<Node> out;
  for (const Node& step : node->only({"type", members}).at(members).list())
    for (const Node& inner : steps_of(step, members)) out.push_back(inner);
  return out;
}

/// The byte of "<0x0A>", -1 for another name.
int byte_of(std::string_view token) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const size_t high = kDigits.find(token[3]), low = kDigits.find(token[4]);
  return high == std::string_view::npos || low == std::string_view::npos ? -1 : static_cast<int>(16 * high + low);
}

class Reader {
 public:
  Reader(const Json& json, const std::string& where) : root_(json, where) {}

  HuggingFaceFile read() {
    // The last three do not affect a text's own tokens.
    root_.only({"version", "added_tokens", "normalizer", "pre_tokenizer", "decoder", "model", "post_processor", "truncation",
                "padding"});
    read_model();
    const auto steps = steps_of(root_.find("pre_tokenizer"), "pretokenizers");
    if (!steps.empty() && steps.back().type() == "ByteLevel") {
      read_bytes(steps);
    } else if (steps.size() == 1 && cuts_at_spaces(steps[0]) && root_.find("normalizer")) {
      read_characters({});  // the normalizer leaves none of the spaces at which it would split
    } else {
      if (!steps.empty() && steps.back().type() != "Metaspace")
        steps.back().refuse("Sheaf knows ByteLevel here, and Metaspace");
      read_characters(steps);
    }
    return std::move(file_);
  }

 private:
  void read_model() {
    const Node model = root_.at("model");
    if (const auto type = model.find("type"); type && type->text() != "BPE") type->refuse("Sheaf knows BPE");
    model.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
                "ignore_merges", "vocab", "merges"});
    if (const auto dropout = model.find("dropout"); dropout && !(dropout->json() == Json(0.0) || dropout->json() == Json(0)))
      dropout->refuse("Sheaf joins all pairs that may join");
    model.must_be("continuing_subword_prefix", "", "Sheaf's tokens of a word have no marks");
    model.must_be("end_of_word_suffix", "", "Sheaf's tokens of a word have no marks");
    file_.whole_words = model.flag("ignore_merges", false);
    byte_fallback_ = model.flag("byte_fallback", false);
    read_ids(model.at("vocab"));
    read_merges(model.at("merges"));
  }

  void read_ids(const Node& vocab) {
    size_t count = vocab.object().size();
    for (const auto& [name, id] : vocab.object()) ids_.emplace(name, -1);
    if (ids_.size() < count) vocab.refuse("a token stands there twice");
    std::vector<Node> added;
    std::unordered_set<std::string> contents;
    if (const auto list = root_.find("added_tokens")) added = list->list();
    for (const Node& token : added) {
      token.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      const std::string& content = token.at("content").text();
      if (content.empty() || content.size() > Bpe::kLongestToken) token.refuse("a token has 1 to 4096 bytes");
      if (!contents.insert(content).second) token.refuse("it stands there twice");
      const bool special = token.flag("special", false), normalized = token.flag("normalized", !special);
      std::string_view unknown;
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        if (!special) token.must_be(key, false, "Sheaf finds tokens wherever they stand, and takes nothing else");
        if (token.flag(key, false)) unknown = key;
      }
      count += !ids_.contains(content);
      file_.added.push_back({0, content, special, normalized, unknown});
    }
    names_.resize(count);
    std::vector<bool> taken(count);
    const auto take = [&](const Node& where, int64_t id, const std::string& name) {
      if (id < 0 || id >= static_cast<int64_t>(count))
        where.refuse(str("the ids of ", count, " tokens must be 0 to ", static_cast<int64_t>(count) - 1));
      if (taken[static_cast<size_t>(id)]) where.refuse(str("another token has the id ", id));
      taken[static_cast<size_t>(id)] = true;
      names_[static_cast<size_t>(id)] = name;
    };
    for (const auto& [name, value] : vocab.object()) {
      const Node entry = vocab.child(name, value);
      if (name.empty() || name.size() > Bpe::kLongestToken) entry.refuse("a token has 1 to 4096 bytes");
      take(entry, ids_[name] = static_cast<int32_t>(std::clamp<int64_t>(entry.integer(), -1, INT32_MAX)), name);
    }
    file_.tokens = names_;  // a token that is only added does not occur in words
    for (size_t i = 0; i < added.size(); ++i) {
      const Node id = added[i].at("id");
      const auto found = ids_.find(file_.added[i].content);
      if (found == ids_.end()) take(id, id.integer(), file_.added[i].content);
      else if (found->second != id.integer()) id.refuse(str("in model.vocab it is ", found->second));
      file_.added[i].id = static_cast<int32_t>(id.integer());
    }
  }

  void read_merges(const Node& merges) {
    for (const Node& merge : merges.list()) {
      const auto id_of = [&](std::string_view token) {
        const auto found = ids_.find(std::string(token));
        if (found == ids_.end()) merge.refuse(str(json_string(token), " is not in model.vocab"));
        return found->second;
      };
      if (merge.json().is_array()) {
        const auto both = merge.list();
        if (both.size() != 2) merge.refuse("expected two tokens");
        file_.merges.emplace_back(id_of(both[0].text()), id_of(both[1].text()));
        continue;
      }
      const std::string_view text = merge.text();
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos)
        merge.refuse("expected two tokens and a space between them");
      file_.merges.emplace_back(id_of(text.substr(0, space)), id_of(text.substr(space + 1)));
    }
  }

  // A pattern, then the alphabet of bytes.
  void read_bytes(const std::vector<Node>& steps) {
    const Node& bytes = steps.back();
    bytes.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    if (bytes.flag("add_prefix_space", true)) bytes.refuse("Sheaf puts no space before a text: add_prefix_space must be false");
    const bool splits = steps.size() == 2;
    if (steps.size() > 2 || bytes.flag("use_regex", true) == splits)
      bytes.refuse("before it Sheaf knows one Split, with use_regex false, or nothing, with use_regex true");
    file_.pattern = splits ? &read_split(steps[0]) : &WordPattern::gpt2();
    for (const Node& step : steps_of(root_.find("normalizer"), "normalizers")) {
      if (step.type() != "NFC") step.refuse("before bytes Sheaf knows the normalizer NFC");
      step.only({"type"});
      file_.nfc = true;
    }
    const auto decoder = steps_of(root_.find("decoder"), "decoders");
    if (decoder.size() != 1 || decoder[0].type() != "ByteLevel")
      root_.at("decoder").refuse("the tokens are bytes: expected ByteLevel");
    decoder[0].only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    if (byte_fallback_) root_.at("model").at("byte_fallback").refuse("the tokens are bytes");

    file_.shown.resize(names_.size());
    for (size_t id = 0; id < names_.size(); ++id) {
      std::string& token = file_.tokens[id];
      try {
        token = alphabet_to_bytes(token);
      } catch (const DataError& e) {
        if (!is_added(id)) {
          const Json number(static_cast<int64_t>(id));
          root_.at("model").at("vocab").child(names_[id], number).refuse(e.what());
        }
        token.clear();
      }
      file_.shown[id] = token.empty() ? names_[id] : token;
    }
  }

  const WordPattern& read_split(const Node& split) {
    if (split.type() != "Split") split.refuse("Sheaf knows Split here");
    split.only({"type", "pattern", "behavior", "invert"});
    const std::string& behavior = split.at("behavior").text();
    const bool inverted = split.flag("invert", false);
    if (!(behavior == "Isolated" && !inverted) && !(behavior == "Removed" && inverted))
      split.at("behavior").refuse("Sheaf knows Isolated, and Removed with invert true: words are what the pattern matches");
    const Node expression = split.at("pattern").only({"Regex"}).at("Regex");
    const WordPattern* pattern = WordPattern::of_expression(expression.text());
    if (!pattern) expression.refuse("Sheaf knows the patterns of GPT-2, Llama 3, Qwen2, Mistral Nemo and GPT-4o, as published");
    return *pattern;
  }

  // Gemma's.
  static bool cuts_at_spaces(const Node& step) {
    if (step.type() != "Split") return false;
    const auto pattern = step.only({"type", "pattern", "behavior", "invert"}).at("pattern").find("String");
    return pattern && pattern->json() == Json(" ") && step.at("behavior").json() == Json("MergedWithPrevious") && !step.flag("invert", false);
  }

  void read_characters(const std::vector<Node>& steps) {
    using Prefix = HuggingFaceFile::Prefix;
    const auto normalizers = steps_of(root_.find("normalizer"), "normalizers");
    bool replaces = false;
    for (const Node& step : normalizers) {
      const std::string type = step.type();
      if (type == "Prepend" && !replaces && file_.prefix == Prefix::none) {
        if (step.only({"type", "prepend"}).at("prepend").text() != kSpaceMark) step.refuse("Sheaf knows \u2581");
        file_.prefix = Prefix::piece_always;
      } else if (type == "Replace" && !replaces) {
        require_replace(step, " ", kSpaceMark);
        replaces = true;
      } else {
        step.refuse("Sheaf knows, in this order, Prepend of \u2581 and Replace of a space by \u2581");
      }
    }
    if (replaces ? !steps.empty() : !normalizers.empty() || steps.size() != 1)
      root_.at(steps.empty() ? "model" : "pre_tokenizer")
          .refuse("Sheaf knows tokens of characters with the pre_tokenizer Metaspace alone or the normalizer Replace alone");
    if (!replaces) read_metaspace(steps[0]);
    if (!byte_fallback_)
      root_.at("model").refuse("tokens of characters without byte_fallback would lose those that are no token");
    if (file_.whole_words) root_.at("model").at("ignore_merges").refuse("with tokens of characters Sheaf joins by merges");
    read_decoder();
    for (auto& added : file_.added) {
      if (!added.normalized || !replaces) continue;
      if (!added.special)
        root_.at("added_tokens")
            .refuse(str(json_string(added.content), " is normalized, but not special: Sheaf finds such tokens in texts ",
                        "that no normalizer changes"));
      added.unknown = "normalized";  // as is its own content, so that Prepend puts a space before it
    }

    file_.bytes.fill(-1);
    file_.shown.resize(names_.size());
    for (size_t id = 0; id < names_.size(); ++id) {
      std::string& token = file_.tokens[id];
      const int byte = token.empty() ? -1 : byte_of(token);
      if (byte >= 0) file_.bytes[static_cast<size_t>(byte)] = static_cast<int32_t>(id);
      token = byte >= 0 ? "" : with_spaces(token);
      file_.shown[id] = byte >= 0 ? std::string(1, static_cast<char>(byte)) : with_spaces(names_[id]);
    }
    // Gemma has a token for a tab instead of that of its byte. No other character is the token of a byte.
    for (size_t byte = 0; byte < 128; ++byte)
      if (const auto found = ids_.find(std::string(1, static_cast<char>(byte))); file_.bytes[byte] < 0 && found != ids_.end())
        file_.bytes[byte] = found->second;
    for (size_t byte = 0; byte < 256; ++byte)
      if (file_.bytes[byte] < 0)
        root_.at("model").at("byte_fallback").refuse(str("model.vocab has no token of the byte ", byte));
  }

  void require_replace(const Node& step, std::string_view from, std::string_view to) {
    step.only({"type", "pattern", "content"});
    const Node pattern = step.at("pattern").only({"String"}).at("String");
    if (pattern.text() != from) pattern.refuse(str("Sheaf knows ", json_string(from), " here"));
    if (step.at("content").text() != to) step.at("content").refuse(str("Sheaf knows ", json_string(to), " here"));
  }

  void read_metaspace(const Node& step) {
    using Prefix = HuggingFaceFile::Prefix;
    step.only({"type", "replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    step.must_be("replacement", kSpaceMark, "Sheaf knows \u2581");
    step.must_be("str_rep", kSpaceMark, "Sheaf knows \u2581");
    const auto scheme = step.find("prepend_scheme"), old = step.find("add_prefix_space");
    const std::string named = scheme ? scheme->text() : old && !old->flag() ? "never" : "always";
    if (named != "always" && named != "first" && named != "never") scheme->refuse("Sheaf knows always, first and never");
    file_.prefix = named == "never" ? Prefix::none : named == "first" ? Prefix::text : Prefix::piece;
    file_.each_space = step.flag("split", true);
  }

  void read_decoder() {
    const Node decoder = root_.at("decoder");
    const auto steps = steps_of(decoder, "decoders");
    const std::vector<std::string> known = {"Replace", "ByteFallback", "Fuse", "Strip"};
    if (steps.size() < 3 || steps.size() > 4)
      decoder.refuse("Sheaf knows Replace, ByteFallback, Fuse and Strip, in this order");
    for (size_t i = 0; i < steps.size(); ++i)
      if (steps[i].type() != known[i]) steps[i].refuse(str("Sheaf knows ", known[i], " here"));
    require_replace(steps[0], kSpaceMark, " ");
    if ((file_.strips_prefix = steps.size() == 4)) {
      steps[3].only({"type", "content", "start", "stop"});
      steps[3].must_be("content", " ", "Sheaf knows a space");
      if (steps[3].at("start").integer() != 1 || steps[3].at("stop").integer() != 0)
        steps[3].refuse("Sheaf knows start 1 and stop 0");
    }
  }

  bool is_added(size_t id) {
    if (added_.empty()) {
      added_.resize(names_.size());
      for (const auto& token : file_.added) added_[static_cast<size_t>(token.id)] = true;
    }
    return added_[id];
  }

  Node root_;
  HuggingFaceFile file_;
  std::unordered_map<std::string, int32_t> ids_;  // of model.vocab
  std::vector<std::string> names_;                // by id, as in the file
  std::vector<bool> added_;
  bool byte_fallback_ = false;
};

}  // namespace

HuggingFaceFile HuggingFaceFile::parse(const Json& json, const std::string& where) { return Reader(json, where).read(); }

std::string with_spaces(std::string_view token) {
  std::string out;
  for (size_t mark; (mark = token.find(kSpaceMark)) != std::string_view::npos; token.remove_prefix(mark + kSpaceMark.size()))
    out.append(token.substr(0, mark)) += ' ';
  return out.append(token);
}

Json reduced_huggingface_file(const Json& json) {
  Json out = Json::Object{};
  for (const char* key : {"added_tokens", "normalizer", "pre_tokenizer", "decoder", "model"})
    if (const Json* value = json.find(key)) out.set(key, *value);
  return out;
}

}  // namespace sheaf::models
