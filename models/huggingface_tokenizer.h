// Tokenizers from Hugging Face's tokenizer.json: byte pairs of bytes (GPT-2's, Llama 3's, Qwen's, Mistral Nemo's, ...), or of
// characters with byte fallback (Llama 2's, Mistral 7B's). huggingface_file.h lists the supported parts.
#pragma once

#include <memory>
#include <string>

#include "sheaf/models/tokenizer.h"

namespace sheaf::models {

/// From a folder with tokenizer.json. The ids of a text are those of `tokenizers` with encode_special_tokens, so that no
/// text makes a special token; other added ones are found in it. Only the text's own tokens: none before or after it.
/// Where a text is not UTF-8, the bytes that belong to no character become their own tokens. The token between documents
/// is "<|endoftext|>", "<|end_of_text|>", "</s>" or "<eos>", the first that is there as a special token. Throws DataError
/// naming file and key.
std::shared_ptr<const Tokenizer> load_huggingface_tokenizer(const std::string& folder);
/// From the file's content, which `where` names. {"kind": "huggingface", "file": {...}} is the form of to_json().
std::shared_ptr<const Tokenizer> make_huggingface_tokenizer(const Json& json, const std::string& where);

}  // namespace sheaf::models
