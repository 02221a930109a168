// Names in the documentation exist: the files and headings that it links to, and its options.
#include <cctype>
#include <filesystem>
#include <map>
#include <regex>
#include <sstream>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/core/error.h"
#include "sheaf/tools/config.h"

namespace sheaf {
namespace {

namespace fs = std::filesystem;

// Bazel symlinks the files of the source tree.
const fs::path& root() {
  static const fs::path path = fs::canonical("README.md").parent_path();
  return path;
}

std::vector<fs::path> pages() {
  std::vector<fs::path> out = {root() / "README.md"};
  for (const fs::directory_entry& e : fs::recursive_directory_iterator(root() / "docs"))
    if (e.path().extension() == ".md") out.push_back(e.path());
  return out;
}

std::vector<std::string> lines_of(const fs::path& page) {
  std::istringstream text(File::open(page.string()).read_all());
  std::vector<std::string> out;
  for (std::string line; std::getline(text, line);) out.push_back(line);
  return out;
}

// Like GitHub's anchor for a heading: lower case, without punctuation, with hyphens for blanks.
std::string anchor_of(const std::string& heading) {
  std::string out;
  for (const char c : std::regex_replace(heading, std::regex(R"(\[([^\]]*)\]\([^)]*\))"), "$1"))
    if (c == ' ') out += '-';
    else if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || static_cast<unsigned char>(c) >= 0x80)
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::set<std::string> anchors_of(const fs::path& page) {
  std::map<std::string, int> seen;
  std::set<std::string> out;
  bool code = false;
  for (const std::string& line : lines_of(page)) {
    if (line.starts_with("```")) code = !code;
    const size_t level = line.find_first_not_of('#');
    if (code || level == 0 || level == std::string::npos || line[level] != ' ') continue;
    const std::string anchor = anchor_of(line.substr(level + 1));
    const int before = seen[anchor]++;
    out.insert(before ? str(anchor, "-", before) : anchor);
  }
  return out;
}

// Calls f(line number, target) for each link of a page.
template <class F>
void for_each_link(const fs::path& page, F&& f) {
  static const std::regex link(R"(\]\(([^)\s]+)\))");
  bool code = false;
  int number = 0;
  for (const std::string& line : lines_of(page)) {
    ++number;
    if (line.starts_with("```")) code = !code;
    if (code) continue;
    for (std::sregex_iterator i(line.begin(), line.end(), link), end; i != end; ++i) f(number, (*i)[1].str());
  }
}

TEST(Docs, LinksLeadSomewhere) {
  int links = 0, anchors = 0;
  for (const fs::path& page : pages())
    for_each_link(page, [&](int number, const std::string& target) {
      if (target.starts_with("http")) return;
      const size_t hash = target.find('#');
      const fs::path file = hash == 0 ? page : page.parent_path() / target.substr(0, hash);
      ++links;
      ASSERT_TRUE(fs::exists(file)) << page << ":" << number << ": " << target;
      if (hash == std::string::npos || file.extension() != ".md") return;
      ++anchors;
      EXPECT_TRUE(anchors_of(file).contains(target.substr(hash + 1))) << page << ":" << number << ": " << target;
    });
  EXPECT_GT(links, 100);
  EXPECT_GT(anchors, 50);
}

TEST(Docs, OptionsAreThose) {
  models::TrainConfig config;
  std::set<std::string> keys;
  for (const tools::ConfigField& field : tools::config_fields(config)) keys.insert(field.key);
  const std::regex option(R"(--((model|data|train|sharding|output|generate)\.[a-z_0-9.]*[a-z_0-9]))");
  int options = 0;
  for (const fs::path& page : pages()) {
    int number = 0;
    for (const std::string& line : lines_of(page)) {
      ++number;
      for (std::sregex_iterator i(line.begin(), line.end(), option), end; i != end; ++i) {
        ++options;
        const std::string key = (*i)[1], rest = i->suffix();
        if (rest.starts_with("*")) continue;
        EXPECT_TRUE(keys.contains(key)) << page << ":" << number << ": --" << key;
      }
    }
  }
  EXPECT_GT(options, 100);
}

}  // namespace
}  // namespace sheaf
