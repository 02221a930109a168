"""Compares `sheaf train-tokenizer` with the BpeTrainer of tokenizers, alternating, with as many threads. Started by
tools/bench_tokenizers --train."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROUNDS = 5
# As Llama 3 published it, `sheaf train-tokenizer`'s default.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
           r"\s*[\r\n]+|\s+(?!\S)|\s+")
PIECE = 1 << 16  # characters


def sheaf(program, path, vocab, threads, out):
    """Seconds of the whole process: reading the text and writing the file included."""
    start = time.perf_counter()
    subprocess.run([program, "train-tokenizer", path, out, "--vocab", str(vocab), "--threads", str(threads)],
                   stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def pieces_of(text):
    """The text in pieces for the peer's threads, cut before single spaces, where a word begins anyway."""
    cut, begin = re.compile(r"(?<=\S) "), 0
    while begin < len(text):
        found = cut.search(text, begin + PIECE)
        end = found.start() if found else len(text)
        yield text[begin:end]
        begin = end


def peer(path, vocab, out):
    """Seconds of the training alone, with the text in memory."""
    with open(path, encoding="utf-8", newline="") as file:
        pieces = list(pieces_of(file.read()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, min_frequency=2, show_progress=False, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    start = time.perf_counter()
    tokenizer.train_from_iterator(pieces, trainer)
    seconds = time.perf_counter() - start
    tokenizer.save(out, pretty=False)
    return seconds


def peer_alone(path, vocab, threads, out):
    """In a separate process, because its thread count is fixed when it starts."""
    parallel = {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false", "RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-B", __file__, "--peer", path, str(vocab), out], stdout=subprocess.PIPE,
                          text=True, env={**os.environ, **parallel}, check=True)
    return float(done.stdout)


def compare(program, path, vocab, threads):
    seconds = {"sheaf": [], "peer": []}
    with tempfile.TemporaryDirectory(prefix="bench_tokenizers_") as folder:
        ours, theirs = os.path.join(folder, "tokenizer.json"), os.path.join(folder, "peer.json")
        for _ in range(ROUNDS):
            seconds["sheaf"].append(sheaf(program, path, vocab, threads, ours))
            seconds["peer"].append(peer_alone(path, vocab, threads, theirs))
        with open(ours, encoding="utf-8") as a, open(theirs, encoding="utf-8") as b:
            same = json.load(a) == json.load(b)
    medians = {side: sorted(values)[ROUNDS // 2] for side, values in seconds.items()}
    megabytes = os.path.getsize(path) / 1e6
    print(f"| {os.path.basename(path)}, {megabytes:.1f} MB | {vocab} | {'the same' if same else 'DIFFERENT'} | "
          f"{medians['sheaf']:.2f} | {medians['peer']:.2f} | {medians['peer'] / medians['sheaf']:.1f} |", flush=True)


def main():
    if sys.argv[1] == "--peer":
        print(peer(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--train", required=True, help="vocabularies, such as 8192,32768")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("texts", nargs="+")
    options = parser.parse_args()
    print(f"| text, {options.threads} thread(s) | tokens | file | sheaf s | tokenizers {tokenizers.__version__} s | ratio |")
    print("|---|---|---|---|---|---|")
    for path in options.texts:
        for vocab in options.train.split(","):
            compare(options.program, path, int(vocab), options.threads)


if __name__ == "__main__":
    main()
