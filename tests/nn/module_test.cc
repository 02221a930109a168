#include "sheaf/nn/module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/fp8.h"
#include "sheaf/nn/layers/attention.h"
#include "sheaf/nn/state_dict.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> names(nn::Module& m) {
  std::vector<std::string> out;
  for (const nn::Parameter& p : m.parameters()) out.push_back(p.name());
  return out;
}

struct Pair : nn::Module {
  nn::Linear first{2, 3}, second{3, 1, {.bias = false}};
  Tensor forward(const Tensor& x) { return second(first(x)); }
  SHEAF_FIELDS(first, second);
};

struct Tuned : nn::Module {
  Pair body;
  nn::Linear head{1, 2};
  Tensor forward(const Tensor& x) { return head(body(x)); }
  SHEAF_FIELDS(body, head);
};

// Every kind of member.
struct Zoo : nn::Module {
  nn::Parameter scale{{3}, nn::Init::ones()};
  nn::Parameter absent;
  nn::Buffer table{{2}, nn::Init::constant(4)};
  Pair pair;
  std::vector<nn::Linear> list;
  std::array<Pair, 2> array;
  std::optional<nn::Linear> nothing, something{std::in_place, 1, 1};
  std::unique_ptr<Pair> pointer = std::make_unique<Pair>();
  std::vector<std::unique_ptr<nn::Linear>> pointers;
  Zoo() {
    list.emplace_back(1, 2);
    list.emplace_back(2, 1, nn::LinearOptions{.bias = false});
    pointers.push_back(std::make_unique<nn::Linear>(1, 1, nn::LinearOptions{.bias = false}));
  }
  Tensor forward(const Tensor& x) { return pair(x); }
  SHEAF_FIELDS(scale, absent, table, pair, list, array, nothing, something, pointer, pointers);
};

TEST(Module, NamesFollowFieldsAndContainers) {
  Zoo zoo;
  EXPECT_THAT(names(zoo),
              ElementsAre("scale", "pair.first.weight", "pair.first.bias", "pair.second.weight", "list.0.weight",
                          "list.0.bias", "list.1.weight", "array.0.first.weight", "array.0.first.bias",
                          "array.0.second.weight", "array.1.first.weight", "array.1.first.bias", "array.1.second.weight",
                          "something.weight", "something.bias", "pointer.first.weight", "pointer.first.bias",
                          "pointer.second.weight", "pointers.0.weight"));
  ASSERT_EQ(zoo.buffers().size(), 1u);
  EXPECT_EQ(zoo.buffers()[0].name(), "table");
  std::vector<std::string> paths;
  for (auto& [path, module] : zoo.named_modules()) paths.push_back(path);
  EXPECT_EQ(paths[0], "");
  EXPECT_EQ(paths[1], "pair");
  EXPECT_EQ(paths[2], "pair.first");
}

// Names as ModuleList and ModuleDict give them in PyTorch.
struct Named : nn::Module {
  std::map<std::string, nn::Linear> heads;
  std::map<std::string, std::unique_ptr<Pair>> branches;
  std::map<std::string, std::vector<nn::Parameter>> scales;
  std::tuple<nn::Linear, Pair, nn::Parameter> parts{nn::Linear(2, 2), Pair(), nn::Parameter({2}, nn::Init::ones())};
  std::pair<nn::Linear, std::optional<nn::Linear>> two{nn::Linear(2, 1, {.bias = false}), std::nullopt};
  explicit Named(std::vector<std::string> keys = {"right", "left"}) {
    for (const std::string& key : keys) heads.emplace(key, nn::Linear(2, 3, {.bias = false}));
    branches.emplace("a", std::make_unique<Pair>());
    branches.emplace("b", nullptr);
    scales["x"].emplace_back(Shape{2}, nn::Init::ones());
  }
  Tensor forward(const Tensor& x, const std::string& head) { return heads.at(head)(std::get<0>(parts)(x) * std::get<2>(parts)); }
  SHEAF_FIELDS(heads, branches, scales, parts, two);
};

TEST(Module, MapsAndTuplesAreFields) {
  Named m;
  EXPECT_THAT(names(m), ElementsAre("heads.left.weight", "heads.right.weight", "branches.a.first.weight", "branches.a.first.bias",
                                    "branches.a.second.weight", "scales.x.0", "parts.0.weight", "parts.0.bias", "parts.1.first.weight",
                                    "parts.1.first.bias", "parts.1.second.weight", "parts.2", "two.0.weight"));
  const Named moved = std::move(m);
  for (const char* key : {"", "a.b"}) {
    Named refused({key});
    EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { materialize(refused); }), HasSubstr(str("[module] key '", key, "' of 'heads'")));
  }
}

TEST(Module, MapsAreShardedClonedAndRead) {
  for (const int ranks : {1, 2})
    run_local(ranks, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", ranks}});
      Named m;
      shard(m, mesh, {.units = nn::units_at({"heads.left", "parts.1"})});
      materialize(m, w.device(), {.seed = 1});
      std::vector<std::string> of_units;
      for (const auto& unit : units(m)) of_units.push_back(unit->name());
      EXPECT_THAT(of_units, ElementsAre("", "heads.left", "parts.1"));
      Named copy = nn::clone(m);
      const Tensor x = redistribute(full({4, 2}, 1.0), Layout(mesh.spec, Placement::shard(0)));
      EXPECT_TRUE(identical(full_tensor(copy(x, "left")), full_tensor(m(x, "left"))));
      EXPECT_FALSE(identical(full_tensor(m(x, "right")), full_tensor(m(x, "left"))));
      const std::vector<std::string> others{"left", "up"};
      EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { nn::clone(m, others); }), HasSubstr("differs from the old one: 'heads.up'"));
      std::vector<std::string> saved;
      for (const nn::StatePiece& piece : nn::state_pieces(m)) saved.push_back(piece.name);
      EXPECT_THAT(saved, ::testing::IsSupersetOf({"heads.left.weight", "branches.a.first.bias", "scales.x.0", "parts.1.second.weight", "two.0.weight"}));
    });
  Named late;
  materialize(late);
  late.heads.emplace("late", nn::Linear(2, 3));
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { late(full({4, 2}, 1.0), "late"); }), HasSubstr("added after materialize()"));
}

TEST(Module, IsNotCopied) {
  static_assert(!std::is_copy_constructible_v<Pair> && std::is_nothrow_move_constructible_v<Pair>);
  static_assert(!std::is_copy_constructible_v<Zoo>);
}

TEST(Module, ValuesAndUnitsSurviveMoves) {
  Pair made;
  materialize(made, Device::cpu(), {.seed = 5});
  const Tensor before = full_parameter(made.first.weight);
  Pair moved = std::move(made);
  std::vector<Pair> list;
  list.push_back(std::move(moved));
  list.emplace_back();  // reallocates
  EXPECT_TRUE(identical(full_parameter(list[0].first.weight), before));
  EXPECT_EQ(list[0](Tensor::from<float>({1, 2}, {1, 2})).shape(), (Shape{1, 1}));
  EXPECT_EQ(list[0].first.weight.name(), "first.weight");
}

TEST(Module, TiedLeavesAreOne) {
  Pair p;
  p.second.weight = nn::Parameter({3, 2}, nn::Init::ones());
  tie(p.second.weight, p.first.weight);
  EXPECT_THAT(names(p), ElementsAre("first.weight", "first.bias"));
  nn::Parameter other({2, 2}, nn::Init::zeros());
  EXPECT_THROW(tie(other, p.first.weight), ShapeError);
  materialize(p);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { tie(p.second.weight, p.first.weight); }), HasSubstr("before materialize"));
  EXPECT_TRUE(identical(full_parameter(p.first.weight), full_parameter(p.second.weight)));
}

// Two parameters that become one, after a setting of either.
struct Twins : nn::Module {
  nn::Parameter a{{2, 64}, nn::Init::normal(1)}, b{{2, 64}, nn::Init::ones()};
  Twins() { parameters(); }  // has them named
  SHEAF_FIELDS(a, b);
};

TEST(Module, TieRefusesSettingsThatDiffer) {
  const std::pair<std::function<void(nn::Parameter&)>, const char*> settings[] = {
      {[](nn::Parameter& p) { p.freeze(); }, "only one of them is frozen:"},
      {[](nn::Parameter& p) { p.freeze_for_good(); }, "only one of them is frozen:"},
      {[](nn::Parameter& p) { p.keep_exact(); }, "only one of them is exact"},
      {[](nn::Parameter& p) { p.steer(0.1); }, "only one of them is exact"},
      {[](nn::Parameter& p) { p.set_cut(OwnershipMap::even(0)); }, "cut differently"},
  };
  for (const auto& [set, message] : settings)
    for (const bool first : {true, false}) {
      Twins m;
      set(first ? m.a : m.b);
      EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { tie(m.a, m.b); }),
                  AllOf(HasSubstr("[tie] 'a' and 'b' f32[2,64] would be one parameter"), HasSubstr(message)));
      EXPECT_NE(m.a.id(), m.b.id());
      set(first ? m.b : m.a);
      tie(m.a, m.b);
      EXPECT_EQ(m.a.id(), m.b.id());
    }
  Twins frozen, steered, blocks;
  frozen.a.freeze_for_good(), frozen.b.freeze();
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { tie(frozen.a, frozen.b); }), HasSubstr("frozen for good"));
  steered.a.steer(0.1), steered.b.steer(0.2);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { tie(steered.a, steered.b); }), HasSubstr("not steered alike"));
  for (nn::Parameter* p : {&blocks.a, &blocks.b}) p->freeze_for_good();
  blocks.b.quantize(BlockFormat::int8);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { tie(blocks.a, blocks.b); }), HasSubstr("the same blocks"));
}

TEST(Module, TieHasTheInitOfTheSecondAndTheNameOfTheFirstListed) {
  Twins m;
  m.b.set_table();
  m.b.set_init(nn::Init::constant(3));
  tie(m.a, m.b);
  EXPECT_THAT(names(m), ElementsAre("a"));
  EXPECT_TRUE(m.a.table());
  m.a.freeze();  // later settings are of both
  EXPECT_FALSE(m.b.trainable());
  materialize(m);
  EXPECT_EQ(full_parameter(m.b).to_vector<float>(), std::vector<float>(128, 3));
  Twins lost;
  lost.a.set_init(nn::Init::constant(3));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { tie(lost.a, lost.b); }), HasSubstr("the first has an init that the second lacks"));
  lost.b.set_init(nn::Init::constant(3));
  tie(lost.a, lost.b);
}

TEST(Module, FreezeIsOfAllItsParameters) {
  Tuned m;
  nn::freeze(m.body);
  for (const nn::Parameter& p : m.parameters()) EXPECT_EQ(p.trainable(), p.name().starts_with("head.")) << p.name();
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& w) {
      Tuned model;
      nn::freeze(model.body);
      shard(model, w.mesh({{"data", ranks}}));
      materialize(model, w.device());
      const Tensor x = redistribute(full({6, 2}, 1.0), Layout(w.mesh({{"data", ranks}}).spec, Placement::shard(0)));
      Recording recording;
      recording.backward(sum(model(x)));
      recording.take();
      for (const nn::Parameter& p : model.parameters()) EXPECT_EQ(full_gradient(p).defined(), p.trainable()) << p.name();
    });
  Pair made;
  materialize(made);
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { nn::freeze(made); }), HasSubstr("'first.weight' is materialized"));
}

TEST(Module, UseBeforeMaterializeNamesTheParameter) {
  Pair p;
  p.parameters();
  const std::string what = message_of<LifetimeError>(ExitCode::kDesync, [&] { p(Tensor::from<float>({1, 2}, {1, 2})); });
  EXPECT_THAT(what, HasSubstr("'first."));
  EXPECT_THAT(what, HasSubstr("call materialize"));
}

struct ForgetsModule : nn::Module {
  Pair listed, forgotten;
  Tensor forward(const Tensor& x) { return listed(x) + forgotten(x); }
  SHEAF_FIELDS(listed);
};

struct ForgetsParameter : nn::Module {
  nn::Parameter listed{{2}, nn::Init::ones()}, forgotten{{1, 2}, nn::Init::ones()};
  Tensor forward(const Tensor& x) { return x + listed + forgotten; }
  SHEAF_FIELDS(listed);
};

struct Base : nn::Module {
  nn::Parameter weight{{2}, nn::Init::ones()};
  SHEAF_FIELDS(weight);
  Tensor forward(const Tensor& x) { return x * weight; }
};
struct Derived : Base {
  nn::Parameter bias{{2}, nn::Init::ones()};
  Tensor forward(const Tensor& x) { return x * weight + bias; }
  SHEAF_FIELDS(bias);  // and not the base's
};

TEST(Module, FieldsThatAreNotListedFailAtFirstUse) {
  const Tensor x = Tensor::from<float>({1, 2}, {1, 2});
  ForgetsModule m;
  materialize(m);
  std::string what = message_of<LifetimeError>(ExitCode::kDesync, [&] { m(x); });
  EXPECT_THAT(what, HasSubstr("Pair used by"));
  EXPECT_THAT(what, HasSubstr("ForgetsModule"));
  EXPECT_THAT(what, HasSubstr("SHEAF_FIELDS"));

  ForgetsParameter p;
  materialize(p);
  what = message_of<LifetimeError>(ExitCode::kDesync, [&] { p(x); });
  EXPECT_THAT(what, HasSubstr("f32[1,2], used in"));
  EXPECT_THAT(what, HasSubstr("ForgetsParameter"));
  EXPECT_THAT(what, HasSubstr("SHEAF_FIELDS"));

  Derived d;
  materialize(d);
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { d(x); }), HasSubstr("a base's fields"));
  EXPECT_EQ(nn::ModuleScope::current(), nullptr);  // all scopes were closed
}

// No forward: methods of other names.
struct Autoencoder : nn::Module {
  nn::Linear down{4, 2}, up{2, 4};
  Tensor encode(const Tensor& x) {
    const auto scope = enter();
    return tanh(down(x));
  }
  Tensor decode(const Tensor& code) {
    const auto scope = enter();
    return up(code);
  }
  SHEAF_FIELDS(down, up);
};

TEST(Module, NeedsNoForward) {
  Autoencoder m;
  materialize(m);
  EXPECT_THAT(names(m), ElementsAre("down.weight", "down.bias", "up.weight", "up.bias"));
  EXPECT_EQ(m.decode(m.encode(Tensor::from<float>({1, 2, 3, 4}, {1, 4}))).shape(), (Shape{1, 4}));
}

// Common parts of several modules; it has no forward either.
struct Scaled : nn::Module {
  nn::Parameter scale{{1}, nn::Init::constant(2)};
  SHEAF_FIELDS(scale);
};
struct ScaledPair : Scaled {
  Pair pair;
  Tensor forward(const Tensor& x) { return scale * pair(x); }
  SHEAF_FIELDS(scale, pair);  // the base's first
};

TEST(Module, ABaseMayHoldFields) {
  ScaledPair m;
  materialize(m, Device::cpu(), {.seed = 1});
  const Tensor x = Tensor::from<float>({1, 2}, {1, 2});
  EXPECT_THAT(names(m), ElementsAre("scale", "pair.first.weight", "pair.first.bias", "pair.second.weight"));
  EXPECT_EQ(m(x).item(), 2 * m.pair(x).item());
}

// Layers of several types with a common base.
struct Layer : nn::Module {
  virtual Tensor forward(const Tensor& x) = 0;
  SHEAF_FIELDS();
};
struct Dense : Layer {
  nn::Linear linear{3, 3};
  Tensor forward(const Tensor& x) override { return linear(x); }
  SHEAF_FIELDS(linear);
};
struct Tanh : Layer {
  Tensor forward(const Tensor& x) override { return tanh(x); }
};
struct Stack : nn::Module {
  std::vector<std::unique_ptr<Layer>> layers;
  Stack() {
    layers.push_back(std::make_unique<Dense>());
    layers.push_back(std::make_unique<Tanh>());
    layers.push_back(std::make_unique<Dense>());
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = (*layer)(x);
    return x;
  }
  SHEAF_FIELDS(layers);
};

TEST(Module, LayersOfSeveralTypesThroughAVirtualForward) {
  Stack m;
  shard(m, Mesh{}, {.units = nn::units_of<Dense>()});
  materialize(m, Device::cpu(), {.seed = 1});
  EXPECT_THAT(names(m), ElementsAre("layers.0.linear.weight", "layers.0.linear.bias", "layers.2.linear.weight",
                                    "layers.2.linear.bias"));
  EXPECT_EQ(units(m).size(), 2u);
  const Tensor x = Tensor::from<float>({1, 2, 3}, {1, 3});
  auto& first = static_cast<Dense&>(*m.layers[0]);
  auto& last = static_cast<Dense&>(*m.layers[2]);
  const Tensor want = last.linear(tanh(first.linear(x)));
  Recording recording;
  EXPECT_TRUE(identical(m(x), want));
  const Tape tape = recording.take();
  std::vector<std::string> paths;
  for (int i = 0; i < tape.num_nodes(); ++i)
    if (tape.op_name(tape.node(i)) == "tanh" || tape.op_name(tape.node(i)) == "linear")
      paths.push_back(tape.path(tape.node(i)));
  EXPECT_THAT(paths, ElementsAre("layers.0.linear", "layers.1", "layers.2.linear"));
}

TEST(Module, TrainAndEvalReachEveryModule) {
  Zoo zoo;
  zoo.eval();
  for (auto& [path, module] : zoo.named_modules()) EXPECT_FALSE(module->training()) << path;
  zoo.pair.train();
  EXPECT_TRUE(zoo.pair.first.training());
  EXPECT_FALSE(zoo.list[0].training());
  {
    const nn::EvalScope evaluation(zoo);
    for (auto& [path, module] : zoo.named_modules()) EXPECT_FALSE(module->training()) << path;
  }
  EXPECT_TRUE(zoo.pair.first.training());
  EXPECT_FALSE(zoo.list[0].training()) << "each has its mode back";
}

TEST(Module, FrozenParametersTakeNoGradient) {
  Pair p;
  p.first.weight.freeze();
  materialize(p);
  EXPECT_THROW(p.first.bias.freeze(), ConfigError);
  Recording recording;
  recording.backward(sum(p(Tensor::from<float>({1, 2}, {1, 2}))));
  recording.take();
  EXPECT_FALSE(full_gradient(p.first.weight).defined());
  EXPECT_TRUE(full_gradient(p.first.bias).defined());
  EXPECT_EQ(units(p)[0]->buffers().size(), 2u);
}

TEST(Module, TapeHasModulePaths) {
  Zoo zoo;
  materialize(zoo);
  Recording recording;
  zoo(Tensor::from<float>({1, 2}, {1, 2}));
  const Tape tape = recording.take();
  std::vector<std::string> paths;
  for (int i = 0; i < tape.num_nodes(); ++i)
    if (tape.op_name(tape.node(i)) == "linear") paths.push_back(tape.path(tape.node(i)));
  EXPECT_THAT(paths, ElementsAre("pair.first", "pair.second"));
}

TEST(Module, CloneHasTheSameValuesInMemoryOfItsOwn) {
  testing::TinyModel model(2);
  model.blocks[1].up.weight.freeze();
  shard(model, Mesh{}, {.units = nn::units_of<testing::TinyBlock>()});
  materialize(model, Device::cpu(), {.seed = 3});
  model.eval();
  model.blocks[0].recompute();
  testing::TinyModel copy = nn::clone(model, 2);
  const auto nodes = [](testing::TinyModel& m) {
    Recording recording;
    recording.backward(sum(m(Tensor::from<int32_t>({1, 2}, {1, 2}))));
    return recording.take().num_nodes();
  };
  EXPECT_EQ(nodes(copy), nodes(model));
  copy.blocks[0].recompute(false);
  EXPECT_LT(nodes(copy), nodes(model));
  EXPECT_EQ(units(copy).size(), 3u);
  EXPECT_FALSE(copy.training());
  EXPECT_FALSE(copy.blocks[1].up.weight.trainable());
  const auto a = model.parameters(), b = copy.parameters();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(identical(full_parameter(a[i]), full_parameter(b[i])));
  assign(b[0], full_like(full_parameter(b[0]), 1.0));
  EXPECT_FALSE(identical(full_parameter(a[0]), full_parameter(b[0])));
  EXPECT_THROW(nn::clone(model, 3), ConfigError);
}

// A part of a model is cloned if its parameters are in units of its own.
struct Scale : nn::Module {
  nn::Buffer mean{{3}, nn::Init::zeros()};
  SHEAF_FIELDS(mean);
};

TEST(Module, CloneOfBuffersAloneHasTheirValues) {
  Scale scale;
  materialize(scale);
  assign(scale.mean, Tensor::from<float>({1, 2, 3}, {3}));
  const Scale copy = nn::clone(scale);
  EXPECT_EQ(copy.mean.value().to_vector(), (std::vector<float>{1, 2, 3}));
}

TEST(Module, CloneOfAPartHasItsValues) {
  testing::TinyModel model(2);
  shard(model, Mesh{}, {.units = nn::units_of<testing::TinyBlock>()});
  materialize(model, Device::cpu(), {.seed = 3});
  testing::TinyBlock block = nn::clone(model.blocks[1], 7);
  EXPECT_TRUE(identical(full_parameter(block.up.weight), full_parameter(model.blocks[1].up.weight)));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { nn::clone(model.blocks[1].up, 7, 21); }),
              HasSubstr("[clone] 'blocks.1.up.weight' is in unit 'blocks.1' of a model around this sheaf::nn::Linear"));
}

struct Attends : nn::Module {
  nn::SelfAttention attention{{.width = 16, .heads = 2}};
  nn::Linear table{16, 32};
  Tensor forward(const Tensor& x) { return table(attention(x)); }
  SHEAF_FIELDS(attention, table);
};

// Settings of shard() and use_fp8() for layers and for parameters are copied, too.
TEST(Module, CloneHasTheSameSettings) {
  Attends model;
  model.table.weight.set_table();
  model.table.bias.set_bias();
  model.attention.context_comm = nn::ContextComm::all_gather;
  nn::use_fp8(model, Fp8::all, [](const std::string& path) { return path.starts_with("attention"); });
  Attends copy = nn::clone(model);
  EXPECT_TRUE(copy.table.weight.table() && copy.table.bias.bias());
  EXPECT_EQ(copy.attention.context_comm, nn::ContextComm::all_gather);
  EXPECT_EQ(copy.attention.qkv.fp8, model.attention.qkv.fp8);
  EXPECT_EQ(copy.attention.qkv.fp8, Fp8::all);
  EXPECT_EQ(copy.table.fp8, Fp8::none);
}

TEST(Module, CloneHasTheSameBuffers) {
  Zoo zoo;
  materialize(zoo, Device::cpu(), {.dtype = kF64});
  assign(zoo.table, Tensor::from<double>({1, 2}, {2}));
  Zoo copy = nn::clone(zoo);
  EXPECT_TRUE(identical(copy.table.value(), zoo.table.value()));
  assign(zoo.table, Tensor::from<double>({3, 4}, {2}));
  EXPECT_EQ(copy.table.value().to_vector<double>(), (std::vector<double>{1, 2}));
}

TEST(Module, BuffersAreWholeAndAssignable) {
  Zoo zoo;
  EXPECT_THROW(zoo.table.value(), LifetimeError);
  materialize(zoo);
  EXPECT_EQ(zoo.table.value().to_vector<float>(), (std::vector<float>{4, 4}));
  assign(zoo.table, Tensor::from<float>({1, 2}, {2}));
  EXPECT_EQ(zoo.table.value().to_vector<float>(), (std::vector<float>{1, 2}));
  EXPECT_THAT(message_of<DTypeError>(ExitCode::kConfig, [&] { assign(zoo.table, Tensor::from<double>({1, 2}, {2})); }),
              HasSubstr("[assign] f64[2] for 'table' f32[2]: cast() it"));
  Recording recording;
  EXPECT_THROW(assign(zoo.table, Tensor::from<float>({1, 2}, {2})), LifetimeError);
}

TEST(Module, BuffersTakeOnlyWhatIsWholeOnSeveralRanks) {
  run_local(1, [](World& world) {
    const MeshSpec* mesh = world.mesh({{"data", 1}}).spec;
    Zoo zoo;
    materialize(zoo);
    const Tensor x = redistribute(Tensor::from<float>({1, 2}, {1, 2}), Layout(mesh, Placement::shard(0)));
    const Tensor mean = sum(x, 0);  // each rank's addend
    EXPECT_THAT(message_of<PlacementError>(ExitCode::kConfig, [&] { assign(zoo.table, mean); }),
                HasSubstr("for 'table' write redistribute(x, \"data\", Placement::invariant())"));
    assign(zoo.table, redistribute(mean, "data", Placement::invariant()));
    EXPECT_EQ(zoo.table.value().to_vector<float>(), (std::vector<float>{1, 2}));
  });
}

}  // namespace
}  // namespace sheaf
