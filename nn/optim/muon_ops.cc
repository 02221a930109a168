#include "sheaf/nn/optim/muon_ops.h"

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/optimizer.h"

namespace sheaf::optim {
namespace {

using namespace kernels::cpu;  // the order of the scalars

constexpr int kOfMomentum = kAdamWScalars, kOfStep = kOfMomentum + int{kSgdScalars};

char* at(const View& v, int64_t element) { return v.as<char>() + element * static_cast<int64_t>(size_of(v.dtype)); }
View part_of(const View& v, int64_t begin, int64_t count) { return View::dense(at(v, begin), v.dtype, {count}); }

View row(const View& segments, int64_t index) {
  constexpr int64_t n = kernels::Segment::kColumns;
  return View::dense(at(segments, index * n), kF64, {1, n});
}

// f(offset in the shard, offset in the state, elements, the segment's row)
template <class F>
void for_each_part(const MuonOps::Parts& a, const View& segments, F&& f) {
  const std::vector<int64_t>& table = *a.parts;
  for (size_t i = 0; i < table.size(); i += 3)
    f(table[i], table[i + 1], table[i + 2], row(segments, static_cast<int64_t>(i / 3)));
}

// SGD's step from 0 with rate -1.
struct MomentumStep {
  static constexpr const char* kName = "momentum";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = MuonOps::Parts;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View scalars = part_of(c.input(3), kOfMomentum, kSgdScalars), clip = optional_input(c, 4),
               found_inf = optional_input(c, 5);
    SHEAF_ON_DEVICE(stream, fill, c.output(0), 0.0);
    for_each_part(a, c.input(2), [&](int64_t from, int64_t to, int64_t n, const View& segment) {
      SHEAF_ON_DEVICE(stream, sgd, part_of(c.output(0), to, n), part_of(c.input(0), from, n), part_of(c.output(1), to, n),
                      segment, scalars, a.nesterov != 0, clip, found_inf);
    });
  }
  static void describe(const Attrs& a, std::string& out) { out += a.nesterov ? "nesterov" : ""; }
};

struct MuonStep {
  static constexpr const char* kName = "muon";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = MuonOps::Parts;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View scalars = part_of(c.input(3), kOfStep, kSgdScalars), found_inf = optional_input(c, 4);
    for_each_part(a, c.input(2), [&](int64_t to, int64_t from, int64_t n, const View& segment) {
      SHEAF_ON_DEVICE(stream, sgd, part_of(c.output(0), to, n), part_of(c.input(1), a.before + from, n), View{}, segment,
                      scalars, false, View{}, found_inf);
    });
  }
};

struct AdamWOfParts {
  static constexpr const char* kName = "adamw";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = MuonOps::Parts;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View scalars = part_of(c.input(5), 0, kAdamWScalars), clip = optional_input(c, 6),
               found_inf = optional_input(c, 7);
    for_each_part(a, c.input(4), [&](int64_t to, int64_t state, int64_t n, const View& segment) {
      SHEAF_ON_DEVICE(stream, adamw, part_of(c.output(0), to, n), part_of(c.input(1), to, n), part_of(c.output(1), state, n),
                      part_of(c.output(2), state, n), segment, scalars, clip, found_inf);
    });
  }
};

struct Join {
  static constexpr const char* kName = "join";
  using Attrs = MuonOps::Slices;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const int64_t largest = c.input(0).numel() / static_cast<int64_t>(a.sizes->size());
    int64_t from = 0, to = 0;
    for (const int64_t n : *a.sizes) {
      if (n > 0) SHEAF_ON_DEVICE(stream, copy, part_of(c.input(0), from, n), part_of(c.output(0), to, n));
      from += largest, to += n;
    }
  }
};

// f(bundle, the owner's values of a matrix, its place in the batch)
template <class F>
void for_each_own(const MuonOps::Own& a, const View& batch, F&& f) {
  const std::vector<int64_t>& table = *a.own;
  if (table.empty()) return;
  const int64_t room = batch.numel() / static_cast<int64_t>(table.size() / 5);
  for (size_t i = 0; i < table.size(); i += 5) {
    const Shape shape{table[i + 2], table[i + 3]};
    f(static_cast<int>(table[i]), [&](const View& held) {
      return View{at(held, table[i + 1]), held.dtype, shape, {table[i + 4], 1}};
    }, View::dense(at(batch, static_cast<int64_t>(i / 5) * room), batch.dtype, shape));
  }
}

struct Stack {
  static constexpr const char* kName = "stack";
  using Attrs = MuonOps::Own;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    for_each_own(a, c.output(0), [&](int bundle, auto&& matrix_in, const View& place) {
      SHEAF_ON_DEVICE(stream, copy, matrix_in(c.input(bundle)), place);
    });
  }
};

struct Unstack {
  static constexpr const char* kName = "unstack";
  static constexpr OpKind kKind = OpKind::step;
  using Attrs = MuonOps::Own;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    for_each_own(a, c.input(0), [&](int bundle, auto&& matrix_in, const View& place) {
      SHEAF_ON_DEVICE(stream, copy, place, matrix_in(c.output(bundle)));
    });
  }
};

// f(rows or columns of all matrices, the same as a rank's blocks)
template <class F>
void for_each_block(const MuonOps::Blocks& a, const View& matrices, const View& blocks, F&& f) {
  const Shape shape{matrices.shape[1], matrices.shape[2]};
  const int dim = a.cut.dim(), ranks = static_cast<int>(blocks.shape[0]);
  for (int rank = 0; rank < ranks; ++rank) {
    const Interval own = a.cut.owned(rank, ranks, shape);
    View part = matrices;
    part.data = at(matrices, own.begin * matrices.strides[dim + 1]);
    part.shape[dim + 1] = own.size();
    if (part.numel() == 0) continue;
    f(part, View{at(blocks, rank * blocks.strides[0]), blocks.dtype, part.shape, {blocks.strides[1], part.shape[2], 1}});
  }
}

struct Assemble {
  static constexpr const char* kName = "assemble";
  using Attrs = MuonOps::Blocks;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    for_each_block(a, c.output(0), c.input(0), [&](const View& part, const View& block) {
      SHEAF_ON_DEVICE(stream, copy, block, part);
    });
  }
};

struct TakeApart {
  static constexpr const char* kName = "take_apart";
  using Attrs = MuonOps::Blocks;
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    for_each_block(a, c.input(0), c.output(0), [&](const View& part, const View& block) {
      SHEAF_ON_DEVICE(stream, copy, part, block);
    });
  }
};

}  // namespace

const OpDef& MuonOps::momentum() { return op_def<MomentumStep>(); }
const OpDef& MuonOps::step() { return op_def<MuonStep>(); }
const OpDef& MuonOps::adamw() { return op_def<AdamWOfParts>(); }
const OpDef& MuonOps::join() { return op_def<Join>(); }
const OpDef& MuonOps::stack() { return op_def<Stack>(); }
const OpDef& MuonOps::unstack() { return op_def<Unstack>(); }
const OpDef& MuonOps::assemble() { return op_def<Assemble>(); }
const OpDef& MuonOps::take_apart() { return op_def<TakeApart>(); }

}  // namespace sheaf::optim
