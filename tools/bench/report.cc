#include "sheaf/tools/bench/report.h"

#include <cmath>
#include <cstdio>

#include "sheaf/core/error.h"
#include "sheaf/core/json.h"

namespace sheaf::bench {
namespace {

// Four digits: more than the precision of any timing.
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

// The machine and its peaks, one line each.
std::vector<std::string> heading(const Machine& m) {
  std::string cpu = str(m.cpu, ", model ", m.model, m.avx512 ? ", AVX-512" : ", no AVX-512",
                        m.bf16.empty() ? "" : ", " + m.bf16, ", ", m.threads, " threads");
  std::string peaks;
  if (m.gpu) {
    const GpuMachine& g = *m.gpu;
    cpu = str(g.name, ", ", g.multiprocessors, " multiprocessors, ",
              number(static_cast<double>(g.memory) / (1 << 30)), " GiB; ", cpu);
    peaks = "square product " + number(g.gflops_bf16 / 1e3) + " TFLOP/s (bf16)";
    if (g.gflops_f16 > 0) peaks += ", " + number(g.gflops_f16 / 1e3) + " (f16)";
    if (g.gflops_f32 > 0) peaks += ", " + number(g.gflops_f32 / 1e3) + " (f32)";
    peaks += ", copy " + number(g.copy_gbs) + " GB/s (read + written); data sheet ";
    peaks += g.datasheet_gflops > 0 ? number(g.datasheet_gflops / 1e3) + " TFLOP/s (bf16, dense)"
                                    : "not known for this name";
  } else {
    peaks = "FMA peak " + number(m.fma_gflops) + " GFLOP/s (f32), copy " + number(m.copy_gbs) +
            " GB/s (read + written)";
    if (m.bf16_gflops > 0) peaks += ", " + m.bf16 + " peak " + number(m.bf16_gflops) + " GFLOP/s (bf16)";
  }
  return {cpu, peaks};
}

double best_gflops(const Machine& m) { return m.gpu ? m.gpu->gflops_bf16 : m.fma_gflops; }
double best_copy(const Machine& m) { return m.gpu ? m.gpu->copy_gbs : m.copy_gbs; }

// The remarks after a line's columns.
std::string remarks(const Line& l, const Machine& m) {
  std::string out;
  const auto add = [&](const std::string& what) { out += (out.empty() ? "" : "  ") + what; };
  if (!l.note.empty()) add(l.note);
  if (l.of_peak > 0) add(number(100 * l.of_peak) + " % of peak");
  for (const auto& [what, value] : l.more) add(what + " " + number(value));
  if (!l.sound)
    add("UNSOUND: the machine was at " + number(100 * l.worst.gflops / best_gflops(m)) +
        " % of its " + (m.gpu ? "square product, " : "FMA peak, ") +
        number(100 * l.worst.copy_gbs / best_copy(m)) + " % of its copy peak");
  return out;
}

}  // namespace

std::string to_table(const Session& session) {
  const Machine& m = session.machine();
  std::string out;
  for (const std::string& line : heading(m)) out += line + "\n";
  out += "\n";
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
    if (const std::string more = remarks(l, m); !more.empty()) out += "  " + more;
    out += "\n";
  }
  return out;
}

std::string to_markdown(const Session& session) {
  const Machine& m = session.machine();
  const auto cell = [](std::string text) {
    for (size_t i = 0; (i = text.find_first_of("|\n", i)) != text.npos; i += 2)
      text.replace(i, 1, text[i] == '|' ? "\\|" : "  ");
    return text + " | ";
  };
  std::string out;
  for (const std::string& line : heading(m)) out += line + "\n\n";
  out += "| line | value | p10 | p90 | unit | peer | peer's | ratio | |\n";
  out += "|---|---:|---:|---:|---|---|---:|---:|---|\n";
  for (const Line& l : session.lines()) {
    out += "| " + cell(l.suite + "/" + l.name);
    if (!l.missing.empty())
      out += "| | | | | | | " + cell("not available: " + l.missing);
    else
      out += cell(number(l.value)) + cell(number(l.p10)) + cell(number(l.p90)) +
             cell(std::string(name(l.unit))) + cell(l.peer) + cell(number(l.peer_value)) +
             cell(number(l.ratio)) + cell(remarks(l, m));
    out.back() = '\n';
  }
  return out;
}

std::string to_json(const Session& session) {
  const Machine& m = session.machine();
  Json machine;
  machine.set("cpu", m.cpu);
  machine.set("model", m.model);
  machine.set("avx512", m.avx512);
  machine.set("bf16", m.bf16);
  machine.set("threads", m.threads);
  machine.set("fma_gflops", m.fma_gflops);
  machine.set("copy_gbs", m.copy_gbs);
  machine.set("bf16_gflops", m.bf16_gflops);
  if (m.gpu) {
    Json gpu;
    gpu.set("name", m.gpu->name);
    gpu.set("multiprocessors", m.gpu->multiprocessors);
    gpu.set("memory", m.gpu->memory);
    gpu.set("gflops_bf16", m.gpu->gflops_bf16);
    gpu.set("gflops_f16", m.gpu->gflops_f16);
    gpu.set("gflops_f32", m.gpu->gflops_f32);
    gpu.set("copy_gbs", m.gpu->copy_gbs);
    gpu.set("datasheet_gflops", m.gpu->datasheet_gflops);
    machine.set("gpu", std::move(gpu));
  }
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
    line.set("probe_gflops", l.worst.gflops);
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
