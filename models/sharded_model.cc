#include "sheaf/models/sharded_model.h"

#include <algorithm>

#include "sheaf/models/language_model.h"
#include "sheaf/models/stage_cut.h"
#include "sheaf/nn/fp8.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

/// Whether the rest of the model, which the expert axis does not shard, is sharded over that axis by the strategy.
bool is_over_experts(int data, int experts, int context) { return data == 1 && experts > 1 && experts >= context; }

ShardOptions shard_options(const TrainConfig& config, const Mesh& mesh, Decoder& model, const StageCut& cut) {
  const auto axis_if_any = [&](const char* name) { return mesh.spec->has_axis(name) ? name : ""; };
  if (config.sharding.experts > 1 && config.model.experts == 0)
    fail<ConfigError>("[train] sharding.experts ", config.sharding.experts, ": the model has no mixtures of experts (model.experts)");
  ShardOptions options;
  const auto ranks = [&](const char* name) { return mesh.spec->has_axis(name) ? mesh.spec->size(mesh.spec->axis(name)) : 1; };
  options.axis = mesh.spec->has_axis("data") ? "data" : "context";
  if (is_over_experts(ranks("data"), ranks("expert"), ranks("context"))) options.axis = "expert";
  options.replica_axis = axis_if_any("replica");
  options.secondary = config.sharding.secondary;
  options.expert_axis = axis_if_any("expert");
  options.context_axis = axis_if_any("context");
  options.context_comm = nn::context_comm_from(config.sharding.context_comm);
  options.tensor_axis = axis_if_any("model");
  options.stage_axis = axis_if_any("stage");
  options.strategy = config.sharding.strategy;
  options.prefetch_bytes = config.sharding.prefetch_bytes;
  options.offload = config.train.offload_parameters;
  if (options.offload && config.sharding.strategy == "replicate")
    fail<ConfigError>("[train] train.offload_parameters goes with a sharding.strategy that shards, with one rank too, not with replicate");
  options.compute_dtype = compute_dtype_from("train", config.train.dtype);
  options.gather_int8 = config.sharding.gather_int8;
  options.reduce_int8 = config.sharding.reduce_dtype == "int8";
  options.whole_blocks = config.train.islands > 1 && config.train.outer_dtype == "int8";
  if (config.sharding.reduce_dtype == "bf16") options.reduce_dtype = kBF16;
  else check<ConfigError>(options.reduce_int8 || config.sharding.reduce_dtype == "f32", "[train] sharding.reduce_dtype is ",
                          config.sharding.reduce_dtype, ", not f32, bf16 or int8");
  if (const int stages = ranks("stage"); stages > 1) {
    if (config.sharding.units != "block")
      fail<ConfigError>("[train] sharding.units ", config.sharding.units, ": the stages of sharding.pipeline ", stages, " are of blocks");
    options.stage_of = [&model, cut](const nn::Module& m, const std::string&) { return model.stage_of(m, cut); };
  }
  // What a pipeline would have in one stage, also without a pipeline: embeddings are large, and each is used at one end of the step.
  if (config.sharding.units == "block")
    options.units = nn::units_where([&model, cut](nn::Module& m, const std::string&) { return model.stage_of(m, cut) >= 0; });
  else if (config.sharding.units == "count")
    options.units = nn::units_of_at_least(config.sharding.min_parameters);
  return options;
}

Fp8 fp8_from(const std::string& name) {
  if (name == "activations") return Fp8::activations;
  if (name == "all") return Fp8::all;
  check<ConfigError>(name == "none", "[train] train.fp8 is ", name, ", not none, activations or all");
  return Fp8::none;
}

// Ranks that share a layer are neighbours, then those that share a sequence, then those that share experts, then those that share the
// model, then its stages: the largest transfers, which nothing hides, are between GPUs of one host. The parameters are sharded over
// "data" or, if those are more ranks, over "context", or over "expert" if there is no other rank for "data"; along the others the
// model is replicated.
std::vector<MeshSpec::Axis> axes_for(const ShardingConfig& sharding, int ranks) {
  if (sharding.replicas > 1 && sharding.strategy == "replicate")
    fail<ConfigError>("[train] sharding.replicas ", sharding.replicas, ": strategy replicate has one on each rank already");
  int rest = ranks;  // for "data"
  const auto divide = [&](const char* key, int64_t by, const char* into) {
    if (by < 1 || rest % by != 0)
      fail<ConfigError>("[train] ", key, " ", by, ": ", rest, rest == 1 ? " rank cannot" : " ranks cannot", " be divided into ",
                        into, rest == ranks ? "" : str("; all ", ranks, " are for sharding.replicas times sharding.context times "
                                               "sharding.tensor times sharding.experts times sharding.pipeline"));
    rest /= static_cast<int>(by);
    return static_cast<int>(by);
  };
  int replicas = divide("sharding.replicas", sharding.replicas, "as many equal groups");
  const int tensor = divide("sharding.tensor", sharding.tensor, "groups of so many");
  const int context = divide("sharding.context", sharding.context, "groups of so many");
  const int stages = divide("sharding.pipeline", sharding.pipeline, "groups of so many");
  const int experts = divide("sharding.experts", sharding.experts, "groups of so many");
  const bool goes_round = sharding.pipeline_runs != 1;
  if (goes_round && (sharding.pipeline_runs < 1 || stages == 1))
    fail<ConfigError>("[train] sharding.pipeline_runs ", sharding.pipeline_runs, ": runs of blocks are those of several stages "
                      "(sharding.pipeline), which is ", stages);
  if (sharding.pipeline_schedule != "1f1b" && stages == 1)
    fail<ConfigError>("[train] sharding.pipeline_schedule ", sharding.pipeline_schedule, ": it is about the turns of several stages "
                      "(sharding.pipeline), which is ", stages);
  const bool over_experts = is_over_experts(rest, experts, context), over_context = context > rest;
  if (over_context) replicas *= rest;
  if (sharding.secondary && replicas == 1 && (context == 1 || (over_context && !over_experts)) && (experts == 1 || over_experts))
    fail<ConfigError>("[train] sharding.secondary needs several groups of ranks: sharding.replicas, or sharding.experts or a "
                      "sharding.context that is not what the parameters are cut over");
  std::vector<MeshSpec::Axis> axes;
  if (stages != 1) axes.push_back({"stage", stages, /*chain=*/true, /*ring=*/goes_round});
  if (replicas != 1) axes.push_back({"replica", replicas});
  if (!over_context) axes.push_back({"data", rest});
  if (experts != 1) axes.push_back({"expert", experts});
  if (context != 1) axes.push_back({"context", context});
  if (tensor != 1) axes.push_back({"model", tensor});
  if (axes.size() > kMaxAxes)
    fail<ConfigError>("[train] a mesh has at most ", kMaxAxes, " axes: stages, replicas, data, experts, context and tensor are ", axes.size());
  return axes;
}

// Islands, which communicate least, are the ranks farthest from each other: the first axis.
std::pair<Mesh, Mesh> meshes_for(const TrainConfig& config, World& world) {
  const int64_t islands = config.train.islands;
  if (islands == 1) return {world.mesh(axes_for(config.sharding, world.size())), {}};
  std::vector<MeshSpec::Axis> axes = axes_for(config.sharding, ranks_of_island("train", config, world.size()));
  if (axes.size() == kMaxAxes)
    fail<ConfigError>("[train] a mesh has at most ", kMaxAxes, " axes, of which each island has ", axes.size(), " and train.islands is one more");
  axes.insert(axes.begin(), {"island", static_cast<int>(islands)});
  const Mesh all = world.mesh(std::move(axes));
  return {world.slice(all, "island"), all};
}

}  // namespace

int ranks_of_island(const char* context, const TrainConfig& config, int world) {
  const int64_t islands = config.train.islands;
  if (islands < 1 || world % islands != 0)
    fail<ConfigError>("[", context, "] train.islands ", islands, ": ", world, world == 1 ? " rank cannot" : " ranks cannot", " be divided into as "
                      "many equal groups");
  return world / static_cast<int>(islands);
}

ShardedModel sharded_model(const TrainConfig& config, int64_t vocab, World& world, const ShardedModelOptions& options) {
  const auto [mesh, islands] = meshes_for(config, world);
  ShardedModel out{.mesh = mesh,
                   .islands = islands,
                   .cut = options.blocks.empty() ? stage_cut(config, vocab) : StageCut(options.blocks, static_cast<int>(config.sharding.pipeline)),
                   .model = make_language_model(model_of(config), vocab, options.frozen),
                   .layers = config.model.layers,
                   .runs = config.sharding.pipeline_runs};
  const Fp8 products = fp8_from(config.train.fp8);
  if (products != Fp8::none && nn::use_fp8(*out.model, products) == 0)
    fail<ConfigError>("[train] train.fp8 ", config.train.fp8, ": no layer's widths are multiples of 16");
  shard(*out.model, out.mesh, shard_options(config, out.mesh, *out.model, out.cut));
  return out;
}

int64_t ShardedModel::end_of_run(int64_t run, int64_t of) const {
  return run + 1 == of ? layers : cut.end_of_run(run, mesh.coordinate("stage"));
}

void ShardedModel::sum_over_islands(std::span<double> values) const {
  if (!islands.spec) return;
  Communicator& lane = islands.runtime->gather_lane(islands.spec->axis("island"));
  lane.all_reduce(values.data(), std::ssize(values), kF64, Reduction::sum, "islands").sync();
}

std::vector<Tensor> ShardedModel::losses(const StepInputs& inputs, const CrossEntropyOptions& options) const {
  const int64_t micro_batches = inputs.num_micro_batches();
  // Outside of a recording a sender waits until its data is received, so one stage of a ring stays free.
  const int64_t at_once = runs > 1 ? mesh.size("stage") - 1 : 1;
  std::vector<Tensor> out(static_cast<size_t>(micro_batches));
  for (int64_t begin = 0; begin < micro_batches; begin += at_once) {
    const int64_t end = std::min(begin + at_once, micro_batches);
    std::vector<ForwardProgress> forwards(static_cast<size_t>(at_once));
    for (int64_t run = 0; run < runs; ++run)
      for (int64_t micro = begin; micro < end; ++micro) {
        const StepInputs::MicroBatch& batch = inputs.micro_batch(micro);
        out[static_cast<size_t>(micro)] =
            model->loss_until(end_of_run(run, runs), forwards[static_cast<size_t>(micro - begin)], batch.tokens, batch.targets, options);
      }
  }
  return out;
}

}  // namespace sheaf::models
