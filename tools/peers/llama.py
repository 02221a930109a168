"""Llama 3 in plain torch.nn: rotary positions, grouped queries, SwiGLU, RMSNorm, a head of its own; shapes and first
weights are Sheaf's."""

import math

import torch
from torch import nn
from torch.nn import functional as F

INIT_STD = 0.02
ROPE_THETA = 500000.0
NORM_EPS = 1e-5


def turned(x, cos, sin):
    """Pairs of x[batch, heads, context, width of a head], half of the width apart, turned by their places."""
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


class Block(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.norm1 = nn.RMSNorm(case.width, eps=NORM_EPS)
        self.attention = Attention(case)
        self.norm2 = nn.RMSNorm(case.width, eps=NORM_EPS)
        self.gate = nn.Linear(case.width, case.hidden, bias=False)
        self.up = nn.Linear(case.width, case.hidden, bias=False)
        self.down = nn.Linear(case.hidden, case.width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """forward(tokens[B, T], targets[B, T]) is the mean cross-entropy in nats."""

    def __init__(self, case):
        super().__init__()
        self.tokens = nn.Embedding(case.vocab, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = nn.RMSNorm(case.width, eps=NORM_EPS)
        self.head = nn.Linear(case.width, case.vocab, bias=False)
        half = torch.arange(0, case.width // case.heads, 2) / (case.width // case.heads)
        angles = torch.outer(torch.arange(case.context), ROPE_THETA**-half).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(torch.bfloat16), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.bfloat16), persistent=False)
        self.bf16_stream = case.bf16_stream
        self.init_weights(case)

    @torch.no_grad()
    def init_weights(self, case):
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                writes_residual = name.endswith(("attention.out.weight", "down.weight"))
                parameter.normal_(std=INIT_STD / math.sqrt(2 * case.layers) if writes_residual else INIT_STD)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        if self.bf16_stream:
            x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
