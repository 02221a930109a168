// The checks T, D, G, M and C on a recorded step with units, and on that step broken in one place at a time.
#include "sheaf/autograd/checks.h"

#include <gmock/gmock.h>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/tests/autograd/findings.h"
#include "sheaf/tests/autograd/unit_step.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

NodeId find(const Tape& tape, const std::string& op, const std::string& path, int nth = 0) {
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    if (tape.op_name(tape.node(id)) == op && tape.path(tape.node(id)) == path && nth-- == 0) return id;
  ADD_FAILURE() << "no " << op << " of '" << path << "'\n" << to_text(tape);
  return 0;
}

Tape step() {
  static const auto* tape = new Tape(unit_step_tapes(3)[1]);
  return *tape;
}

TEST(Checks, RecordedStepsPass) {
  for (Strategy s : {Strategy::full_shard, Strategy::shard_grad_op, Strategy::replicate})
    for (int ranks : {1, 2, 3}) {
      const std::vector<Tape> tapes = unit_step_tapes(ranks, s);
      std::vector<const Tape*> pointers;
      for (const Tape& t : tapes) {
        SCOPED_TRACE(str(name(s), " at ", ranks, "\n", to_text(t)));
        EXPECT_EQ(all(check_types(t)), "");
        EXPECT_EQ(all(check_cotangents(t)), "");
        EXPECT_EQ(all(check_gathers(t)), "");
        EXPECT_EQ(all(check_memory(t)), "");
        EXPECT_EQ(collectives(t).empty(), ranks == 1);
        pointers.push_back(&t);
        EXPECT_EQ(collective_hash(t), collective_hash(tapes[0]));
      }
      EXPECT_EQ(all(check_collectives(pointers)), "");
      EXPECT_FALSE(tapes[0].cotangents().empty());
    }
}

TEST(Checks, GathersTakesAModuleThatNeededNoneOfItsParameters) {
  run_local(2, [](World& world) {
    const auto schedule = std::make_shared<GatherSchedule>(0);
    std::vector<std::shared_ptr<Unit>> units;
    for (const char* name : {"used", "entered"}) {
      units.push_back(std::make_shared<Unit>(name, std::vector<LeafSpec>{{"weight", {3}}}, UnitOptions{
          .mesh = world.mesh({{"data", 2}}).spec, .strategy = Strategy::full_shard}, schedule));
      units.back()->allocate(Device::cpu());
    }
    Recording recording;
    for (const auto& unit : units) unit->enter();
    const Tensor loss = redistribute(sum(square(units[0]->value(0))), "data", Placement::partial());
    for (const auto& unit : units) unit->leave();
    recording.backward(loss);
    EXPECT_EQ(all(check_gathers(recording.take())), "");
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

TEST(Checks, TypesFindsUseBeforeTheValueIsMade) {
  Tape t = step();
  const NodeId linear = find(t, "linear", "blocks.0");
  t.swap_nodes(linear, find(t, "tanh", "blocks.0"));
  EXPECT_THAT(all(check_types(t)), HasSubstr("which no earlier node makes"));
  t = step();
  t.erase_node(linear);
  EXPECT_THAT(all(check_types(t)), HasSubstr("which no earlier node makes"));
}

TEST(Checks, TypesFindsWrongShapesAndDTypes) {
  Tape t = step();
  const ValueId v = t.output(t.node(find(t, "linear", "blocks.0")));
  Type wrong = t.type(v);
  wrong.shape = {7, 4};
  t.retype(v, wrong);
  EXPECT_THAT(all(check_types(t)), HasSubstr("[linear] output 0 is f32[7,4]"));
  t = step();
  wrong = t.type(v);
  wrong.dtype = kF64;
  t.retype(v, wrong);
  EXPECT_THAT(all(check_types(t)), HasSubstr("its inputs give f32[7,3]"));
}

TEST(Checks, TypesFindsPlacementsWithoutARule) {
  Tape t = step();
  const ValueId v = t.output(t.node(find(t, "tanh", "blocks.0")));
  Type wrong = t.type(v);
  wrong.layout[0] = Placement::partial();
  t.retype(v, wrong);
  EXPECT_THAT(all(check_types(t)), HasSubstr("[tanh] has no placement rule Shard(0) -> Partial"));
  wrong.layout[0] = Placement::invariant();
  t.retype(v, wrong);
  EXPECT_THAT(all(check_types(t)), HasSubstr("Invariant goes with Invariant only"));
}

TEST(Checks, CotangentsFindsAGradientThatIsNotTheDual) {
  Tape t = step();
  // The loss is Partial, so its gradient is Replicate.
  const auto [seed, loss] = t.cotangents().front();
  Type wrong = t.type(seed);
  EXPECT_EQ(wrong.layout[0], Placement::replicate());
  wrong.layout[0] = Placement::partial();
  t.retype(seed, wrong);
  EXPECT_THAT(all(check_cotangents(t)), HasSubstr(str("is a gradient of %", loss)));
}

TEST(Checks, CotangentsFindsAContributionThatDoesNotBelongIntoItsSlot) {
  Tape t = step();
  ValueId into = -1;
  for (ValueId v = 0; v < t.num_values(); ++v) {
    const NodeId producer = t.value(v).producer;
    const bool own = t.value(v).base >= 0 && t.value(t.value(v).base).producer == producer;
    if (t.value(v).base >= 0 && !own && t.node(producer).phase == Phase::backward && t.kind(t.node(producer)) == OpKind::op)
      into = v;
  }
  ASSERT_GE(into, 0) << to_text(t);
  Type wrong = t.type(into);
  wrong.layout[0] = Placement::replicate();
  t.retype(into, wrong);
  EXPECT_THAT(all(check_cotangents(t)), HasSubstr(str("is put into %", t.value(into).base)));
}

TEST(Checks, GathersFindsAMissingDiscard) {
  Tape t = step();
  t.erase_node(find(t, "discard", "blocks.0"));
  EXPECT_THAT(all(check_gathers(t)), HasSubstr("of 'blocks.0' is gathered and never discarded"));
}

TEST(Checks, GathersFindsUseAfterDiscard) {
  Tape t = step();  // the discard of blocks.0 moves before the use of its weight, which is a view into the buffer
  const NodeId discard = find(t, "discard", "blocks.0"), linear = find(t, "linear", "blocks.0");
  t.swap_nodes(discard, linear);
  EXPECT_THAT(all(check_gathers(t)), HasSubstr(str("discarded")));
  EXPECT_THAT(all(check_gathers(t)), HasSubstr("uses %"));
}

TEST(Checks, GathersFollowsViews) {
  Tape t = step();  // the root's table is used through a transpose
  const NodeId transpose = find(t, "permute", "");
  const ValueId view = t.output(t.node(transpose));
  EXPECT_GE(t.value(view).view_of, 0);
  NodeId use = -1;
  for (NodeId id = transpose + 1; id < t.num_nodes() && use < 0; ++id)
    for (ValueId v : t.inputs(t.node(id)))
      if (v == view) use = id;
  ASSERT_GE(use, 0);
  NodeId discard = -1;
  for (NodeId id = 0; id < t.num_nodes(); ++id)
    if (t.op_name(t.node(id)) == "discard" && t.path(t.node(id)).empty()) discard = id;
  ASSERT_GT(discard, use);
  EXPECT_EQ(all(check_gathers(t)), "");
  t.swap_nodes(discard, use);
  EXPECT_THAT(all(check_gathers(t)), HasSubstr(str("uses %", view, " (in %")));
}

TEST(Checks, GathersFindsADoubleDiscardAndAGatherWithoutUse) {
  Tape t = step();
  const NodeId discard = find(t, "discard", "blocks.0");
  t.mutable_node(find(t, "discard", "blocks.1")) = t.node(discard);
  EXPECT_THAT(all(check_gathers(t)), HasSubstr("discards %"));
  t = step();
  for (NodeId id = t.num_nodes() - 1; id >= 0; --id)  // every use of the gathered blocks.0
    if (t.path(t.node(id)) == "blocks.0" && t.kind(t.node(id)) == OpKind::op) t.erase_node(id);
  EXPECT_THAT(all(check_gathers(t)), HasSubstr("'blocks.0' is gathered and never used"));
}

TEST(Checks, MemoryFindsWhatIsSentBeforeItIsFilled) {
  Tape t = step();
  const NodeId reduction = find(t, "reduce_scatter", "blocks.0");
  const ValueId slots = t.inputs(t.node(reduction))[0];
  NodeId last = -1;  // that stores into them
  for (NodeId id = 0; id < reduction; ++id)
    for (int o = 0; o < t.node(id).num_outputs; ++o) {
      ValueId v = t.output(t.node(id), o);
      if (t.op_name(t.node(id)) == "grad_slots" || t.value(v).base < 0) continue;
      while (t.value(v).lies_in() >= 0) v = t.value(v).lies_in();
      if (v == slots) last = id;
    }
  ASSERT_GE(last, 0) << to_text(t);
  t.swap_nodes(last, reduction);
  EXPECT_THAT(all(check_memory(t)), HasSubstr(str("stores into %", slots, ", which node ", last, " (reduce_scatter) has sent already")));
  EXPECT_THAT(all(check_tape(t)), HasSubstr("has sent already"));
}

TEST(Checks, MemoryFindsWhatIsNotGivenBack) {
  Tape t = step();
  const ValueId slots = t.inputs(t.node(find(t, "reduce_scatter", "blocks.1")))[0];
  t.erase_node(find(t, "complete", "blocks.1"));
  EXPECT_THAT(all(check_memory(t)), HasSubstr(str("%", slots, " goes with reduce_scatter and does not come back")));
}

TEST(Checks, MemoryFindsSlotsThatAreNotFilled) {
  const Tape whole = step();
  EXPECT_EQ(all(check_memory(whole)), "");
  int first = 0, later = 0;
  for (NodeId id = 0; id < whole.num_nodes(); ++id) {
    const Node& n = whole.node(id);
    if (whole.op_name(n) == "grad_slots" || n.num_outputs == 0) continue;
    const ValueId slot = whole.value(whole.output(n)).base;
    if (slot < 0 || whole.op_name(whole.node(whole.value(slot).producer)) != "grad_slots") continue;
    const bool adds = (n.flags & Node::kAdds) != 0 || std::ranges::find(whole.inputs(n), slot) != whole.inputs(n).end();
    Tape t = whole;
    if (adds) {  // it stores now
      t.mutable_node(id).flags &= static_cast<uint8_t>(~Node::kAdds);
      for (ValueId& v : t.mutable_inputs(n))
        if (v == slot) v = 0;
      EXPECT_THAT(all(check_memory(t)), HasSubstr("stores over the gradient that node")) << to_text(t);
      ++later;
    } else {
      t.erase_node(id);
      EXPECT_THAT(all(check_memory(t)), ::testing::AnyOf(HasSubstr(str("filled slot %", slot)), HasSubstr(str("adds to slot %", slot)))) << to_text(t);
      ++first;
    }
  }
  EXPECT_EQ(first, 3) << "the table's, and two nodes for a weight and a bias each: " << to_text(whole);
  EXPECT_EQ(later, 1) << "the table's other use: " << to_text(whole);
}

TEST(Checks, CollectivesFindsTheFirstDifference) {
  std::vector<Tape> tapes = unit_step_tapes(3);
  const std::vector<const Tape*> pointers{&tapes[0], &tapes[1], &tapes[2]};
  EXPECT_EQ(all(check_collectives(pointers)), "");
  // Rank 2 reduces two units in the opposite order.
  std::vector<NodeId> reductions;
  for (NodeId id = 0; id < tapes[2].num_nodes(); ++id)
    if (tapes[2].op_name(tapes[2].node(id)) == "reduce_scatter") reductions.push_back(id);
  ASSERT_EQ(reductions.size(), 3u);
  tapes[2].swap_nodes(reductions[0], reductions[2]);
  EXPECT_THAT(all(check_collectives(pointers)),
              HasSubstr("collective 0 on (data=3) data reduce: rank 0 issues 'reduce_scatter f32[96] Partial→Shard(flat)"));
  EXPECT_THAT(all(check_collectives(pointers)), HasSubstr("rank 2 issues"));
  EXPECT_EQ(collective_hash(tapes[0]), collective_hash(tapes[1]));
  EXPECT_NE(collective_hash(tapes[0]), collective_hash(tapes[2]));
  EXPECT_EQ(collective_hash(tapes[0], "(data=3) data gather"), collective_hash(tapes[2], "(data=3) data gather"));
  EXPECT_NE(collective_hash(tapes[0], "(data=3) data reduce"), collective_hash(tapes[2], "(data=3) data reduce"));
  // Rank 1 leaves one out.
  tapes[2].swap_nodes(reductions[0], reductions[2]);
  tapes[1].erase_node(find(tapes[1], "all_gather", "blocks.1"));
  EXPECT_THAT(all(check_collectives(pointers)), HasSubstr("rank 1 issues"));
}

}  // namespace
}  // namespace sheaf::testing
