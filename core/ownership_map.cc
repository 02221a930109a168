#include "sheaf/core/ownership_map.h"

#include <algorithm>
#include <numeric>

#include "sheaf/core/error.h"
#include "sheaf/core/interned.h"

namespace sheaf {
OwnershipMap OwnershipMap::even(int dim, int64_t granule) {
  check<PlacementError>(granule > 0, "[placement] Shard(", dim, " by ", granule, "): rows stay together in ones or more");
  // -1, which flat cuts have, is refused where it is used.
  check<PlacementError>(dim >= -1 && dim < kMaxDims, "[placement] Shard(", dim, "): dimensions are 0 to ", kMaxDims - 1);
  OwnershipMap m;
  m.dim_ = static_cast<int8_t>(dim);
  m.granule_ = granule;
  return m;
}

OwnershipMap OwnershipMap::uneven(int dim, const std::vector<int64_t>& sizes, int64_t granule) {
  for (const int64_t size : sizes)
    if (size < 0) fail<PlacementError>("[placement] uneven: a rank has ", size, " of dimension ", dim);
  OwnershipMap m = even(dim, granule);
  m.kind_ = Kind::uneven;
  m.sizes_ = interned(sizes);
  return m;
}

OwnershipMap OwnershipMap::flat(int64_t chunk, int64_t offset) {
  check<PlacementError>(chunk >= 0 && offset >= 0, "[placement] Shard(flat) in chunks of ", chunk, " from ", offset, ": both are at least 0");
  OwnershipMap m;
  m.kind_ = Kind::flat;
  m.dim_ = -1;
  m.granule_ = chunk;
  m.offset_ = offset;
  return m;
}

OwnershipMap OwnershipMap::parts(int dim, const std::vector<int64_t>& sizes, int64_t units) {
  OwnershipMap m = even(dim, units);
  m.kind_ = Kind::parts;
  for (int64_t size : sizes)
    if (size < 0 || size % units != 0)
      fail<PlacementError>("[placement] a part of ", size, " rows cannot be cut in ", units, " units");
  m.sizes_ = interned(sizes);
  return m;
}

OwnershipMap OwnershipMap::inner() const {
  if (is_flat() || is_single())
    fail<PlacementError>("[placement] Shard(", to_string(), ") goes with no other cut: it cannot be an inner one");
  OwnershipMap m = *this;
  m.inner_ = true;
  return m;
}

OwnershipMap OwnershipMap::by_owner(int dim, const std::vector<int64_t>& sizes, const std::vector<int>& owners) {
  if (sizes.size() != owners.size() || std::ranges::any_of(sizes, [](int64_t size) { return size < 0; }))
    fail<PlacementError>("[placement] ", sizes.size(), " sizes, none negative, and ", owners.size(), " owners do not match");
  std::vector<int64_t> table;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) continue;
    if (!table.empty() && table.back() == owners[i]) table[table.size() - 2] += sizes[i];
    else table.insert(table.end(), {sizes[i], owners[i]});
  }
  OwnershipMap m = even(dim);
  m.kind_ = Kind::owned;
  m.sizes_ = interned(table);
  return m;
}

OwnershipMap OwnershipMap::from_both_ends(int dim, int64_t size, int ranks) {
  check<PlacementError>(size >= 0 && ranks > 0, "[placement] ", size, " rows of dimension ", dim, " from both ends over ", ranks, " ranks");
  std::vector<int64_t> sizes(static_cast<size_t>(2 * ranks));
  std::vector<int> owners(sizes.size());
  for (int r = 0; r < ranks; ++r) {
    const size_t front = static_cast<size_t>(r), back = sizes.size() - 1 - front;
    const int64_t rows = size * (r + 1) / ranks - size * r / ranks;
    sizes[front] = rows / 2, sizes[back] = rows - rows / 2;
    owners[front] = owners[back] = r;
  }
  return by_owner(dim, sizes, owners);
}

OwnershipMap OwnershipMap::on(int rank) {
  check<PlacementError>(rank >= 0, "[placement] Shard(on ", rank, "): ranks count from 0");
  OwnershipMap m;
  m.kind_ = Kind::single;
  m.dim_ = -1;
  m.granule_ = rank;
  return m;
}

namespace {
// The intervals of a table of sizes and owners: f(interval, owner).
template <class F>
void for_each_owned(const std::vector<int64_t>& table, F&& f) {
  int64_t at = 0;
  for (size_t i = 0; i < table.size(); i += 2) {
    f(Interval{at, at + table[i]}, table[i + 1]);
    at += table[i];
  }
}
}  // namespace

bool OwnershipMap::can_move(int64_t numerator, int64_t denominator) const {
  if (kind_ == Kind::owned) {
    bool fits = true;
    for_each_owned(*sizes_, [&](Interval i, int64_t) { fits = fits && i.size() * numerator % denominator == 0; });
    return fits;
  }
  if (!is_parts()) return granule_ * numerator % denominator == 0;
  return std::ranges::all_of(*sizes_, [&](int64_t size) { return size / granule_ * numerator % denominator == 0; });
}

OwnershipMap OwnershipMap::moved_to(int dim, int64_t numerator, int64_t denominator) const {
  OwnershipMap m = *this;
  m.dim_ = static_cast<int8_t>(dim);
  if (numerator == denominator) return m;
  if (!can_move(numerator, denominator))
    fail<PlacementError>("[placement] Shard(", to_string(), "): ", is_scattered() ? "its parts" : str("units of ", granule_),
                         " cannot be seen in rows of ", denominator, "/", numerator);
  if (is_parts()) {
    std::vector<int64_t> sizes = *sizes_;
    for (int64_t& size : sizes) size = size * numerator / denominator;
    m.sizes_ = interned(sizes);
    return m;
  }
  if (kind_ == Kind::owned) {
    std::vector<int64_t> table = *sizes_;
    for (size_t i = 0; i < table.size(); i += 2) table[i] = table[i] * numerator / denominator;
    m.sizes_ = interned(table);
    return m;
  }
  m.granule_ = granule_ * numerator / denominator;
  return m;
}

void OwnershipMap::check_fits(int ranks, const Shape& global) const {
  if (kind_ == Kind::flat) {
    if (ranks * granule_ - offset_ < global.numel())
      fail<PlacementError>("[placement] Shard(flat) of ", global, " over ", ranks, " ranks: chunks of ", granule_,
                           " do not hold all of it");
    return;
  }
  if (kind_ == Kind::single) {
    if (owner() >= ranks)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, " over ", ranks, " ranks: there is no rank ", owner());
    return;
  }
  if (dim_ < 0 || dim_ >= global.rank())
    fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": it has no such dimension");
  const int64_t size = global[dim_];
  if (kind_ == Kind::parts) {
    const int64_t sum = std::reduce(sizes_->begin(), sizes_->end());
    const bool whole_units = inner_ && size < sum && size % (sum / granule_) == 0;
    if (sum != size && !whole_units)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": ", sizes_->size(), " parts with a sum of ", sum);
    return;
  }
  if (kind_ == Kind::owned) {
    int64_t sum = 0;
    for_each_owned(*sizes_, [&](Interval i, int64_t owner) {
      sum += i.size();
      if (owner < 0 || owner >= ranks)
        fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, " over ", ranks, " ranks: rank ", owner,
                             " owns [", i.begin, ",", i.end, ")");
    });
    if (sum != size)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": ranks own ", sum, " of ", size);
    return;
  }
  if (size % granule_ != 0)
    fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": ", size, " is no multiple of ", granule_);
  if (kind_ == Kind::uneven) {
    const int64_t sum = std::reduce(sizes_->begin(), sizes_->end());
    if (static_cast<int>(sizes_->size()) != ranks || sum != size / granule_)
      fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, " over ", ranks, " ranks: ", sizes_->size(),
                           " sizes with a sum of ", sum * granule_);
  }
}

int64_t OwnershipMap::units_of(const Shape& global) const {
  const int64_t sum = std::reduce(sizes_->begin(), sizes_->end());
  return sum == global[dim_] ? granule_ : global[dim_] / (sum / granule_);
}

Interval OwnershipMap::owned(int rank, int ranks, const Shape& global) const {
  check_fits(ranks, global);
  switch (kind_) {
    case Kind::flat: {
      const int64_t n = global.numel();
      return {std::clamp<int64_t>(rank * granule_ - offset_, 0, n),
              std::clamp<int64_t>((rank + 1) * granule_ - offset_, 0, n)};
    }
    case Kind::uneven: {
      const auto begin = std::accumulate(sizes_->begin(), sizes_->begin() + rank, int64_t{0}) * granule_;
      return {begin, begin + (*sizes_)[rank] * granule_};
    }
    case Kind::dim: {
      const int64_t rows = global[dim_] / granule_;
      return {rows * rank / ranks * granule_, rows * (rank + 1) / ranks * granule_};
    }
    case Kind::single: return {0, rank == owner() ? global.numel() : 0};
    case Kind::parts:
    case Kind::owned:
      if (ranks == 1) return {0, global[dim_]};
      break;
  }
  fail<PlacementError>("[placement] Shard(", to_string(), ") of ", global, ": a rank's share is not one interval");
}

std::vector<Interval> OwnershipMap::owned_intervals(int rank, int ranks, const Shape& global) const {
  if (!is_scattered()) return {owned(rank, ranks, global)};
  check_fits(ranks, global);
  std::vector<Interval> out;
  if (kind_ == Kind::owned) {
    for_each_owned(*sizes_, [&](Interval i, int64_t owner) {
      if (owner == rank) out.push_back(i);
    });
    return out;
  }
  const int64_t units = units_of(global);
  int64_t part = 0;
  for (const int64_t size : *sizes_) {
    const int64_t rows = size / granule_;
    out.push_back({part + units * rank / ranks * rows, part + units * (rank + 1) / ranks * rows});
    part += units * rows;
  }
  return out;
}

int64_t OwnershipMap::owned_size(int rank, int ranks, const Shape& global) const {
  if (!is_scattered()) return owned(rank, ranks, global).size();
  check_fits(ranks, global);
  if (kind_ == Kind::owned) {
    int64_t own = 0;
    for_each_owned(*sizes_, [&](Interval i, int64_t owner) { own += owner == rank ? i.size() : 0; });
    return own;
  }
  const int64_t units = units_of(global);
  return (units * (rank + 1) / ranks - units * rank / ranks) * (std::reduce(sizes_->begin(), sizes_->end()) / granule_);
}

std::string OwnershipMap::to_string() const {
  if (kind_ == Kind::flat) return "flat";
  if (kind_ == Kind::single) return str("on ", owner());
  const std::string by = kind_ == Kind::dim && granule_ != 1 ? str(" by ", granule_) : "";
  constexpr const char* kSuffix[] = {"", " uneven", "", " parts", " owned"};
  return str(dim_, by, kSuffix[static_cast<int>(kind_)], inner_ ? " inner" : "");
}

}  // namespace sheaf
