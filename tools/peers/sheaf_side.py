"""Sheaf: a process per turn."""

import json
import os
import subprocess
import tempfile
import time

from llmc_side import write_tokens
from sides import Failed, Side, environment, last_line

WARM_UP = 2

CONFIG = """
[model]
type = "gpt2"
layers = {case.layers}
heads = {case.heads}
width = {case.width}
vocab = {case.vocab}
context = {case.context}
bias = {bias}
[data]
train_file = "{tokens}"
val_file = "{tokens}"
[train]
steps = 1000000
batch = {case.batch}
lr = 1e-4
warmup = 0
schedule = "constant"
eval_every = 0
dtype = "{case.dtype}"
[output]
folder = "{folder}"
"""


def bench_step(program, case, threads, count):
    """Runs `count` steps of a case; returns (seconds of each, losses of the first)."""
    with tempfile.TemporaryDirectory(prefix="bench_peers_") as folder:
        tokens, config = os.path.join(folder, "tokens.bin"), os.path.join(folder, "config.toml")
        write_tokens(tokens, case.vocab, 64 * case.tokens + 1)
        with open(config, "w", encoding="utf-8") as file:
            file.write(CONFIG.format(case=case, bias=str(case.bias).lower(), tokens=tokens, folder=folder))
        # It is ended when it has made enough: no evaluation, no checkpoint.
        process = subprocess.Popen(
            [program, "train", "--config", config, "--quiet", "--threads-per-rank", str(threads)],
            env=environment(threads), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        lines = []
        try:
            while len(lines) < WARM_UP + count:
                if process.poll() is not None:
                    raise Failed(last_line(process.stderr.read()))
                time.sleep(0.1)
                metrics = os.path.join(folder, "metrics.jsonl")
                if os.path.exists(metrics):
                    with open(metrics, encoding="utf-8") as file:
                        lines = [json.loads(line) for line in file if line.endswith("\n")]
        finally:
            process.kill()
            process.communicate()
        lines = [line for line in lines if "tokens_per_second" in line]
        timed = lines[WARM_UP:WARM_UP + count]
        return [case.tokens / line["tokens_per_second"] for line in timed], [line["loss"] for line in lines[:5]]


class SheafSide(Side):
    def __init__(self, case, program, threads):
        super().__init__("sheaf")
        self.case, self.program, self.threads = case, program, threads

    def sample(self, count):
        seconds, losses = bench_step(self.program, self.case, self.threads, count)
        self.first_losses = losses
        return seconds
