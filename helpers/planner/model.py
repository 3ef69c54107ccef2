"""A decoder as numbers: parameters and FLOPs for each token. Read by all of the planner."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from helpers.planner.records import Record, look_up, refuse, with_preset


class Tensor(NamedTuple):
    """A parameter of [rows, columns], and which of the two tensor parallelism divides."""

    part: str
    rows: int
    columns: int = 1
    split: str = ""


@dataclass(frozen=True)
class Model(Record):
    """A decoder-only transformer. Zeros are filled in: kv_heads, head_width and ffn from heads and width."""

    name: str = "model"
    layers: int = 0
    width: int = 0
    heads: int = 0
    vocab: int = 0
    seq: int = 2048  # tokens in a sample
    kv_heads: int = 0  # fewer than heads: grouped queries; 1: one for all
    head_width: int = 0
    ffn: int = 0  # the MLP's inner width; with experts, that of one expert
    gated: bool = False  # three matrices in an MLP (SwiGLU) instead of two
    biases: bool = False  # of all linear layers of a block
    qkv_biases: bool = False  # of the query, key and value only
    norm_biases: bool = False  # LayerNorm with a bias; RMSNorm has none
    norms: int = 2  # in a layer; 1 where attention and MLP share theirs
    head_norms: bool = False  # a norm of head_width for queries and one for keys
    learned_positions: bool = False
    tied: bool = False  # the output layer is the embedding's matrix
    classes: int = 0  # rows of a second embedding, for labels
    experts: int = 0
    active_experts: int = 0  # for each token
    dense_layers: int = 0  # layers before the first one with experts
    dense_ffn: int = 0  # the MLP's inner width in these
    shared_experts: int = 0  # that see every token
    dropout: bool = False  # in training; its masks are stored for backward

    # {field: (smallest, largest)}. Each layer and each expert is counted, one after the other; divisors are listed.
    LIMITS: ClassVar[dict[str, tuple[float, float]]] = {
        **dict.fromkeys(("layers", "heads"), (1, 10_000)),
        **dict.fromkeys(("norms", "experts", "shared_experts"), (0, 10_000)),
        **dict.fromkeys(("width", "vocab", "seq"), (1, 10**9)),
        **dict.fromkeys(("head_width", "ffn", "dense_ffn", "classes"), (0, 10**9)),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        name, experts, active = self.name, self.experts, self.active_experts
        if not self.head_width and self.width % self.heads:
            what = f"{name}: a width of {self.width} does not divide among {self.heads} heads"
            refuse(what, "another number of heads, or head_width")
        for field, value in self.derived().items():
            if not getattr(self, field):
                object.__setattr__(self, field, value)
        if self.heads % self.kv_heads:
            what = f"{name}: {self.heads} heads cannot share {self.kv_heads} kv_heads"
            refuse(what, "a divisor of heads as kv_heads")
        if active > experts or (experts and not active):
            refuse(f"{name}: {active} of {experts} experts cannot be active", "1 to experts as active_experts")
        for field in ("dense_layers", "shared_experts"):
            if getattr(self, field) and not experts:
                refuse(f"{name}: {field} is {getattr(self, field)} without experts", "experts, too")
        if experts and self.dense_layers >= self.layers:
            what = f"{name}: {self.dense_layers} dense_layers of {self.layers} leave none for experts"
            refuse(what, f"at most {self.layers - 1} as dense_layers")

    def derived(self) -> dict[str, int]:
        """{field: what it is filled in with where it is 0}."""
        ffn, head_width = 4 * self.width, self.width // self.heads
        return {"kv_heads": self.heads, "head_width": head_width, "ffn": ffn, "dense_ffn": self.ffn or ffn}

    def with_(self, **changes: Any) -> Self:
        """This model with other numbers; what was filled in from those that change is filled in anew."""
        anew = {name: 0 for name, value in self.derived().items() if getattr(self, name) == value}
        return super().with_(**(anew | changes))

    @property
    def attention_width(self) -> int:
        """All heads side by side; the width in most models."""
        return self.heads * self.head_width

    @property
    def matrices(self) -> int:
        """Matrices of one MLP."""
        return 3 if self.gated else 2

    def has_experts(self, layer: int) -> bool:
        return bool(self.experts) and layer >= self.dense_layers

    def like(self, layer: int) -> int:
        """The last layer or the first, whichever is equal to this one: only experts make a difference."""
        return self.layers - 1 if self.has_experts(layer) else 0

    def parameters(self, active: bool = False) -> int:
        """All parameters; those that one token uses, if active.

        GPT: Vh + sh + L(12h² + 13h) + 2h (Radford et al. 2019's code). Llama: L(2d·n_h·d_h + 2d·n_kv·d_h + 3df + 2d)
        + d + 2Vd. With experts the MLP counts E times, plus a router d·E.
        """
        return size_of(self) + sum(size_of(self, self.like(layer), active) for layer in range(self.layers))

    def tensors(self, layer: int | None = None, active: bool = False) -> list[Tensor]:
        """Every parameter of one layer, or outside the layers, as PyTorch's modules hold it; active: see parameters."""
        width, queries = self.width, self.attention_width
        norm = [Tensor("norm", width)] * (2 if self.norm_biases else 1)
        if layer is None:
            outer = [Tensor("embedding", self.vocab, width, "rows")]
            outer += [Tensor("positions", self.seq, width)] * self.learned_positions
            outer += [Tensor("labels", self.classes, width)] * (self.classes > 0) + norm
            return outer + [Tensor("head", self.vocab, width, "rows")] * (not self.tied)
        kv = self.head_width * self.kv_heads
        tensors = norm * self.norms + [Tensor("head norm", self.head_width)] * 2 * self.head_norms
        for name, rows in (("query", queries), ("key", kv), ("value", kv)):
            tensors.append(Tensor(name, rows, width, "rows"))
            tensors += [Tensor(f"{name} bias", rows, 1, "rows")] * (self.biases or self.qkv_biases)
        tensors += [Tensor("output", width, queries, "columns")] + [Tensor("output bias", width)] * self.biases
        ffn, copies = (self.dense_ffn if self.experts else self.ffn), 1
        if self.has_experts(layer):
            tensors.append(Tensor("router", self.experts, width))
            ffn, copies = self.ffn, (self.active_experts if active else self.experts) + self.shared_experts
        into = [Tensor("up", ffn, width, "rows")] + [Tensor("up bias", ffn, 1, "rows")] * self.biases
        back = [Tensor("down", width, ffn, "columns")] + [Tensor("down bias", width)] * self.biases
        return tensors + (into * (self.matrices - 1) + back) * copies

    def recomputed_share(self, recompute: str) -> float:
        """The share of the layers' matrix products in forward that backward repeats; "sac": every second one."""
        if recompute != "sac":
            return float(recompute == "full")
        sizes = [tensor.rows * tensor.columns for tensor in products_of(self, self.layers - 1)]
        return sum(sizes[1::2]) / sum(sizes)

    def gemm_weights(self) -> int:
        """Weights that multiply each token, in the layers; without biases, norms and the output layer."""
        return sum(size_of(self, self.like(layer), active=True, matrices=True) for layer in range(self.layers))

    def flops_per_token(self, count: str = "6N+A", recompute: str = "none") -> float:
        """FLOPs of forward and backward for one token.

        count: "6N" (Brown et al. 2020, Hoffmann et al. 2022), "6N+A" (Chowdhery et al. 2022, appendix B), "6(N-E)+A"
        and "6(N-E)+A/2" (one embedding left out; half of A, as no token sees later ones), "gemm" (Narayanan et al.
        2021, equation 2: 72BLsh²(1 + s/6h + V/12hL), here from the weights, so that it holds for every MLP).
        recompute: "full" repeats the layers' forward, 96Bslh²(1 + s/6h + V/16lh) (Narayanan, equation 3);
        "selective" counts attention's A twice, 72BLsh²(1 + s/3h + V/12hL) (Korthikanti et al. 2022, appendix A);
        "sac" repeats every second matrix (see activations_per_layer).
        N counts the active parameters of a mixture of experts.
        """
        attention = 12.0 * self.layers * self.attention_width * self.seq  # A: every pair of tokens, there and back
        embedding, outer = self.vocab * self.width, size_of(self)  # E
        inner = self.parameters(active=True) - outer
        counts = {  # FLOPs of the layers' matrices, of attention, and outside the layers
            "6N": (6 * inner, 0, 6 * outer),
            "6N+A": (6 * inner, attention, 6 * outer),
            "6(N-E)+A": (6 * inner, attention, 6 * (outer - embedding)),
            "6(N-E)+A/2": (6 * inner, attention / 2, 6 * (outer - embedding)),
            "gemm": (6 * self.gemm_weights(), attention, 6 * embedding),
        }
        matrices, attention, rest = look_up(counts, count, "count of FLOPs")
        if recompute == "full":
            return (matrices + attention) * 4 / 3 + rest
        again = 1 + self.recomputed_share(recompute) / 3
        return matrices * again + attention * (2 if recompute == "selective" else 1) + rest


@functools.cache
def copies_of(model: Model, layer: int | None = None, active: bool = False) -> tuple[tuple[Tensor, int], ...]:
    """((Tensor, how many there are of it), …) of a model's tensors."""
    return tuple(Counter(model.tensors(layer, active)).items())


@functools.cache
def products_of(model: Model, layer: int) -> tuple[Tensor, ...]:
    """The matrices that multiply a token in a layer, in order."""
    return tuple(tensor for tensor in model.tensors(layer, active=True) if tensor.columns > 1)


@functools.cache
def size_of(model: Model, layer: int | None = None, active: bool = False, matrices: bool = False) -> int:
    """Parameters of a layer, or of what is outside the layers; of its matrices alone, if matrices."""
    tensors = copies_of(model, layer, active)
    return sum(tensor.rows * tensor.columns * copies for tensor, copies in tensors if tensor.columns > matrices)


Fields = dict[str, Any]
GPT: Fields = {"biases": True, "norm_biases": True, "learned_positions": True, "tied": True, "dropout": True}
LLAMA: Fields = {"gated": True}
QWEN: Fields = {"gated": True, "head_norms": True, "head_width": 128}


def shapes(common: Fields, seq: int, vocab: int, *rows: tuple[str, int, int, int, Fields]) -> dict[str, Fields]:
    """{name: fields} of models that differ in size only; a row is name, layers, width, heads, and more fields."""
    return {
        name: {"name": name, "layers": layers, "width": width, "heads": heads, "seq": seq, "vocab": vocab}
        | common
        | more
        for name, layers, width, heads, more in rows
    }


# Shapes from the papers and configuration files that book/recorded/published.csv names.
PRESETS: dict[str, Fields] = {
    **shapes(
        GPT, 1024, 50257,
        ("gpt2", 12, 768, 12, {}), ("gpt2-medium", 24, 1024, 16, {}),
        ("gpt2-large", 36, 1280, 20, {}), ("gpt2-xl", 48, 1600, 25, {}),
    ),
    **shapes(
        GPT, 2048, 51200,
        ("gpt-1.7b", 24, 2304, 24, {}), ("gpt-3.6b", 30, 3072, 32, {}), ("gpt-7.5b", 36, 4096, 32, {}),
        ("gpt-18b", 40, 6144, 48, {}), ("gpt-22b", 48, 6144, 64, {}), ("gpt-39b", 48, 8192, 64, {}),
        ("gpt-76b", 60, 10240, 80, {}), ("gpt-145b", 80, 12288, 96, {}), ("gpt-175b", 96, 12288, 96, {}),
        ("gpt-310b", 96, 16384, 128, {}), ("gpt-530b", 105, 20480, 128, {}), ("gpt-1t", 128, 25600, 160, {}),
    ),
    **shapes(
        LLAMA, 4096, 32000,
        ("llama2-7b", 32, 4096, 32, {"ffn": 11008}), ("llama2-13b", 40, 5120, 40, {"ffn": 13824}),
        ("llama2-70b", 80, 8192, 64, {"ffn": 28672, "kv_heads": 8}),
        ("mixtral-8x7b", 32, 4096, 32, {"ffn": 14336, "kv_heads": 8, "experts": 8, "active_experts": 2}),
    ),
    **shapes(
        LLAMA, 8192, 128256,
        ("llama3-8b", 32, 4096, 32, {"ffn": 14336, "kv_heads": 8}),
        ("llama3-70b", 80, 8192, 64, {"ffn": 28672, "kv_heads": 8}),
        ("llama3-405b", 126, 16384, 128, {"ffn": 53248, "kv_heads": 8}),
    ),
    **shapes(
        {**GPT, "dropout": False}, 2048, 50368,
        ("mpt-1b", 24, 2048, 16, {}), ("mpt-7b", 32, 4096, 32, {}),
        ("mpt-13b", 40, 5120, 40, {}), ("mpt-30b", 48, 7168, 56, {}),
    ),
    **shapes(
        {"gated": True, "tied": True, "norms": 1, "kv_heads": 1, "head_width": 256}, 2048, 256000,
        ("palm-8b", 32, 4096, 16, {}), ("palm-62b", 64, 8192, 32, {}), ("palm-540b", 118, 18432, 48, {}),
    ),
    **shapes(
        QWEN, 4096, 151936,
        ("qwen3-30b-a3b", 48, 2048, 32, {"ffn": 768, "kv_heads": 4, "experts": 128, "active_experts": 8}),
        ("qwen3-8b", 36, 4096, 32, {"ffn": 12288, "kv_heads": 8}),
        ("qwen3-32b", 64, 5120, 64, {"ffn": 25600, "kv_heads": 8}),
    ),
    # The book's own: helpers/runtime/models.py.
    **shapes(
        {"biases": True, "norm_biases": True, "learned_positions": True, "classes": 10}, 64, 17,
        ("pixels", 4, 64, 4, {}),
    ),
}  # fmt: skip


def model_of(model: str | dict[str, Any] | Model) -> Model:
    """A Model from a preset's name or from a table of fields, which may name a preset under "preset"."""
    return Model.of(with_preset(model, PRESETS, "model"))
