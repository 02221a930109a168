#include <algorithm>

#include "sheaf/kernels/cuda/reduce_kernels.h"
#include "sheaf/kernels/reduce.h"

namespace sheaf::kernels::cuda {
namespace {

using namespace reduction;

int64_t groups_of(int64_t count) {
  return std::clamp<int64_t>(blocks_for(count, kChunk), 1, kMaxGroups);
}

size_t workspace_of(const View& x, const View& out) {
  const int64_t outputs = out.numel();
  const int64_t groups = outputs == 0 ? 1 : groups_of(x.numel() / outputs);
  return groups == 1 ? 0 : static_cast<size_t>(outputs * groups) * sizeof(Part<double>);
}

/// A view without dimensions, to be given some of v.
View part_of(const View& v) { return {v.data, v.dtype, {}, {}}; }

/// Elements of type T, evenly spaced or adjacent to those of other outputs.
template <class T>
void enqueue(const char* who, const Stream& stream, Plan& plan, bool columns, Workspace workspace) {
  using W = Total<Compute<T>>;
  constexpr int kSize = Pack<T>::kSize;
  Part<W>* parts = static_cast<Part<W>*>(workspace.data);
  const Walk<2>& kept = plan.kept;
  const Walk<1>& reduced = plan.reduced;
  const int last = kept.rank - 1;
  // Packs must begin at multiples of their size.
  plan.packs = aligned16(reduced.data[0]) && (columns || reduced.strides[0][0] == 1);
  for (int d = 0; d < kept.rank; ++d)
    plan.packs = plan.packs && ((columns && d == last) || kept.strides[1][d] % kSize == 0);
  for (int d = 0; columns && d < reduced.rank; ++d)
    plan.packs = plan.packs && reduced.strides[0][d] % kSize == 0;
  if (!columns) {
    launch(who, stream,
           {.blocks = blocks_for(kept.numel * plan.groups, kThreads / plan.lanes),
            .threads = kThreads},
           reduce_rows<T, HeldSource<T>>, plan, parts);
    return;
  }
  const int64_t inner = kept.shape[last];
  const int64_t packs = kept.numel / inner * blocks_for(inner, kSize);
  const int64_t tiles = blocks_for(packs, kThreads / plan.lanes);
  launch(who, stream, {.blocks = tiles * plan.groups, .threads = kThreads}, reduce_columns<T>, plan,
         inner, tiles, parts);
}

/// All others, with the arithmetic of T.
template <class T>
void enqueue_any(const char* who, const Stream& stream, Plan& plan, Workspace workspace) {
  using C = Compute<T>;
  launch(who, stream,
         {.blocks = blocks_for(plan.kept.numel * plan.groups, kThreads / plan.lanes),
          .threads = kThreads},
         reduce_rows<T, AnySource<C>>, plan, static_cast<Part<Total<C>>*>(workspace.data));
}

template <class W>
void enqueue_join(const char* who, const Stream& stream, const Plan& plan, Workspace workspace) {
  launch(who, stream,
         {.blocks = blocks_for(plan.kept.numel, kThreads / kWarp), .threads = kThreads},
         join_groups<W>, plan, static_cast<const Part<W>*>(workspace.data));
}

void reduce(const char* who, const Stream& stream, Kind kind, const View& x, const View& out,
            double number, Workspace workspace) {
  check<ShapeError>(x.rank() == out.rank(), "[", who, "] shapes ", x.shape, " and ", out.shape,
                    " differ in rank");
  View kept_out = part_of(out), kept = part_of(x), reduced = part_of(x);
  for (int i = 0; i < x.rank(); ++i) {
    if (x.shape[i] == out.shape[i]) {
      kept.shape.push_back(x.shape[i]), kept.strides.push_back(x.strides[i]);
      kept_out.shape.push_back(x.shape[i]), kept_out.strides.push_back(out.strides[i]);
    } else {
      check<ShapeError>(out.shape[i] == 1, "[", who, "] cannot reduce ", x.shape, " to ",
                        out.shape);
      reduced.shape.push_back(x.shape[i]), reduced.strides.push_back(x.strides[i]);
    }
  }
  if (out.numel() == 0) return;
  const size_t wanted = workspace_of(x, out);
  check<ShapeError>(workspace.bytes >= wanted, "[", who, "] workspace of ", workspace.bytes,
                    " bytes, wants ", wanted);
  Plan plan{};
  plan.kept = walk_of<2>(who, {kept_out, kept}, Order::row_major),
  plan.reduced = walk_of<1>(who, {reduced}, Order::row_major);
  plan.kind = kind, plan.number = number, plan.groups = groups_of(plan.count());
  plan.by_groups = Divider(plan.groups);
  plan.run = 16 / static_cast<int>(is_floating(x.dtype) ? size_of(x.dtype) : size_of(kI64));
  plan.lanes = 1;
  while (plan.lanes < kWarp && plan.lanes * plan.run < plan.count()) plan.lanes *= 2;

  const int last = plan.kept.rank - 1;
  const bool columns = kind != Kind::argmax && plan.count() > 0 && last >= 0 &&
                       plan.kept.strides[1][last] == 1 && plan.kept.shape[last] >= 8;
  if (is_floating(x.dtype) && (columns || plan.reduced.rank <= 1))
    visit_floating(who, x.dtype,
                   [&]<class T>() { enqueue<T>(who, stream, plan, columns, workspace); });
  else if (x.dtype == kF64)
    enqueue_any<double>(who, stream, plan, workspace);
  else if (x.dtype == kF32)
    enqueue_any<float>(who, stream, plan, workspace);
  else if (is_floating(x.dtype))
    enqueue_any<bf16>(who, stream, plan, workspace);
  else
    enqueue_any<int64_t>(who, stream, plan, workspace);
  if (plan.groups == 1) return;
  if (is_floating(x.dtype))
    enqueue_join<double>(who, stream, plan, workspace);
  else
    enqueue_join<int64_t>(who, stream, plan, workspace);
}

void require_floating(const char* who, const View& x) {
  if (!is_floating(x.dtype)) fail<DTypeError>("[", who, "] is not defined for ", x.dtype);
}

}  // namespace

size_t sum_workspace(const View& x, const View& out) { return workspace_of(x, out); }
size_t max_workspace(const View& x, const View& out) { return workspace_of(x, out); }
size_t min_workspace(const View& x, const View& out) { return workspace_of(x, out); }
size_t argmax_workspace(const View& x, int, const View& out) { return workspace_of(x, out); }
size_t logsumexp_workspace(const View& x, const View& out) { return workspace_of(x, out); }
size_t var_workspace(const View& x, double, const View& out) { return workspace_of(x, out); }

void sum(const Stream& stream, const View& x, const View& out, double scale, Workspace workspace) {
  check<DTypeError>(is_floating(x.dtype) || scale == 1.0,
                    "[sum] integers take no scale: cast to a floating type first");
  reduce("sum", stream, Kind::sum, x, out, scale, workspace);
}

void max(const Stream& stream, const View& x, const View& out, Workspace workspace) {
  reduce("max", stream, Kind::max, x, out, 0, workspace);
}
void min(const Stream& stream, const View& x, const View& out, Workspace workspace) {
  reduce("min", stream, Kind::min, x, out, 0, workspace);
}

void argmax(const Stream& stream, const View& x, int dim, const View& out, Workspace workspace) {
  check<ShapeError>(x.rank() == out.rank() && out.shape[dim] == 1, "[argmax] cannot reduce ",
                    x.shape, " to ", out.shape);
  check<ShapeError>(x.shape[dim] > 0 || out.numel() == 0, "[argmax] dimension ", dim, " of ",
                    x.shape, " has no elements");
  for (int i = 0; i < x.rank(); ++i)
    check<ShapeError>(i == dim || x.shape[i] == out.shape[i], "[argmax] cannot reduce ", x.shape,
                      " to ", out.shape);
  reduce("argmax", stream, Kind::argmax, x, out, 0, workspace);
}

void logsumexp(const Stream& stream, const View& x, const View& out, Workspace workspace) {
  require_floating("logsumexp", x);
  reduce("logsumexp", stream, Kind::logsumexp, x, out, 0, workspace);
}
void var(const Stream& stream, const View& x, double correction, const View& out,
         Workspace workspace) {
  require_floating("var", x);
  reduce("var", stream, Kind::var, x, out, correction, workspace);
}

}  // namespace sheaf::kernels::cuda
