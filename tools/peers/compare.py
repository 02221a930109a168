"""Runs the cases, side after side and round after round, prints the table and writes the JSON. Started by
tools/bench_peers."""

import argparse
import dataclasses
import json
import os
import signal
import sys

import torch

import cases
import llmc_side
import machine
import report
import sheaf_side
import sides


def arguments():
    parser = argparse.ArgumentParser(prog="bench_peers", description=__doc__, usage="see tools/bench_peers --help")
    parser.add_argument("--sheaf", required=True)
    parser.add_argument("--sheaf-version", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--llmc", default="")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    if min(options.rounds, options.threads) < 1 or min(options.samples, options.busy) < 0:
        parser.error("--rounds, --threads, --samples and --busy are positive")
    if options.json:
        try:
            with open(options.json, "a", encoding="utf-8"):  # better now than after an hour
                pass
        except OSError as error:
            parser.error(f"--json: {error}")
    known = {case.name: case for case in cases.on(options.device)}
    try:
        options.cases = [known[name] for name in options.cases.split(",")] if options.cases else list(known.values())
    except KeyError as error:
        parser.error(f"no case {error}; there are " + ", ".join(known))
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"bench_peers: not run: PyTorch {torch.__version__} finds no GPU", file=sys.stderr)
        sys.exit(64)
    return options


def say(text):
    print(text, file=sys.stderr, flush=True)


def makers(case, options):
    """Functions that start each side, in the order in which they take turns."""
    all_sides = {
        "sheaf": lambda: sheaf_side.SheafSide(case, options.sheaf, options.threads),
        "torch-eager": lambda: sides.TorchSide(case, "eager", options.threads),
        "torch-compile": lambda: sides.TorchSide(case, "compile", options.threads),
    }
    if case.device == "cuda":  # the compiled one is faster, and the GPU's memory suffices for two sides only
        del all_sides["torch-eager"]
    if case.goal_llmc and options.llmc:
        all_sides["llm.c"] = lambda: llmc_side.LlmcSide(case, options.llmc, options.threads)
    return all_sides


def run(case, options, probe):
    """The rounds of one case; SideResult by the side's name."""
    results, running = {}, {}

    def attempt(name, action):
        try:
            return action()
        except sides.Failed as error:
            results[name].error = str(error).replace("\n", " ")
            say(f"{case.name}: {name}: {error}")
            return None

    try:
        for name, make in makers(case, options).items():
            results[name] = report.SideResult()
            say(f"{case.name}: starting {name}")
            running[name] = attempt(name, make)
        for turn in range(options.rounds):
            for name, side in running.items():
                if side is None or results[name].error:
                    continue
                before = probe.measure()
                with machine.busy(options.busy):
                    seconds = attempt(name, lambda: side.sample(options.samples or case.samples))  # pylint: disable=W0640
                if seconds is None:
                    continue
                results[name].blocks.append(report.Block(seconds, before, probe.measure()))
                say(f"{case.name}: round {turn + 1} of {options.rounds}: {name} "
                    f"{case.tokens / report.median(seconds):,.0f} tok/s, load {before['load']:.1f}")
    finally:
        for name, side in running.items():
            if side is not None:
                results[name].first_losses = side.first_losses
                results[name].peak_bytes = side.peak_bytes
                results[name].micro_batch = side.micro_batch
                side.close()
    return results


def memory(results):
    """A line for each case: the sides' peak memory, and PyTorch's micro-batch sizes."""
    lines = []
    for case, case_sides in results.items():
        peaks = [f"{name} {side.peak_bytes / (1 << 30):.1f}" +
                 (f" (micro-batches of {side.micro_batch})" if side.micro_batch else "")
                 for name, side in case_sides.items() if side.peak_bytes]
        lines.append(f"- {case}: peak GiB: " + ", ".join(peaks))
    return "\n".join(lines)


def write_json(path, about, best, results, rows):
    document = {
        "machine": about,
        "best_probe": best,
        "cases": {
            name: {side: dataclasses.asdict(result) for side, result in case_sides.items()}
            for name, case_sides in results.items()
        },
        "rows": [
            {"case": row.case.name, "peer": row.peer, "ratio": row.ratio, "ratio_of_rounds": row.rounds,
             "goal": row.goal, "verdict": row.verdict()} for row in rows
        ],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the exit handlers close the sides
    options = arguments()
    chosen = options.cases
    about = {"sheaf": options.sheaf_version, "busy": options.busy, **machine.describe(options.threads, options.device)}
    probe = machine.Probe(options.threads, options.device)
    results = {case.name: run(case, options, probe) for case in chosen}
    best = report.best_probe(results)
    rows = [row for case in chosen for row in report.judge(case, results[case.name], best, not options.busy)]
    print(f"{about['cpu']} (family/model {about['cpu_family_model']}), {about['cores']} cores, "
          f"{about['threads']} threads; {' '.join(about['flags'])}")
    print(f"Sheaf {about['sheaf']}; PyTorch {about['torch']} ({about['torch_cpu_capability']}), "
          f"Python {about['python']}, {about['gcc']}, Linux {about['kernel']}")
    if options.device == "cuda":
        print(f"{about['gpu']}, CUDA {about['cuda']}, cuDNN {about['cudnn']}")
    print(f"best probe: {best['gflops']:,.0f} GFLOP/s {probe.dtype}, copy {best['copy_gb_s']:,.1f} GB/s; "
          f"{options.rounds} rounds; tokens per second: median (10th-90th percentile)"
          + (f"; beside {options.busy} busy processes" if options.busy else "") + "\n")
    print(report.table(results, rows))
    if options.device == "cuda":
        print("\n" + memory(results))
    if options.json:
        write_json(options.json, about, best, results, rows)


if __name__ == "__main__":
    main()
