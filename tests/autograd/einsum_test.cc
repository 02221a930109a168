// einsum against plain loops over all letters. That it has a gradient and keeps cuts is tested by its samples (op_samples.cc).
#include <cmath>
#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

Tensor values(const Shape& shape, int64_t seed) {
  std::vector<double> x;
  for (int64_t i = 0; i < shape.numel(); ++i) x.push_back(std::sin(static_cast<double>(i * i + seed)));
  return Tensor::from(x, shape);
}

/// One letter a dimension, no "...".
struct Case {
  std::string equation;
  std::vector<std::string> in;
  std::string out;
  std::string same_as = {};  ///< written out
};

const std::map<char, int64_t> kSizes = {{'a', 2}, {'b', 3}, {'c', 4}, {'d', 5}, {'e', 1}, {'z', 0}};

Shape shape_of(const std::string& letters) {
  Shape shape;
  for (const char l : letters) shape.push_back(kSizes.at(l));
  return shape;
}

int64_t offset(const std::string& letters, const std::map<char, int64_t>& at) {
  int64_t i = 0;
  for (const char l : letters) i = i * kSizes.at(l) + at.at(l);
  return i;
}

std::vector<double> by_loops(const Case& c, const std::vector<std::vector<double>>& x) {
  std::vector<double> y(static_cast<size_t>(shape_of(c.out).numel()));
  std::map<char, int64_t> at;
  for (const std::string& letters : c.in)
    for (const char l : letters) at[l] = 0;
  const auto add = [&](auto&& self, auto letter) -> void {
    if (letter != at.end()) {
      for (letter->second = 0; letter->second < kSizes.at(letter->first); ++letter->second) self(self, std::next(letter));
      return;
    }
    double product = 1;
    for (size_t i = 0; i < x.size(); ++i) product *= x[i][static_cast<size_t>(offset(c.in[i], at))];
    y[static_cast<size_t>(offset(c.out, at))] += product;
  };
  add(add, at.begin());
  return y;
}

TEST(Einsum, IsTheSumOfProducts) {
  const Case cases[] = {
      {"ab->ba", {"ab"}, "ba"},
      {"abc->b", {"abc"}, "b"},
      {"abc->", {"abc"}, ""},
      {"ab", {"ab"}, "ab"},
      {"ba", {"ba"}, "ab"},
      {"a,a->", {"a", "a"}, ""},
      {"a,a", {"a", "a"}, ""},
      {"a,b->ba", {"a", "b"}, "ba"},
      {"ab,bc->ac", {"ab", "bc"}, "ac"},
      {" ba , cb ", {"ba", "cb"}, "ac"},
      {"ab,cb->ac", {"ab", "cb"}, "ac"},
      {"abc,acd->abd", {"abc", "acd"}, "abd"},
      {"cab,dca->dbc", {"cab", "dca"}, "dbc"},
      {"abcd,dbe->eca", {"abcd", "dbe"}, "eca"},
      {"abcd,abcd->bd", {"abcd", "abcd"}, "bd"},
      {"abcd,abcd->", {"abcd", "abcd"}, ""},
      {"ab,cd->", {"ab", "cd"}, ""},
      {"ab,bc,cd->ad", {"ab", "bc", "cd"}, "ad"},
      {"ab,bc,abd->dc", {"ab", "bc", "abd"}, "dc"},
      {",ab->ba", {"", "ab"}, "ba"},
      {"az,zb->ab", {"az", "zb"}, "ab"},
      {"za,ab->zb", {"za", "ab"}, "zb"},
      {"...a->a...", {"bca"}, "abc"},
      {"...ab,...bc", {"dab", "dbc"}, "dac"},
      {"...ab,bc->...ac", {"edab", "bc"}, "edac"},
      {"a...,b...->...", {"acd", "bd"}, "cd"},
      {"a...->a", {"abc"}, "a"},
  };
  for (const Case& c : cases) {
    std::vector<Tensor> x;
    std::vector<std::vector<double>> numbers;
    for (const std::string& letters : c.in) {
      x.push_back(values(shape_of(letters), static_cast<int64_t>(x.size())));
      numbers.push_back(x.back().to_vector<double>());
    }
    const Tensor y = einsum(c.equation, x);
    ASSERT_EQ(y.shape(), shape_of(c.out)) << c.equation;
    const std::vector<double> got = y.to_vector<double>(), want = by_loops(c, numbers);
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << c.equation << ' ' << i;
  }
}

TEST(Einsum, MultipliesIntegersWhereNothingIsSummed) {
  const Tensor a = Tensor::from<int64_t>({1, 2}, {2}), b = Tensor::from<int64_t>({3, 4, 5}, {3});
  EXPECT_EQ(einsum("i,j->ij", {a, b}).to_vector<int64_t>(), (std::vector<int64_t>{3, 4, 5, 6, 8, 10}));
}

template <class E>
std::string error_of(const std::string& equation, const std::vector<Shape>& shapes) {
  std::vector<Tensor> x;
  for (const Shape& shape : shapes) x.push_back(zeros(shape));
  try {
    einsum(equation, x);
  } catch (const E& e) {
    return e.what();
  }
  return "no error";
}

TEST(Einsum, NamesWhatIsWrong) {
  EXPECT_THAT(error_of<ConfigError>("ij,jk->ik", {{2, 3}}), HasSubstr("\"ij,jk->ik\" is of 2 operands, not of 1"));
  EXPECT_THAT(error_of<ConfigError>("ii->i", {{2, 2}}), HasSubstr("i is twice in \"ii\"; diagonals are not supported"));
  EXPECT_THAT(error_of<ConfigError>("ij->ii", {{2, 2}}), HasSubstr("i is twice in \"ii\""));
  EXPECT_THAT(error_of<ConfigError>("......i->i", {{2, 2}}), HasSubstr("of \"...\" is twice"));
  EXPECT_THAT(error_of<ConfigError>("i1->i", {{2, 2}}), HasSubstr("'1' in \"i1\" is neither a letter nor \"...\""));
  EXPECT_THAT(error_of<ConfigError>("ij->ik", {{2, 2}}), HasSubstr("no operand has k"));
  EXPECT_THAT(error_of<ConfigError>("ij->i->j", {{2, 2}}), HasSubstr("'-' in \"i->j\""));
  EXPECT_THAT(error_of<ShapeError>("ijk->i", {{2, 3}}), HasSubstr("f32[2,3] has not the 3 dimensions of \"ijk\""));
  EXPECT_THAT(error_of<ShapeError>("ij...->i", {{2}}), HasSubstr("f32[2] has not the 2 dimensions of \"ij...\""));
  EXPECT_THAT(error_of<ShapeError>("ij,jk->ik", {{2, 3}, {4, 5}}), HasSubstr("j is 3 and, in operand 1, 4"));
  EXPECT_THAT(error_of<ShapeError>("...i,...i->...", {{2, 3}, {4, 3}}), HasSubstr("dimension -1 of \"...\" is 2 and, in operand 1, 4"));
  EXPECT_THROW(einsum("ij,j->i", {Tensor::from<int64_t>({1, 2}, {1, 2}), Tensor::from<int64_t>({1, 2}, {2})}), DTypeError);
}

}  // namespace
}  // namespace sheaf
