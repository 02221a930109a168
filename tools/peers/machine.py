"""The machine of the comparison: names, versions, and a probe of its current peak performance."""

import contextlib
import os
import platform
import subprocess
import sys
import time

import torch

MATRIX = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
TRIES = 5


def _first_line(*command):
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    except OSError:
        return ""
    return output.stdout.splitlines()[0].strip() if output.stdout else ""


def describe(threads, device):
    """The machine and the versions, for the head of the table and for the JSON."""
    info = {}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    flags = [f for f in info.get("flags", "").split() if f.startswith(("amx", "avx")) or f == "fma"]
    gpu = {}
    if device == "cuda":
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {
        **gpu,
        "cpu": info.get("model name", platform.processor() or "unknown"),
        "cpu_family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "flags": flags,
        "cores": os.cpu_count(),
        "threads": threads,
        "kernel": platform.release(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "gcc": _first_line("gcc", "--version"),
    }


@contextlib.contextmanager
def busy(processes):
    """Keeps `processes` other processes busy until the context ends."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(0.2 if others else 0)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


class Probe:
    """Times one large product (fp32, on a GPU bf16) and one large copy, the best of a few: {"gflops", "copy_gb_s",
    "load"}. It takes a tenth of a second and shows whether the machine was idle before and after a block of samples."""

    def __init__(self, threads, device):
        torch.set_num_threads(threads)
        self.device, self.side, self.bytes = device, MATRIX[device], COPY_BYTES[device]
        self.dtype = "bf16" if device == "cuda" else "fp32"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.a = torch.randn(self.side, self.side, device=device).to(dtype)
        self.product = torch.empty_like(self.a)
        self.source = torch.ones(self.bytes // 4, device=device)
        self.target = torch.zeros_like(self.source)
        self.measure()

    def measure(self):
        def wait():
            if self.device == "cuda":
                torch.cuda.synchronize()

        def best(function):
            seconds = []
            for _ in range(TRIES):
                wait()
                start = time.perf_counter()
                function()
                wait()
                seconds.append(time.perf_counter() - start)
            return min(seconds)

        product = best(lambda: torch.mm(self.a, self.a, out=self.product))
        copy = best(lambda: self.target.copy_(self.source))
        time.sleep(0.2)  # threads of OpenMP spin a while before they sleep
        return {
            "gflops": 2 * self.side**3 / product / 1e9,
            "copy_gb_s": 2 * self.bytes / copy / 1e9,  # read and written
            "load": os.getloadavg()[0],
        }
