#include "sheaf/core/dtype.h"

namespace sheaf::detail {

void bad_dtype(std::string_view who, DType d) { fail<DTypeError>("[", who, "] does not take ", d); }

}  // namespace sheaf::detail
