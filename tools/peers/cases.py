"""The training steps that are compared. The names are those of `sheaf bench step`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    name: str
    layers: int
    heads: int
    width: int
    vocab: int
    bias: bool
    batch: int  # sequences per step
    context: int  # tokens per sequence, and rows of the position table
    dtype: str  # of the computation: "f32", or "bf16" with fp32 masters
    samples: int  # timed steps per round and side
    goal: float  # Sheaf's tokens per second over those of PyTorch's best
    goal_llmc: float = 0.0  # the same over llm.c's train_gpt2; 0: it does not run this step

    @property
    def tokens(self):
        return self.batch * self.context


def _gpt2_124m(name, batch, context, dtype, goal, goal_llmc=0.0):
    return Case(name, layers=12, heads=12, width=768, vocab=50257, bias=True, batch=batch,
                context=context, dtype=dtype, samples=4, goal=goal, goal_llmc=goal_llmc)


def _char(name, dtype, goal):
    """nanoGPT's character model, without its dropout: a mask drawn elsewhere would be another step."""
    return Case(name, layers=6, heads=6, width=384, vocab=65, bias=False, batch=16, context=256,
                dtype=dtype, samples=5, goal=goal)


CASES = [
    _gpt2_124m("gpt2-124m-f32-4x64", 4, 64, "f32", goal=1.5, goal_llmc=7.0),
    _gpt2_124m("gpt2-124m-f32-1x1024", 1, 1024, "f32", goal=1.4),
    _gpt2_124m("gpt2-124m-bf16-1x1024", 1, 1024, "bf16", goal=2.0),
    # nanoGPT's configuration for CPUs.
    Case("nanogpt-f32-12x64", layers=4, heads=4, width=128, vocab=65, bias=False, batch=12, context=64,
         dtype="f32", samples=60, goal=1.8),
    _char("char-f32-16x256", "f32", goal=1.4),
    _char("char-bf16-16x256", "bf16", goal=2.0),
]


def find(name):
    """Throws KeyError."""
    return {case.name: case for case in CASES}[name]
