#include "sheaf/kernels/cuda/product.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <iterator>
#include <vector>

#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr std::string_view kHeader = "sheaf products 1 ";
constexpr std::string_view kPlain = "plain";
constexpr size_t kDigits = 16;  // of one word of an algorithm

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> out;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    if (end > 0) out.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

template <class T>
bool read_number(std::string_view word, T& out, int base = 10) {
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), out, base);
  return error == std::errc() && end == word.data() + word.size();
}

std::optional<DType> floating_of(std::string_view word) {
  for (DType d : {kF64, kF32, kBF16, kF16})
    if (word == name(d)) return d;
  return {};
}

/// One of two words.
bool read_flag(std::string_view word, std::string_view yes, std::string_view no, bool& out) {
  out = word == yes;
  return out || word == no;
}

// In the order of Epilogue.
constexpr std::string_view kEpilogues[] = {"-",    "bias",      "sums_of_a",    "sums_of_b",
                                           "gelu", "bias_gelu", "gelu_gradient"};

std::string_view word_of(Epilogue e) { return kEpilogues[static_cast<size_t>(e)]; }

std::string digits_of(const std::array<uint64_t, 8>& algorithm) {
  std::string out;
  for (uint64_t word : algorithm) {
    char digits[kDigits];
    const auto count =
        static_cast<size_t>(std::to_chars(digits, digits + kDigits, word, 16).ptr - digits);
    out.append(kDigits - count, '0').append(digits, count);
  }
  return out;
}

}  // namespace

std::string ProductShape::to_string() const {
  std::string text = str(in, ' ', out, ' ', transpose_a ? 't' : 'n', ' ', transpose_b ? 't' : 'n',
                         ' ', word_of(epilogue), ' ', accumulate ? "add" : "store");
  for (int bytes : alignment) text += str(' ', bytes);
  for (int64_t v : {m, n, k, batches, ld_a, ld_b, ld_d, stride_a, stride_b, stride_d})
    text += str(' ', v);
  return text;
}

std::optional<ProductShape> ProductShape::parse(std::string_view text) {
  const std::vector<std::string_view> words = words_of(text);
  if (words.size() != 20) return {};
  ProductShape s;
  const std::optional<DType> in = words[0] == name(kU8) ? kU8 : floating_of(words[0]),
                             out = floating_of(words[1]);
  bool good = in && out && read_flag(words[2], "t", "n", s.transpose_a) &&
              read_flag(words[3], "t", "n", s.transpose_b) &&
              read_flag(words[5], "add", "store", s.accumulate);
  for (size_t i = 0; i < 4; ++i) good = good && read_number(words[6 + i], s.alignment[i]);
  int64_t* const numbers[] = {&s.m,    &s.n,    &s.k,        &s.batches,  &s.ld_a,
                              &s.ld_b, &s.ld_d, &s.stride_a, &s.stride_b, &s.stride_d};
  for (size_t i = 0; i < 10; ++i) good = good && read_number(words[10 + i], *numbers[i]);
  const auto* const epilogue = std::find(std::begin(kEpilogues), std::end(kEpilogues), words[4]);
  if (!good || epilogue == std::end(kEpilogues)) return {};
  s.epilogue = static_cast<Epilogue>(epilogue - std::begin(kEpilogues));
  s.in = *in, s.out = *out;
  return s;
}

size_t ProductShapeHash::operator()(const ProductShape& s) const {
  uint64_t hash =
      static_cast<uint64_t>(s.in) | static_cast<uint64_t>(s.out) << 8 |
      static_cast<uint64_t>(s.transpose_a) << 16 | static_cast<uint64_t>(s.transpose_b) << 17 |
      static_cast<uint64_t>(s.accumulate) << 18 | static_cast<uint64_t>(s.epilogue) << 19 |
      uint64_t{std::bit_cast<uint32_t>(s.alignment)} << 32;
  for (int64_t v :
       {s.m, s.n, s.k, s.batches, s.ld_a, s.ld_b, s.ld_d, s.stride_a, s.stride_b, s.stride_d}) {
    hash = (hash ^ static_cast<uint64_t>(v)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

void Product::set_alignment() {
  const auto of = [](const void* data, std::initializer_list<int64_t> steps, DType dtype) {
    uint64_t bits = reinterpret_cast<uintptr_t>(data) | 16;
    for (int64_t step : steps) bits |= static_cast<uint64_t>(step) * size_of(dtype);
    return static_cast<uint8_t>(bits & (~bits + 1));
  };
  const ProductShape& s = shape;
  shape.alignment = {of(a, {s.ld_a, s.stride_a}, s.in), of(b, {s.ld_b, s.stride_b}, s.in),
                     of(d, {s.ld_d, s.stride_d}, s.out), of(vector, {}, s.out)};
}

std::string Product::to_string() const {
  const ProductShape& s = shape;
  return str('[', who, "] product ", s.in == kU8 ? "FP8" : name(s.in), '[', s.n, ',', s.k,
             "] x [", s.k, ',', s.m, "] into ",
             s.out,
             s.epilogue == Epilogue::none ? std::string() : str(" with ", word_of(s.epilogue)),
             s.accumulate ? ", added" : "", ", ", s.batches, " batches (", s.to_string(), ')');
}

int64_t bytes_of_epilogue(const ProductShape& s) {
  const auto of = [](int64_t cells, DType dtype) {
    return cells * static_cast<int64_t>(size_of(dtype));
  };
  switch (s.epilogue) {
    case Epilogue::sums_of_a:
      return of(s.m * s.k, s.in);
    case Epilogue::sums_of_b:
      return of(s.n * s.k, s.in);
    case Epilogue::gelu:
    case Epilogue::bias_gelu:  // reads one matrix, writes another
      return 2 * of(s.m * s.n, s.out);
    case Epilogue::gelu_gradient:  // reads two
      return 3 * of(s.m * s.n, s.out);
    default:
      return 0;
  }
}

void check_workspace(const Product& product, Workspace workspace) {
  check<ShapeError>(workspace.bytes >= kProductWorkspace, product,
                    ": workspace too small: ", workspace.bytes, " bytes");
  check<ShapeError>(reinterpret_cast<uintptr_t>(workspace.data) % kProductWorkspaceAlignment == 0,
                    product, ": its workspace is not at a multiple of ", kProductWorkspaceAlignment,
                    " bytes");
}

void check_can_be_timed(const Stream& stream, const Product& product) {
  check<CudaError>(!capturing(stream), product,
                   ": TuneProducts while a graph is captured; time products in a step before");
}

std::optional<ProductChoices::Choice> ProductChoices::find(const ProductShape& shape) const {
  std::lock_guard lock(mutex_);
  const auto it = choices_.find(shape);
  if (it == choices_.end()) return {};
  return it->second;
}

bool ProductChoices::refuses(const ProductShape& shape) const {
  const std::optional<Choice> choice = find(shape);
  return choice && !choice->supported && (choice->timed || !TuneProducts::active());
}

void ProductChoices::set(const ProductShape& shape, const Choice& choice) {
  std::lock_guard lock(mutex_);
  choices_[shape] = choice;
}

std::string ProductChoices::text(const std::string& library) const {
  std::vector<std::string> lines;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [shape, choice] : choices_)
      lines.push_back(str(shape, " : ",
                          choice.supported ? digits_of(choice.algorithm) : std::string(kPlain),
                          '\n'));
  }
  std::sort(lines.begin(), lines.end());
  std::string out = str(kHeader, library, '\n');
  for (const std::string& line : lines) out += line;
  return out;
}

int64_t ProductChoices::read(const std::string& library, std::string_view text) {
  const auto next_line = [&] {
    const size_t end = text.find('\n');
    check<DataError>(end != text.npos, "[products] choices end within a line");
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    return line;
  };
  const std::string_view first = next_line();
  check<DataError>(first.starts_with(kHeader), "[products] not a text of choices");
  if (first.substr(kHeader.size()) != library) return 0;
  std::vector<std::pair<ProductShape, Choice>> found;  // nothing is taken from damaged text
  while (!text.empty()) {
    const std::string_view line = next_line();
    const size_t colon = std::min(line.find(" : "), line.size());
    const std::optional<ProductShape> shape = ProductShape::parse(line.substr(0, colon));
    const std::string_view value = line.substr(std::min(colon + 3, line.size()));
    Choice choice{.supported = value != kPlain, .timed = true};
    bool good = shape && (!choice.supported || value.size() == 8 * kDigits);
    for (size_t i = 0; good && choice.supported && i < 8; ++i)
      good = read_number(value.substr(i * kDigits, kDigits), choice.algorithm[i], 16);
    check<DataError>(good, "[products] not a choice: ", line);
    found.emplace_back(*shape, choice);
  }
  std::lock_guard lock(mutex_);
  for (const auto& [shape, choice] : found) choices_[shape] = choice;
  return static_cast<int64_t>(found.size());
}

}  // namespace sheaf::kernels::cuda
