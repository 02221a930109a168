// check_rowwise: tests an assumption that rowwise() does not check: that f treats rows independently.
#pragma once

#include <string>

#include "sheaf/autograd/rowwise.h"

namespace sheaf::testing {

struct CheckRowwiseOptions {
  int cuts = 8;          ///< random cuts into 2 to 4 parts, some of them empty
  double tolerance = 0;  ///< largest |difference| relative to an output's largest |element|; 0: the same bits
  std::string seed = "cuts";
};

/// "" if f on the parts of the inputs, cut at random rows, gives the parts of f on the whole; else a description of the first difference.
/// The inputs have no layout. f may not draw random numbers without a key unless a recording is live.
std::string check_rowwise(const RowFunction& f, const std::vector<Tensor>& inputs, const CheckRowwiseOptions& options = {});

}  // namespace sheaf::testing
