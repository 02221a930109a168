// Filling this rank's pieces of a tensor with values from elsewhere: for all that loads weights.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>
#include <vector>

#include "sheaf/core/transfer.h"
#include "sheaf/nn/block_piece.h"
#include "sheaf/nn/state_dict.h"

namespace sheaf::nn {

/// A floating number as another type: by way of f32, in which all but f64 is computed, unless both are f64.
template <class T, class S>
T converted(S x) {
  if constexpr (std::is_same_v<T, double> && std::is_same_v<S, double>) return x;
  else return static_cast<T>(static_cast<float>(x));
}

/// Elements first, first + step, .. of the flat index of a tensor stored in `dtype`, which is floating, as values of T. fetch(begin, end,
/// void* to) copies elements [begin, end) as they are stored.
template <class T, class Fetch>
void read_values(DType dtype, int64_t first, int64_t step, int64_t count, T* out, Fetch&& fetch) {
  constexpr int64_t kChunk = 1 << 16;  // elements read at a time
  if (step == 1 && dtype == dtype_of<T>) return fetch(first, first + count, out);
  visit_floating("weights", dtype, [&]<class S>() {
    const int64_t most = std::max<int64_t>(1, kChunk / step);
    std::vector<S> chunk(static_cast<size_t>(std::min(count, most) * step));
    for (int64_t at = 0; at < count; at += most) {
      const int64_t n = std::min(count - at, most), begin = first + at * step;
      fetch(begin, begin + (n - 1) * step + 1, chunk.data());
      for (int64_t i = 0; i < n; ++i) out[at + i] = converted<T>(chunk[static_cast<size_t>(i * step)]);
    }
  });
}

/// Elements of a tensor's flat index, and the host memory that is to hold them densely, in their order.
template <class T>
struct WantedValues {
  Runs runs;
  T* out;
};

/// Fills this rank's pieces of one floating parameter or buffer, on whichever device: read(span of const WantedValues<T>) puts the values
/// there, T being their dtype or, for values in blocks, float. Returns its result.
template <class Read>
int64_t fill_pieces(std::span<const StatePiece> pieces, Read&& read) {
  if (pieces[0].blocks) {
    std::vector<BlockPiece> staged;
    std::vector<WantedValues<float>> wanted;
    for (const StatePiece& p : pieces) {
      BlockPiece& piece = staged.emplace_back(p.name, *p.blocks, p.runs);
      wanted.push_back({piece.elements(), piece.values().data()});  // in place
    }
    const int64_t result = read(std::span<const WantedValues<float>>(wanted));
    for (size_t i = 0; i < pieces.size(); ++i) staged[i].store(pieces[i].device, pieces[i].data);
    return result;
  }
  return visit_floating("weights", pieces[0].dtype, [&]<class T>() {
    std::vector<std::vector<T>> staged(pieces.size());
    std::vector<WantedValues<T>> wanted;
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (!pieces[i].device.is_cpu()) staged[i].resize(static_cast<size_t>(pieces[i].runs.numel()));
      wanted.push_back({pieces[i].runs, pieces[i].device.is_cpu() ? static_cast<T*>(pieces[i].data) : staged[i].data()});
    }
    const int64_t result = read(std::span<const WantedValues<T>>(wanted));
    for (size_t i = 0; i < pieces.size(); ++i)
      if (!staged[i].empty()) transfer(pieces[i].device, pieces[i].data, Device::cpu(), staged[i].data(), staged[i].size() * sizeof(T));
    return result;
  });
}

}  // namespace sheaf::nn
