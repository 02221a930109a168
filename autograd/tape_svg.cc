// A step as a picture: its memory by purpose, and its units.
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

#include "sheaf/autograd/tape_dump.h"

namespace sheaf {
namespace {

// In pixels.
constexpr double kLeft = 110, kWidth = 900, kTop = 56, kMemory = 300, kGap = 46, kRows = 330, kMostRow = 22, kLine = 16;
constexpr int kColumns = static_cast<int>(kWidth);
constexpr const char *kGather = "#14453d", *kReduction = "#a03a13", *kOther = "#555";

/// From the bottom up: what stays for the whole step first.
struct Shade {
  HeldFor use;
  const char* colour;
};
constexpr Shade kShades[] = {
    {HeldFor::masters, "#3b5b92"},     {HeldFor::optimizer_state, "#7f9fce"},     {HeldFor::gradients, "#c58b2a"},
    {HeldFor::other, "#b9b9b9"},       {HeldFor::inputs, "#8a8a8a"},              {HeldFor::activations, "#8fbf8a"},
    {HeldFor::gathered, "#4f9d8f"},    {HeldFor::whole_gradients, "#e0a458"},     {HeldFor::activation_gradients, "#d9705b"},
    {HeldFor::temporaries, "#9a6fb0"},
};
static_assert(std::size(kShades) + 1 == kNumHeldFor, "each purpose but a program's idle memory has a colour");
const char* colour_of(HeldFor use) {
  return std::ranges::find(kShades, use, &Shade::use)->colour;
}

template <class... Args>
std::string print(const char* format, Args... args) {
  char text[512];
  std::snprintf(text, sizeof text, format, args...);
  return text;
}
std::string escaped(std::string_view s) {
  std::string out;
  for (const char c : s) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&quot;" : std::string(1, c);
  return out;
}
std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return print("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor) + escaped(text) + "</text>\n";
}
std::string box(double x, double y, double width, double height, const char* colour, const std::string& name) {
  return print("<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\">", x, y, width, height, colour) + "<title>" + escaped(name) +
         "</title></rect>\n";
}

/// Bytes by purpose.
using Held = std::array<int64_t, kNumHeldFor>;
int64_t total(const Held& held) {
  int64_t bytes = 0;
  for (const int64_t b : held) bytes += b;
  return bytes;
}

class Picture {
 public:
  Picture(const Tape& tape, const MemoryLedger::History& memory) : tape_(tape), columns_(columns(memory)) {
    for (const Held& held : columns_) peak_ = std::max(peak_, total(held));
  }

  std::string draw(const std::string& title) {
    find_units();
    const double row = std::min(kMostRow, kRows / std::max<double>(1, static_cast<double>(units_.size())));
    const double rows_top = kTop + kMemory + kGap, bottom = rows_top + row * static_cast<double>(units_.size()), height = bottom + 28 + 2 * kLine;
    const std::string body = memory() + rows(rows_top, row) + phases(bottom) + legend(bottom + 26);
    return print("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#222\">\n",
                 kLeft + kWidth + 20, height) +
           "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n" + "<g font-size=\"14\">" + text_at(kLeft, 24, "start", title) + "</g>\n" + body + "</svg>\n";
  }

 private:
  /// Of the left edge of a node, which may be the one after the last.
  double x_of(int64_t node) const { return kLeft + kWidth * static_cast<double>(node) / std::max(1, tape_.num_nodes()); }

  /// The bytes alive in each column: those of its node with the most.
  std::vector<Held> columns(const MemoryLedger::History& memory) const {
    std::vector<Held> columns(static_cast<size_t>(kColumns));
    Held held = memory.before;
    int64_t node = 0;
    size_t done = 0;  // columns before this one are complete
    const auto advance_to = [&](int64_t next) {
      node = std::clamp<int64_t>(next, node, std::max(0, tape_.num_nodes() - 1));
      const auto column = std::min(static_cast<size_t>(x_of(node) - kLeft), columns.size() - 1);
      while (done < column) columns[++done] = held;
    };
    columns[0] = held;
    for (const MemoryLedger::Change& change : memory.changes) {
      advance_to(change.now);
      held[static_cast<size_t>(change.use)] += change.bytes;
      if (total(held) > total(columns[done])) columns[done] = held;
    }
    while (++done < columns.size()) columns[done] = held;
    return columns;
  }

  std::string memory() const {
    const double bottom = kTop + kMemory, scale = kMemory / std::max<double>(1, static_cast<double>(peak_));
    std::string out;
    std::vector<double> below(columns_.size(), 0);
    for (const Shade& shade : kShades) {
      std::vector<double> above = below;
      int64_t most = 0;
      for (size_t c = 0; c < columns_.size(); ++c) {
        const int64_t bytes = columns_[c][static_cast<size_t>(shade.use)];
        most = std::max(most, bytes);
        above[c] += static_cast<double>(bytes) * scale;
      }
      if (most > 0)
        out += print("<path fill=\"%s\" d=\"", shade.colour) + outline(below, above, bottom) + "\"><title>" + escaped(name(shade.use)) + ", at most " +
               format_bytes(most) + "</title></path>\n";
      below = std::move(above);
    }
    for (int quarter = 0; quarter <= 4; ++quarter) {
      const double y = bottom - kMemory * quarter / 4;
      out += print("<line x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#000\" stroke-opacity=\"0.15\"/>\n", kLeft, kLeft + kWidth, y, y) +
             text_at(kLeft - 6, y + 4, "end", format_bytes(peak_ * quarter / 4));
    }
    return out;
  }
  /// The area between two lines of one height per column; steps of equal height are one.
  static std::string outline(const std::vector<double>& below, const std::vector<double>& above, double bottom) {
    std::string d;
    const auto line = [&](const std::vector<double>& y, size_t c, double from, double to) {
      d += print("%s%.0f %.1fH%.0f", d.empty() ? "M" : "L", kLeft + from, bottom - y[c], kLeft + to);
    };
    size_t begin = 0;
    for (size_t c = 0; c < above.size(); ++c)
      if (c + 1 == above.size() || above[c + 1] != above[c]) line(above, c, static_cast<double>(begin), static_cast<double>(c + 1)), begin = c + 1;
    size_t end = below.size();
    for (size_t c = below.size(); c-- > 0;)
      if (c == 0 || below[c - 1] != below[c]) line(below, c, static_cast<double>(end), static_cast<double>(c)), end = c;
    return d + "Z";
  }

  /// Module paths that have gathered weights or a buffer of gradients, in the order in which they compute.
  void find_units() {
    last_use_.assign(static_cast<size_t>(tape_.num_values()), -1);
    for (NodeId id = 0; id < tape_.num_nodes(); ++id)
      if (const Node& n = tape_.node(id); is_unit_gather(tape_, n) || holds_gradients(n)) units_.try_emplace(tape_.path(n), kUnseen);
    size_t seen = 0;
    for (NodeId id = 0; id < tape_.num_nodes(); ++id) {
      const Node& n = tape_.node(id);
      if (const auto unit = unit_of(tape_.path(n)); n.op && unit != units_.end() && unit->second == kUnseen) unit->second = seen++;
      for (const ValueId v : tape_.inputs(n)) last_use_[static_cast<size_t>(tape_.whole_of(v))] = id;
      for (int o = 0; o < n.num_outputs; ++o) last_use_[static_cast<size_t>(tape_.whole_of(tape_.output(n, o)))] = id;
    }
  }
  /// The unit that a module belongs to: the longest path that it begins with.
  std::map<std::string, size_t>::iterator unit_of(std::string path) {
    for (;; path.resize(path.find_last_of('.') == std::string::npos ? 0 : path.find_last_of('.')))
      if (const auto unit = units_.find(path); unit != units_.end() || path.empty()) return unit;
  }
  /// Not of another stage.
  bool is_here(const Layout& layout) const { return !layout.mesh() || !layout.is_elsewhere(tape_.coordinates(layout.mesh()).data()); }
  bool holds_gradients(const Node& n) const { return tape_.op_name(n) == "grad_slots"; }
  NodeId last_use(const Node& n) const {
    NodeId last = -1;
    for (int o = 0; o < n.num_outputs; ++o) last = std::max(last, last_use_[static_cast<size_t>(tape_.whole_of(tape_.output(n, o)))]);
    return last;
  }

  std::string rows(double top, double row) {
    std::string bars, marks;
    for (NodeId id = 0; id < tape_.num_nodes(); ++id) {
      const Node& n = tape_.node(id);
      const auto unit = unit_of(tape_.path(n));
      if (unit == units_.end()) continue;
      const double y = top + row * static_cast<double>(unit->second);
      const std::string path = tape_.path(n).empty() ? "root" : tape_.path(n);
      const bool gathers = is_unit_gather(tape_, n);
      if ((gathers || holds_gradients(n)) && is_here(tape_.type(tape_.output(n)).layout)) {
        const NodeId end = last_use(n) + 1;
        bars += box(x_of(id), gathers ? y + 0.08 * row : y + 0.54 * row, x_of(end) - x_of(id), 0.38 * row,
                    colour_of(gathers ? HeldFor::gathered : HeldFor::whole_gradients),
                    str(path, gathers ? ": weights are gathered" : ": its gradients are whole", ", nodes ", id, " to ", end - 1));
      }
      if (const std::vector<Transfer> all = transfers(tape_, n); !all.empty()) {
        const std::string& what = all[0].name;
        marks += box(x_of(id), y, std::max(1.0, x_of(id + 1) - x_of(id)), row * 0.92,
                     what == "all_gather" ? kGather : what == "reduce_scatter" || what == "all_reduce" ? kReduction : kOther,
                     str(path, ": ", what, ", ", format_bytes(tape_.wire_bytes(n)), ", node ", id));
      }
    }
    const size_t every = std::max<size_t>(1, static_cast<size_t>(12 / row + 0.999));
    for (const auto& [path, index] : units_)
      if (index % every == 0) marks += text_at(kLeft - 6, top + row * (static_cast<double>(index) + 0.5) + 4, "end", path.empty() ? "root" : path);
    return bars + marks;
  }

  /// A line where a phase ends, with names where there is room.
  std::string phases(double bottom) const {
    std::string out;
    for (NodeId begin = 0; begin < tape_.num_nodes();) {
      NodeId end = begin;
      while (end < tape_.num_nodes() && tape_.node(end).phase == tape_.node(begin).phase) ++end;
      const std::string phase(name(tape_.node(begin).phase));
      if (begin > 0)
        out += print("<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.0f\" y2=\"%.1f\" stroke=\"#000\" stroke-opacity=\"0.4\" stroke-dasharray=\"3 3\"/>\n", x_of(begin), x_of(begin),
                     kTop - 6, bottom);
      if (x_of(end) - x_of(begin) > 7.0 * static_cast<double>(phase.size())) out += text_at((x_of(begin) + x_of(end)) / 2, kTop - 10, "middle", phase);
      begin = end;
    }
    return out + text_at(kLeft, kTop + kMemory + kGap - 22, "start", "of each unit: gathered weights, whole gradients, what travels");
  }

  std::string legend(double y) const {
    std::string out;
    double x = kLeft;
    const auto entry = [&](const char* colour, const std::string& label) {
      const double width = 6.0 * static_cast<double>(label.size()) + 26;
      if (x + width > kLeft + kWidth) x = kLeft, y += kLine;
      out += box(x, y - 9, 10, 10, colour, label) + text_at(x + 13, y, "start", label);
      x += width;
    };
    for (const Shade& shade : kShades)
      if (std::ranges::any_of(columns_, [&](const Held& h) { return h[static_cast<size_t>(shade.use)] > 0; })) entry(shade.colour, std::string(name(shade.use)));
    entry(kGather, "all-gather");
    entry(kReduction, "reduce-scatter, all-reduce");
    entry(kOther, "other communication");
    return out;
  }

  const Tape& tape_;
  const std::vector<Held> columns_;
  int64_t peak_ = 0;
  static constexpr size_t kUnseen = static_cast<size_t>(-1);
  std::map<std::string, size_t> units_;  // path to row
  std::vector<NodeId> last_use_;         // of each value's memory
};

}  // namespace

std::string to_svg(const Tape& tape, const MemoryLedger::History& memory, const std::string& title) {
  return Picture(tape, memory).draw(title);
}

}  // namespace sheaf
