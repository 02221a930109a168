// Training steps over NCCL, here ThreadNccl and EchoNccl, which check NCCL's rules for registered memory (NcclRules): all gathers and
// reduce-scatters of units are in place, at the same offsets on all ranks, and the results are those of a run that registers nothing.
#include <gtest/gtest.h>

#include "sheaf/tests/distributed/echo_nccl.h"
#include "sheaf/tests/distributed/nccl_job.h"
#include "sheaf/tests/distributed/thread_nccl.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

constexpr int kRanks = 2, kSteps = 5;

/// In bf16 gradients are also reduced in bf16.
models::TrainConfig config(const char* strategy, const char* dtype) {
  models::TrainConfig c = tiny_rank_config(strategy);
  c.train.dtype = c.sharding.reduce_dtype = dtype;
  return c;
}

struct Trained {
  std::vector<float> results;  ///< losses, norms and weights
  size_t pieces = 0;
};

/// The results of `c` on each rank of a job over `library`. From the third step on, or once that is captured, no more memory is requested.
std::vector<Trained> train(NcclLibrary& library, const models::TrainConfig& c) {
  std::vector<Trained> ranks(kRanks);
  nccl::expect_well(nccl::run_job(library, [&](World& w) {
    Trained& run = ranks[static_cast<size_t>(w.rank())];
    Gpu& gpu = *RankContext::current().gpu;
    models::TrainingStep step(c, c.model.vocab, w, w.device());
    int64_t reserved = 0;
    for (int s = 0; s < kSteps; ++s) {
      const auto result = step.run(s, fill_tiny);
      if (s >= (c.train.cuda_graph ? 3 : 2)) {
        EXPECT_EQ(gpu.memory()->stats().reserved, reserved) << "step " << s;
        EXPECT_EQ(gpu.wire_pieces().size(), run.pieces) << "step " << s;
      }
      reserved = gpu.memory()->stats().reserved;
      run.pieces = gpu.wire_pieces().size();
      run.results.push_back(result.loss.item());
      run.results.push_back(result.grad_norm.item());
    }
    const std::vector<float> weights = shards(step.model());
    run.results.insert(run.results.end(), weights.begin(), weights.end());
  }, {.ranks = kRanks}));
  return ranks;
}

void expect_in_place(const NcclRules& rules, const char* kind) {
  EXPECT_GT(rules.moved(kind).in_place, 0) << kind;
  EXPECT_EQ(rules.moved(kind).copied, 0) << kind << ", up to " << rules.moved(kind).largest_copied << " bytes";
}

/// Gathers and reductions of units are in place; gradients under `replicate` are not in registered memory and are copied, except their
/// casts.
void expect_units_in_place(const NcclRules& rules, const std::string& strategy, const std::string& dtype) {
  if (strategy == "replicate" && dtype == "bf16") {
    EXPECT_GT(rules.moved("all_reduce out").in_place, 0);
  } else if (strategy == "replicate") {
    EXPECT_GT(rules.moved("all_reduce out").copied, 0);
    EXPECT_EQ(rules.moved("all_reduce out").in_place, 0);
  } else {
    for (const char* kind : {"all_gather in", "all_gather out", "reduce_scatter in"}) expect_in_place(rules, kind);
  }
}

TEST(RegisteredBuffers, EverythingThatUnitsSend) {
  SHEAF_NEEDS_GPU();
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const char* dtype : {"f32", "bf16"}) {
      SCOPED_TRACE(str(strategy, ' ', dtype));
      ThreadNccl nccl, plain;
      std::vector<Trained> ranks;
      {
        const nccl::Registered scope;
        ranks = train(nccl, config(strategy, dtype));
      }
      const NcclRules& rules = *nccl.rules;
      expect_units_in_place(rules, strategy, dtype);
      EXPECT_EQ(rules.at_unequal_offsets(), 0);
      // Once per piece, rank and communicator: those for gathers, reductions and everything else.
      const int64_t pieces = static_cast<int64_t>(ranks[0].pieces);
      EXPECT_EQ(ranks[1].pieces, ranks[0].pieces);
      EXPECT_GT(rules.registrations(), 0);
      EXPECT_EQ(rules.registrations() % (kRanks * pieces), 0);
      EXPECT_LE(rules.registrations(), 3 * kRanks * pieces);

      const std::vector<Trained> same = train(plain, config(strategy, dtype));
      EXPECT_EQ(plain.rules->registrations(), 0);
      EXPECT_EQ(plain.rules->moved("all_gather out").in_place, 0);
      for (size_t r : {0, 1}) {
        EXPECT_EQ(same[r].results, ranks[r].results);
        EXPECT_EQ(same[r].pieces, 0u);
      }
    }
}

TEST(RegisteredBuffers, InGraphs) {
  SHEAF_NEEDS_GPU();
  const nccl::Registered scope;
  for (const char* strategy : {"full_shard", "replicate"}) {
    SCOPED_TRACE(strategy);
    models::TrainConfig c = config(strategy, "bf16");
    EchoNccl plain, nccl;
    const std::vector<Trained> one_by_one = train(plain, c);
    c.train.cuda_graph = true;
    const std::vector<Trained> ranks = train(nccl, c);
    expect_units_in_place(*nccl.rules, strategy, "bf16");
    for (size_t r : {0, 1}) EXPECT_EQ(ranks[r].results, one_by_one[r].results);
  }
}

}  // namespace
}  // namespace sheaf::testing
