// Redistribution: the same value in another placement on one mesh axis. The only op that communicates besides units.
#pragma once

#include <string>

#include "sheaf/autograd/op.h"

namespace sheaf {

bool is_redistribute(const OpDef* op);
/// What a redistribution does: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice", "zero_embed",
/// "keep_on_one", "nothing".
std::string redistribution_name(const Layout& from, const Layout& to);

}  // namespace sheaf
