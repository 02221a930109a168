"""One case as PyTorch trains it, in a process of its own.

Prints a JSON line per step: {"step", "timed", "seconds", "loss", "peak_rss_bytes"}, and {"ready": true} when it is
warm. Then it times --samples steps; with --serve instead, for every number read from standard input, that many steps
after one that is not timed, so that a block of steps does not pay for what ran on the machine before it.
"""

import argparse
import json
import os
import sys
import time

import torch

import cases
import gpt2

# Of the first steps some allocate the optimizer's state, and a compiled model is compiled in the first.
WARM_UP = {"eager": 3, "compile": 5}
LR, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.99), 0.1, 1.0


def peak_rss_bytes():
    """Of this program; getrusage() would count what its parent held when it started it."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


class Training:
    def __init__(self, case, variant):
        torch.manual_seed(1337)
        self.case = case
        self.model = gpt2.Gpt2(case)
        parameters = list(self.model.parameters())
        self.parameters = parameters
        self.optimizer = torch.optim.AdamW(
            [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
             {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}],
            lr=LR, betas=BETAS, fused=True)
        self.loss = torch.compile(self.model) if variant == "compile" else self.model
        self.steps = 0

    def step(self):
        """One step on new random tokens; returns its seconds and its loss."""
        shape = (self.case.batch, self.case.context + 1)
        text = torch.randint(self.case.vocab, shape)
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.dtype == "bf16"):
            loss = self.loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        seconds = time.perf_counter() - start
        self.steps += 1
        return seconds, value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--variant", choices=WARM_UP, default="eager")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()

    # Only our lines go to standard output, whatever a compiler underneath prints.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(line):
        print(json.dumps(line), file=lines, flush=True)

    def run(training, steps, timed):
        for _ in range(steps):
            seconds, loss = training.step()
            write({"step": training.steps, "timed": timed, "seconds": seconds, "loss": loss,
                   "peak_rss_bytes": peak_rss_bytes()})

    torch.set_num_threads(options.threads)
    training = Training(cases.find(options.case), options.variant)
    run(training, WARM_UP[options.variant], timed=False)
    write({"ready": True})
    if not options.serve:
        run(training, options.samples, timed=True)
        return
    for line in sys.stdin:
        run(training, 1, timed=False)
        run(training, int(line), timed=True)


if __name__ == "__main__":
    main()
