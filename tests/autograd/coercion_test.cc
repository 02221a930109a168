// Operands whose placements do not match: conversions that need no communication are implicit, everything else is refused with the line to
// write. Also which losses are refused, on one rank as on several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/shard.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const Placement kR = Placement::replicate(), kP = Placement::partial(), kI = Placement::invariant();
const LocalOptions kLocal{.timeout = std::chrono::seconds(20), .threads_per_rank = 1};

int count(const Tape& tape, std::string_view op) {
  int n = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) n += tape.op_name(tape.node(id)) == op;
  return n;
}

Tensor rows() { return arange(-2.0, 2.0, 0.25, kF64); }

// The loss of the sharded batch is Partial, the penalty on a weight Replicate.
TEST(Coercion, APenaltyCountsOnceAndMovesNoByte) {
  std::vector<double> expected;
  double expected_loss = 0;
  for (int ranks : {0, 1, 2, 3}) {  // 0: without a mesh
    run_local(std::max(ranks, 1), [&](World& world) {
      nn::Linear model(4, 3);
      const Mesh mesh = ranks == 0 ? Mesh{} : world.mesh({{"data", ranks}});
      shard(model, mesh, {.strategy = ranks == 0 ? Strategy::none : Strategy::full_shard});
      materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
      Tensor x = reshape(rows(), {4, 4});
      if (mesh.spec) x = redistribute(x, Layout(mesh.spec, Placement::shard(0)));
      Recording recording;
      const auto scope = model.enter();
      Tensor loss = mean(square(linear(x, model.weight, model.bias))) + 0.25 * sum(square(model.weight));
      recording.backward(loss);
      const Tape tape = recording.take();
      EXPECT_TRUE(check_types(tape).empty() && check_cotangents(tape).empty());
      const std::vector<double> gradient = full_gradient(model.weight).to_vector<double>();
      if (mesh.spec) {
        EXPECT_EQ(count(tape, "keep_on_one"), ranks == 1 ? 0 : 2) << "forward and backward";
        EXPECT_EQ(count(tape, "all_reduce"), 0);
        loss = redistribute(loss, "data", kI);
      }
      if (world.rank() != 0) return;
      if (ranks == 0) {
        expected = gradient;
        expected_loss = loss.item<double>();
      }
      EXPECT_NEAR(loss.item<double>(), expected_loss, 1e-14);
      for (size_t i = 0; i < gradient.size(); ++i) EXPECT_NEAR(gradient[i], expected[i], 1e-14) << ranks << " ranks";
    }, kLocal);
  }
}

template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const PlacementError& e) {
    EXPECT_THAT(e.what(), Not(HasSubstr("\n"))) << "a message is one line";
    return e.what();
  }
  ADD_FAILURE() << "nothing thrown";
  return "";
}

// As to other values: on their device, which need not be the rank's, and only a whole number to integers.
TEST(Coercion, ANumberIsAddedToAddendsWhereTheyAre) {
  run_local(2, [](World& world) {
    const Tensor x = full_of({kI64, {2}, Layout(world.mesh({{"data", 2}}).spec, kP)}, 3);
    EXPECT_THROW(x + 0.5, DTypeError);
    const auto of_meta = [&] {
      const DeviceScope meta(Device::meta());
      return 1.0 - x;
    };
    EXPECT_EQ(redistribute(of_meta(), "data", kI).to_vector<int64_t>(), (std::vector<int64_t>{-2, -2}));
  }, kLocal);
}

TEST(Coercion, RefusalsSayWhatToWrite) {
  run_local(2, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}}).spec;
    const auto in = [&](const Placement& p) { return redistribute(reshape(rows(), {4, 4}), Layout(mesh, p)); };

    EXPECT_THAT(refusal([&] { relu(in(kP)); }),
                HasSubstr("has Partial (f64[4,4] Partial@data); accepted: Replicate -> Replicate; communication is never "
                          "implied: write redistribute(x, \"data\", Placement::replicate()) for x = input 0"));
    relu(redistribute(in(kP), "data", Placement::replicate()));

    // A rank's rows, padded with zeros, are a partial sum.
    EXPECT_THAT(refusal([&] { in(kP) + in(Placement::shard(0)); }),
                HasSubstr("write redistribute(x, \"data\", Placement::partial()) for x = input 1 (moves no byte)"));
    in(kP) + redistribute(in(Placement::shard(0)), "data", Placement::partial());
    // Not where only the result of a reduction is Partial: rows are centered by a whole mean.
    EXPECT_THAT(refusal([&] { in(Placement::shard(0)) - mean(in(Placement::shard(0)), 0); }),
                HasSubstr("write redistribute(x, \"data\", Placement::replicate()) for x = input 1"));
    // An op that is several says which.
    EXPECT_THAT(refusal([&] { lt(in(kP), 0); }), HasSubstr("has Partial (f64[4,4] Partial@data, lt 0); accepted"));

    const std::string mixed = refusal([&] { in(kR) * in(kI); });
    EXPECT_THAT(mixed, HasSubstr("all Invariant"));
    EXPECT_THAT(mixed, HasSubstr("write redistribute(x, \"data\", Placement::replicate()) for x = input 1 (moves no byte)"));
    in(kR) * redistribute(in(kI), "data", Placement::replicate());

    EXPECT_THAT(refusal([&] { in(Placement::shard(0)) * in(Placement::shard(1)); }),
                HasSubstr("write redistribute(x, \"data\", Placement::shard(0)) for x = input 1"));
    in(Placement::shard(0)) * redistribute(in(Placement::shard(1)), "data", Placement::shard(0));
    // Nor does it suggest making both Partial, each as large as the whole, if neither is.
    const std::string cuts = refusal([&] { in(Placement::shard(0)) + in(Placement::shard(1)); });
    EXPECT_THAT(cuts, HasSubstr("write redistribute(x, \"data\", Placement::shard(0)) for x = input 1"));
    EXPECT_THAT(cuts, Not(HasSubstr("write redistribute(x, \"data\", Placement::partial())")));
    // Cuts that print alike: the message says how they differ.
    const auto uneven = [&](const std::vector<int64_t>& sizes) {
      return full_of({kF64, {4}, Layout(mesh, Placement::shard(OwnershipMap::uneven(0, sizes)))}, 1);
    };
    EXPECT_THAT(refusal([&] { uneven({1, 3}) + uneven({3, 1}); }),
                HasSubstr("Shard(0 uneven) Shard(0 uneven) (input 1 <1 3 1>, not <3 1 1>)"));
  }, kLocal);
}

// What has no elements is cut like what has some.
// What one rank has is combined with what the same rank has, or with what all have.
TEST(Coercion, OperandsOnTwoRanksAreRefused) {
  run_local(2, [](World& world) {
    const Mesh mesh = world.mesh({{"stage", 2}});
    const Tensor x = redistribute(rows(), Layout(mesh.spec));
    const Tensor first = redistribute(x, "stage", Placement::on(0)), second = redistribute(x, "stage", Placement::on(1));
    const Tensor cut = redistribute(x, "stage", Placement::shard(0));
    EXPECT_EQ(add(first, x).layout()[0], Placement::on(0));
    const auto refused = [](int input) {
      return ::testing::ThrowsMessage<PlacementError>(HasSubstr(str("redistribute(x, \"stage\", Placement::on(1)) for x = input ", input)));
    };
    EXPECT_THAT([&] { add(first, second); }, refused(0));
    EXPECT_THAT([&] { add(second, first); }, refused(1));
    EXPECT_THAT([&] { add(cut, second); }, refused(0));
  }, kLocal);
}

// An op of two outputs, whose rule places one.
struct ShortRule {
  static constexpr const char* kName = "short_rule";
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)), c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { p.rule({p.in(0)}, {p.in(0)}); }
  static void execute(const Attrs&, Execute&) {}
};

TEST(Coercion, RulesPlaceEverything) {
  run_local(2, [](World& world) {
    const Tensor x = redistribute(rows(), Layout(world.mesh({{"data", 2}}).spec, Placement::shard(0)));
    EXPECT_THAT([&] { apply_all<ShortRule>({}, {x}); },
                ::testing::ThrowsMessage<PlacementError>(
                    HasSubstr("[short_rule] a placement rule for 1 inputs and 1 outputs: there are 1 and 2")));
  }, kLocal);
}

TEST(Coercion, AnEmptyBatchIsReshapedWhereItIs) {
  run_local(2, [](World& w) {
    const Layout rows(w.mesh({{"data", 2}}).spec, Placement::shard(0));
    const Tensor x = full_of({kF32, {0, 3, 8}, rows}, 1);
    EXPECT_EQ(reshape(x, {0, 3, 2, 4}).type(), (Type{kF32, {0, 3, 2, 4}, rows}));
    EXPECT_EQ(reshape(x, {0, 24}).type(), (Type{kF32, {0, 24}, rows}));
  });
}

// Many rows' gradients are added up in f32, so that they do not stall.
TEST(Coercion, GradientsOfTakenRowsAreRoundedOnce) {
  for (const int ranks : {1, 2, 4})
    for (const DType dtype : {kBF16, kF16, kF32})
      run_local(ranks, [&](World& w) {
        const Layout whole(w.mesh({{"data", ranks}}).spec), rows(whole.mesh(), Placement::shard(0));
        const Tensor index = full_of({kI64, {4000}, rows}, 0), of_each = full_of({kI64, {4000, 3}, rows}, 0);
        Recording recording;
        const Tensor x = recording.watch(full_of({dtype, {2, 3}, whole}, 1));
        for (const Tensor& y : {take(x, index), gather(x, 0, of_each)}) {
          const Tensor g = recording.gradient(sum(y), std::span(&x, 1), {.keep = true})[0];
          EXPECT_TRUE(g.dtype() == dtype);
          EXPECT_EQ(full_tensor(g).to_vector<double>(), (std::vector<double>{4000, 4000, 4000, 0, 0, 0})) << str(dtype, " on ", ranks);
        }
      });
}

// Axes cut a dimension in order: if a later axis cuts it, an earlier one cannot slice it without communication.
TEST(Coercion, WhatALaterAxisCutsIsNotSliced) {
  run_local(4, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 2}, {"model", 2}}).spec;
    const Placement s0 = Placement::shard(0), s1 = Placement::shard(1);
    const auto in = [&](const Placement& a, const Placement& b) {
      return redistribute(reshape(rows(), {4, 4}), Layout(mesh, {a, b}));
    };
    const Tensor both = in(s0, s0), inner = in(kR, s0);
    const std::string message = refusal([&] { both + inner; });
    EXPECT_THAT(message, HasSubstr("on mesh axis data"));
    EXPECT_THAT(message, HasSubstr("write redistribute(x, \"data\", Placement::shard(0)) for x = input 1"));
    EXPECT_THAT(message, Not(HasSubstr("moves no byte")));
    both + redistribute(inner, "data", s0);
    both + in(s0, kR);
    both + in(kR, kR);
    in(s0, s1) + in(kR, s1);
  }, kLocal);
}

// A program that works on one rank works on a cluster.
TEST(Item, IsOneValueOfAllRanksOnOneRankToo) {
  EXPECT_EQ(Tensor::scalar(2.5).item(), 2.5f);
  for (int ranks : {1, 2}) {
    run_local(ranks, [&](World& world) {
      const MeshSpec* mesh = world.mesh({{"data", ranks}, {"model", 1}}).spec;
      const auto in = [&](const Placement& p) {
        return redistribute(Tensor::from<float>({2.5f}, {1}), Layout(mesh, kI).with(0, p));
      };
      for (const Placement& p : {kR, kP, Placement::shard(0)}) {
        EXPECT_THAT(refusal([&] { in(p).item(); }),
                    HasSubstr("Invariant@model is not one value of all ranks of mesh axis data: write redistribute(x, "
                              "\"data\", Placement::invariant()).item()"));
        EXPECT_EQ(redistribute(in(p), "data", kI).item(), 2.5f);
      }
    }, kLocal);
  }
}

TEST(Loss, WholeOnEveryRankIsRefusedOnOneRankToo) {
  for (int ranks : {1, 2}) {
    run_local(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({{"data", ranks}});
      nn::Linear model(4, 3);
      shard(model, mesh);
      materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
      const Tensor x = reshape(rows(), {4, 4});
      const auto loss_of = [&](const Tensor& batch) { return mean(square(model(batch))); };
      {
        Recording recording;
        EXPECT_THAT(refusal([&] { recording.backward(loss_of(x)); }),
                    HasSubstr("redistribute(x, \"data\", Placement::shard(0)), and it is Partial; or, to count once what "
                              "all ranks compute alike, write recording.backward(redistribute(loss, \"data\", "
                              "Placement::partial()))"));
        const Tensor one = slice(slice(reshape(model(x), {1, 12}), 1, 0, 1), 0, 0, 1);
        EXPECT_THAT(refusal([&] { recording.backward(redistribute(one, "data", Placement::shard(0))); }),
                    HasSubstr("is of one rank on mesh axis data: write recording.backward(redistribute(loss, "));
      }
      const auto gradient_after = [&](auto&& loss) {
        for (const auto& unit : units(model)) unit->zero_grad();
        {
          Recording recording;
          recording.backward(loss());
        }
        return full_gradient(model.weight).to_vector<double>();
      };
      // The line that the message suggests gives the same gradient either way.
      const auto cut = gradient_after([&] { return loss_of(redistribute(x, Layout(mesh.spec, Placement::shard(0)))); });
      const auto once = gradient_after([&] { return redistribute(loss_of(x), "data", Placement::partial()); });
      ASSERT_EQ(cut.size(), 12u);
      for (size_t i = 0; i < cut.size(); ++i) EXPECT_NEAR(once[i], cut[i], 1e-14);
    }, kLocal);
  }
}

// A unit reduces over its own mesh: with parameters on no mesh it would take each rank's share for the whole gradient.
TEST(Loss, OfParametersOnNoMeshIsRefusedOnOneRankToo) {
  for (int ranks : {1, 2}) {
    run_local(ranks, [&](World& world) {
      const MeshSpec* mesh = world.mesh({{"data", ranks}}).spec;
      nn::Linear model(4, 4);
      materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
      const Tensor x = redistribute(reshape(rows(), {4, 4}), Layout(mesh, Placement::shard(0)));
      const auto message = [&](auto&& loss) {
        Recording recording;
        return refusal([&] { recording.backward(loss()); });
      };
      for (const std::string& m : {message([&] { return sum(model(x)); }),
                                   message([&] { return sum(mul(x, model.bias)); })})
        EXPECT_THAT(m, HasSubstr("is on no mesh and meets values on (data="));
      const Tensor whole = redistribute(x, "data", kI);
      {
        Recording recording;
        recording.backward(sum(mul(whole, model.bias)));
      }
      EXPECT_EQ(full_gradient(model.bias).to_vector<double>(), sum(whole, 0).to_vector<double>());
    }, kLocal);
  }
}

TEST(Loss, WithoutAMeshIsTaken) {
  nn::Linear model(4, 3);
  materialize(model);
  Recording recording;
  recording.backward(mean(square(model(cast(reshape(rows(), {4, 4}), kF32)))));
  recording.take();
  EXPECT_TRUE(full_gradient(model.weight).defined());
}

}  // namespace
}  // namespace sheaf
