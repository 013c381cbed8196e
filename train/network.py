"""The models for training, in PyTorch, with every expert computed for every token.

The experts are small. On a GPU it is faster to compute all of them as one wide feed-forward, and to multiply each
expert's activations by its routing weight (zero if it is not routed), than to sort tokens; the function is equal. Names
and shapes suit training speed; `export.py` converts them to the published architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SPAN = 5  # consecutive tokens whose routed experts are compared or united, as in one verification


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, dense if `experts` is 0; `ffn` is the intermediate size of it or of one expert."""

    vocab: int = 4096
    hidden: int = 160
    layers: int = 16
    heads: int = 5
    kv_heads: int = 1
    head_dim: int = 32
    ffn: int = 160
    experts: int = 0
    top_k: int = 2
    shared: int = 0  # intermediate size of a shared expert, which runs for every token and is gated per token
    renormalise: bool = True  # the weights of the routed experts sum to one
    attention_bias: bool = False
    rope_theta: float = 10_000.0
    eps: float = 1e-5


def rotary(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of every position."""  # 2 x [length, head_dim]
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding."""  # x: [batch, heads, length, head_dim]
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.hidden, q, bias=shape.attention_bias)
        self.k = nn.Linear(shape.hidden, kv, bias=shape.attention_bias)
        self.v = nn.Linear(shape.hidden, kv, bias=shape.attention_bias)
        self.o = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v, is_causal=True, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Gated feed-forward layer, dense or with all experts stacked."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        stack = (max(1, shape.experts), shape.ffn, shape.hidden)
        self.gate = nn.Parameter(torch.empty(stack))
        self.up = nn.Parameter(torch.empty(stack))
        self.down = nn.Parameter(torch.empty(stack))  # transposed: [experts, ffn, hidden]
        if shape.experts:
            self.router = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        if shape.shared:
            self.shared_gate = nn.Parameter(torch.empty(1, shape.shared, shape.hidden))
            self.shared_up = nn.Parameter(torch.empty(1, shape.shared, shape.hidden))
            self.shared_down = nn.Parameter(torch.empty(1, shape.shared, shape.hidden))
            self.shared_weight = nn.Parameter(torch.empty(1, shape.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the load-balancing and the overlap loss of this layer (zero if dense)."""
        h = F.silu(F.linear(x, self.gate.flatten(0, 1))) * F.linear(x, self.up.flatten(0, 1))
        if not self.shape.experts:
            return h @ self.down.flatten(0, 1).to(h.dtype), x.new_zeros(()), x.new_zeros(())
        s = self.shape
        probs = route(x, self.router)  # [batch, length, experts]
        top, index = probs.topk(s.top_k, dim=-1)
        chosen = torch.zeros_like(probs).scatter(-1, index, 1.0)
        weights = probs * chosen
        if s.renormalise:
            weights = weights / top.sum(dim=-1, keepdim=True)
        h = (h.unflatten(-1, (s.experts, s.ffn)) * weights.to(h.dtype)[..., None]).flatten(-2)
        out = h @ self.down.flatten(0, 1).to(h.dtype)
        if s.shared:
            common = F.silu(F.linear(x, self.shared_gate[0])) * F.linear(x, self.shared_up[0])
            out = out + torch.sigmoid(F.linear(x, self.shared_weight)) * (common @ self.shared_down[0].to(common.dtype))
        # fraction of tokens times mean probability per expert, as in Switch Transformers: 1 if balanced
        balance = s.experts * (chosen.mean(dim=(0, 1)) / s.top_k * probs.mean(dim=(0, 1))).sum()
        return out, balance, overlap(probs, chosen, s.top_k)


def overlap(probs: Tensor, chosen: Tensor, top_k: int) -> Tensor:
    """Return the probability that goes to experts of the SPAN - 1 tokens before: 1 if tokens route independently.

    `probs` and `chosen` (0 or 1): [batch, length, experts]. As in the load-balancing loss, only `probs` has a gradient.
    """
    length, experts = probs.shape[1:]
    before = torch.stack([chosen[:, SPAN - 1 - back : length - back] for back in range(1, SPAN)]).mean(0)
    return experts / top_k * (before * probs[:, SPAN - 1 :]).sum(-1).mean()


def route(x: Tensor, router: Tensor) -> Tensor:
    """Return routing probabilities in float32."""  # x: [..., hidden] -> [..., experts]
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), router.float()).softmax(dim=-1)


class Layer(nn.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.attention = Attention(shape)
        self.norm2 = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the hidden states after the layer and after attention, and the load-balancing and overlap losses."""
        x = x + self.attention(self.norm1(x), cos, sin)
        out, balance, overlapping = self.ffn(self.norm2(x))
        return x + out, x, balance, overlapping


class Output(NamedTuple):
    """Outputs of a forward pass."""

    logits: Tensor  # [batch, length, vocabulary]
    balance: Tensor  # load-balancing loss, mean over layers
    overlap: Tensor  # overlap loss, mean over layers
    taps: list[Tensor]  # per layer, the hidden states after attention, which prediction feeds to a target's router


class Decoder(nn.Module):
    """Language model with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                std = 0.02 if name.startswith("embed") else shape.hidden**-0.5
                small = name.endswith(("attention.o.weight", "down"))  # projections that write to the residual stream
                nn.init.normal_(parameter, std=std / (2 * shape.layers) ** 0.5 if small else std)
            elif "norm" not in name:
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Output:
        """Run the model on complete windows."""  # tokens: [batch, length]
        cos, sin = rotary(self.shape, tokens.shape[1], tokens.device)
        x = self.embed(tokens)
        taps, balances, overlaps = [], [], []
        for layer in self.layers:
            x, tap, balance, overlapping = layer(x, cos, sin)
            taps.append(tap)
            balances.append(balance)
            overlaps.append(overlapping)
        logits = F.linear(self.norm(x), self.embed.weight)
        return Output(logits, torch.stack(balances).mean(), torch.stack(overlaps).mean(), taps)
