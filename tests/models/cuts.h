// Ways to cut tensors over ranks, as data and tensor parallelism do.
#pragma once

#include <string>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/core/runs.h"

namespace sheaf::testing {

/// Dimension `dim`, if a tensor has it, is cut over `model` ranks, and the rest is cut flat over `data`, in unequal parts.
struct Cut {
  enum class Kind { even, uneven, parts };
  int dim = -1, model = 1, data = 1;
  Kind kind = Kind::even;

  int world() const { return model * data; }
  OwnershipMap map(const Shape& shape) const {
    const int64_t size = shape[dim];
    if (kind == Kind::even) return OwnershipMap::even(dim);
    if (kind == Kind::parts && size % 3 == 0) return OwnershipMap::parts(dim, {size / 3 * 2, size / 3}, size / 3);
    if (kind == Kind::parts) return OwnershipMap::parts(dim, {size - 1, 1}, 1);
    std::vector<int64_t> sizes(static_cast<size_t>(model), 0);
    sizes.back() = (size + 1) / 2, sizes[0] += size / 2;
    return OwnershipMap::uneven(dim, sizes);
  }
  /// A rank's part of a tensor: one or several runs, empty if it has no elements.
  std::vector<Runs> runs(const Shape& shape, int rank) const {
    const bool cut = dim >= 0 && dim < shape.rank();
    const int m = rank % model, d = rank / model;
    Shape local = shape;
    if (cut) local[dim] = map(shape).owned_size(m, model, shape);
    const int64_t n = local.numel();
    const Interval flat{n * d * d / (data * data), n * (d + 1) * (d + 1) / (data * data)};
    if (!cut) return {m == 0 ? Runs::of(flat) : Runs()};
    std::vector<Runs> out;
    for (const LocalRuns& l : runs_of(map(shape), m, model, shape, flat)) out.push_back(l.runs);
    if (out.empty()) out.emplace_back();
    return out;
  }
  std::string to_string() const {
    const char* const kinds[] = {"even", "uneven", "parts"};
    return str("dim ", dim, " ", kinds[static_cast<int>(kind)], " over ", model, " x ", data);
  }
};

/// For worlds of 1 to 5 ranks.
inline const std::vector<Cut>& cuts() {
  static const auto* list = [] {
    auto* out = new std::vector<Cut>;
    for (int world = 1; world <= 5; ++world) out->push_back({-1, 1, world});
    for (int dim : {0, 1, 2})
      for (auto kind : {Cut::Kind::even, Cut::Kind::uneven, Cut::Kind::parts})
        for (int model = 1; model <= 5; ++model)
          for (int data = 1; model * data <= 5; ++data) {
            if (dim == 2 && kind != Cut::Kind::even) continue;
            out->push_back({dim, model, data, kind});
          }
    return out;
  }();
  return *list;
}

}  // namespace sheaf::testing
