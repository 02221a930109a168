// einsum: sums of products of tensors whose dimensions have names, by permute, reshape, matmul and sum.
#include <algorithm>
#include <cctype>
#include <map>

#include "sheaf/autograd/ops/common.h"

namespace sheaf {
namespace {

/// A dimension's letter; those of "..." are -1, -2, .. from the last one.
using Labels = std::vector<int>;
struct Term {
  Tensor x;
  Labels labels;  ///< of x's dimensions
};

bool has(const Labels& labels, int label) { return std::ranges::find(labels, label) != labels.end(); }
Labels operator+(Labels a, const Labels& b) { return a.insert(a.end(), b.begin(), b.end()), a; }
std::string name_of(int label) { return label < 0 ? str("dimension ", label, " of \"...\"") : std::string(1, static_cast<char>(label)); }

/// The labels of a part of an equation, with `dots` dimensions in place of "...".
Labels parse(std::string_view equation, std::string_view part, int dots) {
  Labels labels;
  for (size_t i = 0; i < part.size(); ++i) {
    const size_t begin = labels.size();
    if (part.substr(i).starts_with("...")) {
      for (int d = dots; d > 0; --d) labels.push_back(-d);
      i += 2;
    } else if (std::isalpha(static_cast<unsigned char>(part[i]))) {
      labels.push_back(part[i]);
    } else {
      fail<ConfigError>("[einsum] \"", equation, "\": '", part[i], "' in \"", part, "\" is neither a letter nor \"...\"");
    }
    for (size_t k = begin; k < labels.size(); ++k)
      if (std::ranges::count(labels, labels[k]) > 1)
        fail<ConfigError>("[einsum] \"", equation, "\": ", name_of(labels[k]), " is twice in \"", part, "\"; diagonals are not supported");
  }
  return labels;
}
bool has_dots(std::string_view part) { return part.find("...") != std::string_view::npos; }

std::vector<std::string_view> split_at_commas(std::string_view inputs) {
  std::vector<std::string_view> parts;
  for (size_t comma; (comma = inputs.find(',')) != std::string_view::npos; inputs.remove_prefix(comma + 1)) parts.push_back(inputs.substr(0, comma));
  parts.push_back(inputs);
  return parts;
}

/// Without an output in the equation: the dimensions of "...", then letters that occur once, in alphabetical order.
Labels implied(const Labels& all) {
  Labels once, dots;
  for (const int l : all) {
    if (l >= 0 && std::ranges::count(all, l) == 1) once.push_back(l);
    if (l < 0 && !has(dots, l)) dots.push_back(l);
  }
  std::ranges::sort(once);
  std::ranges::sort(dots);
  return dots + once;
}

/// x summed over the dimensions that are not in `keep`.
Term summed_to(const Term& t, const Labels& keep) {
  Dims gone;
  Labels left;
  for (size_t d = 0; d < t.labels.size(); ++d)
    if (has(keep, t.labels[d])) left.push_back(t.labels[d]);
    else gone.push_back(static_cast<int>(d));
  return gone.empty() ? t : Term{sum(t.x, gone), left};
}

/// x's dimensions in this order; what x does not have, if anything, has size 1.
Tensor arranged(const Term& t, const Labels& order) {
  std::vector<int> from, missing;
  for (size_t i = 0; i < order.size(); ++i)
    if (const auto found = std::ranges::find(t.labels, order[i]); found != t.labels.end()) from.push_back(static_cast<int>(found - t.labels.begin()));
    else missing.push_back(static_cast<int>(i));
  const Tensor x = std::ranges::is_sorted(from) ? t.x : permute(t.x, from);
  return missing.empty() ? x : unsqueeze(x, missing);
}

bool is_cut(const Term& t, int label) {
  const auto found = std::ranges::find(t.labels, label);
  const Layout& layout = t.x.type().layout;
  for (int axis = 0; axis < layout.num_axes(); ++axis)
    if (found != t.labels.end() && layout[axis].is_shard(static_cast<int>(found - t.labels.begin()))) return true;
  return false;
}

/// [.., rows, columns] of x's dimensions in the order batch, rows, columns: the latter become one each. Of the batch's first dimensions
/// those are left out that x does not have.
Tensor matrices(const Term& t, Labels batch, const Labels& rows, const Labels& columns) {
  while (!batch.empty() && !has(t.labels, batch.front())) batch.erase(batch.begin());
  const Tensor x = arranged(t, batch + rows + columns);
  Shape shape;
  for (size_t d = 0; d < batch.size(); ++d) shape.push_back(x.size(static_cast<int>(d)));
  size_t d = batch.size();
  for (const Labels* group : {&rows, &columns}) {
    int64_t size = 1;
    for (size_t end = d + group->size(); d < end; ++d) size *= x.size(static_cast<int>(d));
    shape.push_back(size);
  }
  return reshape(x, shape);
}

/// a times b, summed over what both have and `keep` has not.
Term product(Term a, Term b, const Labels& keep, const std::map<int, int64_t>& sizes) {
  a = summed_to(a, b.labels + keep);
  b = summed_to(b, a.labels + keep);
  Labels batch, summed, left, right;
  for (const int l : a.labels) (!has(b.labels, l) ? left : has(keep, l) ? batch : summed).push_back(l);
  for (const int l : b.labels)
    if (!has(a.labels, l)) right.push_back(l);
  if (summed.empty()) return {mul(arranged(a, batch + left + right), arranged(b, batch + left + right)), batch + left + right};

  // Of dimensions that become one, only the first may be cut. Further ones that are count the products; they are summed afterwards.
  const auto cut = [&](int l) { return is_cut(a, l) || is_cut(b, l); };
  for (Labels* group : {&summed, &left, &right}) {
    std::ranges::stable_partition(*group, cut);
    for (; group->size() > 1 && cut((*group)[1]); group->erase(group->begin())) batch.insert(batch.begin(), group->front());
  }
  Shape shape;
  for (const int l : batch + left + right) shape.push_back(sizes.at(l));
  const Tensor y = matmul(matrices(a, batch, left, summed), matrices(b, batch, summed, right));
  return summed_to({reshape(y, shape), batch + left + right}, keep);
}

}  // namespace

Tensor einsum(const std::string& equation, const std::vector<Tensor>& operands) {
  std::string text = equation;
  std::erase_if(text, [](unsigned char c) { return std::isspace(c) != 0; });
  const size_t arrow = text.find("->");
  const std::vector<std::string_view> parts = split_at_commas(std::string_view(text).substr(0, arrow));
  check<ConfigError>(parts.size() == operands.size(), "[einsum] \"", equation, "\" is of ", parts.size(), " operands, not of ", operands.size());

  std::vector<Term> terms;
  Labels all;
  std::map<int, int64_t> sizes;
  int most_dots = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& x = operands[i];
    expect_defined("einsum", x, static_cast<int>(i));
    const int letters = static_cast<int>(parse(equation, parts[i], 0).size()), dots = has_dots(parts[i]) ? std::max(x.rank() - letters, 0) : 0;
    terms.push_back({x, parse(equation, parts[i], dots)});
    if (letters + dots != x.rank())
      fail<ShapeError>("[einsum] \"", equation, "\": ", x.type(), " has not the ", letters, " dimensions of \"", parts[i], "\"");
    for (int d = 0; d < x.rank(); ++d) {
      const auto [known, is_new] = sizes.emplace(terms[i].labels[d], x.size(d));
      if (!is_new && known->second != x.size(d))
        fail<ShapeError>("[einsum] \"", equation, "\": ", name_of(known->first), " is ", known->second, " and, in operand ", i, ", ", x.size(d));
    }
    all = all + terms[i].labels;
    most_dots = std::max(most_dots, dots);
  }
  const Labels out = arrow == std::string::npos ? implied(all) : parse(equation, std::string_view(text).substr(arrow + 2), most_dots);
  for (const int l : out)
    if (!has(all, l)) fail<ConfigError>("[einsum] \"", equation, "\": no operand has ", name_of(l));

  Term result = terms[0];
  for (size_t i = 1; i < terms.size(); ++i) {
    Labels needed = out;
    for (size_t later = i + 1; later < terms.size(); ++later) needed = needed + terms[later].labels;
    result = product(result, terms[i], needed, sizes);
  }
  return arranged(summed_to(result, out), out);
}

}  // namespace sheaf
