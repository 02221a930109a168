#include "sheaf/autograd/tape_dump.h"

#include <gmock/gmock.h>

#include "sheaf/core/communicator.h"
#include "sheaf/core/json.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/tests/autograd/unit_step.h"

namespace sheaf::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST(TapeDump, TextReadsLikeTheStep) {
  const Tape tape = unit_step_tapes(3)[0];
  const std::string text = to_text(tape);
  SCOPED_TRACE(text);
  EXPECT_TRUE(text.starts_with("leaf\n  %0"));
  EXPECT_LT(text.find("\nforward\n"), text.find("\nbackward\n"));
  // 96 elements of 4 bytes, a third of which this rank has.
  EXPECT_THAT(text, ContainsRegex("= all_gather %[0-9]+ +root +Shard\\(flat\\)→Replicate@data f32\\[96\\] +256 B  gather lane\n"));
  EXPECT_THAT(text, ContainsRegex("= linear %[0-9]+, %[0-9]+, %[0-9]+ +blocks.0 +f32\\[7,3\\] Shard\\(0\\)@data"));
  EXPECT_THAT(text, ContainsRegex("= all_gather %[0-9]+ +blocks.0 .*gather lane  mirror of its discard"));
  EXPECT_THAT(text, ContainsRegex("= reduce_scatter %[0-9]+ +root +Partial→Shard\\(flat\\)@data f32\\[96\\] +256 B  reduce lane"));
  // A layer's two gradients come from one op, which stores both in place.
  EXPECT_THAT(text, ContainsRegex("= linear_gradients .*  stored into slot %[0-9]+, stored into slot %[0-9]+\n"));
  EXPECT_THAT(text, HasSubstr("added to slot %"));  // the tied table's second use
  EXPECT_THAT(text, ContainsRegex("= permute .* view of %"));
  EXPECT_THAT(text, ContainsRegex("\n  discard %[0-9]+ +blocks.1\n"));
}

TEST(TapeDump, JsonHoldsEverything) {
  const Tape tape = unit_step_tapes(2)[1];
  const Json json = Json::parse(to_json(tape), "tape");
  const Json::Array& nodes = json.at("nodes").as_array();
  const Json::Array& values = json.at("values").as_array();
  ASSERT_EQ(nodes.size(), static_cast<size_t>(tape.num_nodes()));
  ASSERT_EQ(values.size(), static_cast<size_t>(tape.num_values()));
  int64_t bytes = 0, expected = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Json& n = nodes[static_cast<size_t>(id)];
    EXPECT_EQ(n.at("id").as_int(), id);
    EXPECT_EQ(n.at("op").as_string(), tape.op_name(tape.node(id)));
    EXPECT_EQ(n.at("path").as_string(), tape.path(tape.node(id)));
    EXPECT_EQ(n.at("phase").as_string(), name(tape.node(id).phase));
    EXPECT_EQ(n.at("inputs").as_array().size(), tape.node(id).num_inputs);
    EXPECT_EQ(std::ssize(n.at("outputs").as_array()), tape.node(id).num_outputs);
    bytes += n.at("bytes").as_int();
    expected += tape.wire_bytes(tape.node(id));
    if (n.at("op").as_string() == "reduce_scatter") { EXPECT_EQ(n.at("lane").as_string(), "reduce"); }
  }
  EXPECT_EQ(bytes, expected);
  for (ValueId v = 0; v < tape.num_values(); ++v) {
    const Json& value = values[static_cast<size_t>(v)];
    EXPECT_EQ(value.at("dtype").as_string(), name(tape.type(v).dtype));
    ASSERT_EQ(value.at("layout").as_array().size(), static_cast<size_t>(tape.type(v).layout.num_axes()));
    if (tape.type(v).layout.mesh()) {
      EXPECT_EQ(value.at("layout").as_array()[0].at("placement").as_string(), tape.type(v).layout[0].to_string());
    }
  }
}

TEST(TapeDump, DotHasANodePerNodeAndBytesOnTheWire) {
  const Tape tape = unit_step_tapes(2)[0];
  const std::string dot = to_dot(tape);
  EXPECT_TRUE(dot.starts_with("digraph tape {"));
  EXPECT_TRUE(dot.ends_with("}\n"));
  for (NodeId id = 0; id < tape.num_nodes(); ++id) EXPECT_THAT(dot, HasSubstr(str("  n", id, " [label=")));
  EXPECT_THAT(dot, HasSubstr("B\", penwidth=3]"));
  // Gradients are written to slots, which the reduction reads, and the update writes to the masters.
  int stores = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    for (int o = 0; o < tape.node(id).num_outputs; ++o) {
      const ValueId base = tape.value(tape.output(tape.node(id), o)).base;
      if (base < 0 || tape.value(base).producer == id) continue;
      const NodeId made = tape.value(base).producer;
      const std::string edge = tape.node(made).op ? str("  n", id, " -> n[0-9]+ \\[style=dashed\\]")
                                                  : str("  n", id, " -> n", made, " \\[style=dashed, constraint=false");
      EXPECT_THAT(dot, ::testing::ContainsRegex(edge)) << tape.op_name(tape.node(id));
      ++stores;
    }
  EXPECT_GT(stores, 0);
  for (const char* colour : {"lightblue", "palegreen", "lightsalmon"}) EXPECT_THAT(dot, HasSubstr(str("fillcolor=", colour)));
}

TEST(TapeDump, WireBytesAreWhatCommunicatorsReceive) {
  for (Strategy s : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::replicate})
    for (int ranks : {1, 2, 3, 5})
      run_local(ranks, [&](World& world) {
        UnitStep step(world, s);
        const Tape tape = step.record();
        int64_t foreseen = 0;
        for (NodeId id = 0; id < tape.num_nodes(); ++id) foreseen += tape.wire_bytes(tape.node(id));
        MeshRuntime& runtime = *world.mesh({{"data", ranks}}).runtime;
        EXPECT_EQ(foreseen, runtime.gather_lane(0).bytes_received() + runtime.reduce_lane(0).bytes_received())
            << name(s) << " at " << ranks << "\n" << to_text(tape);
        EXPECT_EQ(foreseen > 0, ranks > 1);
      }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

TEST(TapeDump, SummaryCountsPerUnit) {
  const std::string summary = collective_summary(unit_step_tapes(3)[0]);
  SCOPED_TRACE(summary);
  EXPECT_THAT(summary, ContainsRegex("root +all_gather +1 +256 B\n"));
  EXPECT_THAT(summary, ContainsRegex("blocks.0 +all_gather +2 +512 B\n"));
  EXPECT_THAT(summary, ContainsRegex("blocks.0 +reduce_scatter +1 +256 B\n"));
  EXPECT_THAT(summary, ContainsRegex("blocks.1 +all_gather +1 +256 B\n"));
  EXPECT_THAT(summary, ContainsRegex("total +7 +1.8 KiB\n"));
}

TEST(TapeDump, ATapeOutlivesItsWorld) {
  const Tape tape = unit_step_tapes(4)[3];  // the world is gone
  EXPECT_THAT(to_text(tape), HasSubstr("all_gather"));
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(12595), "12.3 KiB");
  EXPECT_EQ(format_bytes(int64_t{3} << 30), "3.0 GiB");
}

}  // namespace
}  // namespace sheaf::testing
