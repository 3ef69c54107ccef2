"""The models that the chapters share."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp(width: int = 256) -> nn.Sequential:
    """A two-layer classifier of digits: float32 [batch, 64] to logits [batch, 10]."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class PixelBlock(nn.Module):
    """A causal layer of a transformer: [batch, pixels, width] to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, pixels, width] to [batch, heads, pixels, head_width]."""
        # With tensor parallelism a rank has only some heads, so -1 infers their number.
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        query = self.split_heads(self.query(y))
        key = self.split_heads(self.key(y))
        value = self.split_heads(self.value(y))
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class PixelTransformer(nn.Module):
    """Predicts each pixel's grey level from the label and the pixels before it.

    Grey levels int64 [batch, 64], labels int64 [batch] to logits [batch, 64, levels].
    """

    def __init__(
        self, width: int = 64, layers: int = 4, heads: int = 4, levels: int = 17
    ) -> None:
        super().__init__()
        self.label = nn.Embedding(10, width)
        self.level = nn.Embedding(levels, width)
        self.position = nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(PixelBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, levels, bias=False)

    def forward(self, grey: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # The label comes before the first pixel, and the last pixel predicts nothing.
        x = torch.cat([self.label(labels)[:, None], self.level(grey[:, :-1])], dim=1)
        x = x + self.position  # [batch, pixels, width]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_weights(part: nn.Module, device: torch.device | str) -> None:
    """Give a part of a model memory on a device, and initialize its layers' weights.

    The model was built under ``torch.device("meta")``, so it has shapes, but no memory.
    """
    part.to_empty(device=device)
    for layer in part.modules():
        reset_parameters = getattr(layer, "reset_parameters", None)
        if reset_parameters is not None:
            reset_parameters()
