// The estimated time of a step: from the model's operations, with independently derived times.
#include "sheaf/models/step_time.h"

#include <gtest/gtest.h>

#include <set>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/autograd/work.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/models/flops.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

class StepTimes : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kernels::kHasCuda) GTEST_SKIP() << "estimates are of GPUs, for which this build has no kernels";
  }
};

models::TrainConfig config_of(const std::string& type) {
  models::TrainConfig c = tiny_config();
  c.model = type == "mixture" ? tiny_mixture(1.1) : tiny_model(type, 4, 4);
  if (type == "latent") c.model.v_head_dim = 9;  // as wide as keys: each of the backward's five products is a fifth
  c.model.layers = 4;
  c.model.dropout = 0;
  c.train.batch = 24;
  return c;
}

struct Operations {
  double products = 0, attention = 0;
};
// Of rank 0.
Operations operations_of(const models::TrainConfig& c, int world) {
  const models::Plan plan = models::plan_step(c, c.model.vocab, 0, world, 1, "nccl", Device::cuda());
  Operations out;
  for (NodeId id = 0; id < plan.tape.num_nodes(); ++id) {
    const Work w = work_of(plan.tape, plan.tape.node(id));
    out.products += w.products;
    // The field counts four products of attention's backward, without that of the scores, which is repeated there.
    out.attention += w.attention_forward + w.attention_backward * 4 / 5;
  }
  return out;
}

TEST_F(StepTimes, OperationsOnTheTapeAreThoseOfTheModel) {
  for (const char* type : {"gpt2", "llama", "latent"})
    for (const char* strategy : {"full_shard", "zero1", "replicate"})
      for (const int world : {1, 2, 4}) {
        models::TrainConfig c = config_of(type);
        c.model.vocab = 48;
        c.train.micro_batches = 3;
        c.sharding.strategy = strategy;
        const Operations counted = operations_of(c, world);
        EXPECT_DOUBLE_EQ(world * (counted.products + counted.attention), models::flops_per_step(c)) << type << ' ' << world;
        c.train.recompute = "selective";
        EXPECT_EQ(operations_of(c, world).products, counted.products);
      }
}

// Each MTP layer adds a block, the ops before it, and a head.
TEST_F(StepTimes, LayersForFurtherTokensHaveTheOperationsOfTheModel) {
  for (const char* type : {"llama", "latent"})
    for (const int64_t mtp_layers : {1, 2}) {
      models::TrainConfig c = config_of(type);
      c.model.vocab = 48, c.model.mtp_layers = mtp_layers;
      c.model.window = mtp_layers == 2 ? 2 : 0, c.model.full_attention_every = mtp_layers == 2 ? 2 : 0;
      const Operations counted = operations_of(c, 2);
      EXPECT_DOUBLE_EQ(2 * (counted.products + counted.attention), models::flops_per_step(c)) << type << ' ' << mtp_layers;
    }
}

// Frozen weights have no gradients; nor, in the first block, does attention's input.
TEST_F(StepTimes, AdaptersHaveTheOperationsOfTheModel) {
  for (const char* type : {"gpt2", "llama"})
    for (const char* layers : {"all", "attention", "mlp"}) {
      models::TrainConfig c = config_of(type);
      c.model.vocab = 48, c.model.lora_rank = 3, c.model.lora_layers = layers;
      const models::ModelConfig m = models::resolved(c.model);
      const auto tokens = static_cast<double>(m.context * c.train.batch);
      double unneeded = 2 * tokens * static_cast<double>(m.width * (m.heads + 2 * m.kv_heads) * m.head_dim);
      if (layers == std::string("mlp"))  // nor do attention and the input of an MLP
        unneeded += 2 * tokens * static_cast<double>(m.width * m.heads * m.head_dim) +
                    2 * tokens * static_cast<double>((type == std::string("gpt2") ? 1 : 2) * m.width * m.mlp_width) +
                    tokens * 4 * static_cast<double>(m.context * m.heads * m.head_dim);
      else unneeded += 2 * tokens * static_cast<double>(m.width * m.lora_rank);
      if (layers == std::string("mlp")) unneeded += 2 * tokens * static_cast<double>((type == std::string("gpt2") ? 1 : 2) * m.width * m.lora_rank);
      const Operations counted = operations_of(c, 1);
      EXPECT_DOUBLE_EQ(counted.products + counted.attention + unneeded, models::flops_per_step(c)) << type << ' ' << layers;
    }
}

// Of the keys that each block's window leaves.
TEST_F(StepTimes, WindowsHaveTheOperationsOfTheirKeys) {
  for (const int64_t every : {0, 2, 3}) {
    models::TrainConfig c = config_of("llama");
    c.model.vocab = 48;
    const Operations all = operations_of(c, 1);
    c.model.window = c.model.context;
    EXPECT_EQ(operations_of(c, 1).attention, all.attention);
    c.model.window = 2, c.model.full_attention_every = every;
    const Operations counted = operations_of(c, 1);
    EXPECT_DOUBLE_EQ(counted.products + counted.attention, models::flops_per_step(c)) << every;
    EXPECT_EQ(counted.products, all.products);
    // Of T tokens each attends to two, except the first; without a window to T / 2 on average.
    const auto context = static_cast<double>(c.model.context), full = every ? static_cast<double>(4 / every) : 0;
    EXPECT_DOUBLE_EQ(counted.attention, all.attention * (full + (4 - full) * (2 - 2 / context) / (context / 2)) / 4);
  }
}

TEST_F(StepTimes, RanksThatShareLayersShareTheirOperations) {
  for (const char* type : {"gpt2", "llama", "latent"}) {
    models::TrainConfig c = config_of(type);
    c.model.vocab = 48;
    c.model.context = 8, c.model.mlp_width = 64;  // four even parts
    const Operations alone = operations_of(c, 1);
    c.sharding.context = 4;
    EXPECT_DOUBLE_EQ(4 * operations_of(c, 4).attention, alone.attention);
    EXPECT_DOUBLE_EQ(4 * operations_of(c, 4).products, alone.products);
    c.sharding.context = 1, c.sharding.tensor = 4;
    EXPECT_DOUBLE_EQ(4 * operations_of(c, 4).attention, alone.attention);
    // A tensor-parallel head computes its logits a second time.
    const double logits = 2 * static_cast<double>(c.train.batch * c.model.context * c.model.width * c.model.vocab);
    EXPECT_DOUBLE_EQ(4 * operations_of(c, 4).products, alone.products + logits);
  }
}

TEST_F(StepTimes, StagesHaveTheOperationsOfTheirBlocks) {
  models::TrainConfig c = config_of("llama");
  c.model.vocab = 48;
  c.model.tie_embeddings = false;
  const Operations alone = operations_of(c, 1);
  c.sharding.pipeline = 4;
  c.train.micro_batches = 4;
  const double head = 6 * static_cast<double>(c.train.batch * c.model.context * c.model.width * c.model.vocab);
  EXPECT_DOUBLE_EQ(4 * operations_of(c, 4).products, alone.products - head);
}

// By default operands are read and results written once; results that are accumulated into are read, too.
TEST_F(StepTimes, BytesAreThoseOfOperandsAndResults) {
  for (const bool tied : {false, true}) {
    models::TrainConfig c = config_of("llama");
    c.model.tie_embeddings = tied;
    const models::Plan plan = models::plan_step(c, 48, 0, 1, 1, "nccl", Device::cuda());
    const auto bytes = [&](ValueId v) {
      return static_cast<double>(plan.tape.type(v).shape.numel()) * static_cast<double>(size_of(plan.tape.type(v).dtype));
    };
    int seen = 0;
    for (NodeId id = 0; id < plan.tape.num_nodes(); ++id) {
      const Node& n = plan.tape.node(id);
      const Work work = work_of(plan.tape, n);
      if (n.num_outputs && plan.tape.value(plan.tape.output(n)).view_of >= 0) {
        EXPECT_EQ(work.bytes, 0) << plan.tape.op_name(n);
      }
      if (plan.tape.op_name(n) != "embedding_backward") continue;
      ++seen;
      EXPECT_EQ((n.flags & Node::kAdds) != 0, tied);
      const auto in = plan.tape.inputs(n);
      EXPECT_EQ(work.bytes, bytes(in[0]) + bytes(in[1]) + (tied ? 2 : 1) * bytes(plan.tape.output(n)));
    }
    EXPECT_EQ(seen, 1);
  }
}

// Except a block's last product, whose result is not needed again.
TEST_F(StepTimes, RecomputingIsWorkToo) {
  models::TrainConfig c = config_of("llama");
  c.model.vocab = 48;
  const double once = operations_of(c, 1).products;
  c.train.recompute = "block";
  const models::ModelConfig m = models::resolved(c.model);
  const double tokens = static_cast<double>(c.train.batch * m.context), queries = static_cast<double>(m.heads * m.head_dim);
  const double forward = 2 * static_cast<double>(m.layers) *
                         (static_cast<double>(m.width) * (2 * queries + 2 * static_cast<double>(m.kv_heads * m.head_dim)) +
                          2 * static_cast<double>(m.width * m.mlp_width));
  EXPECT_DOUBLE_EQ(operations_of(c, 1).products - once, tokens * forward);
}

// Each stage's timeline if only attention takes time, 1 forward and 3 backward, of which `of_weight` is its last weight's gradient.
std::vector<Timeline> seconds_of_attention(const models::TrainConfig& c, double of_weight = 0) {
  const Machine machine = machine_named("h200");
  const auto stages = static_cast<int>(c.sharding.pipeline);
  std::vector<models::Plan> plans;
  for (int rank = 0; rank < stages; ++rank)
    plans.push_back(models::plan_step(c, 48, rank, stages, 1, "nccl", Device::cuda(), &machine));
  std::vector<RankTimes> times;
  for (models::Plan& plan : plans) {
    plan.times.tape = &plan.tape;
    plan.times.issue_seconds = 0;
    for (NodeId id = 0; id < plan.tape.num_nodes(); ++id) {
      NodeTime& time = plan.times.nodes[static_cast<size_t>(id)];
      const std::string name = plan.tape.op_name(plan.tape.node(id));
      time.travels = 0;
      const bool weight = name == "linear_weight_gradient" && plan.tape.path(plan.tape.node(id)).ends_with("attention.projection");
      time.computes = !time.runs ? 0 : name == "packed_attention" ? 1 : name == "packed_attention_backward" ? 3 - of_weight : weight ? of_weight : 0;
    }
    times.push_back(plan.times);
  }
  return clock(times);
}

// 1F1B: with M micro-batches through N stages the last one ends after (M + N - 1) turns of a forward and a backward.
TEST_F(StepTimes, APipelineTakesAsManyTurnsAsMicroBatchesAndStagesAskFor) {
  for (const int stages : {1, 2, 4})
    for (const int64_t micro_batches : {4, 8, 12}) {
      models::TrainConfig c = config_of("llama");
      c.sharding.pipeline = stages;
      c.train.micro_batches = micro_batches;
      const double turn = 4.0 * static_cast<double>(c.model.layers) / stages;
      for (const Timeline& line : seconds_of_attention(c)) {
        EXPECT_EQ(line.computing, turn * static_cast<double>(micro_batches));
        EXPECT_EQ(line.seconds, turn * static_cast<double>(micro_batches + stages - 1)) << stages << ' ' << micro_batches;
      }
    }
}

// Of that the stages wait (N - 1) (F + B - W), if gradients of weights are deferred.
TEST_F(StepTimes, StagesWaitLessWhereGradientsOfWeightsComeLater) {
  for (const int stages : {2, 3, 4})
    for (const int runs : {1, 2})
      for (const int64_t micro_batches : {stages, 2 * stages, 5 * stages}) {
        models::TrainConfig c = config_of("llama");
        c.model.layers = 2 * stages * runs;
        c.model.tie_embeddings = stages == 3;
        c.sharding.pipeline = stages, c.sharding.pipeline_runs = runs, c.sharding.pipeline_schedule = "zero_bubble";
        c.sharding.pipeline_head = 0;
        c.train.micro_batches = micro_batches, c.train.batch = 2 * micro_batches;
        double last = 0;
        for (const Timeline& line : seconds_of_attention(c, 1)) {
          EXPECT_EQ(line.computing, 4.0 * 2 * runs * static_cast<double>(micro_batches));
          last = std::max(last, line.seconds);
        }
        EXPECT_EQ(last, 4.0 * 2 * runs * static_cast<double>(micro_batches) + 2.0 * 2 * (stages - 1))
            << stages << ' ' << runs << ' ' << micro_batches;
      }
}

// In a ring of two, forward and backward sends use different links.
TEST_F(StepTimes, ARingHasALinkEachWay) {
  models::TrainConfig c = config_of("llama");
  c.sharding.pipeline = c.sharding.pipeline_runs = 2;
  c.train.micro_batches = 2;
  const Machine machine = machine_named("h200");
  std::set<std::string> lanes;
  for (int rank = 0; rank < 2; ++rank)
    for (const std::string& lane : models::plan_step(c, 48, rank, 2, 1, "nccl", Device::cuda(), &machine).times.lanes)
      if (lane.find(" to ") != std::string::npos) lanes.insert(lane);
  EXPECT_EQ(lanes, (std::set<std::string>{"rank 0 to 1", "rank 0 back to 1", "rank 1 to 0", "rank 1 back to 0"}));
}

// With V runs of blocks a turn takes a V-th of that: (M V + N - 1) of them.
TEST_F(StepTimes, RunsOfBlocksMakeTurnsShorter) {
  for (const auto& [stages, runs] : {std::pair{2, 2}, {2, 4}, {4, 2}, {3, 3}})
    for (const int64_t rounds : {1, 2, 3}) {
      models::TrainConfig c = config_of("llama");
      c.model.layers = 2 * stages * runs;
      c.sharding.pipeline = stages, c.sharding.pipeline_runs = runs;
      c.train.micro_batches = rounds * stages;
      const double turn = 4.0 * 2;
      for (const Timeline& line : seconds_of_attention(c)) {
        EXPECT_EQ(line.computing, turn * static_cast<double>(c.train.micro_batches * runs));
        EXPECT_EQ(line.seconds, turn * static_cast<double>(c.train.micro_batches * runs + stages - 1)) << stages << ' ' << runs << ' ' << rounds;
      }
    }
}

Machine slow_links(int ranks_per_host) {
  Machine m = machine_named("h200");
  m.ranks_per_host = ranks_per_host;
  m.within = {1e3, 0};
  m.between = {10, 0};
  return m;
}

// Seconds and bytes of the first transfer of this name.
std::pair<double, double> first_transfer(models::TrainConfig c, int world, const Machine& machine, const std::string& name) {
  const models::Plan plan = models::plan_step(c, 48, 0, world, 1, "nccl", Device::cuda(), &machine);
  for (NodeId id = 0; id < plan.tape.num_nodes(); ++id) {
    const auto found = transfers(plan.tape, plan.tape.node(id));
    if (found.empty() || found[0].name != name) continue;
    return {plan.times.nodes[static_cast<size_t>(id)].travels, static_cast<double>(plan.tape.wire_bytes(plan.tape.node(id)))};
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

TEST_F(StepTimes, TransfersTakeTheLinksBetweenTheirRanks) {
  const models::TrainConfig c = config_of("llama");
  const auto near = [](double a, double b) { EXPECT_NEAR(a, b, 2e-3 * b); };  // slices are padded, bytes are those of rank 0
  for (const char* name : {"all_gather", "reduce_scatter"}) {
    const auto [inside, bytes] = first_transfer(c, 4, slow_links(4), name);
    near(inside, bytes / 1e3);
    // Two hosts of two ranks: half of everything comes in through two links.
    near(first_transfer(c, 4, slow_links(2), name).first, bytes / 3 * 4 / 2 / 2 / 10);
    // Every rank alone.
    near(first_transfer(c, 4, slow_links(1), name).first, bytes / 10);
  }
  models::TrainConfig sharing = c;
  sharing.sharding.context = 4;
  const auto [inside, bytes] = first_transfer(sharing, 4, slow_links(4), "all_to_all");
  EXPECT_DOUBLE_EQ(inside, bytes / 1e3);
  EXPECT_DOUBLE_EQ(first_transfer(sharing, 4, slow_links(2), "all_to_all").first, bytes * 2 / 3 / 10);
  models::TrainConfig stages = c;
  stages.sharding.pipeline = 4, stages.train.micro_batches = 4;
  const double activations = 6 * static_cast<double>(c.model.context * c.model.width) * 4;
  EXPECT_DOUBLE_EQ(first_transfer(stages, 4, slow_links(4), "send").first, activations / 1e3);
  EXPECT_DOUBLE_EQ(first_transfer(stages, 4, slow_links(1), "send").first, activations / 10);
}

// A ring has as many hops as ranks; with one rank per host NCCL uses trees, as for all-reduces.
TEST_F(StepTimes, RingsTakeAHopForEachRank) {
  const models::TrainConfig c = config_of("llama");
  const auto hops = [&](int ranks_per_host, const char* name) {
    Machine m = machine_named("h200");
    m.ranks_per_host = ranks_per_host;
    m.within = {1e30, 1e-3, 1}, m.between = {1e30, 1e-6, 100};
    return first_transfer(c, 8, m, name).first;
  };
  for (const char* name : {"all_gather", "reduce_scatter"}) {
    EXPECT_NEAR(hops(8, name), 7, 1e-9);
    EXPECT_NEAR(hops(4, name), 6 + 100, 1e-9);
    EXPECT_NEAR(hops(1, name), 3e-6, 1e-9);
  }
  EXPECT_NEAR(hops(8, "all_reduce"), 3e-3, 1e-9);
  EXPECT_NEAR(hops(4, "all_reduce"), 2e-3 + 1e-6, 1e-9);
}

// Half as many heads, twice as wide: the same number of operations.
TEST_F(StepTimes, HeadsThatCudnnRefusesTakeTwiceAsLong) {
  Machine machine = machine_named("h200");
  machine.products = {1e30, 0}, machine.attention_forward = machine.attention_backward = {1e6, 0};
  machine.bytes_per_second = 1e30, machine.least_seconds = machine.issue_seconds = 0;
  const auto seconds = [&](int64_t heads, int64_t width) {
    models::TrainConfig c = config_of("llama");
    c.model.heads = c.model.kv_heads = heads, c.model.head_dim = width;
    return models::time_step(c, 48, 1, machine).computing;
  };
  EXPECT_NEAR(seconds(2, 256), 2 * seconds(4, 128), 1e-9 * seconds(4, 128));
}

TEST_F(StepTimes, WaitsAreWhatIsNotComputed) {
  models::TrainConfig c = config_of("gpt2");
  Machine machine = machine_named("h200");
  machine.issue_seconds = 0;
  for (const double rate : {1e4, 1e12}) {
    machine.within.bytes_per_second = rate;
    for (const char* strategy : {"full_shard", "zero1", "replicate"}) {
      c.sharding.strategy = strategy;
      const models::StepTime time = models::time_step(c, 48, 4, machine);
      double waits = 0;
      for (const auto& [name, seconds] : time.waits) waits += seconds;
      EXPECT_NEAR(time.computing + waits, time.seconds, 1e-9 * time.seconds) << strategy;
      EXPECT_GT(time.received, 0);
    }
  }
  // If the host is slower than the GPU, its time counts; a graph is one launch.
  machine.issue_seconds = 1;
  EXPECT_GT(models::time_step(c, 48, 1, machine).seconds, 50);
  c.train.cuda_graph = true;
  EXPECT_LT(models::time_step(c, 48, 1, machine).seconds, 1);
}

// With two islands, each sends the other one half of its masters twice.
TEST_F(StepTimes, IslandsTakeAStepOfOneAndAShareOfAnOuterStep) {
  models::TrainConfig c = models::islands_of(config_of("gpt2"), 2);
  Machine machine = machine_named("h200");
  machine.ranks_per_host = 4;
  machine.between.bytes_per_second = 1e6;
  const models::StepTime alone = models::time_step(models::island_of(c), 48, 4, machine);
  const auto more = [&](int64_t inner_steps) {
    c.train.inner_steps = inner_steps;
    return models::time_step(c, 48, 8, machine).seconds - alone.seconds;
  };
  const double each = more(1);
  EXPECT_NEAR(more(10), each / 10, 1e-9 * each);
  const models::Plan plan = models::plan_step(c, 48, 7, 8, 1, "nccl", Device::cuda());
  const auto masters = static_cast<double>(plan.outer_state_bytes);  // one tensor of masters and one of momentum, both halved
  EXPECT_GT(each, 0.95 * masters / 1e6);  // the last island has the larger part if units are small
  EXPECT_LT(each, 1.1 * masters / 1e6);
  c.train.inner_steps = 1;
  const models::StepTime time = models::time_step(c, 48, 8, machine);
  EXPECT_NEAR(static_cast<double>(time.received - alone.received), masters, 0.05 * masters);
  EXPECT_EQ(time.peak_bytes, plan.peak.bytes);
  EXPECT_GE(time.peak_bytes, alone.peak_bytes + plan.outer_state_bytes);
  for (const auto& [stages, ranks] : {std::pair{2, 8}, {4, 8}, {4, 16}}) {
    c.sharding.pipeline = stages, c.train.micro_batches = 8;
    c.model.layers = 16;
    EXPECT_EQ(models::time_step(c, 48, ranks, machine).seconds, models::time_step(c, 48, ranks, machine, models::Planning::whole).seconds) << stages;
  }
}

// Of two islands of six ranks, eight to a host, the second is on two hosts: the step is its.
TEST_F(StepTimes, IslandsAreAsSlowAsTheOneOnTheMostHosts) {
  models::TrainConfig c = models::islands_of(config_of("gpt2"), 2);
  c.train.batch = 12, c.train.inner_steps = 1'000'000'000;
  Machine machine = machine_named("h200");
  machine.ranks_per_host = 8;
  machine.between.bytes_per_second = 1e6;
  EXPECT_GT(models::time_step(c, 48, 12, machine).seconds, 2 * models::time_step(models::island_of(c), 48, 6, machine).seconds);
}

TEST_F(StepTimes, StateInTheHostsMemoryTakesTheBus) {
  models::TrainConfig c = config_of("gpt2");
  Machine machine = machine_named("h200");
  machine.host_bytes_per_second = 1e3;
  const double without = models::time_step(c, 48, 1, machine).seconds;
  c.train.offload_optimizer = true;
  const models::Plan plan = models::plan_step(c, 48, 0, 1, 1, "nccl", Device::cuda());
  EXPECT_NEAR(models::time_step(c, 48, 1, machine).seconds - without, static_cast<double>(plan.host_peak.bytes) / 1e3,
              0.02 * static_cast<double>(plan.host_peak.bytes) / 1e3);
}

// Onloading and offloading overlap with compute, if the bus is fast enough.
TEST_F(StepTimes, MastersComeBesideWhatIsComputed) {
  models::TrainConfig c = config_of("gpt2");
  c.model.layers = 8;
  Machine machine = machine_named("h200");
  machine.issue_seconds = machine.least_seconds = 0;
  machine.within = {1e18, 0, 0};
  for (const int world : {1, 2}) {
    c.train.offload_parameters = false;
    const double computing = models::time_step(c, 48, world, machine).seconds;
    c.train.offload_parameters = true;
    const models::StepTime slow = [&] {
      machine.host_bytes_per_second = 1;
      return models::time_step(c, 48, world, machine);
    }();
    machine.host_bytes_per_second = slow.seconds / (0.5 * computing);  // everything that crosses the bus takes half of the step
    const models::StepTime fast = models::time_step(c, 48, world, machine);
    // The update and the gradients' norm read half of it, without overlap.
    EXPECT_GT(fast.seconds, 1.2 * computing) << world;
    EXPECT_LT(fast.seconds, 1.35 * computing) << world;
  }
}

// Masters when they are onloaded, gradients when they are offloaded, both in the update, and gradients once more for their norm.
TEST_F(StepTimes, MastersInTheHostsMemoryTakeTheBus) {
  for (const char* dtype : {"f32", "bf16"}) {
    models::TrainConfig c = config_of("gpt2");
    c.train.dtype = dtype;
    c.train.offload_parameters = true;
    Machine machine = machine_named("h200");
    machine.host_bytes_per_second = 1e3;
    const Tape tape = models::plan_step(c, 48, 0, 1, 1, "nccl", Device::cuda()).tape;
    double brought = 0, left = 0;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) {
      const Node& n = tape.node(id);
      if (tape.op_name(n) == "onload_shard") brought += 4.0 * static_cast<double>(tape.type(tape.inputs(n)[0]).local_shape().numel());
      if (tape.op_name(n) == "offload_gradient") left += 4.0 * static_cast<double>(tape.type(tape.output(n, 0)).local_shape().numel());
    }
    EXPECT_GT(brought, 1.4 * left);  // blocks twice
    // Offloading overlaps with onloading of later ones.
    const double seconds = models::time_step(c, 48, 1, machine).seconds, update = (2 * left + left) / 1e3;
    EXPECT_GT(seconds, 0.99 * (brought / 1e3 + update)) << dtype;
    EXPECT_LT(seconds, 0.99 * ((brought + left) / 1e3 + update)) << dtype;
  }
}

}  // namespace
}  // namespace sheaf::testing
