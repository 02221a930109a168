// Matrices of all kinds with given gradients, for the tests of Muon; and the ways to cut them.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/embedding.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {

using Values = std::map<std::string, std::vector<double>>;

inline const LocalOptions kLocal{.threads_per_rank = 1};

/// The matrices of muon/make_golden, two of them in an inner module, and a parameter that is not a matrix.
struct Inner : nn::Module {
  nn::Parameter packed{{16, 6}, nn::Init::zeros()}, beside{{5, 12}, nn::Init::zeros()};
  Inner() {
    packed.set_cut(OwnershipMap::parts(0, {8, 4, 4}, 4));
    beside.set_cut(OwnershipMap::parts(1, {6, 3, 3}, 3));
  }
  SHEAF_FIELDS(packed, beside);
};
struct Zoo : nn::Module {
  nn::Parameter wide{{4, 7}, nn::Init::zeros()}, bias{{5}, nn::Init::zeros()}, tall{{9, 5}, nn::Init::zeros()};
  nn::Embedding table{6, 3};
  nn::Parameter square{{6, 6}, nn::Init::zeros()};
  Inner inner;
  nn::Parameter row{{1, 8}, nn::Init::zeros()};
  Zoo() {
    tall.set_cut(OwnershipMap::even(0, 3));
    square.set_cut(OwnershipMap::even(1, 2));
    bias.set_cut(OwnershipMap::even(0));
  }
  SHEAF_FIELDS(wide, bias, tall, table, square, inner, row);
};

inline double initial(int64_t i) { return static_cast<double>((29 * i + 7) % 43 - 21) / 64; }
inline double gradient(int64_t i, int64_t step) { return static_cast<double>((37 * i + i * i / 5 + 101 * step + 17) % 61 - 30) / 16; }

inline std::string last_of(const std::string& path) { return path.substr(path.find_last_of('.') + 1); }

// Sets this rank's elements of `values`, which are those of the buffer, to f(flat index).
template <class F>
void fill(const Unit& unit, const FlatBuffer& b, const Tensor& values, F&& f) {
  for (const LocalPiece& piece : unit.pieces(b))
    for (int64_t i = 0; i < piece.runs.numel(); ++i) {
      const double v = f(piece.runs.at(i));
      if (b.dtype == kF64) values.view().as<double>()[piece.shard_offset + i] = v;
      else values.view().as<float>()[piece.shard_offset + i] = static_cast<float>(v);
    }
}

inline void set_gradients(nn::Module& m, int64_t step) {
  for (const auto& unit : units(m))
    for (FlatBuffer& b : unit->buffers()) {
      if (!b.trainable) continue;
      const DeviceScope host(Device::cpu());
      const Tensor values = full_of(b.shard.type(), 0.0);
      fill(*unit, b, values, [&](int64_t i) { return gradient(i, step); });
      b.grad = values.to(b.shard.device());
    }
}

inline void start(nn::Module& m, const Mesh& mesh, const ShardOptions& options, DType dtype = kF64,
                  Device device = Device::cpu()) {
  shard(m, mesh, options);
  materialize(m, device, {.dtype = dtype});
  for (const nn::Parameter& p : m.parameters()) {
    std::vector<double> whole;
    for (int64_t i = 0; i < p.numel(); ++i) whole.push_back(initial(i));
    assign(p, cast(Tensor::from(whole, p.shape()), dtype).to(device));
  }
}

inline Values values(nn::Module& m) {
  Values out;
  for (const nn::Parameter& p : m.parameters()) out[last_of(p.name())] = full_parameter(p).to_vector<double>();
  return out;
}

struct Way {
  std::vector<MeshSpec::Axis> axes;
  Strategy strategy;
  bool one_unit = false;
};
inline std::vector<Way> ways() {
  std::vector<Way> out;
  for (int world = 1; world <= 5; ++world)
    for (Strategy s : {Strategy::replicate, Strategy::zero1, Strategy::shard_grad_op, Strategy::full_shard})
      for (const bool one_unit : {false, true}) out.push_back({{{"data", world}}, s, one_unit});
  out.push_back({{{"data", 11}}, Strategy::full_shard});  // more ranks than matrices
  out.push_back({{{"data", 11}}, Strategy::replicate});
  out.push_back({{{"data", 2}, {"model", 1}}, Strategy::full_shard});  // a tensor axis that cuts nothing
  out.push_back({{{"data", 3}, {"model", 1}}, Strategy::replicate});
  out.push_back({{{"replica", 2}, {"data", 2}}, Strategy::full_shard});
  out.push_back({{{"replica", 3}, {"data", 2}}, Strategy::zero1});
  for (Strategy s : {Strategy::replicate, Strategy::zero1, Strategy::full_shard})
    for (const bool one_unit : {false, true})
      for (const auto& [replicas, data, model] : {std::tuple{1, 1, 2}, {1, 1, 3}, {1, 2, 2}, {1, 2, 3}, {1, 3, 2}, {2, 1, 3}})
        out.push_back({{{"replica", replicas}, {"data", data}, {"model", model}}, s, one_unit});
  for (Strategy s : {Strategy::zero1, Strategy::full_shard})
    for (const bool one_unit : {false, true}) {
      for (const auto& [groups, data] : {std::pair{2, 1}, {2, 2}, {3, 1}, {2, 3}, {3, 2}, {1, 2}})
        out.push_back({{{"secondary", groups}, {"data", data}}, s, one_unit});
      for (const auto& [groups, data, model] : {std::tuple{2, 1, 2}, {3, 1, 2}, {2, 1, 3}})
        out.push_back({{{"secondary", groups}, {"data", data}, {"model", model}}, s, one_unit});
    }
  return out;
}

inline void on(const Way& way, const std::function<void(World&, const Mesh&, const ShardOptions&)>& f,
               const LocalOptions& local = kLocal) {
  int ranks = 1;
  std::string trace(name(way.strategy));
  for (const auto& axis : way.axes) ranks *= axis.size, trace += str(" ", axis.name, "=", axis.size);
  SCOPED_TRACE(trace);
  run_local(ranks, [&](World& w) {
    ShardOptions options{.strategy = way.strategy};
    options.secondary = way.axes[0].name == "secondary";
    if (options.secondary || way.axes[0].name == "replica") options.replica_axis = way.axes[0].name;
    if (way.axes.back().name == "model") options.tensor_axis = "model";
    if (!way.one_unit) options.units = nn::units_of<Inner, TinyBlock>();
    f(w, w.mesh(way.axes), options);
  }, local);
}

}  // namespace sheaf::testing
