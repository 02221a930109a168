// A MemoryLedger's results in readable form.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <functional>

#include "sheaf/core/error.h"
#include "sheaf/core/memory_ledger.h"

namespace sheaf {
namespace {

using Holder = MemoryLedger::Holder;
using Peak = MemoryLedger::Peak;

constexpr size_t kRows = 12;

// "blocks.*.mlp.up" of "blocks.11.mlp.up".
std::string without_numbers(const std::string& path) {
  std::string out;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string part = path.substr(begin, end - begin);
    const bool is_number = !part.empty() && std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c) != 0; });
    ((out += begin > 0 ? "." : "") += is_number ? "*" : part);
    begin = end + 1;
  }
  return out;
}

// Holders that `same` considers equal, merged; largest first.
template <class Same>
std::vector<Holder> together(std::vector<Holder> holders, Same&& same) {
  std::vector<Holder> out;
  for (const Holder& h : holders) {
    const auto known = std::ranges::find_if(out, [&](const Holder& o) { return same(o, h); });
    if (known == out.end()) out.push_back(h);
    else known->bytes += h.bytes, known->blocks += h.blocks;
  }
  std::ranges::stable_sort(out, std::ranges::greater(), &Holder::bytes);
  return out;
}

std::vector<Holder> by_use(const Peak& peak) {
  return together(peak.holders, [](const Holder& a, const Holder& b) { return a.use == b.use; });
}

double percent(int64_t bytes, const Peak& peak) {
  return 100 * static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(peak.bytes, 1));
}

std::string row(int64_t bytes, const Peak& peak) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%10.2f  %5.1f  ", static_cast<double>(bytes) / (1 << 20), percent(bytes, peak));
  return text.data();
}

std::string who(const Holder& h) {
  std::string out = h.op;
  if (!h.op.empty()) out += h.module.empty() ? " of the model itself" : " of " + h.module;
  return out;
}

}  // namespace

std::string to_words(const Peak& peak) {
  std::string out;
  for (const Holder& h : by_use(peak))
    if (const double share = percent(h.bytes, peak); share >= 1) {
      std::array<char, 32> text{};
      std::snprintf(text.data(), text.size(), " %.0f%%", share);
      out += (out.empty() ? "" : ", ") + std::string(name(h.use)) + text.data();
    }
  return out;
}

std::string to_text(const Peak& peak) {
  std::string out = "       MiB      %  held for";
  for (const Holder& h : by_use(peak)) out += "\n" + row(h.bytes, peak) + std::string(name(h.use));
  std::vector<Holder> takers = peak.holders;
  std::erase_if(takers, [](const Holder& h) { return h.op.empty(); });
  for (Holder& h : takers) h.module = without_numbers(h.module);
  takers = together(takers, [](const Holder& a, const Holder& b) { return a.use == b.use && a.op == b.op && a.module == b.module; });
  out += "\n       MiB      %  of it, the largest by what took it";
  for (size_t i = 0; i < std::min(kRows, takers.size()); ++i)
    out += "\n" + row(takers[i].bytes, peak) + str(name(takers[i].use), ": ", who(takers[i]),
                                                  takers[i].blocks > 1 ? str(", ", takers[i].blocks, " times") : "");
  if (peak.last.bytes > 0)
    out += str("\nit came to that when ", peak.last.op.empty() ? name(peak.last.use) : who(peak.last), " took ", peak.last.bytes,
               " bytes (", name(peak.last.use), ")");
  return out;
}

}  // namespace sheaf
