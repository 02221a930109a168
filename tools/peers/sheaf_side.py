"""Sheaf: `sheaf bench step` or `generate`, a process per turn."""

import json
import os
import subprocess
import tempfile

from sides import Failed, Side, environment, last_line


class SheafSide(Side):
    def __init__(self, case, program, threads):
        super().__init__("sheaf")
        self.case, self.program, self.threads = case, program, threads

    def sample(self, count):
        with tempfile.TemporaryDirectory(prefix="bench_peers_") as folder:
            path = os.path.join(folder, "bench.json")
            done = subprocess.run(
                [self.program, "bench", self.case.suite, "--device", self.case.device, "--filter", self.case.name,
                 "--threads", str(self.threads), "--samples", str(count), "--json", path],
                env=environment(self.threads), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                check=False)
            if done.returncode != 0:
                raise Failed(last_line(done.stderr))
            with open(path, encoding="utf-8") as file:
                lines = [line for line in json.load(file)["lines"] if line["name"] == self.case.name]
        if not lines:
            raise Failed(f"sheaf bench {self.case.suite} has no line {self.case.name}")
        if "missing" in lines[0]:
            raise Failed(lines[0]["missing"])
        more = lines[0]["more"]
        if "GiB live" in more:
            self.peak_bytes = round(more["GiB live"] * (1 << 30))
        return lines[0]["samples_s"]
