#include "sheaf/core/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& v) {
  return std::as_bytes(std::span(v));
}

std::string file_of(const std::string& header, size_t data_bytes) {
  std::string out(8, '\0');
  const uint64_t n = header.size();
  std::memcpy(out.data(), &n, 8);
  return out + header + std::string(data_bytes, 'x');
}

class Safetensors : public ::testing::Test {
 protected:
  ScratchFolder folder_;
  const ScratchFolder& folder = folder_;
  const std::string path;
  Safetensors() : path(folder_ / "model.safetensors") {}

  // The error for a file with this header and this number of data bytes.
  std::string refusal(const std::string& header, size_t data_bytes = 0) {
    return raw_refusal(file_of(header, data_bytes));
  }
  std::string raw_refusal(const std::string& content) {
    write_file(path, content);
    return message_of<CheckpointError>(ExitCode::kData, [&] { SafetensorsFile::open(path); });
  }
};

TEST_F(Safetensors, RoundTripWithPiecesAndMetadata) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<int64_t> b = {-1, 7};
  const std::vector<uint8_t> c = {9, 8, 7};
  const std::span<const float> whole(a);
  write_safetensors(path,
                    {{"c", DType::u8, {3}, {bytes_of(c)}},
                     {"a", DType::f32, {2, 3}, {std::as_bytes(whole.first(2)), std::as_bytes(whole.subspan(2))}},
                     {"empty", DType::bf16, {0, 5}, {}},
                     {"b \"\u00e9", DType::i64, {2}, {bytes_of(b)}}},
                    {{"format", "pt"}, {"step", "3"}});
  SafetensorsFile file = SafetensorsFile::open(path);
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.at("a").dtype, DType::f32);
  EXPECT_EQ(file.at("a").shape, (Shape{2, 3}));
  EXPECT_EQ(file.at("empty").bytes(), 0);
  EXPECT_EQ(std::memcmp(file.data("a").data(), a.data(), 24), 0);
  EXPECT_EQ(std::memcmp(file.data("b \"\u00e9").data(), b.data(), 16), 0);
  float middle[3];
  file.read("a", 2, 5, middle);
  EXPECT_EQ(middle[0], 3);
  EXPECT_EQ(middle[2], 5);
  // Every tensor we write is aligned to its element size, and the data starts at a multiple of 8.
  for (const auto& [name, entry] : file.tensors()) EXPECT_EQ(entry.begin % size_of(entry.dtype), 0u) << name;
}

TEST_F(Safetensors, LayoutIsThatOfTheReference) {
  const std::vector<float> a = {1.0f};
  const std::vector<uint8_t> b = {7};
  write_safetensors(path, {{"a.small", DType::u8, {1}, {bytes_of(b)}}, {"z", DType::f32, {}, {bytes_of(a)}}});
  std::string header =
      R"({"z":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a.small":{"dtype":"U8","shape":[1],"data_offsets":[4,5]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string expected = file_of(header, 0) + std::string("\0\0\x80\x3f\x07", 5);
  EXPECT_EQ(File::open(path).read_all(), expected);
}

TEST_F(Safetensors, WriterRefuses) {
  const std::vector<float> a = {1, 2};
  auto refuse = [&](SafetensorsInput input) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { write_safetensors(path, {std::move(input)}); });
  };
  EXPECT_THAT(refuse({"a", DType::f32, {3}, {bytes_of(a)}}), HasSubstr("\"a\": its pieces hold 8 bytes"));
  EXPECT_THAT(refuse({"", DType::f32, {2}, {bytes_of(a)}}), HasSubstr("unusable name"));
  EXPECT_THAT(refuse({"\xff", DType::f32, {2}, {bytes_of(a)}}), HasSubstr("unusable name"));
  EXPECT_THAT(refuse({"__metadata__", DType::f32, {2}, {bytes_of(a)}}), HasSubstr("unusable name"));
  EXPECT_THROW(write_safetensors(path, {{"a", DType::f32, {2}, {bytes_of(a)}}, {"a", DType::f32, {2}, {bytes_of(a)}}}),
               CheckpointError);
  EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { write_safetensors(folder / "none/x", {}); }),
              HasSubstr("No such file"));
}

TEST_F(Safetensors, Accepts) {
  const auto opens = [&](const std::string& content) {
    write_file(path, content);
    return SafetensorsFile::open(path).tensors().size();
  };
  EXPECT_EQ(opens(file_of("{}", 0)), 0u);
  EXPECT_EQ(opens(file_of("  {}  \n", 0)), 0u);
  EXPECT_EQ(opens(file_of(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4)), 1u);
  EXPECT_EQ(opens(file_of(R"({"a":{"dtype":"F32","shape":[0,281474976710656],"data_offsets":[0,0]}})", 0)), 1u);
  // Offsets decide the order, not the header; fields may be in any order.
  EXPECT_EQ(opens(file_of(R"({"a":{"data_offsets":[4,6],"shape":[2],"dtype":"U8"},)"
                          R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 6)), 2u);
}

TEST_F(Safetensors, MissingFolderPipe) {
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { SafetensorsFile::open(folder / "no"); }),
              HasSubstr("No such file"));
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { SafetensorsFile::open(folder.path()); }),
              HasSubstr("it is a folder"));
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { SafetensorsFile::open("/dev/zero"); }),
              HasSubstr("not a regular file"));
}

TEST_F(Safetensors, RefusesBadLengths) {
  EXPECT_THAT(raw_refusal(""), HasSubstr("0 bytes are no safetensors file"));
  EXPECT_THAT(raw_refusal("1234567"), HasSubstr("7 bytes"));
  EXPECT_THAT(raw_refusal(std::string(8, '\0')), HasSubstr("a header of 0 bytes"));
  EXPECT_THAT(raw_refusal(std::string(16, '\xff')), HasSubstr("a header of 18446744073709551615 bytes"));
  std::string longer = file_of("{}", 0);
  longer[0] = 3;
  EXPECT_THAT(raw_refusal(longer), HasSubstr("a header of 3 bytes in a file of 10"));
}

TEST_F(Safetensors, RefusesBadHeaders) {
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  struct Case {
    std::string header;
    size_t data;
    const char* reason;
  };
  const std::string f32 = R"("F32")";
  const Case cases[] = {
      {"[]", 0, "not a JSON object"},
      {"   ", 0, "not a JSON object"},
      {"{", 0, "not valid JSON"},
      {"{} x", 0, "not valid JSON"},
      {"\xEF\xBB\xBF{}", 0, "not a JSON object"},
      {std::string("{}\0", 3), 0, "zero byte"},
      {"{}", 1, "1 bytes after the last tensor"},
      {R"({"a":1})", 0, "\"a\" is not an object"},
      {R"({"":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4, "empty name"},
      {R"({"a\u0000b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4, "unusable name"},
      {"{\"\xff\":{}}", 0, "not valid JSON"},
      {R"({"__metadata__":{"a":1}})", 0, "not a string"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "duplicate key"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "duplicate key"},
      {R"({"a":{}})", 0, "lacks dtype"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4, "duplicate field \"dtype\""},
      {R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"x":1}})", 4, "unknown field \"x\""},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
       0, "appears twice"},
      {tensor(R"("f32")", "[]", "[0,4]"), 4, "unknown dtype \"f32\""},
      {tensor(R"("F8_E5M2")", "[4]", "[0,4]"), 4, "tensor \"a\": unknown dtype \"F8_E5M2\""},
      {tensor("7", "[]", "[0,4]"), 4, "has a number"},
      {tensor("[]", "[]", "[0,4]"), 4, "has an array"},
      {tensor(f32, "4", "[0,4]"), 4, "has a number"},
      {tensor(f32, "[-1]", "[0,4]"), 4, "negative number"},
      {tensor(f32, "[1.0]", "[0,4]"), 4, "not an unsigned integer"},
      {tensor(f32, "[1e0]", "[0,4]"), 4, "not an unsigned integer"},
      {tensor(f32, "[\"1\"]", "[0,4]"), 4, "has a string"},
      {tensor(f32, "[[1]]", "[0,4]"), 4, "has an array"},
      {tensor(f32, "[null]", "[0,4]"), 4, "has null"},
      {tensor(f32, "[18446744073709551616]", "[0,4]"), 4, "not an unsigned integer"},
      {tensor(f32, "[9223372036854775808,9223372036854775808,0]", "[0,0]"), 0, "is too large"},
      {tensor(f32, "[281474976710656,281474976710656,0]", "[0,0]"), 0, "overflows"},
      {tensor(f32, "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "more than 8 dimensions"},
      {tensor(f32, "[1]", "[4,0]"), 4, "reversed"},
      {tensor(f32, "[1]", "[0]"), 4, "fewer than two"},
      {tensor(f32, "[1]", "[0,4,4]"), 4, "more than two"},
      {tensor(f32, "[1]", "[0,5]"), 4, "lies beyond"},
      {tensor(f32, "[2]", "[0,4]"), 4, "takes 8 bytes, data_offsets span 4"},
      {tensor(f32, "[1]", "[0,8]"), 8, "takes 4 bytes, data_offsets span 8"},
      {tensor(f32, "[1]", "[4,8]"), 8, "leaves a gap"},
      {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[2,5]}})", 5,
       "tensor \"b\": overlaps"},
      {R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 3,
       "tensor \"b\": overlaps"},
      {std::string(100'000, '['), 0, "not a JSON object"},
      {R"({"a":)" + std::string(100'000, '{'), 0, "not valid JSON"},
      {R"({"a":{"dtype":)" + std::string(100'000, '['), 0, "has an array"},
  };
  for (const Case& c : cases) {
    const std::string reason = refusal(c.header, c.data);
    EXPECT_THAT(reason, HasSubstr(c.reason)) << c.header.substr(0, 200);
    EXPECT_THAT(reason, HasSubstr("model.safetensors"));
  }
}

// Mutates valid files; each result either opens, and then every byte of every tensor can be read, or is refused.
TEST_F(Safetensors, MutatedFilesOpenOrAreRefused) {
  const std::vector<float> a(30, 1.5f);
  const std::vector<uint8_t> b(7, 3);
  write_safetensors(path, {{"layer.0.weight", DType::f32, {5, 6}, {bytes_of(a)}}, {"b", DType::u8, {7}, {bytes_of(b)}}},
                    {{"format", "pt"}});
  const std::string valid = File::open(path).read_all();
  const std::string tokens[] = {"{",   "}",  "[",     "]",  "\"",   ",",    ":",      "-1",        "0",
                                "1e3", "\0", "F64",   "U8", "null", "true", "\xff",   "\\u0061",   "4294967297",
                                "99",  "a",  "shape", "[]", "{}",   " ",    "\"b\":", "0.5",       "9223372036854775807"};
  std::mt19937 random(1337);
  const auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  int opened = 0, refused = 0;
  const int memory_file = memfd_create("mutant", 0);  // thousands of writes need no disk
  const std::string memory_path = "/proc/self/fd/" + std::to_string(memory_file);
  for (int round = 0; round < 20'000; ++round) {
    std::string mutant = valid;
    for (size_t edits = 1 + below(3); edits > 0; --edits) {
      const size_t at = below(mutant.size());
      switch (below(6)) {
        case 0: mutant[at] ^= static_cast<char>(1u << below(8)); break;
        case 1: mutant.erase(at, 1 + below(8)); break;
        case 2: mutant.insert(at, tokens[below(std::size(tokens))]); break;
        case 3: mutant.resize(1 + at); break;
        case 4: mutant.insert(at, mutant.substr(below(mutant.size()), 1 + below(40))); break;
        case 5: mutant[8 + below(std::min<size_t>(180, mutant.size()) - std::min<size_t>(8, mutant.size() - 1))] =
                    static_cast<char>('0' + below(10)); break;
      }
      if (mutant.size() < 16) mutant = valid;
    }
    // Half of the time the header length is corrected, so that the header's content is what is tested.
    if (below(2)) {
      const size_t end = mutant.rfind('}');
      if (end != std::string::npos && end > 8) {
        const uint64_t length = end + 1 - 8;
        std::memcpy(mutant.data(), &length, 8);
      }
    }
    ASSERT_EQ(ftruncate(memory_file, 0), 0);
    ASSERT_EQ(pwrite(memory_file, mutant.data(), mutant.size(), 0), static_cast<ssize_t>(mutant.size()));
    try {
      SafetensorsFile file = SafetensorsFile::open(memory_path);
      int64_t total = 0;
      for (const auto& [name, entry] : file.tensors()) {
        const auto data = file.data(name);
        total += static_cast<int64_t>(data.size());
        unsigned sum = 0;
        for (std::byte byte : data) sum += static_cast<unsigned>(byte);
        (void)sum;
      }
      EXPECT_LE(total, static_cast<int64_t>(mutant.size()));
      ++opened;
    } catch (const CheckpointError&) {
      ++refused;
    }
  }
  close(memory_file);
  EXPECT_GT(opened, 500);
  EXPECT_GT(refused, 5000);
}

}  // namespace
}  // namespace sheaf
