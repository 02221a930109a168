// Tapes that are edited and run again.
#include "sheaf/autograd/tape_editor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/program.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/json.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// y = sum((x w)^2), with its gradient for w, as a program.
struct Squares {
  Tensor x, w;
  std::vector<ValueId> wanted;
  std::optional<Program> program;
  ValueId product = -1;
  NodeId makes_product = -1, backward = -1;

  Squares(const Tensor& x_, const Tensor& w_) : x(x_), w(w_) {
    Recording recording({.capture_leaves = true});
    const Tensor watched = recording.watch(w);
    const Tensor z = x * watched, y = sum(square(z));
    const Tensor dw = recording.gradient(y, std::vector{watched})[0];
    product = recording.value_of(z);
    wanted = {recording.value_of(y), recording.value_of(dw)};
    const auto leaves = recording.leaves();
    const Tape tape = recording.take();
    makes_product = tape.value(product).producer;
    for (NodeId id = tape.num_nodes(); id-- > 0;)
      if (tape.node(id).phase == Phase::backward) backward = id;
    program.emplace(tape, [&](ValueId v) { return leaves.at(v); }, wanted);
  }
};

Tensor row(std::vector<float> values) { return Tensor::from(values, {std::ssize(values)}); }

TEST(TapeEditor, ChangesNothingByItself) {
  const Squares s(row({1, 2, 3}), row({4, 5, 6}));
  const Tape same = TapeEditor(s.program->tape()).take();
  EXPECT_EQ(same.num_nodes(), s.program->tape().num_nodes());
  Program again = s.program->with_tape(same);
  EXPECT_THAT(again.run()[1].to_vector(), ElementsAre(2 * 4, 2 * 4 * 5, 2 * 9 * 6));
}

// As a pass does that computes something again.
TEST(TapeEditor, ANodeIsMadeFromAnotherOfTheSameTape) {
  const Tensor x = row({1, 2, 3});
  Recording recording;
  Tensor y = x;
  for (int i = 0; i < 9; ++i) y = square(full_like(y, 1.0 + i) - y) * 0.5;
  const Tensor all = sum(y);
  const ValueId wanted = recording.value_of(all);
  const auto leaves = recording.leaves();
  const Program plain(recording.take(), [&](ValueId v) { return leaves.at(v); }, std::vector{wanted});
  TapeEditor edit(plain.tape());
  for (NodeId id = 0; id < plain.tape().num_nodes(); ++id) {
    const Tape& tape = edit.tape();
    const Node n = tape.node(id);
    if (!n.op) continue;
    const std::vector<const Type*> types{&tape.type(tape.output(n))};
    const NodeId copy = edit.insert_node(id + 1, *n.op, tape.attrs(n), tape.inputs(n), types, tape.path(n), n.phase);
    edit.replace(plain.tape().output(n), tape.output(tape.node(copy)), id + 1);
  }
  Program doubled = plain.with_tape(edit.take());
  EXPECT_GT(doubled.tape().num_nodes(), 2 * plain.tape().num_nodes() - 3);
  EXPECT_EQ(doubled.run()[0].item(), all.item());
}

TEST(TapeEditor, WhatTheBackwardReadsIsRounded) {
  const float w = 1.0f + 0x1p-9f;  // bf16 has 8 bits
  const Squares s(row({1, 3}), row({w, w}));
  TapeEditor edit(s.program->tape());
  const ValueId half = edit.insert(s.makes_product + 1, [](const Tensor& x) { return cast(x, kBF16); }, s.product);
  const ValueId back = edit.insert(s.backward, [](const Tensor& x) { return cast(x, kF32); }, half);
  edit.replace(s.product, back, s.backward);
  Program program = s.program->with_tape(edit.take());
  const std::vector<Tensor> results = program.run();
  EXPECT_EQ(results[0].item(), w * w + 9 * w * w) << "the forward is as it was";
  EXPECT_THAT(results[1].to_vector(), ElementsAre(2 * 1, 2 * 3 * 3));
}

TEST(TapeEditor, CodeMayHaveViewsAndSeveralResults) {
  const Squares s(row({1, 2, 3, 4}), row({1, 1, 1, 1}));
  TapeEditor edit(s.program->tape());
  const std::vector<ValueId> inputs{s.product};
  const std::vector<ValueId> more = edit.insert(s.makes_product + 1, [](std::span<const Tensor> x) {
    const PathScope path("probe");
    const Tensor square = reshape(x[0], {2, 2});
    return std::vector<Tensor>{sum(transpose(square, 0, 1), 0), x[0], exp(square * 0.0)};
  }, inputs);
  EXPECT_EQ(more[1], s.product) << "what is returned as it came is no new value";
  Program program = s.program->with_tape(edit.take(), more);
  const std::vector<Tensor> results = program.run();
  ASSERT_EQ(results.size(), 5u);
  EXPECT_THAT(results[2].to_vector(), ElementsAre(3, 7));
  EXPECT_THAT(results[3].to_vector(), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(results[4].to_vector(), ElementsAre(1, 1, 1, 1));
  int views = 0, probes = 0;
  for (NodeId id = 0; id < program.tape().num_nodes(); ++id) {
    const Node& n = program.tape().node(id);
    views += n.num_outputs > 0 && program.tape().whole_of(program.tape().output(n)) == s.product && program.tape().output(n) != s.product;
    probes += program.tape().path(n) == "probe";
    EXPECT_TRUE(program.tape().path(n) != "probe" || n.phase == Phase::forward);
  }
  EXPECT_EQ(views, 2) << "they lie in what they view";
  EXPECT_GE(probes, 4);
}

// The replacement of a strided view is dense: its views may become copies.
TEST(TapeEditor, ViewsOfStridedValuesHaveTheirElements) {
  Recording recording;
  const Tensor x = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3}), t = transpose(x * 2.0, 0, 1);
  const std::vector<ValueId> wanted{recording.value_of(t)};
  const auto leaves = recording.leaves();
  const Program plain(recording.take(), [&](ValueId v) { return leaves.at(v); }, wanted);
  TapeEditor edit(plain.tape());
  const ValueId flat = edit.insert(edit.tape().num_nodes(), [](const Tensor& y) { return reshape(y, {6}) + 1.0; }, wanted[0]);
  EXPECT_THAT(plain.with_tape(edit.take(), std::vector{flat}).run()[1].to_vector(), ElementsAre(3, 9, 5, 11, 7, 13));
}

TEST(TapeEditor, TheLastReplacementBeforeANodeHolds) {
  const Squares s(row({1, 1}), row({1, 1}));
  TapeEditor edit(s.program->tape());
  const auto twice = [](const Tensor& x) { return x + x; };
  const NodeId after = s.makes_product + 1;
  const ValueId two = edit.insert(after, twice, s.product), four = edit.insert(after, twice, two);
  const ValueId probe = edit.insert(edit.tape().num_nodes() - 2, [](const Tensor& x) { return x * 1.0; }, s.product);
  edit.replace(s.product, two, after);
  edit.replace(two, four, s.backward);
  Program program = s.program->with_tape(edit.take(), std::vector{probe});
  const std::vector<Tensor> results = program.run();
  EXPECT_EQ(results[0].item(), 2 * 2 * 2) << "sum of two twos squared";
  EXPECT_THAT(results[1].to_vector(), ElementsAre(2 * 4, 2 * 4));
  EXPECT_THAT(results[2].to_vector(), ElementsAre(4, 4)) << "as what is inserted there";
}

TEST(TapeEditor, UnusedNodesAreErased) {
  const Squares s(row({1, 2}), row({3, 4}));
  TapeEditor edit(s.program->tape());
  const auto chain = [](const Tensor& x) { return exp(sigmoid(x)); };
  const NodeId nodes = edit.tape().num_nodes();
  const ValueId wanted = edit.insert(nodes, chain, s.product);
  edit.insert(s.makes_product + 1, chain, s.product);
  const ValueId same = edit.insert(s.backward, [](const Tensor& x) { return x * 1.0; }, s.product);
  edit.replace(s.product, same, s.backward);
  std::vector<ValueId> keep = s.wanted;
  keep.push_back(wanted);
  edit.erase_unused(keep);
  const Tape tape = edit.take();
  EXPECT_EQ(tape.num_nodes(), nodes + 3) << "exp and sigmoid of one chain, and a product";
  Program program = s.program->with_tape(tape, std::vector{wanted});
  EXPECT_THAT(program.run()[1].to_vector(), ElementsAre(2 * 3, 2 * 4 * 4));
}

TEST(TapeEditor, DumpsNameOnlyWhatIsThere) {
  const Squares s(row({1, 2}), row({3, 4}));
  ASSERT_FALSE(s.program->tape().cotangents().empty());
  TapeEditor edit(s.program->tape());
  edit.erase_unused(std::vector{s.wanted[0]});
  const Json dump = Json::parse(to_json(edit.take()), "the dump");
  std::set<int64_t> ids;
  for (const Json& value : dump.at("values").as_array()) ids.insert(value.at("id").as_int());
  for (const Json& pair : dump.at("cotangents").as_array())
    for (const Json& id : pair.as_array()) EXPECT_TRUE(ids.contains(id.as_int())) << id.as_int();
  EXPECT_EQ(ids.size(), 5u) << "x, w, their product, its squares, and their sum";

  Recording recording;  // a store whose memory is gone
  const Tensor memory = row({1, 2}) * 1.0, x = row({3, 4}) * 3.0;
  store_into(memory, x);
  const ValueId made = recording.value_of(memory);
  TapeEditor other(recording.take());
  other.erase(other.tape().value(made).producer);
  EXPECT_THAT(to_dot(other.take()), HasSubstr("store"));
}

TEST(TapeEditor, RefusesWhatATapeDoesNotHave) {
  const Squares s(row({1, 2}), row({3, 4}));
  TapeEditor edit(s.program->tape());
  const Tensor captured = row({1, 1});
  const auto insert = [&](auto code) {
    return message_of<ConfigError>(ExitCode::kConfig, [&] { edit.insert(s.makes_product + 1, code, s.product); });
  };
  EXPECT_THAT(insert([&](const Tensor& x) { return x + captured; }), HasSubstr("the code uses a tensor f32[2], which is none of its inputs"));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { edit.insert(1000, [](const Tensor& x) { return x + x; }, s.product); }),
              HasSubstr("[insert] in front of node 1000 of a tape of "));
  EXPECT_THAT(insert([&](const Tensor&) { return captured; }), HasSubstr("the code returns f32[2], which it has not computed"));
  const ValueId scalar = edit.insert(s.makes_product + 1, [](const Tensor& x) { return sum(x); }, s.product);
  EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [&] { edit.replace(s.product, scalar, s.backward); }),
              HasSubstr("f32[] in place of %"));
  edit.erase(s.makes_product);
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { edit.take(); }), HasSubstr("and the node that makes it is erased"));
  TapeEditor early(s.program->tape());
  early.insert(0, [](const Tensor& x) { return x * 2.0; }, s.product);
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { s.program->with_tape(early.take()); }), HasSubstr("which no earlier node makes"));
}

// Which collectives are needed follows from the types.
TEST(TapeEditor, ASumOfWhatRanksShareIsAllReduced) {
  for (int world = 1; world <= 5; ++world)
    run_local(world, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", world}});
      const Layout cut(mesh.spec, Placement::shard(0)), invariant(mesh.spec, Placement::invariant());
      const Squares s(redistribute(row({1, 2, 3, 4, 5, 6, 7}), cut), redistribute(row({1, 1, 1, 1, 1, 1, 1}), cut));
      TapeEditor edit(s.program->tape());
      const ValueId total = edit.insert(s.backward, [&](const Tensor& x) { return redistribute(sum(x), invariant); }, s.product);
      Program program = s.program->with_tape(edit.take(), std::vector{total});
      for (int run = 0; run < 2; ++run) EXPECT_EQ(program.run()[2].item(), 28);
      EXPECT_EQ(collectives(program.tape()).size(), collectives(s.program->tape()).size() + (world > 1));
    });
}

}  // namespace
}  // namespace sheaf
