#include "sheaf/tests/check_rowwise.h"

#include <algorithm>
#include <cmath>

#include "sheaf/autograd/ops.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {

std::string check_rowwise(const RowFunction& f, const std::vector<Tensor>& inputs, const CheckRowwiseOptions& options) {
  if (inputs.empty()) return "no inputs";
  const std::vector<Tensor> whole = f(inputs);
  const int64_t rows = inputs[0].size(0);
  for (size_t o = 0; o < whole.size(); ++o)
    if (whole[o].rank() == 0 || whole[o].size(0) != rows)
      return str("output ", o, " is ", whole[o].type(), ": it has not a row for each of the ", rows, " rows");
  Generator draw(options.seed);
  for (int i = 0; i < options.cuts; ++i) {
    std::vector<int64_t> at = {0, rows};
    for (int64_t k = 1 + draw.below(3); k > 0; --k) at.push_back(draw.below(rows + 1));
    std::sort(at.begin(), at.end());
    for (size_t c = 0; c + 1 < at.size(); ++c) {
      std::vector<Tensor> part;
      for (const Tensor& x : inputs) part.push_back(slice(x, 0, at[c], at[c + 1]));
      const std::vector<Tensor> got = f(part);
      const std::string cut = str("rows [", at[c], ", ", at[c + 1], ") of ", rows, " alone: ");
      if (got.size() != whole.size()) return str(cut, got.size(), " outputs instead of ", whole.size());
      for (size_t o = 0; o < got.size(); ++o) {
        const Tensor want = slice(whole[o], 0, at[c], at[c + 1]);
        if (!(got[o].type() == want.type())) return str(cut, "output ", o, " is ", got[o].type(), ", not ", want.type());
        const Values a = local_part(got[o]).values, b = local_part(want).values;
        double largest = 0;
        for (double v : local_part(whole[o]).values) largest = std::max(largest, std::abs(v));
        for (size_t e = 0; e < a.size(); ++e) {
          if (a[e] == b[e] || (std::isnan(a[e]) && std::isnan(b[e])) || std::abs(a[e] - b[e]) <= options.tolerance * largest)
            continue;
          return str(cut, "element ", e, " of output ", o, " is ", a[e], " instead of ", b[e]);
        }
      }
    }
  }
  return "";
}

}  // namespace sheaf::testing
