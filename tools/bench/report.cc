#include "sheaf/tools/bench/report.h"

#include <cmath>
#include <cstdio>

#include "sheaf/core/error.h"
#include "sheaf/core/json.h"

namespace sheaf::bench {
namespace {

// Four digits: more than any timing is good for.
std::string number(double x) {
  if (x == 0 || !std::isfinite(x)) return "-";
  char text[32];
  const double size = std::abs(x);
  std::snprintf(text, sizeof text,
                size >= 1000  ? "%.0f"
                : size >= 100 ? "%.1f"
                : size >= 1   ? "%.2f"
                              : "%.4g",
                x);
  return text;
}

std::string left(std::string text, size_t width) {
  if (text.size() < width) text.resize(width, ' ');
  return text;
}
std::string right(const std::string& text, size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}

}  // namespace

std::string to_table(const Session& session) {
  const Machine& m = session.machine();
  std::string out = str(m.cpu, ", model ", m.model, m.avx512 ? ", AVX-512" : ", no AVX-512",
                        m.amx ? ", AMX" : ", no AMX", ", ", m.threads, " threads\n");
  out += "FMA peak " + number(m.fma_gflops) + " GFLOP/s (f32), copy " + number(m.copy_gbs) +
         " GB/s (read + written)";
  if (m.amx_gflops > 0) out += ", AMX peak " + number(m.amx_gflops) + " GFLOP/s (bf16)";
  out += "\n\n";
  size_t width = 8, peer_width = 4;
  for (const Line& l : session.lines()) {
    width = std::max(width, l.suite.size() + l.name.size() + 1);
    peer_width = std::max(peer_width, l.peer.size());
  }
  out += left("line", width) + right("value", 12) + right("p10", 12) + right("p90", 12) + "  " +
         left("unit", 8) + left("peer", peer_width + 1) + right("peer's", 12) + right("ratio", 11) +
         "\n";
  for (const Line& l : session.lines()) {
    out += left(l.suite + "/" + l.name, width);
    if (!l.missing.empty()) {
      out += "  not available: " + l.missing + "\n";
      continue;
    }
    out += right(number(l.value), 12) + right(number(l.p10), 12) + right(number(l.p90), 12) + "  " +
           left(std::string(name(l.unit)), 8) + left(l.peer, peer_width + 1) +
           right(number(l.peer_value), 12) + right(number(l.ratio), 11);
    if (!l.note.empty()) out += "  " + l.note;
    if (l.of_peak > 0) out += "  " + number(100 * l.of_peak) + " % of peak";
    for (const auto& [what, value] : l.more) out += "  " + what + " " + number(value);
    if (!l.sound)
      out += "  UNSOUND: the machine was at " + number(100 * l.worst.fma_gflops / m.fma_gflops) +
             " % of its FMA peak, " + number(100 * l.worst.copy_gbs / m.copy_gbs) +
             " % of its copy peak";
    out += "\n";
  }
  return out;
}

std::string to_json(const Session& session) {
  const Machine& m = session.machine();
  Json machine;
  machine.set("cpu", m.cpu);
  machine.set("model", m.model);
  machine.set("avx512", m.avx512);
  machine.set("amx", m.amx);
  machine.set("threads", m.threads);
  machine.set("fma_gflops", m.fma_gflops);
  machine.set("copy_gbs", m.copy_gbs);
  machine.set("amx_gflops", m.amx_gflops);
  Json::Array lines;
  for (const Line& l : session.lines()) {
    Json line;
    line.set("suite", l.suite);
    line.set("name", l.name);
    line.set("unit", name(l.unit));
    if (!l.missing.empty()) {
      line.set("value", Json());
      line.set("missing", "not available: " + l.missing);
      line.set("sound", false);
      lines.push_back(std::move(line));
      continue;
    }
    line.set("value", l.value);
    line.set("p10", l.p10);
    line.set("p90", l.p90);
    line.set("peer", l.peer.empty() ? Json() : Json(l.peer));
    line.set("peer_value", l.peer.empty() ? Json() : Json(l.peer_value));
    line.set("ratio", l.peer.empty() ? Json() : Json(l.ratio));
    if (!l.note.empty()) line.set("note", l.note);
    if (l.of_peak > 0) line.set("of_peak", l.of_peak);
    line.set("sound", l.sound);
    line.set("probe_fma_gflops", l.worst.fma_gflops);
    line.set("probe_copy_gbs", l.worst.copy_gbs);
    if (!l.more.empty()) {
      Json more;
      for (const auto& [what, value] : l.more) more.set(what, value);
      line.set("more", std::move(more));
    }
    Json::Array samples;
    for (double s : l.samples_s) samples.emplace_back(s);
    line.set("samples_s", std::move(samples));
    lines.push_back(std::move(line));
  }
  Json all;
  all.set("machine", std::move(machine));
  all.set("lines", std::move(lines));
  return all.dump() + "\n";
}

}  // namespace sheaf::bench
