#include "sheaf/tests/kernels/attention_shards.h"

#include <gmock/gmock.h>

#include "sheaf/tests/kernels/attention_kernels.h"

// Against the whole context, which attention_test compares with the definition.
namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;
using ::testing::HasSubstr;

// Intervals of no query, of one, within a block of 64, of whole blocks, over several; some parts end where documents do.
const std::vector<std::vector<int64_t>> kBorders{{0, 64, 64, 170}, {0, 37, 40, 170}, {0, 1, 65, 129, 170}};
const std::vector<int64_t> kDocuments{1, 64, 7, 80, 5};

void expect_parts(const ContextCase& c) {
  for (const std::vector<int64_t>& borders : kBorders)
    for (const Kernels& by : kernels(c.dtype, c.width, c.value_width)) {
      // Tiles are slow where they are emulated.
      if (by.forward == amx::attention && (&borders != &kBorders.back() || c.width != 64)) continue;
      SCOPED_TRACE(by.name);
      expect_parts_are_the_whole<OnHost>(c, borders, [&](const AttentionOperands& a, const AttentionMask& mask) {
        with_workspace(by.workspace(a.q, a.k, a.v),
                       [&](Workspace w) { by.forward(a.q, a.k, a.v, mask, 0.3, a.out, a.lse, w); });
        with_workspace(by.backward_workspace(a.q, a.k, a.v), [&](Workspace w) {
          by.backward(a.q, a.k, a.v, a.out, a.lse, a.dout, mask, 0.3, a.dq, a.dk, a.dv, w);
        });
      });
    }
}

void expect_parts_of(const std::vector<int64_t>& documents, const std::vector<int64_t>& windows, bool causal = true) {
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const int64_t window : windows) {
      expect_parts({d, 2, 170, 4, 2, 32, 32, documents, window, causal});
      expect_parts({d, 2, 170, 2, 1, 64, 32, documents, window, causal});
      expect_parts({d, 1, 170, 2, 2, 20, 40, documents, window, causal});
    }
}

TEST(AttentionShards, HaveTheBitsOfTheWhole) { expect_parts_of({}, {0}); }
TEST(AttentionShards, WindowsCrossTheirBorders) { expect_parts_of({}, {1, 20, 100}); }
TEST(AttentionShards, DocumentsCrossTheirBorders) { expect_parts_of(kDocuments, {0}); }
TEST(AttentionShards, DocumentsWithoutACausalMaskCrossTheirBorders) { expect_parts_of(kDocuments, {0}, false); }
TEST(AttentionShards, WindowsAndDocumentsCrossTheirBorders) { expect_parts_of(kDocuments, {20, 64}); }

TEST(AttentionShards, ThreadsChangeNothing) {
  for (const int threads : {1, 3})
    with_threads(threads, [&] { expect_parts({kF64, 2, 170, 4, 2, 32, 32, kDocuments, 0}); });
}

TEST(AttentionShards, RefusesWhatIsNoBeginOfADocument) {
  const Array q = Array::random(kF32, {1, 3, 2, 8}, 1), k = Array::random(kF32, {1, 5, 2, 8}, 2),
              few = Array::random(kF32, {1, 2, 2, 8}, 2), lse(kF32, {1, 2, 3}), out(kF32, {1, 3, 2, 8});
  const auto refusal = [&](const Array& keys, std::vector<double> begins) -> std::string {
    try {
      attention(q, keys, keys, {true, Array::of(kI32, {1, 3}, begins)}, 1, out, lse, Scratch(1 << 20));
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  for (const std::vector<double>& good : {std::vector<double>{0, 0, 0}, {1, 1, 4}, {2, 2, 2}, {2, 3, 4}, {0, 3, 3}})
    EXPECT_EQ(refusal(k, good), "");
  EXPECT_THAT(refusal(k, {-1, -1, -1}), HasSubstr("[attention] begins[0,0] is -1"));
  EXPECT_THAT(refusal(k, {3, 3, 3}), HasSubstr("begins[0,0] is 3"));
  EXPECT_THAT(refusal(k, {0, 1, 1}), HasSubstr("begins[0,1] is 1"));
  EXPECT_THAT(refusal(k, {0, 3, 5}), HasSubstr("begins[0,2] is 5"));
  EXPECT_THAT(refusal(k, {2, 3, 2}), HasSubstr("begins[0,2] is 2"));
  EXPECT_THAT(refusal(few, {0, 0, 0}), HasSubstr("no fewer keys than queries"));
}

TEST(AttentionShards, StatisticsAreDenseInTheLastDimension) {
  const Array q = Array::random(kF32, {1, 3, 2, 8}, 1), out(kF32, {1, 3, 2, 8}), lse(kF32, {1, 2, 3}, {12, 6, 2});
  EXPECT_THROW(attention(q, q, q, true, 1, out, lse, Scratch(1 << 20)), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
