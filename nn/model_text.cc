#include "sheaf/nn/model_text.h"

#include <charconv>
#include <map>
#include <utility>

#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/nn/unit_mark.h"

namespace sheaf::nn {
namespace {

struct Field;

/// A leaf, or a module with fields of its own.
struct Body {
  std::string text;
  std::string masters;  ///< of a module that is a unit with memory
  bool is_module = false, is_unit = false;
  std::vector<Field> fields;
  bool operator==(const Body&) const;
};
struct Field {
  std::string name;  ///< relative to the module around it
  Body body;
  bool operator==(const Field&) const = default;
};
bool Body::operator==(const Body&) const = default;

std::string with_commas(int64_t n) {
  std::string out = std::to_string(n);
  for (auto i = static_cast<int64_t>(out.size()) - 3; i > 0; i -= 3) out.insert(static_cast<size_t>(i), ",");
  return out;
}

std::string without_namespaces(const std::string& type) {
  const size_t last = type.substr(0, type.find('<')).rfind("::");
  return last == type.npos ? type : type.substr(last + 2);
}

std::string describe(const Parameter& p) {
  std::string out = str(p.dtype(), p.shape());
  if (!p.trainable()) out += "  frozen";
  if (p.blocks()) out += str("  in blocks of ", name(*p.blocks()));
  if (p.table()) out += "  a table";
  if (p.exact()) out += "  exact";
  if (p.steered() != 0) out += "  steered";
  if (p.cut_axis() >= 0)
    out += str("  ", Placement::shard(*p.cut()).to_string(), '@', p.unit()->buffers()[0].shard.layout().mesh()->name(p.cut_axis()));
  return out;
}

std::string masters_of(Unit& unit) {
  std::string out;
  for (const FlatBuffer& b : unit.buffers()) {
    out += str(out.empty() ? "" : "; ", b.shard.type());
    if (!b.trainable) out += " frozen";
    if (b.compute != b.dtype) out += str(" computing in ", b.compute);
  }
  return out;
}

class Reader : public Visitor {
 public:
  explicit Reader(Module& model) { module(model); }
  const Body& model() const { return around_model_.fields.front().body; }
  void parameter(Parameter& p) override {
    const auto [first, is_new] = paths_.try_emplace(p.id(), path());
    add_leaf(is_new ? describe(p) : "is " + first->second);
  }
  void buffer(Buffer& b) override { add_leaf(str(b.state().dtype, b.state().shape, "  a buffer")); }
  void module(Module& m) override {
    Body body;
    body.text = without_namespaces(m.type_name());
    body.is_module = true, body.is_unit = m.unit() || ModuleAccess::mark(m);
    if (m.unit()) body.masters = masters_of(*m.unit());
    const std::string name = name_here();
    Body* const around = std::exchange(around_, &body);
    const size_t begin = std::exchange(begin_, path().empty() ? 0 : path().size() + 1);
    m.visit(*this);
    around_ = around, begin_ = begin;
    around_->fields.push_back({name, std::move(body)});
  }

 private:
  std::string name_here() const { return path().substr(begin_); }
  void add_leaf(std::string text) {
    Body body;
    body.text = std::move(text);
    around_->fields.push_back({name_here(), std::move(body)});
  }
  Body around_model_;
  Body* around_ = &around_model_;
  size_t begin_ = 0;  // of names in paths
  std::map<const Parameter::State*, std::string> paths_;
};

/// What stands before the last dot of an element's name, and its number; -1: it is no element of a vector.
std::pair<std::string_view, int64_t> numbered(std::string_view name) {
  const size_t dot = name.rfind('.');
  int64_t number = -1;
  if (dot != name.npos) std::from_chars(name.data() + dot + 1, name.data() + name.size(), number);
  return {name.substr(0, dot), number};
}

bool is_next(const Field& next, const Field& last) {
  const auto [stem, number] = numbered(last.name);
  return number >= 0 && numbered(next.name) == std::pair(stem, number + 1) && next.body == last.body;
}

void write(std::string& out, const std::vector<Field>& fields, size_t indent) {
  for (size_t i = 0, last = 0; i < fields.size(); i = last + 1) {
    const auto& [name, body] = fields[i];
    for (last = i; last + 1 < fields.size() && is_next(fields[last + 1], fields[last]);) ++last;
    out.append(indent, ' ');
    out += name + (last > i ? " to " + fields[last].name : "") + (body.is_module ? ": " : "  ") + body.text;
    if (body.is_unit) out += last > i ? ", each a unit" : ", a unit";
    if (!body.masters.empty()) out += ": " + body.masters;
    out += '\n';
    write(out, body.fields, indent + 2);
  }
}

}  // namespace

std::string to_text(Module& model) {
  const Reader reader(model);
  const Body& root = reader.model();
  const std::vector<Parameter> parameters = model.parameters();
  int64_t all = 0, frozen = 0, bytes = 0;
  for (const Parameter& p : parameters) all += p.numel(), frozen += p.trainable() ? 0 : p.numel();
  std::string out = str(root.text, ": ", with_commas(all), " parameters");
  if (frozen) out += str(", ", with_commas(frozen), " of them frozen");
  if (!parameters.empty() && parameters[0].unit()) {
    const auto units = distinct_units(parameters);
    for (const auto& unit : units)
      for (const FlatBuffer& b : unit->buffers()) bytes += b.shard.local_shape().numel() * static_cast<int64_t>(size_of(b.shard.dtype()));
    out += str("; masters of ", units.size(), units.size() == 1 ? " unit, " : " units, ", format_bytes(bytes), " on this rank");
  }
  if (root.is_unit) out += str("\nthe root is a unit", root.masters.empty() ? "" : ": " + root.masters);
  out += '\n';
  write(out, root.fields, 2);
  return out;
}

}  // namespace sheaf::nn
