// Byte-pair tokenizers: GPT-2's and Llama 3's, from their published files. They encode any bytes: those that are not UTF-8 become
// single-byte tokens, so that nothing is lost.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sheaf/models/tokenizer.h"

namespace sheaf::models {

/// GPT-2's, from a folder with OpenAI's encoder.json and vocab.bpe, or the same under Hugging Face's names, vocab.json and
/// merges.txt. Any vocabulary in that form is accepted if its ids have no gap. Throws DataError naming file and place.
std::shared_ptr<const Tokenizer> load_gpt2_tokenizer(const std::string& folder);
/// Llama 3's, from a folder with tokenizer.model: a line for each token, its bytes in base64, a space and its rank. The
/// ids after these are 256 special tokens. Throws DataError naming the line.
std::shared_ptr<const Tokenizer> load_llama3_tokenizer(const std::string& folder);

/// Ids of two tokens that may join.
using BpePair = std::pair<int32_t, int32_t>;
/// Splits words like GPT-2; `tokens` are bytes, by id, and `merges` the pairs that merge, the best first. Every single byte must be a
/// token. Tokens that no merge produces are special: never produced from text; "<|endoftext|>" is the one between documents. Throws
/// DataError.
std::shared_ptr<const Tokenizer> make_gpt2_tokenizer(std::vector<std::string> tokens, std::vector<BpePair> merges);
/// Splits words like Llama 3; `tokens` are bytes, by rank, without the special ones. Throws DataError.
std::shared_ptr<const Tokenizer> make_llama3_tokenizer(std::vector<std::string> tokens);

/// {"kind": "gpt2", "tokens": "! ... Ġthe ...", "merges": "Ġ t Ġ a ..."}, in the order of ids and of ranks, or {"kind":
/// "llama3", "tokens": "..."} without the special ones; a byte is written as the character that GPT-2's files have for
/// it. Throws DataError.
std::shared_ptr<const Tokenizer> bpe_from_json(const Json& json);

}  // namespace sheaf::models
