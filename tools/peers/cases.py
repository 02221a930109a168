"""The training steps and text generations that are compared, named as in `sheaf bench step` and `generate`."""

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
    goal: float = None  # Sheaf's tokens per second over those of PyTorch's best; None: no goal
    goal_llmc: float = 0.0  # the same for llm.c's train_gpt2; 0: it does not run this step
    device: str = "cpu"
    kv_heads: int = 0  # of Llama, which has them; GPT-2: 0
    hidden: int = 0  # of Llama's MLP, or of an expert
    experts: int = 0  # of a mixture in place of each MLP
    choices: int = 0  # experts of a token
    linear_heads: int = 0  # of Llama's linear attention, in all blocks except every fourth; 0: none
    generated: int = 0  # tokens generated after prompts of `context` tokens; 0: a training step
    bf16_stream: bool = False  # PyTorch's residual stream is bf16, as Sheaf's, where autocast alone would keep f32

    @property
    def tokens(self):
        return self.batch * (self.generated or self.context)

    @property
    def suite(self):
        return "generate" if self.generated else "step"


def _gpt2_124m(name, batch, context, dtype, goal, goal_llmc=0.0):
    return Case(name, layers=12, heads=12, width=768, vocab=50257, bias=True, batch=batch,
                context=context, dtype=dtype, samples=4, goal=goal, goal_llmc=goal_llmc)


def _char(name, dtype, goal):
    """nanoGPT's character model, without its dropout: different random masks would make the steps differ."""
    return Case(name, layers=6, heads=6, width=384, vocab=65, bias=False, batch=16, context=256,
                dtype=dtype, samples=5, goal=goal)


def _small_llama(name, dtype, batch=8, context=256, **mlp):
    """The mixtures do as much work per token as an MLP of width 1,024."""
    return Case(name, layers=4, heads=6, width=384, vocab=65, bias=False, batch=batch, context=context, dtype=dtype, samples=6,
                kv_heads=6, bf16_stream=dtype == "bf16", **mlp)


def _texts(dtype, rows):
    """GPT-2 124M continues prompts of 64 tokens by 64 more."""
    return Case(f"gpt2-124m-{dtype}-{rows}x64+64", layers=12, heads=12, width=768, vocab=50257, bias=True, batch=rows, context=64,
                dtype=dtype, samples=3, generated=64)


CASES = [
    _gpt2_124m("gpt2-124m-f32-4x64", 4, 64, "f32", goal=1.5, goal_llmc=7.0),
    _gpt2_124m("gpt2-124m-f32-1x1024", 1, 1024, "f32", goal=1.4),
    _gpt2_124m("gpt2-124m-bf16-1x1024", 1, 1024, "bf16", goal=2.0),
    # nanoGPT's configuration for CPUs.
    Case("nanogpt-f32-12x64", layers=4, heads=4, width=128, vocab=65, bias=False, batch=12, context=64,
         dtype="f32", samples=60, goal=1.8),
    _char("char-f32-16x256", "f32", goal=1.4),
    _char("char-bf16-16x256", "bf16", goal=2.0),
    _small_llama("llama-f32-8x256", "f32", hidden=1024),
    _small_llama("llama-bf16-8x256", "bf16", hidden=1024),
    _small_llama("mixture-f32-8x256", "f32", hidden=512, experts=8, choices=2),
    _small_llama("mixture-4-of-32-bf16-8x256", "bf16", hidden=256, experts=32, choices=4),
    _small_llama("linear-f32-1x2048", "f32", batch=1, context=2048, hidden=1024, linear_heads=6),
    _small_llama("linear-bf16-1x2048", "bf16", batch=1, context=2048, hidden=1024, linear_heads=6),
    *(_texts(dtype, rows) for dtype in ("f32", "bf16") for rows in (1, 8, 32)),
]


def _gpt2_on_gpu(name, layers, heads, width, samples):
    """Half a million tokens, in as many micro-batches as each side needs."""
    return Case(f"{name}-bf16-512x1024", layers=layers, heads=heads, width=width, vocab=50304, bias=True, batch=512,
                context=1024, dtype="bf16", samples=samples, device="cuda", bf16_stream=True)


GPU_CASES = [
    _gpt2_on_gpu("gpt2-124m", 12, 12, 768, samples=5),
    _gpt2_on_gpu("gpt2-774m", 36, 20, 1280, samples=3),
    _gpt2_on_gpu("gpt2-1558m", 48, 25, 1600, samples=2),
    Case("llama3-8b-8layers-bf16-4x8192", layers=8, heads=32, width=4096, vocab=128256, bias=False, batch=4,
         context=8192, dtype="bf16", samples=5, device="cuda", kv_heads=8, hidden=14336, bf16_stream=True),
]


def on(device):
    return [case for case in CASES + GPU_CASES if case.device == device]


def find(name):
    """Throws KeyError."""
    return {case.name: case for case in CASES + GPU_CASES}[name]
