"""One case as PyTorch trains it, or generates texts, in a process of its own.

Prints a JSON line per step: {"step", "timed", "seconds", "loss", "peak_bytes"}, and {"ready": true, "micro_batch": N}
when it is warm. Then it times --samples steps; with --serve instead, for every number read from standard input, that
many steps after one that is not timed, so that a block of steps does not pay for what ran on the machine before it.
peak_bytes: resident on the host, or allocated on the GPU.
"""

import argparse
import json
import os
import sys
import time

import torch

import cases
import gpt2
import llama

# The first steps allocate the optimizer's state, and a compiled model is compiled in the first.
WARM_UP = {"eager": 3, "compile": 5}
LR, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.99), 0.1, 1.0
MOST_TOKENS = 65536  # of a micro-batch on a GPU: more do not utilise it any better


def peak_bytes(device):
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Of this program; getrusage() would include the parent's memory at the time of the fork.
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


class Training:
    """A model and its optimizer; `micro_batch` sequences at a time."""

    def __init__(self, case, variant, micro_batch):
        torch.manual_seed(1337)
        self.case = case
        self.micro_batch = micro_batch
        with torch.device(case.device):
            self.model = llama.Llama(case) if case.kv_heads else gpt2.Gpt2(case)
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
        case = self.case
        text = torch.randint(case.vocab, (case.batch, case.context + 1))
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        parts = case.batch // self.micro_batch
        self.wait()
        start = time.perf_counter()
        tokens, targets = tokens.to(case.device), targets.to(case.device)
        total = 0
        for some_tokens, some_targets in zip(tokens.split(self.micro_batch), targets.split(self.micro_batch)):
            with torch.autocast(case.device, torch.bfloat16, enabled=case.dtype == "bf16"):
                loss = self.loss(some_tokens, some_targets)
            if parts > 1:
                loss = loss / parts
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = total.item()
        self.wait()
        seconds = time.perf_counter() - start
        self.steps += 1
        return seconds, value

    def wait(self):
        if self.case.device == "cuda":
            torch.cuda.synchronize()


class Generation:
    """A model that continues prompts; a whole continuation counts as one step."""

    def __init__(self, case, variant):
        torch.manual_seed(1337)
        self.case = case
        self.micro_batch = case.batch
        self.model = gpt2.Gpt2(case).to(torch.bfloat16 if case.dtype == "bf16" else torch.float32).eval()
        if variant == "compile":  # one compilation for all positions
            for block in self.model.blocks:
                block.compile(dynamic=True)
        self.steps = 0

    def step(self):
        prompts = torch.randint(self.case.vocab, (self.case.batch, self.case.context))
        start = time.perf_counter()
        self.model.generate(prompts, self.case.generated)
        seconds = time.perf_counter() - start
        self.steps += 1
        return seconds, 0.0


def started(case, variant, warm):
    """A training after its warm-up, run by `warm`, with the largest micro-batch that fits the GPU."""
    if case.generated:
        generation = Generation(case, variant)
        warm(generation)
        return generation
    micro_batch = case.batch
    while case.device == "cuda" and (micro_batch * case.context > MOST_TOKENS or case.batch % micro_batch):
        micro_batch -= 1
    while True:
        try:
            training = Training(case, variant, micro_batch)
            warm(training)
            return training
        except torch.OutOfMemoryError:
            if micro_batch == 1:
                raise
        training = None  # frees its memory before the next one is created
        torch.compiler.reset()
        torch.cuda.empty_cache()
        micro_batch //= 2
        while case.batch % micro_batch:
            micro_batch -= 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True)
    parser.add_argument("--variant", choices=WARM_UP, default="eager")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()

    # Only our lines go to standard output, whatever a compiler prints.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(line):
        print(json.dumps(line), file=lines, flush=True)

    def run(training, steps, timed):
        for _ in range(steps):
            seconds, loss = training.step()
            write({"step": training.steps, "timed": timed, "seconds": seconds, "loss": loss,
                   "peak_bytes": peak_bytes(training.case.device)})

    torch.set_num_threads(options.threads)
    case = cases.find(options.case)
    training = started(case, options.variant, lambda t: run(t, WARM_UP[options.variant], timed=False))
    write({"ready": True, "micro_batch": training.micro_batch})
    if not options.serve:
        run(training, options.samples, timed=True)
        return
    for line in sys.stdin:
        run(training, 1, timed=False)
        run(training, int(line), timed=True)
        if case.device == "cuda":
            torch.cuda.empty_cache()  # leave the memory to the next side


if __name__ == "__main__":
    main()
