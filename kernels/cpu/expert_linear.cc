// Products of the used rows with each expert's matrix. Rows are gathered first, so that an expert with few rows in each of many
// groups has products of many rows.
#include <algorithm>
#include <cstring>
#include <vector>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cpu/gemm.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/experts.h"
#include "sheaf/kernels/fp8.h"

namespace sheaf::kernels::cpu {
namespace {

// Rows are multiplied in pieces of whole units: a piece has one of a few sizes, so that the workspace for the largest is known
// without the counts. The rest of a unit is zero.
constexpr int64_t kPiece = 512, kUnit = 32;
constexpr const char *kLinear = "expert_linear", *kGradient = "expert_weight_gradient";

constexpr int64_t in_units(int64_t rows) { return (rows + kUnit - 1) / kUnit * kUnit; }

/// Used rows, from row `first` of a group on.
struct Piece {
  int64_t group, first, rows;
};

/// The groups of experts, [E, ..] as counts has them, and where their rows are in rows[Q, .., R, C].
class Groups {
 public:
  Groups(const char* who, const View& counts, const View& rows)
      : parts_{counts.shape[0], rows.shape[0]}, room_(rows.shape.dim(-2)) {
    const Elements<int32_t> taken(who, counts);
    count_ = taken.count(), each_ = parts_.experts ? count_ / parts_.experts : 0;
    if (!counts.data) return;  // only sizes are requested
    rows_.resize(static_cast<size_t>(count_));
    for (int64_t q = 0; q < parts_.parts; ++q)
      for (int64_t j = 0; j < each_; ++j)
        for (int64_t e = parts_.first_of(q), row = 0; e < parts_.first_of(q + 1); ++e) {
          const int64_t used = std::clamp<int64_t>(taken[e * each_ + j], 0, room_ - row);
          rows_[static_cast<size_t>(e * each_ + j)] = {row, used};
          row += used;
        }
  }
  int64_t experts() const { return parts_.experts; }
  int64_t count() const { return count_; }
  int64_t used(int64_t group) const { return rows_[static_cast<size_t>(group)].count; }
  /// A group's index among those of all parts, [Q, ..], and the first of its rows there.
  int64_t group_of_part(int64_t group) const { return parts_.part_of(group / each_) * each_ + group % each_; }
  int64_t begin(int64_t group) const { return rows_[static_cast<size_t>(group)].begin; }

  bool is_empty(int64_t expert) const {
    for (int64_t g = expert * each_; g < (expert + 1) * each_; ++g)
      if (used(g) > 0) return false;
    return true;
  }

  /// f(rows) for all sizes of pieces.
  template <class F>
  void sizes(F&& f) const {
    const int64_t most = each_ * room_;
    for (int64_t rows = kUnit; rows <= std::min(kPiece, in_units(most)); rows += kUnit) f(rows);
  }
  int64_t largest_piece() const {
    int64_t largest = 0;
    sizes([&](int64_t rows) { largest = rows; });
    return largest;
  }
  /// f(Piece) for the used rows of an expert's groups, in order.
  template <class F>
  void pieces(int64_t expert, F&& f) const {
    const int64_t end = (expert + 1) * each_;
    for (int64_t group = expert * each_, first = 0; group < end;) {
      Piece piece{group, first, 0};
      while (piece.rows < kPiece && group < end) {
        const int64_t rows = std::min(used(group) - first, kPiece - piece.rows);
        piece.rows += rows, first += rows;
        if (first == used(group)) ++group, first = 0;
      }
      if (piece.rows > 0) f(piece);
    }
  }
  /// f(group, first row, rows, their offset in the piece).
  template <class F>
  void parts(const Piece& piece, F&& f) const {
    int64_t at = 0, first = piece.first;
    for (int64_t group = piece.group; at < piece.rows; ++group, first = 0) {
      const int64_t rows = std::min(used(group) - first, piece.rows - at);
      f(group, first, rows, at);
      at += rows;
    }
  }
  /// f(group of a part, its first unused row), in parallel.
  template <class F>
  void rests(F&& f) const {
    parallel_for(parts_.parts * each_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        int64_t row = 0;
        for (int64_t e = parts_.first_of(g / each_); e < parts_.first_of(g / each_ + 1); ++e) row += used(e * each_ + g % each_);
        f(g, row);
      }
    });
  }

 private:
  struct Taken {
    int64_t begin, count;
  };
  ExpertParts parts_;
  int64_t room_, count_, each_;
  std::vector<Taken> rows_;
};

/// Rows[Q, .., R, C] by group, dense along C.
class Source {
 public:
  Source(const char* who, const View& rows, const View& counts) : rows_(rows) {
    Shape all = counts.shape;
    all[0] = rows.shape[0];
    all.push_back(rows.shape.dim(-2)), all.push_back(rows.shape.back());
    check<ShapeError>(rows.shape == all && all[0] <= counts.shape[0] && (rows.strides.back() == 1 || rows.shape.back() <= 1), "[",
                      who, "] rows ", rows.shape, " of strides ", rows.strides, " for counts ",
                      counts.shape);
  }
  int64_t cols() const { return rows_.shape.back(); }
  size_t row_bytes() const { return static_cast<size_t>(cols()) * size_of(rows_.dtype); }
  /// A row of a part's group.
  char* at(int64_t group, int64_t row) const {
    int64_t offset = row * rows_.strides.dim(-2);
    for (int d = rows_.rank() - 3; d >= 0; --d)
      offset += group % rows_.shape[d] * rows_.strides[d], group /= rows_.shape[d];
    return rows_.as<char>() + offset * static_cast<int64_t>(size_of(rows_.dtype));
  }
  /// Bytes of a piece of `rows`, and the piece as a matrix.
  size_t piece_bytes(int64_t rows) const { return line_align(static_cast<size_t>(rows) * row_bytes()); }
  View matrix(void* piece, int64_t rows) const { return View::dense(piece, rows_.dtype, {rows, cols()}); }
  /// Gathers rows in `memory`, followed by zeros.
  void gather(const Groups& groups, const Piece& piece, char* memory) const {
    copy(groups, piece, memory, true);
    std::memset(memory + static_cast<size_t>(piece.rows) * row_bytes(), 0,
                static_cast<size_t>(in_units(piece.rows) - piece.rows) * row_bytes());
  }
  void scatter(const Groups& groups, const Piece& piece, char* memory) const {
    copy(groups, piece, memory, false);
  }
  /// Zeros the unused rows.
  void clear_rests(const Groups& groups) const {
    groups.rests([&](int64_t group, int64_t row) {
      for (; row < rows_.shape.dim(-2); ++row) std::memset(at(group, row), 0, row_bytes());
    });
  }

 private:
  void copy(const Groups& groups, const Piece& piece, char* memory, bool there) const {
    groups.parts(piece, [&](int64_t group, int64_t first, int64_t rows, int64_t place) {
      const int64_t part = groups.group_of_part(group), start = groups.begin(group) + first;
      parallel_for(rows, row_grain(cols()), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          char *row = at(part, start + r), *copy = memory + static_cast<size_t>(place + r) * row_bytes();
          there ? std::memcpy(copy, row, row_bytes()) : std::memcpy(row, copy, row_bytes());
        }
      });
    });
  }
  View rows_;
};

/// The matrix of one expert, or its bias.
View weight_of(View v, int64_t expert) {
  const auto offset = expert * v.strides[0] * static_cast<int64_t>(size_of(v.dtype));
  if (v.data) v.data = v.as<char>() + offset;
  v.shape.erase(0), v.strides.erase(0);
  return v;
}

View bias_of(const View& all, int64_t expert) { return all.rank() ? weight_of(all, expert) : View{}; }

/// Each expert's matrix [O, I] in the form that is multiplied: rounded for fp8, once for all of its pieces.
class Rounded {
 public:
  Rounded(const View& weight, bool fp8) : weight_(weight), fp8_(fp8) {}
  size_t bytes() const { return fp8_ ? line_align(static_cast<size_t>(weight_of(weight_, 0).bytes())) : 0; }
  /// In `memory` if it is rounded (nullptr to ask for sizes).
  View matrix(int64_t expert, void* memory) const {
    const View from = weight_of(weight_, expert);
    if (!fp8_) return from;
    const View to = dense_as_it_lies(memory, from);
    if (memory) round_to_fp8(from, to);
    return to;
  }

 private:
  View weight_;
  bool fp8_;
};

/// Products to be summed are computed in the compute type.
struct Gradient {
  View dweight, sum;  // of one expert
  bool copies;

  Gradient(const View& all, DType computed, int64_t expert, void* scratch)
      : dweight(weight_of(all, expert)), sum(dweight), copies(all.dtype != computed) {
    if (copies) sum = View::dense(scratch, computed, dweight.shape);
  }
  size_t bytes() const { return copies ? line_align(static_cast<size_t>(sum.bytes())) : 0; }
};
DType computed_in(DType d) { return d == kF64 ? kF64 : kF32; }

}  // namespace

size_t expert_linear_workspace(const View& x, const View& weight, const View& bias, const View& counts,
                               const View& y, const ExpertProduct& how) {
  if (y.numel() == 0) return 0;
  const Groups groups(kLinear, counts, x);
  const Source from(kLinear, x, counts), to(kLinear, y, counts);
  const Rounded rounded(weight, how.fp8);
  size_t most = 0;
  groups.sizes([&](int64_t rows) {
    most = std::max(most, gemm_workspace({kLinear, from.matrix(nullptr, rows), transposed(rounded.matrix(0, nullptr)),
                                          to.matrix(nullptr, rows), bias_of(bias, 0)}));
  });
  return most + from.piece_bytes(groups.largest_piece()) + to.piece_bytes(groups.largest_piece()) + rounded.bytes();
}

void expert_linear(const View& x, const View& weight, const View& bias, const View& counts, const View& y,
                   Workspace workspace, const ExpertProduct& how) {
  if (y.numel() == 0) return;
  const Groups groups(kLinear, counts, x);
  const Source from(kLinear, x, counts), to(kLinear, y, counts);
  const Rounded rounded(weight, how.fp8);
  const size_t bytes[] = {from.piece_bytes(groups.largest_piece()), to.piece_bytes(groups.largest_piece())};
  const size_t taken = bytes[0] + bytes[1] + rounded.bytes();
  check<ShapeError>(workspace.bytes >= taken, "[", kLinear, "] workspace too small: ", workspace.bytes, " bytes, of ", taken);
  char *const in = static_cast<char*>(workspace.data), *const out = in + bytes[0];
  const Workspace rest{in + taken, workspace.bytes - taken};
  for (int64_t expert = 0; expert < groups.experts(); ++expert) {
    if (groups.is_empty(expert)) continue;
    const View matrix = rounded.matrix(expert, out + bytes[1]);
    groups.pieces(expert, [&](const Piece& piece) {
      const View rows = from.matrix(in, in_units(piece.rows));
      from.gather(groups, piece, in);
      if (how.fp8) round_to_fp8(rows, rows);
      gemm({kLinear, rows, transposed(matrix), to.matrix(out, in_units(piece.rows)), bias_of(bias, expert)}, rest);
      to.scatter(groups, piece, out);
    });
  }
  to.clear_rests(groups);
}

size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts,
                                        const View& dweight, bool) {
  if (dweight.numel() == 0) return 0;
  const Gradient gradient(dweight, computed_in(x.dtype), 0, nullptr);
  const Groups groups(kGradient, counts, x);
  const Source rows_of_dy(kGradient, dy, counts), rows_of_x(kGradient, x, counts);
  size_t most = 0;
  groups.sizes([&](int64_t rows) {
    for (const bool accumulate : {false, true})
      most = std::max(most, gemm_workspace({kGradient, transposed(rows_of_dy.matrix(nullptr, rows)),
                                            rows_of_x.matrix(nullptr, rows), gradient.sum, {}, accumulate}));
  });
  return gradient.bytes() + rows_of_dy.piece_bytes(groups.largest_piece()) +
         rows_of_x.piece_bytes(groups.largest_piece()) + most;
}

void expert_weight_gradient(const View& dy, const View& x, const View& counts, const View& dweight,
                            Workspace workspace, bool) {
  if (dweight.numel() == 0) return;
  const Groups groups(kGradient, counts, x);
  const Source rows_of_dy(kGradient, dy, counts), rows_of_x(kGradient, x, counts);
  const size_t sums = Gradient(dweight, computed_in(x.dtype), 0, nullptr).bytes(),
               bytes[] = {rows_of_dy.piece_bytes(groups.largest_piece()), rows_of_x.piece_bytes(groups.largest_piece())};
  const size_t taken = sums + bytes[0] + bytes[1];
  check<ShapeError>(workspace.bytes >= taken, "[", kGradient, "] workspace too small: ", workspace.bytes, " bytes, of ", taken);
  char* const start = static_cast<char*>(workspace.data);
  char *const dy_piece = start + sums, *const x_piece = dy_piece + bytes[0];
  const Workspace rest{start + taken, workspace.bytes - taken};
  for (int64_t expert = 0; expert < groups.experts(); ++expert) {
    const Gradient gradient(dweight, computed_in(x.dtype), expert, start);
    bool begun = false;
    groups.pieces(expert, [&](const Piece& piece) {
      const int64_t rows = in_units(piece.rows);
      rows_of_dy.gather(groups, piece, dy_piece);
      rows_of_x.gather(groups, piece, x_piece);
      gemm({kGradient, transposed(rows_of_dy.matrix(dy_piece, rows)), rows_of_x.matrix(x_piece, rows), gradient.sum, {}, begun},
           rest);
      begun = true;
    });
    if (!begun) fill(gradient.sum, 0);
    if (gradient.copies) copy(gradient.sum, gradient.dweight);
  }
}

void expert_bias_gradient(const View& dy, const View& counts, const View& dbias) {
  constexpr const char* who = "expert_bias_gradient";
  if (dbias.numel() == 0) return;
  const Groups groups(who, counts, dy);
  const Source rows(who, dy, counts);
  check<ShapeError>(dbias.shape == Shape{groups.experts(), rows.cols()} && dbias.contiguous(), "[", who, "] gradients ", dbias.shape,
                    " of rows ", dy.shape, " for counts ", counts.shape);
  visit_floating(who, dy.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const int64_t cols = rows.cols(), slices = (cols + kLanes - 1) / kLanes, each = groups.count() / groups.experts();
    const bool wide = dbias.dtype == dtype_of<C>;
    check<DTypeError>(wide || dbias.dtype == dy.dtype, "[", who, "] of ", dy.dtype, " into ", dbias.dtype);
    parallel_for(groups.experts() * slices, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t expert = item / slices, at = item % slices * kLanes;
        const int n = static_cast<int>(std::min<int64_t>(kLanes, cols - at));
        Lanes<C> sum(C(0));
        for (int64_t group = expert * each; group < (expert + 1) * each; ++group) {
          const int64_t part = groups.group_of_part(group), first = groups.begin(group);
          for (int64_t row = first; row < first + groups.used(group); ++row)
            sum = sum + load_lanes(reinterpret_cast<const T*>(rows.at(part, row)) + at, n);
        }
        if (wide) store_lanes(dbias.as<C>() + expert * cols + at, sum, n);
        else store_lanes(dbias.as<T>() + expert * cols + at, sum, n);
      }
    });
  });
}

}  // namespace sheaf::kernels::cpu
