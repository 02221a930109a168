"""Compares `sheaf tokenize` with tiktoken and tokenizers for GPT-2's vocabulary, or with tokenizers alone for a tokenizer.json,
one thread each. Started by tools/bench_tokenizers."""

import array
import os
import re
import subprocess
import sys
import tempfile
import time

import tiktoken
import tiktoken.load
import tokenizers

ROUNDS = 5
# As GPT-2 published it.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
HEADER_BYTES = 1024  # of a token file


class Sheaf:
    name = "sheaf"

    def __init__(self, program, folder, tokenizer, bits):
        self.command = [program, "tokenize", "--tokenizer", tokenizer, "--tokenizer-folder", folder, "--threads", "1"]
        self.bits = bits

    def run(self, path, _):
        """Seconds, as it reports them (including reading the text and writing the file), and ids."""
        with tempfile.TemporaryDirectory(prefix="bench_tokenizers_") as folder:
            out = os.path.join(folder, "out.bin")
            done = subprocess.run([*self.command, path, out], stdout=subprocess.PIPE, text=True, check=True)
            ids = array.array("H" if self.bits == 16 else "I")
            with open(out, "rb") as file:
                ids.frombytes(file.read()[HEADER_BYTES:])
        return float(re.search(r"MB in ([0-9.]+) s", done.stdout)[1]), list(ids)


class Peer:
    def __init__(self, name, encode):
        self.name, self.encode = name, encode

    def run(self, _, text):
        start = time.perf_counter()
        ids = self.encode(text)
        return time.perf_counter() - start, ids


def peers(folder):
    vocabulary, merges = os.path.join(folder, "encoder.json"), os.path.join(folder, "vocab.bpe")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges, encoder_json_file=vocabulary)
    tik = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    hugging = tokenizers.ByteLevelBPETokenizer(vocabulary, merges)
    return [Peer(f"tiktoken {tiktoken.__version__}", tik.encode_ordinary),
            Peer(f"tokenizers {tokenizers.__version__}", lambda text: hugging.encode(text).ids)]


def without_end(ids, other):
    """Without the end-of-text token, which peers do not append."""
    return ids[:-1] if len(ids) == len(other) + 1 else ids


def all_sides(program, folder):
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(file):
        return [Sheaf(program, folder, "gpt2", 16), *peers(folder)]
    hugging = tokenizers.Tokenizer.from_file(file)
    hugging.encode_special_tokens = True
    bits = 16 if hugging.get_vocab_size() <= 65536 else 32
    peer = Peer(f"tokenizers {tokenizers.__version__}", lambda text: hugging.encode(text, add_special_tokens=False).ids)
    return [Sheaf(program, folder, "huggingface", bits), peer]


def main():
    program, folder, *paths = sys.argv[1:]
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    sides = all_sides(program, folder)
    print("| text | ids | " + " | ".join(f"{side.name} MB/s" for side in sides) + " | ratio |")
    print("|---|---|" + "---|" * (len(sides) + 1))
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        megabytes = len(text.encode()) / 1e6
        seconds, ids = {side.name: [] for side in sides}, {}
        for _ in range(ROUNDS):
            for side in sides:
                took, ids[side.name] = side.run(path, text)
                seconds[side.name].append(took)
        rates = [megabytes / sorted(seconds[side.name])[ROUNDS // 2] for side in sides]
        same = all(ids[side.name] == without_end(ids["sheaf"], ids[side.name]) for side in sides[1:])
        print(f"| {os.path.basename(path)}, {megabytes:.1f} MB | {'the same' if same else 'DIFFERENT'} | "
              + " | ".join(f"{rate:.1f}" for rate in rates) + f" | {rates[0] / max(rates[1:]):.1f} |", flush=True)


if __name__ == "__main__":
    main()
