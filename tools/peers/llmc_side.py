"""llm.c's train_gpt2: built from a checkout, fed with random weights and tokens in its own file formats."""

import array
import ctypes
import os
import re
import shutil
import subprocess
import tempfile

import torch

import gpt2
from sides import Failed, Side, environment

FLAGS = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w"]
# At step 20 it samples text, which takes minutes: stop before.
MOST_SAMPLES = 19
STEP = re.compile(r"step (\d+): train loss (\S+) \(took (\S+) ms\)")


def _write_header(file, *numbers):
    array.array("i", [*numbers, *[0] * (256 - len(numbers))]).tofile(file)


def write_tokens(path, vocab, count):
    """Random tokens: 256 int32 {20240520, version 1, count}, then uint16."""
    with open(path, "wb") as file:
        _write_header(file, 20240520, 1, count)
        array.array("H", torch.randint(vocab, (count,)).tolist()).tofile(file)


def write_model(path, case):
    """The first weights of gpt2.py: 256 int32 {20240326, version 3, sizes}, then each kind of parameter, fp32, over all
    layers. The rows of the embedding are padded to a multiple of 128."""
    model = gpt2.Gpt2(case)
    padded = -(-case.vocab // 128) * 128
    blocks = model.blocks
    with open(path, "wb") as file:
        _write_header(file, 20240326, 3, case.context, case.vocab, case.layers, case.heads, case.width, padded)
        embedding = torch.zeros(padded, case.width)
        embedding[: case.vocab] = model.tokens.weight.detach()
        kinds = [
            lambda b: b.norm1.weight, lambda b: b.norm1.bias,
            lambda b: b.attention.qkv.weight, lambda b: b.attention.qkv.bias,
            lambda b: b.attention.out.weight, lambda b: b.attention.out.bias,
            lambda b: b.norm2.weight, lambda b: b.norm2.bias,
            lambda b: b.mlp.up.weight, lambda b: b.mlp.up.bias,
            lambda b: b.mlp.down.weight, lambda b: b.mlp.down.bias,
        ]
        tensors = [embedding, model.positions.weight]
        tensors += [kind(block) for kind in kinds for block in blocks]
        tensors += [model.norm.weight, model.norm.bias]
        for tensor in tensors:
            values = tensor.detach().contiguous()
            file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))


class LlmcSide(Side):
    def __init__(self, case, checkout, threads):
        super().__init__("llm.c")
        self.threads = threads
        self.folder = tempfile.mkdtemp(prefix="bench_peers_llmc_")
        try:
            self._build(checkout)
            write_model(os.path.join(self.folder, "gpt2_124M.bin"), case)
            data = os.path.join(self.folder, "dev/data/tinyshakespeare")
            os.makedirs(data)
            for part in ("train", "val"):
                write_tokens(os.path.join(data, f"tiny_shakespeare_{part}.bin"), case.vocab, 24 * case.tokens + 1)
        except BaseException:
            self.close()
            raise

    def _build(self, checkout):
        self.program = os.path.join(self.folder, "train_gpt2")
        source = os.path.join(checkout, "train_gpt2.c")
        if not os.path.exists(source):
            raise Failed(f"no train_gpt2.c in {checkout}")
        build = subprocess.run(["gcc", *FLAGS, "-I", checkout, source, "-o", self.program, "-lm"],
                               stderr=subprocess.PIPE, text=True, check=False)
        if build.returncode != 0:
            raise Failed("llm.c does not build: " + (build.stderr.strip().splitlines() or ["gcc failed"])[0])

    def sample(self, count):
        """The first step allocates and is not counted; the program is stopped after enough steps."""
        count = min(count, MOST_SAMPLES)
        # stdbuf: without it lines would reach the pipe only when the buffer is full.
        process = subprocess.Popen(["stdbuf", "-oL", self.program], cwd=self.folder, env=environment(self.threads),
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds, line = [], ""
        try:
            for line in process.stdout:
                found = STEP.match(line)
                if not found:
                    continue
                self.note_loss(float(found[2]))
                if int(found[1]) > 0:
                    seconds.append(float(found[3]) / 1e3)
                if len(seconds) == count:
                    return seconds
        finally:
            process.kill()
            process.wait()
        raise Failed(f"llm.c ended after {len(seconds)} steps: {line.strip()}")

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)
