"""Statistics, verdicts and the table."""

from dataclasses import dataclass, field

MOST_SPREAD = 0.15  # between the rounds of one side
LEAST_PROBE = 0.90  # of the run's best
PROBED = ("gflops", "copy_gb_s")


def percentile(values, share):
    """Quantile, interpolated linearly between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median(values):
    return percentile(values, 0.5)


@dataclass
class Block:
    """The steps of one side in one round, with the machine's peaks before and after them."""

    seconds: list
    before: dict
    after: dict


@dataclass
class SideResult:
    blocks: list = field(default_factory=list)
    error: str = ""
    first_losses: list = field(default_factory=list)
    peak_bytes: int = None
    micro_batch: int = None

    def seconds(self):
        return [s for block in self.blocks for s in block.seconds]

    def tokens_per_second(self, case):
        """Median, 10th and 90th percentile; None if there are no samples."""
        seconds = self.seconds()
        if not seconds:
            return None
        return tuple(case.tokens / percentile(seconds, share) for share in (0.5, 0.9, 0.1))

    def spread(self):
        """Slowest over fastest round, minus 1."""
        rounds = [median(block.seconds) for block in self.blocks]
        return max(rounds) / min(rounds) - 1 if rounds else 0.0


@dataclass
class Row:
    """Sheaf against one peer in one case."""

    case: object
    peer: str  # "PyTorch" or "llm.c"
    goal: float
    ratio: float = None
    rounds: tuple = ()  # smallest and largest ratio of a round
    doubts: list = field(default_factory=list)
    not_run: str = ""

    def verdict(self):
        if self.not_run:
            return f"not run: {self.not_run}"
        if self.doubts:
            return "unsound: " + ", ".join(self.doubts)
        if self.goal is None:
            return "-"
        return "yes" if self.ratio >= self.goal else "no"


def _probes(sides):
    return [p for side in sides.values() for block in side.blocks for p in (block.before, block.after)]


def best_probe(results):
    """The best reading of each peak in the run."""
    probes = [p for sides in results.values() for p in _probes(sides)]
    return {key: max((p[key] for p in probes), default=0.0) for key in PROBED}


def _doubts(sides, best):
    doubts = []
    for name, side in sides.items():
        if side.spread() > MOST_SPREAD:
            doubts.append(f"rounds of {name} spread {100 * side.spread():.0f} %")
    probes = _probes(sides)
    for key in PROBED:
        share = min((p[key] / best[key] for p in probes), default=1.0)
        if share < LEAST_PROBE:
            doubts.append(f"the probe's {key} fell to {100 * share:.0f} % of its best")
    return doubts


def _judge(case, peer, goal, sides, best, missing=""):
    row = Row(case, peer, goal)
    sheaf, peers = sides["sheaf"], {name: s for name, s in sides.items() if name != "sheaf" and s.blocks}
    if not sheaf.blocks or not peers:
        errors = [s.error for s in sides.values() if s.error]
        row.not_run = "; ".join(errors) or missing or "no samples"
        return row
    name = min(peers, key=lambda n: median(peers[n].seconds()))
    row.ratio = median(peers[name].seconds()) / median(sheaf.seconds())
    rounds = [median(p.seconds) / median(s.seconds) for p, s in zip(peers[name].blocks, sheaf.blocks)]
    row.rounds = (min(rounds), max(rounds))
    row.doubts = _doubts({"sheaf": sheaf, name: peers[name]}, best)
    # A missing faster variant of the peer would flatter Sheaf.
    row.doubts += [f"{n} did not run: {s.error}" for n, s in sides.items() if s.error]
    return row


def judge(case, sides, best, goals=True):
    """The rows of a case; `sides`: SideResult by name. Without `goals` they are not compared with their goals."""
    torch = {n: s for n, s in sides.items() if n == "sheaf" or n.startswith("torch-")}
    rows = [_judge(case, "PyTorch", case.goal, torch, best)]
    if case.goal_llmc:
        llmc = {n: s for n, s in sides.items() if n in ("sheaf", "llm.c")}
        rows.append(_judge(case, "llm.c", case.goal_llmc, llmc, best, missing="give --llmc"))
    for row in rows:
        row.goal = row.goal if goals else None
    return rows


def _rate(side, case):
    rates = side.tokens_per_second(case) if side else None
    if rates is None:
        return "-"
    return f"{rates[0]:,.0f} ({rates[1]:,.0f}-{rates[2]:,.0f})"


def table(results, rows):
    """Markdown; tokens per second: the median and, in brackets, the 10th to the 90th percentile."""
    head = ["case", "Sheaf tok/s", "PyTorch eager", "PyTorch compile", "llm.c", "ratio (rounds)", "goal", "met?"]
    lines = [head]
    for row in rows:
        sides = results[row.case.name]
        torch = row.peer == "PyTorch"
        lines.append([
            row.case.name if torch else f"{row.case.name}, llm.c",
            _rate(sides.get("sheaf"), row.case),
            _rate(sides.get("torch-eager") if torch else None, row.case),
            _rate(sides.get("torch-compile") if torch else None, row.case),
            _rate(None if torch else sides.get("llm.c"), row.case),
            f"{row.ratio:.2f} ({row.rounds[0]:.2f}-{row.rounds[1]:.2f})" if row.ratio else "-",
            "-" if row.goal is None else f"{row.goal:.1f}",
            row.verdict(),
        ])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]

    def text(line):
        return "| " + " | ".join([*(cell.ljust(w) for cell, w in zip(line, widths)), line[-1]]) + " |"

    return "\n".join([text(head), "|" + "|".join(["---"] * len(head)) + "|", *map(text, lines[1:])])
