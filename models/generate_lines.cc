#include "sheaf/models/generate_lines.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "sheaf/core/append_file.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/distributed/agreement.h"
#include "sheaf/distributed/gather_texts.h"
#include "sheaf/models/generate.h"
#include "sheaf/models/generate_many.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/saved_model.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/models/text_reader.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

constexpr int64_t kBatchesOfALap = 4;  // what is lost if the process is killed, and sorted by length before

struct Line {
  Json members;
  std::vector<int32_t> prompt;
};

std::string place_of(int64_t line, const std::string& file) { return str("line ", line, " of '", file, "'"); }

// All of the file's, in order.
std::vector<Line> read_lines(const std::string& text, const SavedModel& saved, const GenerateConfig& config, const GenerateLinesOptions& o) {
  std::vector<Line> lines;
  int64_t count = 0;
  for (const NumberedLine& one : numbered_lines(text, count)) {
    const std::string place = place_of(one.number, o.prompts);
    Line line{Json::parse(one.text, place), {}};
    check<DataError>(line.members.is_object(), "[generate] ", place, " is no object");
    for (const std::string& key : {o.field, std::string("ended"), std::string("sample")})
      check<DataError>(!line.members.find(key), "[generate] ", place, " has a member ", json_string(key), ", which the output's lines have: ",
                       key == o.field ? "give --field another name" : "leave it out");
    const Json* said = line.members.find(o.prompt_field);
    check<DataError>(said != nullptr, "[generate] ", place, " has no member ", json_string(o.prompt_field));
    line.prompt = encode_prompt(*saved.text.tokenizer, config, *said, place);
    if (config.chat.empty() && !config.special_tokens)  // what is rendered has what stands before a text
      line.prompt.insert(line.prompt.begin(), saved.text.before.begin(), saved.text.before.end());
    check<DataError>(std::ssize(line.prompt) <= saved.model.context, "[generate] ", place, ": the prompt has ", line.prompt.size(),
                     " tokens, the model's context ", saved.model.context);
    lines.push_back(std::move(line));
  }
  check<DataError>(!lines.empty(), "[generate] '", o.prompts, "' has no lines");
  return lines;
}

// Whole lines that are there. What a kill has left of another one is cut off; whatever does not follow from these prompts is left alone.
int64_t lines_that_are_there(const std::vector<Line>& lines, const GenerateLinesOptions& o) {
  if (!path_exists(o.output)) return 0;
  const std::string text = File::open(o.output).read_all();
  if (text.empty()) return 0;
  check<ConfigError>(o.resume, "[generate] '", o.output, "' is there: give --resume to go on behind its lines, or another --output");
  const size_t whole = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
  const auto count = static_cast<int64_t>(std::ranges::count(text, '\n'));
  const int64_t all = std::ssize(lines) * o.samples;
  check<DataError>(count <= all, "[generate] '", o.output, "' has ", count, " lines, and there are only ", all, " to write");
  if (count > 0) {
    const size_t begin = whole < 2 || text.rfind('\n', whole - 2) == std::string::npos ? 0 : text.rfind('\n', whole - 2) + 1;
    const Json last = Json::parse(std::string_view(text).substr(begin, whole - 1 - begin), place_of(count, o.output));
    const Line& line = lines[static_cast<size_t>((count - 1) / o.samples)];
    const Json* said = last.find(o.prompt_field);
    check<DataError>(last.find(o.field) && said && *said == line.members.at(o.prompt_field), "[generate] ", place_of(count, o.output),
                     " is not of the prompt that has its place in '", o.prompts, "'");
  }
  std::error_code error;
  std::filesystem::resize_file(o.output, whole, error);
  check<IoError>(!error, "[generate] cannot write '", o.output, "': ", error.message());
  return count;
}

// The ranks that have a share of the lines each: all, but for those that share layers.
struct Shares {
  Layout rows;
  bool speaks = true;  ///< for the ranks that have the same share
  explicit Shares(const Mesh& mesh) : rows(mesh.spec, Placement::shard(0)) {
    if (!mesh.spec || !mesh.spec->has_axis("model")) return;
    rows[mesh.spec->axis("model")] = Placement::replicate();
    speaks = mesh.coordinate("model") == 0;
  }
  int64_t ranks() const {
    int64_t n = 1;
    for (int a = 0; a < rows.num_axes(); ++a) n *= rows[a].is_shard() ? rows.mesh()->size(a) : 1;
    return n;
  }
  /// This rank's of `count`.
  Interval of(int64_t count) const {
    const Type all{kI64, {count}, rows};
    const int64_t begin = all.layout.local_start(all.shape)[0];
    return {begin, begin + all.local_shape()[0]};
  }
};

/// What a rank has made of its share.
struct Part {
  int64_t begin = 0, tokens = 0, ended = 0;
  std::string lines = {};
};

// Of all ranks, in order.
Part put_together(World& world, const Shares& shares, const Part& mine) {
  if (world.size() == 1) return mine;
  const std::string sent = shares.speaks ? Json(Json::Array{mine.begin, mine.tokens, mine.ended, mine.lines}).dump() : "";
  std::vector<Part> parts;
  for (const std::string& text : gather_texts(world.communicator(), sent, "generate")) {
    if (text.empty()) continue;
    const Json part = Json::parse(text, "a rank's lines");
    const Json::Array& a = part.as_array();
    parts.push_back({a[0].as_int(), a[1].as_int(), a[2].as_int(), a[3].as_string()});
  }
  std::ranges::stable_sort(parts, {}, &Part::begin);
  Part all;
  for (const Part& p : parts) all.tokens += p.tokens, all.ended += p.ended, all.lines += p.lines;
  return all;
}

}  // namespace

GenerateLinesProgress generate_lines(const std::string& folder, TrainConfig config, World& world, Device device, const GenerateLinesOptions& options,
                                     const std::function<void(const GenerateLinesProgress&)>& progress) {
  check<ConfigError>(options.samples > 0 && options.at_once > 0, "[generate] samples ", options.samples, ", at_once ", options.at_once,
                     ": both must be positive");
  require_agreement(world, "model", {{"what is in the folder", has_published_weights(folder) ? "published weights" : "a run"}});
  SavedModel saved = open_saved_model("generate", folder, checkpoint_group(world));
  saved.model.mtp_layers = 0;  // many are not drafted for
  saved.quantize("generate", config.generate.quantize);
  check<ConfigError>(saved.text.tokenizer != nullptr, "[generate] ", saved.no_tokenizer);
  const Tokenizer& tokenizer = *saved.text.tokenizer;
  const std::string text = File::open<DataError>(options.prompts).read_all();
  const std::vector<Line> lines = read_lines(text, saved, config.generate, options);
  const std::vector<int32_t> ends = ends_of(tokenizer, config.generate, saved.text.ends);
  // Rank 0 writes; the others go by what it has found.
  int64_t there = 0;
  std::optional<AppendFile> out;
  if (world.rank() == 0) there = lines_that_are_there(lines, options), out.emplace("generate", options.output);
  if (world.size() > 1) there = std::stoll(gather_texts(world.communicator(), str(there), "generate")[0]);
  require_agreement(world, "prompts", {{"the model", saved.digest, str("'", saved.origin, "' (XXH3 ", saved.digest, ")")},
                                       {"the prompts", digest_of_text(text).xxh3}});

  const DeviceScope scope(device);
  config.model = saved.model;
  config.train.dtype = config.generate.dtype;
  const ShardedModel sharded = sharded_model(config, saved.vocab, world, {.frozen = true});
  materialize(*sharded.model, device, {.values = false});
  saved.load(*sharded.model);

  const Shares shares(sharded.mesh);
  GenerateLinesProgress now{.done = there, .all = std::ssize(lines) * options.samples};
  const int64_t lap = options.at_once * shares.ranks() * kBatchesOfALap;
  if (progress) progress(now);
  while (now.done < now.all) {
    const int64_t count = std::min(lap, now.all - now.done);
    const Interval mine = shares.of(count);
    std::vector<std::vector<int32_t>> prompts;
    for (int64_t i = now.done + mine.begin; i < now.done + mine.end; ++i) prompts.push_back(lines[static_cast<size_t>(i / options.samples)].prompt);
    const std::vector<Continuation> made =
        generate_many(*sharded.model, prompts, config.generate,
                      {.context = saved.model.context, .vocab = tokenizer.vocab_size(), .ends = ends, .at_once = options.at_once,
                       .rows = shares.rows, .first = now.done + mine.begin});
    Part part{.begin = mine.begin};
    for (int64_t i = 0; i < mine.size(); ++i) {
      const Continuation& c = made[static_cast<size_t>(i)];
      const int64_t number = now.done + mine.begin + i;
      Json line = lines[static_cast<size_t>(number / options.samples)].members;
      line.set(options.field, tokenizer.decode_more(c.tokens));
      line.set("ended", c.ended);
      if (options.samples > 1) line.set("sample", number % options.samples);
      part.lines += line.dump() + "\n";
      part.tokens += std::ssize(c.tokens), part.ended += c.ended;
    }
    part = put_together(world, shares, part);
    if (out) out->write(part.lines), out->sync();
    now.done += count, now.tokens += part.tokens, now.ended += part.ended;
    if (progress) progress(now);
  }
  return now;
}

}  // namespace sheaf::models
