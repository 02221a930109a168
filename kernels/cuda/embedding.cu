
#include "sheaf/kernels/cuda/gather.h"
#include "sheaf/kernels/cuda/layout.h"
#include "sheaf/kernels/cuda/numbers.h"
#include "sheaf/kernels/cuda/sort.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/embedding.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
// Rows of a token that one warp sums. Tokens with more are divided into pieces of this many, each summed separately: a common token
// may have a tenth of all rows.
constexpr int64_t kPiece = 128;

void check_views(const char* name, const View& tokens, const View& table, const View& rows,
                 bool wide) {
  Shape expected = tokens.shape;
  expected.push_back(table.rank() == 2 ? table.shape[1] : -1);
  check<ShapeError>(rows.shape == expected, "[embedding] tokens ", tokens.shape, ", table ",
                    table.shape, ", rows ", rows.shape);
  check<DTypeError>(rows.dtype == table.dtype || (wide && is_wide_of(table.dtype, rows.dtype)),
                    "[embedding] rows of ", rows.dtype, " and a table of ", table.dtype);
  if (!is_floating(rows.dtype)) fail<DTypeError>('[', name, "] is not defined for ", rows.dtype);
  for (const View& v : {table, rows})
    check<ShapeError>(v.strides.back() == 1 || v.shape.back() <= 1 || v.numel() == 0, '[', name,
                      "] the last dimension must be dense, its stride is ", v.strides.back());
}

struct Range {
  uint32_t begin, end;
};
/// Tokens with more than kPiece rows, and their pieces.
struct Heavy {
  struct Token {
    uint32_t token, first_piece;
  };
  uint32_t* counts;  // of tokens, of pieces
  Token* tokens;
  Range* pieces;  // in the sorted order
};
int64_t most_pieces(int64_t rows) { return rows / kPiece + rows / (kPiece + 1); }
int64_t most_heavy(int64_t rows) { return rows / (kPiece + 1); }

/// starts[v]: the first index in the sorted order with a key of at least v.
__global__ void find_starts(const uint32_t* keys, int64_t count, int64_t vocabulary,
                            uint32_t* starts, Heavy heavy) {
  const int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (v < 2) heavy.counts[v] = 0;
  if (v > vocabulary) return;
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < v)
      low = middle + 1;
    else
      high = middle;
  }
  starts[v] = static_cast<uint32_t>(low);
}

/// sum += the rows at positions[begin, end), one after another, in kWidth columns.
template <class T, class C, int kWidth>
__device__ void add_rows(const T* columns, const Layout<1>& at, const uint32_t* positions,
                         int64_t begin, int64_t end, C (&sum)[kWidth]) {
  constexpr int kUnroll = 8;  // loads in flight: of positions, then of rows; past the end, once more of the last one, without a branch
  for (int64_t i = begin; i < end; i += kUnroll) {
    int64_t offset[kUnroll][1];
    Group<T, kWidth> row[kUnroll];
    uint32_t position[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) position[k] = positions[i + k < end ? i + k : end - 1];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) at.offsets(position[k], offset[k]);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) row[k] = *reinterpret_cast<const Group<T, kWidth>*>(columns + offset[k][0]);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k)
      if (i + k < end)
        for (int j = 0; j < kWidth; ++j) sum[j] += convert_to<C>(row[k].v[j]);
  }
}

/// The work of a warp: 32 groups of kWidth columns of one of `rows` rows.
struct Work {
  int64_t row, column;
  bool first, inside;  // first columns of the row; inside the row
  template <int kWidth>
  __device__ static Work of_this(int64_t cols) {
    const int64_t chunks = blocks_for(cols, kWidth * kWarp);
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    const int64_t row = warp / chunks, chunk = warp - row * chunks;
    const int64_t column = (chunk * kWarp + threadIdx.x % kWarp) * kWidth;
    return {row, column, chunk == 0, column < cols};
  }
};

template <class To, int kWidth, class C>
__device__ void load_sum(const To* from, C (&sum)[kWidth]) {
  const auto before = *reinterpret_cast<const Group<To, kWidth>*>(from);
  for (int j = 0; j < kWidth; ++j) sum[j] = convert_to<C>(before.v[j]);
}
template <class To, int kWidth, class C>
__device__ void store_sum(To* to, const C (&sum)[kWidth]) {
  Group<To, kWidth> out;
  for (int j = 0; j < kWidth; ++j) out.v[j] = element<To>(sum[j]);
  *reinterpret_cast<Group<To, kWidth>*>(to) = out;
}

struct Operands {
  const void* dout;
  Layout<1> rows;  // of dout
  void* dtable;
  int64_t stride, vocabulary, cols;
  bool accumulate;
  const uint32_t *positions, *starts;
  void* partial;  // [pieces, cols]
};

/// Tokens of at most kPiece rows; the others are listed.
template <class T, class To, int kWidth>
__global__ void sum_tokens(Operands in, Heavy heavy) {
  using C = Compute<T>;
  const Work work = Work::of_this<kWidth>(in.cols);
  if (work.row >= in.vocabulary) return;
  const uint32_t begin = in.starts[work.row], end = in.starts[work.row + 1];
  if (end - begin > kPiece) {
    if (!work.first) return;
    const auto n = static_cast<uint32_t>(blocks_for(end - begin, kPiece));
    const uint32_t lane = threadIdx.x % kWarp;
    // The order of arrival determines where the pieces are, not their contents.
    uint32_t first = 0;
    if (lane == 0) {
      first = atomicAdd(&heavy.counts[1], n);
      heavy.tokens[atomicAdd(&heavy.counts[0], 1u)] = {static_cast<uint32_t>(work.row), first};
    }
    first = __shfl_sync(kFullWarp, first, 0);
    for (uint32_t p = lane; p < n; p += kWarp) {
      const auto from = static_cast<uint32_t>(begin + p * kPiece);
      heavy.pieces[first + p] = {from, p + 1 < n ? from + static_cast<uint32_t>(kPiece) : end};
    }
    return;
  }
  if (!work.inside || (in.accumulate && begin == end)) return;
  To* to = static_cast<To*>(in.dtable) + work.row * in.stride + work.column;
  C sum[kWidth] = {};
  if (in.accumulate) load_sum<To, kWidth>(to, sum);
  add_rows<T, C, kWidth>(static_cast<const T*>(in.dout) + work.column, in.rows, in.positions, begin,
                         end, sum);
  store_sum<To, kWidth>(to, sum);
}

template <class T, int kWidth>
__global__ void sum_pieces(Operands in, Heavy heavy) {
  using C = Compute<T>;
  const Work work = Work::of_this<kWidth>(in.cols);
  if (work.row >= heavy.counts[1] || !work.inside) return;
  const Range piece = heavy.pieces[work.row];
  C sum[kWidth] = {};
  add_rows<T, C, kWidth>(static_cast<const T*>(in.dout) + work.column, in.rows, in.positions,
                         piece.begin, piece.end, sum);
  store_sum<C, kWidth>(static_cast<C*>(in.partial) + work.row * in.cols + work.column, sum);
}

template <class T, class To, int kWidth>
__global__ void sum_heavy_tokens(Operands in, Heavy heavy) {
  using C = Compute<T>;
  const Work work = Work::of_this<kWidth>(in.cols);
  if (work.row >= heavy.counts[0] || !work.inside) return;
  const Heavy::Token token = heavy.tokens[work.row];
  const int64_t pieces = blocks_for(in.starts[token.token + 1] - in.starts[token.token], kPiece);
  To* to = static_cast<To*>(in.dtable) + token.token * in.stride + work.column;
  C sum[kWidth] = {};
  if (in.accumulate) load_sum<To, kWidth>(to, sum);
  const C* partial = static_cast<const C*>(in.partial) + token.first_piece * in.cols + work.column;
#pragma unroll 4
  for (int64_t p = 0; p < pieces; ++p) {
    C term[kWidth];
    load_sum<C, kWidth>(partial + p * in.cols, term);
    for (int j = 0; j < kWidth; ++j) sum[j] += term[j];
  }
  store_sum<To, kWidth>(to, sum);
}

template <class T, class To, int kWidth>
void add_up(const char* name, const Stream& stream, const Operands& in, const Heavy& heavy) {
  const int64_t chunks = blocks_for(in.cols, kWidth * kWarp), rows = in.rows.numel;
  const auto shape = [&](int64_t n) {
    return LaunchShape{.blocks = blocks_for(n * chunks, kWarps), .threads = kThreads};
  };
  launch(name, stream, shape(in.vocabulary), sum_tokens<T, To, kWidth>, in, heavy);
  launch(name, stream, shape(most_pieces(rows)), sum_pieces<T, kWidth>, in, heavy);
  launch(name, stream, shape(most_heavy(rows)), sum_heavy_tokens<T, To, kWidth>, in, heavy);
}

template <class T, class To>
void add_up(const char* name, const Stream& stream, const Operands& in, const Heavy& heavy) {
  constexpr int kWidth = Pack<T>::kSize;
  bool packs = in.cols % kWidth == 0 && in.stride % kWidth == 0 && aligned16(in.dout) &&
               aligned16(in.dtable);
  for (int d = 0; d < in.rows.rank; ++d)
    packs = packs && (in.rows.strides[0][d] % kWidth == 0 || in.rows.shape[d] == 1);
  packs ? add_up<T, To, kWidth>(name, stream, in, heavy)
        : add_up<T, To, 1>(name, stream, in, heavy);
}

}  // namespace

void embedding(const Stream& stream, const View& tokens, const View& table, TablePart part,
               const View& out) {
  check_views("embedding", tokens, table, out, false);
  View x{table.data, table.dtype, out.shape, Shape::filled(out.rank(), 0)}, index = tokens;
  x.strides[out.rank() - 1] = table.strides[1];
  index.shape.push_back(table.shape[1]), index.strides.push_back(0);
  pick("embedding", stream, x, {table.shape[0], table.strides[0], part.first, part.all}, index,
       out);
}

size_t embedding_backward_workspace(const View& tokens, const View& dout, const View& dtable) {
  const int64_t rows = tokens.numel(), vocabulary = dtable.shape[0];
  const size_t wide = dout.dtype == kF64 ? 8 : 4;
  const auto pieces = static_cast<size_t>(most_pieces(rows));
  return line_align(sort_workspace(rows, vocabulary)) +
         line_align(static_cast<size_t>(vocabulary + 1) * sizeof(uint32_t)) +
         line_align(2 * sizeof(uint32_t)) +
         line_align(static_cast<size_t>(most_heavy(rows)) * sizeof(Heavy::Token)) +
         line_align(pieces * sizeof(Range)) +
         line_align(pieces * static_cast<size_t>(dout.shape.back()) * wide);
}

void embedding_backward(const Stream& stream, const View& tokens, const View& dout, TablePart part,
                        const View& dtable, bool accumulate, Workspace workspace) {
  const char* name = "embedding_backward";
  check_views(name, tokens, dtable, dout, true);
  if (dtable.numel() == 0) return;
  const int64_t rows = tokens.numel(), vocabulary = dtable.shape[0], cols = dtable.shape[1];
  const int64_t pieces = most_pieces(rows);
  const size_t sort_bytes = sort_workspace(rows, vocabulary);
  Carver carver(name, workspace);
  char* sort_memory = carver.take<char>(static_cast<int64_t>(sort_bytes));
  auto* starts = carver.take<uint32_t>(vocabulary + 1);
  Heavy heavy{};
  heavy.counts = carver.take<uint32_t>(2);
  heavy.tokens = carver.take<Heavy::Token>(most_heavy(rows));
  heavy.pieces = carver.take<Range>(pieces);
  void* partial = carver.take<char>(pieces * cols * (dout.dtype == kF64 ? 8 : 4));

  const Sorted sorted =
      sort_positions(name, stream, tokens, part.first, vocabulary, {sort_memory, sort_bytes});
  launch(name, stream, {.blocks = blocks_for(vocabulary + 1, kThreads), .threads = kThreads},
         find_starts, sorted.keys, rows, vocabulary, starts, heavy);
  View heads = dout;
  heads.shape = tokens.shape, heads.strides.erase(dout.rank() - 1);
  const Operands in{dout.data,   Layout<1>(heads.shape, {heads.strides}, Order::row_major),
                    dtable.data, dtable.strides[0],
                    vocabulary,  cols,
                    accumulate,  sorted.positions,
                    starts,      partial};
  visit_floating(name, dout.dtype, [&]<class T>() {
    using C = Compute<T>;
    if (dtable.dtype == dtype_of<C>)
      add_up<T, C>(name, stream, in, heavy);
    else if constexpr (kIsNarrow<T>)
      add_up<T, T>(name, stream, in, heavy);
  });
}

}  // namespace sheaf::kernels::cuda
