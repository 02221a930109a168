// Cuts of a dimension that consists of several parts: what ops refuse, and what the samples do not cover.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/rowwise.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

const LocalOptions kLocal{.timeout = std::chrono::seconds(20), .threads_per_rank = 1};
const Placement kR = Placement::replicate();

Placement parts(int dim, const std::vector<int64_t>& sizes, int64_t units) {
  return Placement::shard(OwnershipMap::parts(dim, sizes, units));
}

Values drawn(const Shape& shape, const std::string& stream) {
  Generator draw(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = draw.uniform(-1, 1);
  return v;
}

// The inputs and result of packed attention's backward on one rank: its node on a tape, and the values.
struct Backward {
  const OpDef* op;
  std::vector<char> attrs;
  std::vector<Values> inputs;
  std::vector<Shape> shapes;
  Values result;
};
Backward backward_of(int64_t heads, int64_t key_heads, int64_t width) {
  const Shape shape{2, 3, (heads + 2 * key_heads) * width}, out_shape{2, 3, heads * width};
  const Tensor qkv = make_tensor(drawn(shape, "qkv"), shape, kF64),
               weight = make_tensor(drawn(out_shape, "weight"), out_shape, kF64);
  Recording recording({.capture_leaves = true});
  recording.watch(qkv);
  recording.gradient(sum(packed_attention(qkv, heads, key_heads) * weight), std::span(&qkv, 1));
  const auto captured = recording.captured();
  const Tape tape = recording.take();
  Backward out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (tape.op_name(n) != "packed_attention_backward") continue;
    out.op = n.op;
    const char* attrs = static_cast<const char*>(tape.attrs(n));
    out.attrs.assign(attrs, attrs + n.op->attrs_size);
    std::vector<ValueId> wanted(tape.inputs(n).begin(), tape.inputs(n).end());
    wanted.push_back(tape.output(n));
    for (const Tensor& t : replay(tape, [&](ValueId v) { return captured.at(v); }, wanted)) {
      out.inputs.push_back(t.to_vector<double>());
      out.shapes.push_back(t.shape());
    }
    out.result = out.inputs.back();
    out.inputs.pop_back();
  }
  return out;
}

// Any operand with a cut determines the cut of the others, which are sliced.
TEST(Parts, OneCutOperandCutsTheBackwardOfPackedAttention) {
  struct Heads { int64_t queries, keys, units; };
  for (const auto& [queries, keys, units] : {Heads{4, 2, 2}, Heads{4, 2, 1}, Heads{6, 3, 3}, Heads{4, 4, 2}}) {
    constexpr int64_t kWidth = 3;
    const Backward b = backward_of(queries, keys, kWidth);
    const Placement qkv = parts(2, {queries * kWidth, keys * kWidth, keys * kWidth}, units),
                    out = Placement::shard(OwnershipMap::even(2, queries * kWidth / units)),
                    lse = Placement::shard(OwnershipMap::even(1, queries / units)), cuts[] = {qkv, out, out, lse};
    for (int ranks = 1; ranks <= 5; ++ranks)
      for (unsigned given = 1; given < 16; ++given) {
        std::vector<LocalPart> got(static_cast<size_t>(ranks));
        run_local(ranks, [&](World& world) {
          const MeshSpec* mesh = world.mesh({{"model", ranks}}).spec;
          std::vector<Tensor> inputs;
          for (size_t i = 0; i < 4; ++i)
            inputs.push_back(make_local(b.inputs[i], {kF64, b.shapes[i], Layout(mesh, given >> i & 1 ? cuts[i] : kR)}, ""));
          const Tensor d = apply(*b.op, b.attrs.data(), inputs)[0];
          EXPECT_EQ(d.layout(), Layout(mesh, qkv));
          got[static_cast<size_t>(world.rank())] = local_part(d);
        }, kLocal);
        std::string error;
        EXPECT_LE(scaled_error(assemble(got, error), b.result), 1e-13) << ranks << " ranks, operands " << given;
        EXPECT_EQ(error, "");
      }
  }
}

// On every rank, and with the op's name: no rank waits for ranks that would have gone on.
TEST(Parts, WhatWouldTearThemApartIsRefused) {
  run_local(3, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"model", 3}}).spec;
    const auto refusal = [&](const Shape& shape, const Placement& p, const std::function<void(const Tensor&)>& f) -> std::string {
      const Tensor x = make_local(drawn(shape, "x"), {kF64, shape, Layout(mesh, p)}, "");
      try {
        f(x);
      } catch (const PlacementError& e) {
        return e.what();
      }
      return "nothing is refused";
    };
    const Placement packed = parts(2, {8, 4, 4}, 2), heads = parts(2, {4, 2, 2}, 2);
    const Shape qkv{2, 3, 16}, apart{2, 3, 8, 2};
    for (const auto& [begin, end] : {std::pair{0, 6}, {6, 12}, {8, 14}, {2, 8}, {9, 11}})  // no whole parts
      EXPECT_THAT(refusal(qkv, packed, [b = begin, e = end](const Tensor& x) { slice(x, 2, b, e); }),
                  HasSubstr("[slice] on mesh axis model")) << begin << " to " << end;
    EXPECT_EQ(refusal(qkv, packed, [](const Tensor& x) { slice(x, 2, 8, 16); }), "nothing is refused");
    EXPECT_THAT(refusal(qkv, packed, [](const Tensor& x) { concat({x, x}, 2); }), HasSubstr("[concat] on mesh axis model"));
    EXPECT_THAT(refusal(qkv, packed, [](const Tensor& x) { softmax(x); }), HasSubstr("[softmax] on mesh axis model"));
    EXPECT_THAT(refusal(qkv, parts(2, {8, 4, 4}, 4), [](const Tensor& x) { reshape(x, {2, 3, 8, 2}); }),
                HasSubstr("[reshape] on mesh axis model")) << "units of 2, 1 and 1 elements are no heads of 2";
    EXPECT_THAT(refusal(apart, heads, [](const Tensor& x) { rotary(x, {.theta = 100.0, .heads = 5}); }), HasSubstr("[rotary] on mesh axis model"));
    EXPECT_THAT(refusal(apart, Placement::shard(2), [](const Tensor& x) { rotary(x, {.theta = 100.0, .heads = 6}); }),
                HasSubstr("[rotary] on mesh axis model"));
    EXPECT_THAT(refusal(apart, parts(2, {4, 4}, 4), [](const Tensor& q) {
                  const Tensor k = full_of({kF64, {2, 3, 4, 2}, Layout(q.layout().mesh())}, 1.0);
                  attention(q, k, k);
                }), HasSubstr("[attention] on mesh axis model")) << "two queries read a key";
    // Units other than key heads, other parts, and none.
    const auto attend = [](const Tensor& x) { packed_attention(x, 4, 2); };
    for (const Placement& p : {parts(2, {8, 4, 4}, 4), parts(2, {4, 8, 4}, 2), parts(2, {12, 4}, 2), Placement::shard(2)})
      EXPECT_THAT(refusal(qkv, p, attend), HasSubstr("[packed_attention] on mesh axis model"));
    EXPECT_EQ(refusal(qkv, packed, attend), "nothing is refused");
    EXPECT_THAT(refusal({8, 2}, parts(0, {4, 4}, 4), [](const Tensor& x) {
                  rowwise([](const Tensor& r) { return r; }, x);
                }), HasSubstr("[rowwise] a rank's rows must be one interval"));
  }, kLocal);
}

// Refusals suggest a line of C++ as the fix; there is no short one for parts, so the message names the alternative.
TEST(Parts, ARefusalSaysWhatWorks) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"model", 2}}).spec;
    const Tensor x = full_of({kF64, {2, 8}, Layout(mesh, parts(1, {4, 4}, 2))}, 1.0);
    try {
      softmax(x);
      ADD_FAILURE() << "not refused";
    } catch (const PlacementError& e) {
      EXPECT_THAT(e.what(), HasSubstr("has Shard(1 parts) (f64[2,8] Shard(1 parts)@model); accepted: Replicate -> Replicate; "
                                      "communication is never implied: write redistribute(x, \"model\", Placement::replicate())"));
    }
  }, kLocal);
}

// Cuts that keep different numbers of rows together print differently, and so does the line that converts between them.
TEST(Parts, ARefusalNamesTheRowsThatStayTogether) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"model", 2}}).spec;
    const auto cut = [&](int dim, int64_t rows) { return Placement::shard(OwnershipMap::even(dim, rows)); };
    const Tensor x = full_of({kF64, {3, 8}, Layout(mesh, cut(1, 2))}, 1.0), scale = full_of({kF64, {8}, Layout(mesh, cut(0, 1))}, 1.0);
    try {
      mul(x, scale);
      ADD_FAILURE() << "not refused";
    } catch (const PlacementError& e) {
      EXPECT_THAT(e.what(), HasSubstr("has Shard(1 by 2) Shard(0) (f64[3,8] Shard(1 by 2)@model, f64[8] Shard(0)@model); accepted: "
                                      "Shard(1 by 2) Shard(0 by 2) -> Shard(1 by 2), "));
      EXPECT_THAT(e.what(), HasSubstr("write redistribute(x, \"model\", Placement::shard(OwnershipMap::even(0, 2))) for x = input 1"));
    }
    EXPECT_NO_THROW(mul(x, redistribute(scale, "model", cut(0, 2))));
    try {
      mul(redistribute(x, "model", Placement::shard(OwnershipMap::even(1).inner())), scale);
      ADD_FAILURE() << "not refused";
    } catch (const PlacementError& e) {
      EXPECT_THAT(e.what(), HasSubstr("accepted: Shard(1 inner) Shard(0 inner) -> Shard(1 inner), "));
      EXPECT_THAT(e.what(), HasSubstr("write redistribute(x, \"model\", Placement::shard(OwnershipMap::even(0).inner())) for x = input 1"));
    }
  }, kLocal);
}

// Two axes share the heads, the first axis of the mesh cutting what the second leaves: from tokens to whole sequences, and back.
TEST(Parts, AnInnerCutSharesWhatAnotherAxisHas) {
  constexpr int64_t kQueries = 10, kKeys = 5, kWidth = 4, kQ = kQueries * kWidth, kK = kKeys * kWidth;
  const Shape shape{2, 3, kQ + 2 * kK}, out_shape{2, 3, kQ};
  const Values x = drawn(shape, "x"), weight = drawn(out_shape, "weight");
  const auto attend = [&](const Tensor& qkv, bool apart) {
    const Tensor heads = rotary(reshape(qkv, {2, 3, kQueries + 2 * kKeys, kWidth}), {.theta = 100.0, .heads = kQueries + kKeys});
    const Tensor turned = reshape(heads, shape);
    if (!apart) return packed_attention(turned, kQueries, kKeys, {.causal = true});
    const auto part = [&](int64_t begin, int64_t end) {
      return reshape(slice(turned, 2, begin * kWidth, end * kWidth), {2, 3, end - begin, kWidth});
    };
    return reshape(attention(part(0, kQueries), part(kQueries, kQueries + kKeys), part(kQueries + kKeys, kQueries + 2 * kKeys),
                             {.causal = true}), out_shape);
  };
  const auto run = [&](const Tensor& leaf, const Layout& inside, const Layout& back, bool apart) {
    Recording recording;
    recording.watch(leaf);
    const Tensor y = redistribute(attend(redistribute(leaf, inside), apart), back);
    const Tensor w = make_local(weight, {kF64, out_shape, back}, "");
    return std::pair{y, recording.gradient(sum(y * w), std::span(&leaf, 1))[0]};
  };
  const auto [y, dx] = run(make_tensor(x, shape, kF64), {}, {}, false);
  for (const bool apart : {false, true})
    for (const Shape& ranks : {Shape{2, 1}, Shape{2, 2}, Shape{5, 1}}) {
      const int n = static_cast<int>(ranks.numel());
      std::vector<LocalPart> got_y(static_cast<size_t>(n)), got_dx(static_cast<size_t>(n));
      run_local(n, [&](World& world) {
        const MeshSpec* mesh = world.mesh({{"context", static_cast<int>(ranks[0])}, {"model", static_cast<int>(ranks[1])}}).spec;
        const Placement tokens = Placement::shard(1), packed = parts(2, {kQ, kK, kK}, kKeys),
                        inner = Placement::shard(packed.map().inner()),
                        heads = Placement::shard(OwnershipMap::even(2, kQ / kKeys));
        const auto [mine, gradient] = run(make_local(x, {kF64, shape, Layout(mesh, {tokens, packed})}, ""),
                                          Layout(mesh, {inner, packed}), Layout(mesh, {tokens, heads}), apart);
        got_y[static_cast<size_t>(world.rank())] = local_part(mine);
        got_dx[static_cast<size_t>(world.rank())] = local_part(gradient);
      }, kLocal);
      std::string error;
      EXPECT_LE(scaled_error(assemble(got_y, error), y.to_vector<double>()), 1e-13) << ranks.to_string() << apart;
      EXPECT_LE(scaled_error(assemble(got_dx, error), dx.to_vector<double>()), 1e-13) << ranks.to_string() << apart;
      EXPECT_EQ(error, "");
    }
}

// Samples are cut along dimension 0: a cut of parts on another axis does not matter.
TEST(Parts, RowsMayBeCutInThem) {
  run_local(6, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 3}}).spec;
    const Shape shape{4, 8};
    const Type type{kF64, shape, Layout(mesh, {Placement::shard(0), parts(1, {4, 2, 2}, 2)})};
    const Tensor x = make_local(drawn(shape, "x"), type, "");
    int64_t first = -1;
    const Tensor y = rowwise([&](const Tensor& r) {
      first = first_local_row();
      return 2.0 * r;
    }, x);
    EXPECT_EQ(first, world.rank() / 3 * 2);
    EXPECT_TRUE(identical(y, 2.0 * x));
  }, kLocal);
}

}  // namespace
}  // namespace sheaf::testing
