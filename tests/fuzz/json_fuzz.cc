// libFuzzer target: any bytes as JSON and as a tokenizer file. Accepted input survives being written and read again.
#include <string_view>

#include "sheaf/core/json.h"
#include "sheaf/models/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const std::string keys[] = {"kind", "file"};
    sheaf::json_members(text, keys, "fuzz");
  } catch (const sheaf::DataError&) {
  }
  try {
    const auto json = sheaf::Json::parse(text, "fuzz");
    if (!(sheaf::Json::parse(json.dump(), "again") == json)) __builtin_trap();
    const auto tokenizer = sheaf::models::tokenizer_from_json(json);
    if (!(tokenizer->to_json() == sheaf::models::tokenizer_from_json(tokenizer->to_json())->to_json())) __builtin_trap();
  } catch (const sheaf::DataError&) {
  }
  return 0;
}
