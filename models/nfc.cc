#include "sheaf/models/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

using Points = std::vector<utf8proc_int32_t>;

utf8proc_ssize_t checked(utf8proc_ssize_t size) {
  if (size < 0) throw Error(ExitCode::kDesync, str("[tokenizer] utf8proc fails: ", utf8proc_errmsg(size)));
  return size;
}

// Letters and marks, each on its own, in the order of the text.
Points decomposed(std::string_view text) {
  Points points;
  points.reserve(text.size());
  utf8proc_int32_t parts[32];
  for (size_t at = 0; at < text.size();) {
    const int length = utf8_length(text, at);
    const auto point = static_cast<utf8proc_int32_t>(code_point(text, at, length));
    const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
    points.insert(points.end(), parts, parts + checked(utf8proc_decompose_char(point, parts, std::size(parts), options, nullptr)));
    at += static_cast<size_t>(length);
  }
  return points;
}

// Unicode's canonical order of each run of marks. utf8proc's own takes the square of a run's length.
void order_marks(Points& points) {
  const auto rank = [](utf8proc_int32_t point) { return utf8proc_get_property(point)->combining_class; };
  for (auto begin = points.begin(); begin != points.end();) {
    begin = std::find_if(begin, points.end(), rank);
    const auto end = std::find_if_not(begin, points.end(), rank);
    if (!std::ranges::is_sorted(begin, end, {}, rank)) std::ranges::stable_sort(begin, end, {}, rank);
    begin = end;
  }
}

}  // namespace

bool may_change_in_nfc(std::string_view text) {
  constexpr unsigned char kLeadOf300 = 0xCC;
  return std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= kLeadOf300; });
}

std::string nfc(std::string_view text) {
  Points points = decomposed(text);
  order_marks(points);
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  points.resize(static_cast<size_t>(checked(utf8proc_normalize_utf32(points.data(), std::ssize(points), options))));
  std::string out;
  out.reserve(text.size());
  for (const utf8proc_int32_t point : points) append_utf8(out, static_cast<uint32_t>(point));
  return out;
}

}  // namespace sheaf::models
