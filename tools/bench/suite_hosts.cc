// hosts: a step with gradient accumulation by four ranks on two hosts, against full_shard over all four: under the strategies that
// reduce traffic between the hosts, with gradients sent in bf16 or, as weights may be, in int8, with units that a program keeps
// gathered, with a pipeline stage per host, with tensor parallelism within each host, and with a replica per host, averaged now and
// then (DiLoCo). Ranks are threads of this process that receive from the other host no faster than over such a link; the computation
// and the cores that they share are the same for every strategy.
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/timed_steps.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

constexpr int kRanks = 4, kRanksPerHost = 2;

struct Choice {
  std::string_view name;
  std::vector<std::string> overrides;
};
const Choice kFullShard{"full_shard", {}};
const Choice kChoices[] = {
    {"reduce-bf16", {"--sharding.reduce_dtype=bf16"}},
    {"reduce-int8", {"--sharding.reduce_dtype=int8"}},
    {"int8", {"--sharding.reduce_dtype=int8", "--sharding.gather_int8=true"}},
    {"zero1", {"--sharding.strategy=zero1"}},
    {"zero1-reduce-bf16", {"--sharding.strategy=zero1", "--sharding.reduce_dtype=bf16"}},
    {"zero1-int8", {"--sharding.strategy=zero1", "--sharding.reduce_dtype=int8", "--sharding.gather_int8=true"}},
    {"kept", {"--train.compile=true", "--sharding.memory_budget=1000000000000"}},
    {"hybrid", {"--sharding.replicas=2"}},
    {"secondary", {"--sharding.replicas=2", "--sharding.secondary=true"}},
    {"hybrid-zero1", {"--sharding.strategy=zero1", "--sharding.replicas=2"}},
    {"hybrid-zero1-reduce-bf16", {"--sharding.strategy=zero1", "--sharding.replicas=2", "--sharding.reduce_dtype=bf16"}},
    {"hybrid-zero1-reduce-int8", {"--sharding.strategy=zero1", "--sharding.replicas=2", "--sharding.reduce_dtype=int8"}},
    {"pipeline", {"--sharding.pipeline=2"}},
    {"pipeline-zero1", {"--sharding.strategy=zero1", "--sharding.pipeline=2"}},
    {"islands", {"--train.islands=2", "--train.inner_steps=10"}},
    {"tensor", {"--sharding.tensor=2"}},
    {"tensor-zero1", {"--sharding.strategy=zero1", "--sharding.tensor=2"}},
};

// The first axis spans the hosts; if it is the only axis, some of its ranks are on this host.
double bytes_from_elsewhere(const Mesh& mesh) {
  int64_t bytes = mesh.runtime->gather_lane(0).bytes_received() + mesh.runtime->reduce_lane(0).bytes_received();
  if (mesh.spec->is_chain(0))
    bytes += mesh.runtime->link(0, 0, Toward::next).bytes_received() + mesh.runtime->link(0, 1, Toward::before).bytes_received();
  const double there = mesh.spec->num_axes() > 1 ? 1 : static_cast<double>(kRanks - kRanksPerHost) / (kRanks - 1);
  return there * static_cast<double>(bytes);
}

void measure(Session& session, const std::string& name, double bytes_per_second,
             const Choice& choice, Line& line) {
  const bool quick = session.options().quick;
  const auto steps = [&](const Choice& c) {
    std::vector<std::string> more = c.overrides;
    more.insert(more.end(), {quick ? "--train.batch=16" : "--train.batch=32", "--train.micro_batches=4"});
    if (quick) more.push_back("--model.context=16");
    StepsToTime out{.config = training_config(name, more),
                    .ranks = kRanks,
                    .links = {.ranks_per_host = kRanksPerHost, .bytes_per_second_between_hosts = bytes_per_second, .threads_per_rank = 1},
                    .warm = quick ? 3 : 4,  // the third step becomes a program
                    .received = [](const models::TrainingStep& step) { return bytes_from_elsewhere(step.all()); }};
    if (out.config.train.islands > 1) {  // up to an averaging
      out.at_once = out.config.train.inner_steps;
      out.warm = 1;
    }
    return out;
  };
  const auto timed = compare_steps(line, quick ? 2 : session.samples(12), steps(choice), std::string(kFullShard.name), steps(kFullShard));
  line.more = {{"MB from the other host", timed[0].megabytes}, {"MB under full_shard", timed[1].megabytes}};
}

}  // namespace

void hosts_suite(Session& session) {
  for (const double gigabytes : {1.25, 0.125}) {  // 10 and 1 Gbit/s
    if (session.options().quick && gigabytes < 1.25) break;
    for (const Choice& choice : kChoices) {
      const std::string name = "nanogpt-f32-12x64";
      session.line("hosts", str(name, "-", gigabytes, "GB/s-", choice.name), Unit::seconds,
                   [&](Line& line) { measure(session, name, 1e9 * gigabytes, choice, line); });
    }
  }
}

}  // namespace sheaf::bench
