"""Llama 3 in plain torch.nn: rotary embedding, grouped-query attention, SwiGLU, RMSNorm, untied head; shapes and initial
weights are Sheaf's."""

import math

import torch
from torch import nn
from torch.nn import functional as F

INIT_STD = 0.02
ROPE_THETA = 500000.0
NORM_EPS = 1e-5
AUX_LOSS = 0.01


def turned(x, cos, sin):
    """Pairs of elements of x[batch, heads, context, head width], half of the width apart, rotated by their positions."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.heads, self.kv_heads = case.heads, case.kv_heads
        self.head_width = case.width // case.heads
        self.qkv = nn.Linear(case.width, (case.heads + 2 * case.kv_heads) * self.head_width, bias=False)
        self.out = nn.Linear(case.width, case.width, bias=False)

    def forward(self, x, cos, sin):
        batch, context, width = x.shape
        heads = self.qkv(x).view(batch, context, -1, self.head_width).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        y = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, context, width))


class DeltaNet(nn.Module):
    """Gated DeltaNet (Yang et al., https://arxiv.org/abs/2412.06464) in chunks of 64 tokens."""

    CHUNK, TAPS = 64, 4

    def __init__(self, case):
        super().__init__()
        self.heads, self.head_width = case.linear_heads, case.width // case.heads
        inner = self.heads * self.head_width
        self.qkv = nn.Linear(case.width, 3 * inner, bias=False)
        self.gate = nn.Linear(case.width, inner, bias=False)
        self.rates = nn.Linear(case.width, 2 * self.heads, bias=False)
        self.taps = nn.Conv1d(3 * inner, 3 * inner, self.TAPS, groups=3 * inner, padding=self.TAPS - 1, bias=False)
        self.log_decay = nn.Parameter(torch.empty(self.heads).uniform_(0, math.log(16)))
        self.decay_bias = nn.Parameter(torch.empty(self.heads).uniform_(math.log(0.001), math.log(0.1)))
        self.norm = nn.RMSNorm(self.head_width, eps=NORM_EPS)
        self.out = nn.Linear(inner, case.width, bias=False)

    def states(self, q, k, v, decay, beta):
        """The output of the states for q[batch, heads, chunks, 64, width]; decay and beta [batch, heads, chunks, 64]."""
        sums = decay.cumsum(-1)
        places = torch.arange(self.CHUNK, device=q.device)
        earlier = places[:, None] > places
        between = (sums[..., :, None] - sums[..., None, :]).masked_fill(places[:, None] < places, float("-inf")).exp()
        rate, since = beta[..., None], sums.exp()[..., None]
        among = torch.eye(self.CHUNK, device=q.device) + (rate * (k @ k.mT) * between).masked_fill(~earlier, 0.0)
        written = torch.linalg.solve_triangular(among, torch.cat((rate * v, rate * since * k), -1), upper=False, unitriangular=True)
        own, of_state = written.split(v.shape[-1], dim=-1)
        seen, asked = (q @ k.mT) * between, q * since
        kept = k * (sums[..., -1:] - sums).exp()[..., None]
        state, y = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], device=q.device), []
        for i in range(q.shape[2]):
            new = own[:, :, i] - of_state[:, :, i] @ state
            y.append(asked[:, :, i] @ state + seen[:, :, i] @ new)
            state = state * since[:, :, i, -1:] + kept[:, :, i].mT @ new
        return torch.stack(y, dim=2)

    def forward(self, x, cos, sin):
        batch, context, _ = x.shape
        x_qkv = F.silu(self.taps(self.qkv(x).mT)[..., :context]).mT
        heads = x_qkv.view(batch, -1, self.CHUNK, 3 * self.heads, self.head_width).permute(0, 3, 1, 2, 4).float()
        q, k, v = heads.split(self.heads, dim=1)
        rates = self.rates(x).float().view(batch, -1, self.CHUNK, 2 * self.heads).permute(0, 3, 1, 2)
        b, a = rates.split(self.heads, dim=1)
        per_head = (slice(None), None, None)
        decay = -self.log_decay.exp()[per_head] * F.softplus(a + self.decay_bias[per_head])
        with torch.autocast(x.device.type, enabled=False):
            y = self.states(F.normalize(q, dim=-1) / math.sqrt(self.head_width), F.normalize(k, dim=-1), v, decay, b.sigmoid())
        y = self.norm(y).permute(0, 2, 3, 1, 4).reshape(batch, context, -1)
        return self.out(y.to(x.dtype) * F.silu(self.gate(x)))


class Mlp(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.gate = nn.Linear(case.width, case.hidden, bias=False)
        self.up = nn.Linear(case.width, case.hidden, bias=False)
        self.down = nn.Linear(case.hidden, case.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x)), 0.0


class Mixture(nn.Module):
    """Top-k mixture of experts without dropped tokens: rows sorted by expert, multiplied by grouped_mm or one expert after the
    other, as torchtitan does. Returns the sum and the load imbalance."""

    def __init__(self, case):
        super().__init__()
        self.choices = case.choices
        self.router = nn.Linear(case.width, case.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(case.experts, case.hidden, case.width))
        self.up = nn.Parameter(torch.empty(case.experts, case.hidden, case.width))
        self.down = nn.Parameter(torch.empty(case.experts, case.width, case.hidden))

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            affinity = F.linear(x.float(), self.router.weight.float()).softmax(-1)
            weights, chosen = affinity.topk(self.choices)
            weights = weights / weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        counts = torch.zeros(affinity.shape[1], dtype=torch.int64, device=x.device).scatter_add_(
            0, experts, torch.ones_like(experts))
        ends = counts.cumsum(0).to(torch.int32)
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32
        rows = x.to(dtype)[order // self.choices]

        if x.device.type == "cuda":
            def product(rows, weight):
                return F.grouped_mm(rows, weight.to(dtype).transpose(1, 2), offs=ends)
        else:  # on a CPU a loop is slightly faster
            lengths = counts.tolist()

            def product(rows, weight):
                return torch.cat([F.linear(own, w) for own, w in zip(rows.split(lengths), weight.to(dtype))])

        rows = product(F.silu(product(rows, self.gate)) * product(rows, self.up), self.down)
        rows = rows * weights.flatten()[order, None].to(dtype)
        y = torch.zeros_like(x, dtype=dtype).index_add(0, order // self.choices, rows)
        imbalance = (affinity.mean(0) * counts).sum() * (affinity.shape[1] / chosen.numel())
        return y.view(shape), imbalance


class Block(nn.Module):
    def __init__(self, case, index):
        super().__init__()
        self.norm1 = nn.RMSNorm(case.width, eps=NORM_EPS)
        self.attention = DeltaNet(case) if case.linear_heads and (index + 1) % 4 != 0 else Attention(case)
        self.norm2 = nn.RMSNorm(case.width, eps=NORM_EPS)
        self.mlp = Mixture(case) if case.experts else Mlp(case)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y, imbalance = self.mlp(self.norm2(x))
        return x + y, imbalance


class Llama(nn.Module):
    """forward(tokens[B, T], targets[B, T]) is the mean cross-entropy in nats plus the auxiliary loss of mixtures."""

    def __init__(self, case):
        super().__init__()
        self.tokens = nn.Embedding(case.vocab, case.width)
        self.blocks = nn.ModuleList(Block(case, index) for index in range(case.layers))
        self.norm = nn.RMSNorm(case.width, eps=NORM_EPS)
        self.head = nn.Linear(case.width, case.vocab, bias=False)
        half = torch.arange(0, case.width // case.heads, 2) / (case.width // case.heads)
        angles = torch.outer(torch.arange(case.context), ROPE_THETA**-half).repeat(1, 2)
        dtype = torch.float32 if case.dtype == "f32" else torch.bfloat16
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)
        self.bf16_stream = case.bf16_stream
        self.init_weights(case)

    @torch.no_grad()
    def init_weights(self, case):
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("taps.weight"):
                writes_residual = name.endswith(("attention.out.weight", "down.weight", "mlp.down"))
                parameter.normal_(std=INIT_STD / math.sqrt(2 * case.layers) if writes_residual else INIT_STD)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        if self.bf16_stream:
            x = x.to(torch.bfloat16)
        imbalance = 0.0
        for block in self.blocks:
            x, of_block = block(x, self.cos, self.sin)
            imbalance = imbalance + of_block
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1)) + AUX_LOSS * imbalance
