"""The sides of a comparison. Each gives the seconds of a few training steps whenever it is asked, so that the sides of
a case take turns; each runs in processes of its own."""

import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


class Failed(Exception):
    """A side cannot run; says why in a line."""


def environment(threads):
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


class Side:
    """One peer, or Sheaf, in one case."""

    def __init__(self, name):
        self.name = name
        self.first_losses = []
        self.peak_bytes = None
        self.micro_batch = None

    def sample(self, count):
        """Seconds of each of `count` training steps, after steps that are not counted."""
        raise NotImplementedError

    def close(self):
        """Ends what still runs and removes its files."""

    def note_loss(self, loss):
        if len(self.first_losses) < 5:
            self.first_losses.append(loss)


class TorchSide(Side):
    """A torch_worker.py that stays warm between its turns."""

    def __init__(self, case, variant, threads):
        super().__init__(f"torch-{variant}")
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # pylint: disable=consider-using-with
        self.process = subprocess.Popen(  # pylint: disable=consider-using-with
            [sys.executable, "-B", os.path.join(HERE, "torch_worker.py"), "--case", case.name, "--variant", variant,
             "--threads", str(threads), "--serve"],
            env=environment(threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        try:
            answer = {}
            while not answer.get("ready"):
                answer = self._read()
            self.micro_batch = answer["micro_batch"]
        except BaseException:
            self.close()
            raise

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            with open(self.log.name, encoding="utf-8", errors="replace") as log:
                raise Failed(f"{self.name} ended with status {status}: {last_line(log.read())}")
        answer = json.loads(line)
        if "loss" in answer:
            self.note_loss(answer["loss"])
            self.peak_bytes = answer["peak_bytes"]
        return answer

    def sample(self, count):
        print(count, file=self.process.stdin, flush=True)
        seconds = []
        while len(seconds) < count:
            answer = self._read()
            if answer["timed"]:
                seconds.append(answer["seconds"])
        return seconds

    def close(self):
        try:
            self.process.stdin.close()  # it ends by itself, and ends its compilers
            self.process.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.log.close()
