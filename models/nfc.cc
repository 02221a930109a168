#include "sheaf/models/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <memory>
#include <new>

#include "sheaf/core/error.h"

namespace sheaf::models {

bool may_change_in_nfc(std::string_view text) {
  constexpr unsigned char kLeadOf300 = 0xCC;
  return std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= kLeadOf300; });
}

std::string nfc(std::string_view text) {
  utf8proc_uint8_t* made = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &made,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(made, std::free);
  if (size == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  if (size < 0) throw Error(ExitCode::kDesync, str("[tokenizer] utf8proc fails: ", utf8proc_errmsg(size)));
  return {reinterpret_cast<const char*>(made), static_cast<size_t>(size)};
}

}  // namespace sheaf::models
