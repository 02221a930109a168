// Cuts of parts on ranks that share a GPU: the middle of a transformer's block against one rank on the CPU, forward and backward, and the
// redistributions of its packed projection.
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/needs_gpu.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

struct Heads {
  int64_t queries, keys;
  int64_t all() const { return queries + 2 * keys; }
};
constexpr int64_t kWidth = 8, kTokens = 16, kChannels = 6;

Values drawn(const Shape& shape, const std::string& stream) {
  Generator draw(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = draw.uniform(-1, 1);
  return v;
}

// Output and gradients of x, weight and bias, on this rank.
std::vector<Tensor> middle(const Heads& h, DType dtype, const Mesh& mesh, Device device) {
  const int64_t e = h.all() * kWidth;
  Layout whole, rows;
  if (mesh.spec) {
    whole = Layout(mesh.spec);
    const int64_t q = h.queries * kWidth, k = h.keys * kWidth;
    rows = whole.with(0, Placement::shard(OwnershipMap::parts(0, {q, k, k}, h.keys)));
  }
  const auto value = [&](const Shape& shape, const Layout& layout, const std::string& name) {
    return make_local(drawn(shape, name), {dtype, shape, layout}, "").to(device);
  };
  const std::vector<Tensor> in = {value({2, kTokens, kChannels}, whole, "x"), value({e, kChannels}, rows, "w"), value({e}, rows, "b")};
  Recording recording;
  for (const Tensor& t : in) recording.watch(t);
  Tensor qkv = linear(in[0], in[1], in[2]);
  const Shape packed = qkv.shape();
  qkv = rotary(reshape(qkv, {2, kTokens, h.all(), kWidth}), {.theta = 100.0, .heads = h.queries + h.keys});
  const Tensor y = dropout(packed_attention(reshape(qkv, packed), h.queries, h.keys), 0.25, Key{5});
  const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(y, kF64)), in);
  std::vector<Tensor> out = {y};
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

TEST(PartsGpu, TheMiddleOfABlockIsThatOfOneRank) {
  SHEAF_NEEDS_GPU();
  for (const Heads& h : {Heads{4, 2}, Heads{6, 3}, Heads{3, 3}})
    for (const auto& [dtype, bound] : {std::pair(kF64, 1e-12), std::pair(kBF16, 0.05)})
      for (int ranks = 1; ranks <= 5; ++ranks) {
        const std::vector<Tensor> reference = middle(h, kF64, {}, Device::cpu());
        std::vector<std::vector<LocalPart>> got(4, std::vector<LocalPart>(static_cast<size_t>(ranks)));
        run_local(ranks, [&](World& world) {
          const std::vector<Tensor> mine = middle(h, dtype, world.mesh({{"model", ranks}}), world.device());
          for (size_t i = 0; i < 4; ++i) got[i][static_cast<size_t>(world.rank())] = local_part(mine[i]);
        }, {.threads_per_rank = 1, .device = Device::cuda()});
        for (size_t i = 0; i < 4; ++i) {
          std::string error;
          EXPECT_LE(scaled_error(assemble(got[i], error), reference[i].to_vector<double>()), bound)
              << str(h.queries, " heads in ", h.keys, ", ", ranks, " ranks, ", got[i][0].type);
          EXPECT_EQ(error, "");
        }
      }
}

TEST(PartsGpu, RedistributionsMoveTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  const Shape shape{3, 16, 5};
  const Values x = drawn(shape, "x");
  const Placement all[] = {Placement::replicate(), Placement::partial(), Placement::shard(0), Placement::shard(1),
                           Placement::shard(OwnershipMap::parts(1, {8, 4, 4}, 4)), Placement::shard(OwnershipMap::parts(1, {10, 6}, 2)),
                           Placement::shard(OwnershipMap::flat(130))};
  for (int ranks : {2, 3, 4})
    run_local(ranks, [&](World& world) {
      const MeshSpec* mesh = world.mesh({{"model", ranks}}).spec;
      for (const Placement& from : all)
        for (const Placement& to : all) {
          const Tensor here = make_local(x, {kF32, shape, Layout(mesh, from)}, "addends");
          EXPECT_TRUE(identical(redistribute(here.to(world.device()), Layout(mesh, to)).to(Device::cpu()), redistribute(here, Layout(mesh, to))))
              << str(from, " to ", to, " at ", ranks, " ranks");
        }
    }, {.threads_per_rank = 1, .device = Device::cuda()});
}

// A tensor-parallel MLP whose input arrives in pieces and whose partial sums are sent in pieces: output and gradients.
std::vector<Tensor> mlp(int64_t sequences, DType dtype, const Mesh& mesh, Device device) {
  Layout whole, tokens, rows, columns;
  OutputLayout output_layout;
  if (mesh.spec) {
    whole = Layout(mesh.spec);
    tokens = whole.with(0, Placement::shard(1)), rows = whole.with(0, Placement::shard(0)), columns = tokens;
    output_layout = along(0, Placement::shard(1));
  }
  const auto value = [&](const Shape& shape, const Layout& layout, const std::string& name) {
    return make_local(drawn(shape, name), {dtype, shape, layout}, "").to(device);
  };
  constexpr int64_t kHidden = 24;
  const std::vector<Tensor> in = {value({sequences, 13, 16}, tokens, "x"), value({kHidden, 16}, rows, "up"), value({kHidden}, rows, "b"),
                                  value({16, kHidden}, columns, "down")};
  Recording recording({.piece_rows = 1});
  for (const Tensor& t : in) recording.watch(t);
  const Tensor y = gelu_linear(linear_gelu(redistribute_in_pieces(in[0], whole), in[1], in[2]), in[3], {}, Fp8::none, output_layout);
  const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(y, kF64)), in);
  std::vector<Tensor> out = {y};
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

// The ops around attention that is cut by a context axis: rows are sent to their columns while a product computes them, and come back into
// a product; with heads of several parts.
std::vector<Tensor> exchanged(int64_t sequences, DType dtype, const Mesh& mesh, Device device) {
  constexpr int64_t kHeads = 3, kWide = 8 * kHeads;
  Layout whole, tokens;
  OutputLayout output_layout;
  if (mesh.spec) {
    whole = Layout(mesh.spec), tokens = whole.with(0, Placement::shard(1));
    output_layout = along(0, Placement::shard(OwnershipMap::parts(2, {4 * kHeads, 4 * kHeads}, kHeads)));
  }
  const auto value = [&](const Shape& shape, const Layout& layout, const std::string& name) {
    return make_local(drawn(shape, name), {dtype, shape, layout}, "").to(device);
  };
  const std::vector<Tensor> in = {value({sequences, 13, 16}, tokens, "x"), value({kWide, 16}, whole, "read"), value({kWide}, whole, "b"),
                                  value({16, kWide}, whole, "write")};
  Recording recording({.piece_rows = 1});
  for (const Tensor& t : in) recording.watch(t);
  const Tensor inside = linear(in[0], in[1], in[2], Fp8::none, output_layout);
  const Tensor y = linear(redistribute_in_pieces(inside * inside, tokens), in[3]);
  const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(y, kF64)), in);
  std::vector<Tensor> out = {y};
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

// Attention of a rank's own queries, with keys and values that arrive in groups of heads.
std::vector<Tensor> attended(int64_t sequences, DType dtype, const Mesh& mesh, Device device) {
  constexpr int64_t kKeyHeads = 3;
  Layout whole, tokens;
  if (mesh.spec) {
    whole = Layout(mesh.spec);
    tokens = whole.with(0, Placement::shard(OwnershipMap::from_both_ends(1, 13, mesh.spec->size(0))));
  }
  const auto value = [&](int64_t heads, const std::string& name) {
    return make_local(drawn({sequences, 13, heads, kWidth}, name), {dtype, {sequences, 13, heads, kWidth}, tokens}, "").to(device);
  };
  const std::vector<Tensor> in = {value(2 * kKeyHeads, "q"), value(2 * kKeyHeads, "kv")};
  Recording recording({.piece_rows = 1});
  for (const Tensor& t : in) recording.watch(t);
  std::vector<Tensor> of_all;
  {
    const RecomputeScope again({.results = true});
    of_all = chunk(mesh.spec ? redistribute_in_heads(in[1], whole, 2) : in[1], 2, 2);
  }
  const Tensor y = attention(in[0], of_all[0], of_all[1]);
  const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(y, kF64)), in);
  return {y, gradients[0], gradients[1]};
}

// The products of experts, to and back, whose rows arrive and return rank by rank, or, with three sequences, in groups of experts, which
// the library multiplies.
std::vector<Tensor> of_experts(int64_t sequences, DType dtype, const Mesh& mesh, Device device) {
  constexpr int64_t kExperts = 6, kHidden = 24;
  Layout tokens, experts;
  if (mesh.spec) tokens = experts = Layout(mesh.spec, Placement::shard(0));
  const auto value = [&](const Shape& shape, const Layout& layout, const std::string& name, DType of) {
    return make_local(drawn(shape, name), {of, shape, layout}, "").to(device);
  };
  const std::vector<Tensor> in = {value({5, 7, 16}, tokens, "x", dtype), value({kExperts, kHidden, 16}, experts, "up", dtype),
                                  value({kExperts, 16, kHidden}, experts, "down", dtype)};
  Recording recording({.piece_rows = 1});
  for (const Tensor& t : in) recording.watch(t);
  const int64_t parts = sequences > 1 ? kExperts : mesh.spec ? mesh.spec->size(0) : 1;
  const ExpertRoutes routes = expert_routes(top_k(value({5, 7, kExperts}, tokens, "affinity", kF32), 2), kExperts, 7, 1, parts);
  const Tensor sent = to_experts(in[0], routes), counts = mesh.spec ? redistribute(routes.counts, experts) : routes.counts;
  const Tensor inside = expert_linear(mesh.spec ? redistribute_in_pieces(sent, experts) : sent, in[1], counts);
  const OutputLayout back = [&](const Type&) { return sent.layout(); };
  const Tensor y = from_experts(expert_linear(inside * inside, in[2], counts, {.output_layout = mesh.spec ? back : OutputLayout()}), routes);
  const auto gradients = recording.gradient(sum(cast(y, kF64) * cast(y, kF64)), in);
  std::vector<Tensor> out = {y};
  out.insert(out.end(), gradients.begin(), gradients.end());
  return out;
}

// So that a GPU has enough work with each of them.
TEST(PartsGpu, HeadsComeInPartsOfEnoughRows) {
  SHEAF_NEEDS_GPU();
  run_local(2, [&](World& world) {
    const Layout cut(world.mesh({{"context", 2}}).spec, Placement::shard(1)), whole(cut.mesh());
    const auto parts = [&](int64_t least_rows, int64_t readers, Device device) {
      Recording recording({.piece_rows = least_rows});
      const Tensor all = redistribute_in_heads(make_local(drawn({1, 32, 8, 4}, "kv"), {kF32, {1, 32, 8, 4}, cut}, "").to(device), whole, readers);
      return all.storage()->pieces().size();  // of four key heads, for 16 tokens of a rank
    };
    EXPECT_EQ(parts(8, 4, world.device()), 4u);  // 256 rows of queries
    EXPECT_EQ(parts(8, 2, world.device()), 2u);
    EXPECT_EQ(parts(16, 4, world.device()), 0u);
    EXPECT_EQ(parts(16, 4, Device::cpu()), 4u);
  }, {.bytes_per_second = 1e9, .threads_per_rank = 1, .device = Device::cuda()});
}

// The weight is Replicate, so its gradient must be bitwise the same on all ranks, regardless of which rank's rows arrived first.
TEST(PartsGpu, ProductsInPiecesAreAlikeOnAllRanks) {
  SHEAF_NEEDS_GPU();
  std::vector<std::vector<float>> got(3);
  run_local(3, [&](World& world) {
    const Layout whole(world.mesh({{"model", 3}}).spec), cut = whole.with(0, Placement::shard(1));
    Recording recording({.piece_rows = 1});
    const auto value = [&](const Shape& shape, const Layout& layout) {
      return make_local(drawn(shape, "x"), {kBF16, shape, layout}, "").to(world.device());
    };
    const Tensor y = linear(redistribute_in_pieces(value({1, 31, 40}, cut), whole), value({24, 40}, whole));
    got[static_cast<size_t>(world.rank())] = y.to_vector();
  }, {.bytes_per_second = 1e9, .threads_per_rank = 1, .device = Device::cuda()});
  EXPECT_EQ(got[1], got[0]);
  EXPECT_EQ(got[2], got[0]);
}

TEST(PartsGpu, WhatIsComputedInPiecesIsThatOfOneRank) {
  SHEAF_NEEDS_GPU();
  for (const auto& [name, products] :
       {std::pair<const char*, decltype(&mlp)>{"mlp", mlp}, {"exchanged", exchanged}, {"attended", attended}, {"experts", of_experts}})
    for (const int64_t sequences : {1, 3})
      for (const auto& [dtype, bound] : {std::pair(kF64, 1e-12), std::pair(kF32, 1e-5), std::pair(kBF16, 0.05)})
        for (const int ranks : {2, 3}) {
          const std::vector<Tensor> reference = products(sequences, kF64, {}, Device::cpu());
          std::vector<std::vector<LocalPart>> got(reference.size(), std::vector<LocalPart>(static_cast<size_t>(ranks)));
          run_local(ranks, [&](World& world) {
            const std::vector<Tensor> mine = products(sequences, dtype, world.mesh({{"ranks", ranks}}), world.device());
            for (size_t i = 0; i < mine.size(); ++i) got[i][static_cast<size_t>(world.rank())] = local_part(mine[i]);
          }, {.bytes_per_second = 1e9, .threads_per_rank = 1, .device = Device::cuda()});
          for (size_t i = 0; i < reference.size(); ++i) {
            std::string error;
            EXPECT_LE(scaled_error(assemble(got[i], error), reference[i].to_vector<double>()), bound)
                << str(name, ", ", sequences, " sequences, ", ranks, " ranks, ", got[i][0].type);
            EXPECT_EQ(error, "");
          }
        }
}

}  // namespace
}  // namespace sheaf::testing
