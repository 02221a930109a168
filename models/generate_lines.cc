#include "sheaf/models/generate_lines.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <vector>

#include "sheaf/core/append_file.h"
#include "sheaf/core/file.h"
#include "sheaf/core/file_lock.h"
#include "sheaf/core/json.h"
#include "sheaf/core/parallel.h"
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

constexpr int64_t kBatchesOfALap = 4;  // of each rank: lost if the process is killed; sorted by length before

struct Line {
  Json members;
  std::vector<int32_t> prompt;
};

std::string place_of(int64_t line, const std::string& file) { return str("line ", line, " of '", file, "'"); }

void check_options(const GenerateLinesOptions& o) {
  check<ConfigError>(o.samples > 0 && o.at_once > 0, "[generate] samples ", o.samples, ", at_once ", o.at_once, ": both must be positive");
  check<ConfigError>(!o.field.empty() && o.field != "ended" && o.field != "sample" && o.field != o.prompt_field, "[generate] --field ",
                     json_string(o.field), ": lines need it for what follows a prompt");
}

// Its members and its prompt, as tokens.
Line read_line(const NumberedLine& one, const SavedModel& saved, const GenerateConfig& config, const GenerateLinesOptions& o) {
  const std::string place = place_of(one.number, o.prompts);
  Line line{Json::parse(one.text, place), {}};
  check<DataError>(line.members.is_object(), "[generate] ", place, " is no object");
  std::vector<std::string> taken = {o.field, "ended"};
  if (o.samples > 1) taken.push_back("sample");
  for (const std::string& key : taken)
    check<DataError>(!line.members.find(key), "[generate] ", place, " has a member ", json_string(key), ", which the output's lines have: ",
                     key == o.field ? "give --field another name" : "leave it out");
  const Json* said = line.members.find(o.prompt_field);
  check<DataError>(said != nullptr, "[generate] ", place, " has no member ", json_string(o.prompt_field));
  line.prompt = encode_prompt(*saved.text.tokenizer, config, *said, place);
  begin_as_text(line.prompt, config, saved.text.before);
  check<DataError>(std::ssize(line.prompt) <= saved.model.context, "[generate] ", place, ": the prompt has ", line.prompt.size(),
                   " tokens, the model's context ", saved.model.context);
  return line;
}

// All lines of the file, in order.
std::vector<Line> read_lines(const std::string& text, const SavedModel& saved, const GenerateConfig& config, const GenerateLinesOptions& o) {
  int64_t count = 0;
  const std::vector<NumberedLine> found = numbered_lines(text, count);
  check<DataError>(!found.empty(), "[generate] '", o.prompts, "' has no lines");
  std::vector<Line> lines(found.size());
  parallel_for(std::ssize(found), 16, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) lines[i] = read_line(found[i], saved, config, o);
  });
  return lines;
}

// The beginning of output line number `i`.
std::string beginning_of(const std::vector<Line>& lines, int64_t i, const GenerateLinesOptions& o) {
  std::string text = lines[static_cast<size_t>(i / o.samples)].members.dump();
  text.pop_back();
  return text + "," + json_string(o.field) + ":\"";
}

struct There {
  int64_t lines = 0, bytes = 0;  ///< whole lines of the output, and their bytes
};

// The existing output. A partial line left by a kill is not counted; anything else that does not match these prompts is an error.
There what_is_there(const std::vector<Line>& lines, const GenerateLinesOptions& o) {
  const std::string text = File::open(o.output).read_all();
  if (text.empty()) return {};
  check<ConfigError>(o.resume, "[generate] '", o.output, "' is there: give --resume to go on after its lines, or another --output");
  const int64_t count = std::ranges::count(text, '\n'), all = std::ssize(lines) * o.samples;
  check<DataError>(count <= all, "[generate] '", o.output, "' has ", count, " lines, and there are only ", all, " to write");
  const size_t whole = count > 0 ? text.rfind('\n') + 1 : 0;
  const auto wrong = [&](int64_t line) {
    fail<DataError>("[generate] ", place_of(line, o.output), " is not what follows the prompt that has its place in '", o.prompts, "'");
  };
  if (count > 0) {
    const size_t before = whole < 2 ? std::string::npos : text.rfind('\n', whole - 2), begin = before == std::string::npos ? 0 : before + 1;
    const std::string_view last = std::string_view(text).substr(begin, whole - 1 - begin);
    if (!last.starts_with(beginning_of(lines, count - 1, o))) wrong(count);
    const Json members = Json::parse(last, place_of(count, o.output)), number = (count - 1) % o.samples;
    const Json* sample = members.find("sample");
    const Json* expected = o.samples > 1 ? &number : lines[static_cast<size_t>(count - 1)].members.find("sample");
    if (!members.find("ended") || !sample != !expected || (sample && *sample != *expected)) wrong(count);
  }
  if (const std::string_view rest = std::string_view(text).substr(whole); !rest.empty()) {
    const std::string begins = count < all ? beginning_of(lines, count, o) : "";
    const size_t common = std::min(begins.size(), rest.size());
    if (common == 0 || rest.substr(0, common) != std::string_view(begins).substr(0, common)) wrong(count + 1);
  }
  return {count, static_cast<int64_t>(whole)};
}

// Truncates the output after those lines.
void cut_off(const There& there, const std::string& path) {
  std::error_code error;
  if (std::filesystem::file_size(path, error) == static_cast<uintmax_t>(there.bytes)) return;
  std::filesystem::resize_file(path, static_cast<uintmax_t>(there.bytes), error);
  check<IoError>(!error, "[generate] cannot write '", path, "': ", error.message());
}

// The ranks that each have a share of the lines: all, except those that share layers.
struct Shares {
  Layout rows;
  bool speaks = true;  ///< it represents the ranks that have the same share
  explicit Shares(const Mesh& mesh) : rows(mesh.spec, Placement::shard(0)) {
    if (!mesh.spec || !mesh.spec->has_axis("model")) return;
    rows[mesh.spec->axis("model")] = Placement::replicate();
    speaks = mesh.coordinate("model") == 0;
  }
  /// This rank's of `count`.
  Interval of(int64_t count) const {
    const Type all{kI64, {count}, rows};
    const int64_t begin = all.layout.local_start(all.shape)[0];
    return {begin, begin + all.local_shape()[0]};
  }
};

/// A rank's results for its share.
struct Part {
  int64_t begin = 0, tokens = 0, ended = 0;
  std::string lines = {};
};

// The parts of all ranks, in order.
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
  check_options(options);
  require_agreement(world, "model", {{"what is in the folder", has_published_weights(folder) ? "published weights" : "a run"}});
  SavedModel saved = open_saved_model("generate", folder, checkpoint_group(world));
  saved.model.mtp_layers = 0;  // batches do not use drafts
  saved.quantize("generate", config.generate.quantize);
  saved.expect_tokenizer("[generate] ");
  const Tokenizer& tokenizer = *saved.text.tokenizer;
  const std::string text = File::open<DataError>(options.prompts).read_all();
  const std::vector<Line> lines = read_lines(text, saved, config.generate, options);
  const std::vector<int32_t> ends = ends_of(tokenizer, config.generate, saved.text.ends);
  wait_for_all(world);  // each has read at the speed of its disk, as below
  require_agreement(world, "prompts", {{"the model", saved.digest, str("'", saved.origin, "' (XXH3 ", saved.digest, ")")},
                                       {"the prompts", digest_of_text(text).xxh3}});
  // Before anything is written: not every model can be sharded in every way.
  const DeviceScope scope(device);
  config.model = saved.model;
  config.train.dtype = config.generate.dtype;
  const ShardedModel sharded = sharded_model(config, saved.vocab, world, {.frozen = true});

  // Rank 0 writes; the others use its findings.
  There there;
  std::optional<FileLock> lock;
  std::optional<AppendFile> out;
  if (world.rank() == 0) {
    std::error_code none;
    check<ConfigError>(!std::filesystem::equivalent(options.output, options.prompts, none), "[generate] --output is the file of prompts");
    if (lock.emplace(options.output).state() == FileLock::State::elsewhere)
      fail<ConfigError>("[generate] another `sheaf generate` is writing to '", options.output, "': wait until it has ended");
    there = what_is_there(lines, options), cut_off(there, options.output), out.emplace("generate", options.output);
  }
  if (world.size() > 1) there.lines = std::stoll(gather_texts(world.communicator(), str(there.lines), "generate")[0]);
  GenerateLinesProgress now{.done = there.lines, .all = std::ssize(lines) * options.samples};
  if (now.done == now.all) {
    if (progress) progress(now);
    return now;
  }

  materialize(*sharded.model, device, {.values = false});
  saved.load(*sharded.model);
  wait_for_all(world);

  const Shares shares(sharded.mesh);
  const int64_t lap = options.at_once * world.size() * kBatchesOfALap;
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
