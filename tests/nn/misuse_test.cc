// Misuse that would silently compute wrong numbers, or fail without saying where: changes of memory that derivatives read, values watched
// too late, ranks that compute different programs, errors deep inside a model; and expressions that look like misuse but are not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The message of what `f` throws, of any type.
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no exception";
}

Tensor numbers(std::vector<double> values) {
  const int64_t n = std::ssize(values);
  return Tensor::from(values, {n});
}

TEST(Sizes, WhoseProductsDoNotFitAreRefused) {
  const Tensor x = numbers({1, 2, 3, 4}), none = numbers({});
  const int64_t wraps = (int64_t{1} << 62) + 1, large = int64_t{1} << 32;
  for (const Shape& shape : {Shape{wraps, 4}, Shape{large, large, 4}, Shape{wraps, -1}})
    EXPECT_THROW(reshape(x, shape), ShapeError) << shape.to_string();
  EXPECT_THROW(reshape(none, {large, large}), ShapeError);
  EXPECT_THROW(expand(numbers({1}), {large * 256, large * 256}), ShapeError);
  EXPECT_EQ(reshape(none, {0, large}).shape(), (Shape{0, large}));
}

TEST(Slices, HaveSteps) {
  const Tensor x = numbers({0, 1, 2, 3, 4, 5, 6}), odd = slice(x, 0, 1, 7, 2), rows = slice(reshape(slice(x, 0, 0, 6), {3, 2}), -2, -3, 3, 2);
  EXPECT_EQ(odd.to_vector<double>(), (std::vector<double>{1, 3, 5}));
  EXPECT_EQ(odd.storage(), x.storage());
  EXPECT_EQ(rows.to_vector<double>(), (std::vector<double>{0, 1, 4, 5}));
  EXPECT_EQ(slice(x, 0, 0, 7, 3).to_vector<double>(), (std::vector<double>{0, 3, 6}));
  EXPECT_EQ(slice(x, 0, 4, 6, 9).to_vector<double>(), (std::vector<double>{4}));
  EXPECT_EQ(slice(x, 0, 7, 7, 2).numel(), 0);
  EXPECT_THAT(error_of([&] { slice(x, 0, 0, 7, 0); }), HasSubstr("[slice] step 0 along dimension 0 of f64[7]: the least is 1"));
  Recording recording;
  const Tensor w = recording.watch(numbers({1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(recording.gradient(sum(square(slice(w, 0, 1, 5, 3))), std::vector{w})[0].to_vector<double>(), (std::vector<double>{0, 4, 0, 0, 10, 0}));
  EXPECT_THAT(to_json(recording.tape()), HasSubstr("dim 0 [1,5) step 3"));
}

TEST(Changes, OfWhatHasAGradientAreRefused) {
  const auto refusal = [](auto&& change) {
    return message_of<LifetimeError>(ExitCode::kDesync, [&] {
      Recording recording;
      const Tensor x = recording.watch(numbers({0.1, 0.2})), h = tanh(x);
      change(h, x);
    });
  };
  EXPECT_THAT(
      refusal([](const Tensor& h, const Tensor&) { store_into(h, numbers({1, 2})); }),
      AllOf(HasSubstr("[store] root: %"), HasSubstr("f64[2] depends on values whose gradients are needed: changed memory has no derivative")));
  EXPECT_THAT(refusal([](const Tensor& h, const Tensor& x) { add_into(h, x); }), HasSubstr("[add_into] root: %"));
  EXPECT_THAT(refusal([](const Tensor& h, const Tensor&) { store_into(slice(h, 0, 0, 1), numbers({1})); }), HasSubstr("[store] root: %"));
  for (const bool of_input : {false, true})
    EXPECT_THAT(refusal([=](const Tensor& h, const Tensor& x) { store_into(slice(stop_gradient(of_input ? x : h), 0, 0, 1), numbers({1})); }),
                HasSubstr("[store] root: %")) << of_input;
  EXPECT_EQ(refusal([](const Tensor& h, const Tensor&) { store_into(copy_of(stop_gradient(h)), numbers({1, 2})); }), "no exception");
}

// Also where nothing leads from x to y, and the gradient is 0.
TEST(Gradients, AreOfScalars) {
  Recording recording;
  const Tensor x = recording.watch(numbers({1, 2})), other = recording.watch(numbers({3, 4}));
  EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { recording.gradient(square(other), std::vector{x}); }),
              HasSubstr("[gradient] needs a scalar, not f64[2]"));
  EXPECT_EQ(recording.gradient(sum(square(other)), std::vector{x})[0].to_vector<double>(), (std::vector<double>{0, 0}));
}

// Whatever the rank's device: that of values.
TEST(Gradients, AreWhereTheirValuesAre) {
  Recording recording;
  const Tensor x = recording.watch(Tensor::empty({kF32, {4, 3}, {}}, Device::meta())), other = recording.watch(Tensor::empty(x.type(), Device::meta()));
  const Tensor index = Tensor::empty({kI64, {2}, {}}, Device::meta()), xs[] = {x, other};
  for (const Tensor& g : recording.gradient(sum(take(x, index)), xs)) EXPECT_TRUE(g.device().is_meta());
}

// Storing a value without a gradient: the value is stored, and no gradient passes through.
TEST(Changes, PassNoGradientOn) {
  Recording recording;
  const Tensor x = recording.watch(numbers({0.5, -1})), memory = numbers({0, 0, 0}), other = x * slice(memory + 3.0, 0, 0, 2);
  store_into(slice(memory, 0, 1, 3), x * 2.0);
  store_into(slice(memory, 0, 0, 1), numbers({7}));  // again, where nothing with a gradient changes
  EXPECT_EQ(memory.to_vector<double>(), (std::vector<double>{7, 1, -2}));
  const Tensor xs[] = {x};
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.gradient(sum(square(memory)), xs, {.keep = true}); }),
              HasSubstr("memory that a value with a gradient was stored into"));
  EXPECT_EQ(recording.gradient(sum(other), xs)[0].to_vector<double>(), (std::vector<double>{3, 3}));
}

// The same through views from before the change, in the recording or outside of it.
TEST(Changes, PassNoGradientOnThroughEarlierViews) {
  const Tensor memory = numbers({0, 0, 0, 5}), outside = slice(memory, 0, 0, 2), apart = slice(memory, 0, 2, 4), crossing = slice(memory, 0, 1, 3);
  Recording recording;
  const Tensor x = recording.watch(numbers({0.5, -1})), inside = slice(memory, 0, 0, 2), of_inside = slice(inside, 0, 1, 2), xs[] = {x};
  const Tensor before = x * inside;
  store_into(slice(memory, 0, 0, 2), x * 2.0);
  for (const Tensor& view : {outside, inside, of_inside, crossing})
    for (const bool also : {false, true}) {
      const Tensor y = also ? sum(view * 3.0) + sum(x) : sum(view * 3.0);
      EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.gradient(y, xs, {.keep = true}); }),
                  HasSubstr("memory that a value with a gradient was stored into"));
    }
  for (const Tensor& view : {apart, stop_gradient(inside)})
    EXPECT_EQ(recording.gradient(sum(view * x), xs, {.keep = true})[0].to_vector<double>(), view.to_vector<double>());
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.gradient(sum(before), xs); }), HasSubstr("was changed in place"));
}

// One op saved it before the change, and one after: the first no longer has what it read.
TEST(Changes, BetweenTwoReadersAreNoticed) {
  Recording recording;
  const Tensor x = recording.watch(numbers({0.1, 0.2})), y = numbers({1, 2}), before = x * y;
  store_into(y, numbers({3, 4}));
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { x* y; }),
              AllOf(HasSubstr("[mul] value %"), HasSubstr("was changed in place after an op had it")));
}

TEST(Changes, AreOfOneType) {
  const Tensor memory = numbers({0, 0});
  EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { store_into(memory, numbers({1, 2, 3})); }),
              HasSubstr("[store] a value f64[3] into memory of f64[2]"));
  EXPECT_THAT(message_of<DTypeError>(ExitCode::kConfig, [&] { add_into(memory, Tensor::from<float>({1, 2}, {2})); }),
              HasSubstr("[add_into] a value f32[2] into memory of f64[2]: cast() it"));
  EXPECT_THAT(message_of<DTypeError>(ExitCode::kConfig, [&] { store_into(memory, Tensor::from<int64_t>({1, 2}, {2})); }), HasSubstr("i64[2]"));
  EXPECT_THAT(message_of<ShapeError>(ExitCode::kConfig, [&] { add_into(expand(numbers({5}), {4}), numbers({1, 2, 3, 4})); }),
              HasSubstr("has one address for all of dimension 0"));
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const Tensor whole = full_of({kF32, {2}, Layout(mesh.spec)}, 0), part = full_of({kF32, {2}, Layout(mesh.spec, Placement::partial())}, 1);
    EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [&] { store_into(whole, part); }),
                HasSubstr("a value f32[2] Partial@data into memory of f32[2] Replicate@data: redistribute() it"));
    const Tensor constant = Tensor::from<float>({0, 0}, {2});
    for (const Placement& p : {Placement::partial(), Placement::shard(0), Placement::on(1)})
      EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [&] { add_into(constant, full_of({kF32, {2}, Layout(mesh.spec, p)}, 1)); }),
                  HasSubstr("into memory of f32[2]: redistribute() it"));
    add_into(constant, whole);
  });
}

// Of a rank without columns, whose rows are all at one address.
TEST(Changes, OfNoElements) {
  run_local(2, [](World& w) {
    const Layout columns(w.mesh({{"data", 2}}).spec, Placement::shard(1));
    const Tensor memory = full_of({kF32, {3, 1}, columns}, 1);
    store_into(memory, full_of({kF32, {3, 1}, columns}, 2));
    add_into(memory, full_of({kF32, {3, 1}, columns}, 3));
    EXPECT_EQ(memory.to_vector(), std::vector<float>(static_cast<size_t>(memory.local_shape().numel()), 5.0f));
  });
}

// The value is that before the change, wherever it lies.
TEST(Changes, ByWhatLiesInTheSameMemory) {
  const std::vector<double> all{1, 2, 3, 4, 5, 6, 7, 8, 9};
  const auto after = [&](auto&& change) {
    const Tensor memory = Tensor::from(all, {3, 3});
    change(memory);
    return memory.to_vector<double>();
  };
  EXPECT_EQ(after([](const Tensor& m) { store_into(m, transpose(m, 0, 1)); }), (std::vector<double>{1, 4, 7, 2, 5, 8, 3, 6, 9}));
  EXPECT_EQ(after([](const Tensor& m) { add_into(m, transpose(m, 0, 1)); }), (std::vector<double>{2, 6, 10, 6, 10, 14, 10, 14, 18}));
  EXPECT_EQ(after([](const Tensor& m) { store_into(slice(m, 0, 1, 3), slice(m, 0, 0, 2)); }), (std::vector<double>{1, 2, 3, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(after([](const Tensor& m) { add_into(slice(m, 0, 1, 3), slice(m, 0, 0, 2)); }), (std::vector<double>{1, 2, 3, 5, 7, 9, 11, 13, 15}));
  EXPECT_EQ(after([](const Tensor& m) { add_into(m, m); }), (std::vector<double>{2, 4, 6, 8, 10, 12, 14, 16, 18}));
}

// What has no mesh is Replicate on every one, as the operand of an op is.
TEST(Changes, ByWhatHasNoMesh) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const Tensor x = Tensor::from<float>({1, 2, 3}, {3});
    for (const Placement& p : {Placement::replicate(), Placement::invariant(), Placement::partial(), Placement::shard(0), Placement::on(1)}) {
      const Tensor memory = full_of({kF32, {3}, Layout(mesh.spec, p)}, 7);
      store_into(memory, x);
      EXPECT_EQ(full_tensor(memory).to_vector<float>(), (std::vector<float>{1, 2, 3})) << str(p);
      add_into(memory, x);
      EXPECT_EQ(full_tensor(memory).to_vector<float>(), (std::vector<float>{2, 4, 6})) << str(p);
    }
  });
}

TEST(Watch, ComesBeforeTheFirstUse) {
  Recording recording;
  const Tensor x = numbers({1, 2}), y = sum(square(x));
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.watch(x); }),
              HasSubstr("[watch] f64[2] was read by square before: what is differentiated is watched before its first use"));
  const Tensor z = recording.watch(numbers({1, 2}));
  sum(square(z));
  EXPECT_EQ(error_of([&] { recording.watch(z); }), "no exception") << "it was watched in time";
}

/// The error of a job on two ranks, each of which runs its own `f`.
std::string disagreement(const std::function<void(World&, const Mesh&)>& f) {
  return error_of([&] { run_local(2, [&](World& w) { f(w, w.mesh({{"data", 2}})); }); });
}

// The same number of elements is sent, but of different meaning.
TEST(Ranks, WhoseValuesDifferAreTold) {
  const auto partial = [](const Mesh& mesh, const Shape& shape) { return full_of({kF32, shape, Layout(mesh.spec, Placement::partial())}, 1); };
  EXPECT_THAT(disagreement([&](World& w, const Mesh& mesh) {
                redistribute(partial(mesh, w.rank() ? Shape{3, 4} : Shape{4, 3}), "data", Placement::invariant());
              }),
              AllOf(HasSubstr("ranks disagree"), HasSubstr("of f32[4,3] Partial@data to Invariant@data"), HasSubstr("of f32[3,4] Partial@data")));
  EXPECT_THAT(disagreement([&](World& w, const Mesh& mesh) { redistribute(partial(mesh, {2, 2}), "data", Placement::shard(w.rank())); }),
              AllOf(HasSubstr("to Shard(0)@data"), HasSubstr("to Shard(1)@data")));
  EXPECT_THAT(disagreement([&](World& w, const Mesh& mesh) {
                redistribute(partial(mesh, {2}), "data", w.rank() ? Placement::replicate() : Placement::invariant());
              }),
              HasSubstr("ranks disagree"));
}

TEST(Ranks, WhoseModelsDifferAreTold) {
  const auto made = [](const std::string& strategy, auto&& make, auto&& seed) {
    return disagreement([&](World& w, const Mesh& mesh) {
      nn::Linear model = make(w.rank());
      shard(model, mesh, {.strategy = strategy});
      materialize(model, w.device(), {.seed = seed(w.rank())});
    });
  };
  const auto same = [](int) { return uint64_t{3}; };
  for (const char* strategy : {"full_shard", "replicate"}) {
    EXPECT_THAT(made(strategy, [](int rank) { return nn::Linear(6, rank ? 4 : 5); }, same),
                AllOf(HasSubstr("[materialize] ranks disagree: unit 'root' is weight f32[5,6], bias f32[5] on rank 0"),
                      HasSubstr("weight f32[4,6], bias f32[4] on rank 1")));
    EXPECT_THAT(made(strategy, [](int) { return nn::Linear(6, 4); }, [](int rank) { return static_cast<uint64_t>(rank); }),
                HasSubstr("[materialize] ranks disagree: the seed is 0 on rank 0 and 1 on rank 1"));
    EXPECT_EQ(made(strategy, [](int) { return nn::Linear(6, 4); }, same), "no exception");
  }
}

struct Two : nn::Module {
  nn::Linear a{6, 6}, b{6, 6};
  Tensor forward(const Tensor& x) { return b(tanh(a(x))); }
  SHEAF_FIELDS(a, b);
};

// Parameters of two units in one op, outside any module's scope: the gather of one does not discard the other.
TEST(Units, MeetOutsideOfScopes) {
  const auto gradients = [](int ranks, const std::string& strategy) {
    std::vector<std::vector<double>> out;
    run_local(ranks, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", ranks}});
      Two model;
      shard(model, mesh, {.units = nn::units_of<nn::Linear>(), .strategy = strategy});
      materialize(model, w.device(), {.seed = 1, .dtype = kF64});
      std::vector<double> rows;
      for (int i = 0; i < 6 * 6; ++i) rows.push_back(0.1 * (i * 7 % 11) - 0.4);
      const Tensor x = redistribute(Tensor::from(rows, {6, 6}), Layout(mesh.spec, Placement::shard(0)));
      Recording recording;
      Tensor loss = sum(square(model(x)));
      const Tensor a = model.a.weight, apart = sum(square(a - slice(model.b.weight, 0, 0, 6))),
                   all = sum(concat({a, model.b.weight, model.a.weight}, 0));
      recording.backward(loss + redistribute(apart + all * 0.5, "data", Placement::partial()));
      recording.take();
      for (const nn::Parameter& p : model.parameters()) {
        const auto g = full_gradient(p).to_vector<double>();
        if (w.rank() == 0) out.push_back(g);
      }
    });
    return out;
  };
  const auto one = gradients(1, "full_shard");
  for (int ranks : {2, 3})
    for (const char* strategy : {"full_shard", "shard_grad_op", "replicate"}) {
      const auto many = gradients(ranks, strategy);
      ASSERT_EQ(many.size(), one.size());
      for (size_t p = 0; p < one.size(); ++p)
        for (size_t i = 0; i < one[p].size(); ++i) EXPECT_NEAR(many[p][i], one[p][i], 1e-12) << strategy << ' ' << p;
    }
}

using Deep = testing::Chain<Two, 2>;

// Its layer is called like a word of messages.
struct Reader : nn::Module {
  nn::Linear input{5, 6};
  Tensor forward(const Tensor& x) { return input(x); }
  SHEAF_FIELDS(input);
};

// Every error, of any op and any kind, says in which module, and on which of several ranks.
TEST(Errors, SayWhere) {
  const auto message = [](int ranks) {
    return error_of([&] {
      run_local(ranks, [&](World& w) {
        Deep model;
        model.blocks[1].b = nn::Linear(5, 6);
        shard(model, w.mesh({{"data", ranks}}));
        materialize(model, w.device());
        model(full({4, 6}, 1.0));
      });
    });
  };
  EXPECT_THAT(message(1), AllOf(HasSubstr("[linear]"), ::testing::EndsWith(" (in blocks.1.b)")));
  EXPECT_THAT(message(2), AllOf(HasSubstr("[linear]"), ::testing::ContainsRegex("\\(in blocks\\.1\\.b, rank [01]\\)")));
  EXPECT_THAT(error_of([] { add(full({2}, 1.0), full({3}, 1.0)); }), ::testing::Not(HasSubstr("(in")));
  Reader reader;
  materialize(reader);
  EXPECT_THAT(error_of([&] { reader(full({4, 6}, 1.0)); }), AllOf(HasSubstr("[linear] input f32[4,6]"), ::testing::EndsWith(" (in input)")));
  EXPECT_THAT(error_of([] { where(full({2}, 1.0), full({2}, 1.0), full({3}, 1.0)); }), HasSubstr("[where] cannot broadcast f32[2] with f32[2] with f32[3]"));
  EXPECT_THAT(error_of([] { add(full({2}, 1.0), Tensor()); }), HasSubstr("[add] root: input 1 is undefined"));
  EXPECT_THAT(error_of([] { linear(full({4, 5}, 1.0), Tensor()); }), HasSubstr("[linear] root: input 1 is undefined"));
}

}  // namespace
}  // namespace sheaf
