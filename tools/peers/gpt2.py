"""GPT-2 in plain torch.nn: learned positions, pre-norm blocks, GELU (tanh), tied head; shapes and first weights are
Sheaf's."""

import math

import torch
from torch import nn
from torch.nn import functional as F

INIT_STD = 0.02


class Attention(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.heads = case.heads
        self.qkv = nn.Linear(case.width, 3 * case.width, bias=case.bias)
        self.out = nn.Linear(case.width, case.width, bias=case.bias)

    def forward(self, x, cache=None, position=0):
        """cache: keys and values [2, batch, heads, tokens, width of a head], of those before `position`; these are written to it."""
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [batch, heads, context, width of a head] each
        if cache is not None:
            end = position + context
            cache[0, :, :, position:end] = k
            cache[1, :, :, position:end] = v
            k, v = cache[:, :, :, :end].unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=position == 0)
        return self.out(y.transpose(1, 2).reshape(batch, context, width))


class Mlp(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.up = nn.Linear(case.width, 4 * case.width, bias=case.bias)
        self.down = nn.Linear(4 * case.width, case.width, bias=case.bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.norm1 = nn.LayerNorm(case.width, bias=case.bias)
        self.attention = Attention(case)
        self.norm2 = nn.LayerNorm(case.width, bias=case.bias)
        self.mlp = Mlp(case)

    def forward(self, x, cache=None, position=0):
        x = x + self.attention(self.norm1(x), cache, position)
        return x + self.mlp(self.norm2(x))


class Gpt2(nn.Module):
    """forward(tokens[B, T], targets[B, T]) is the mean cross-entropy in nats."""

    def __init__(self, case):
        super().__init__()
        self.tokens = nn.Embedding(case.vocab, case.width)
        length = case.context + case.generated
        self.positions = nn.Embedding(length, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = nn.LayerNorm(case.width, bias=case.bias)
        self.register_buffer("places", torch.arange(length), persistent=False)
        self.bf16_stream = case.bf16_stream
        self.init_weights(case)

    @torch.no_grad()
    def init_weights(self, case):
        # Small first weights matter for time too: confident logits would have denormal gradients, on which products are
        # 20 times slower.
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() >= 2:
                writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                parameter.normal_(std=INIT_STD / math.sqrt(2 * case.layers) if writes_residual else INIT_STD)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(self.places)
        if self.bf16_stream:
            x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    @torch.inference_mode()
    def generate(self, tokens, count):
        """`count` tokens that continue tokens[B, T], sampled from the softmax: [B, count]."""
        made, position = [], 0
        weight = self.tokens.weight
        width = weight.shape[1] // self.blocks[0].attention.heads
        caches = [torch.empty(2, len(tokens), block.attention.heads, tokens.shape[1] + count, width, dtype=weight.dtype)
                  for block in self.blocks]
        for _ in range(count):
            end = position + tokens.shape[1]
            x = self.tokens(tokens) + self.positions(self.places[position:end])
            for block, cache in zip(self.blocks, caches):
                x = block(x, cache, position)
            logits = F.linear(self.norm(x[:, -1]), weight)
            tokens = torch.multinomial(torch.softmax(logits.float(), -1), 1)
            made.append(tokens)
            position = end
        return torch.cat(made, 1)
