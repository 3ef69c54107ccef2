"""A decoder as numbers: its tensors, its parameters and its FLOPs for each token. Read by all of the planner."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from helpers.planner.conventions import FLOPS
from helpers.planner.records import Record, refuse, with_preset


class Tensor(NamedTuple):
    """The shape of a parameter, [rows, columns], or of several equal ones. A vector, such as a bias, has one column."""

    name: str
    rows: int
    columns: int = 1
    split: str = ""  # "rows" or "columns", whichever tensor parallelism divides
    copies: int = 1

    @property
    def numbers(self) -> int:
        """How many numbers all copies have together."""
        return self.rows * self.columns * self.copies


@dataclass(frozen=True)
class Model(Record):
    """A decoder-only transformer. If kv_heads, head_width or ffn is 0, it follows from heads and width."""

    name: str = "model"
    layers: int = 0
    width: int = 0
    heads: int = 0
    vocab: int = 0
    seq: int = 2048  # tokens in a sample
    kv_heads: int = 0  # heads of keys and values; if there are fewer than ``heads``, groups of queries share one
    head_width: int = 0
    ffn: int = 0  # the MLP's inner width; with experts, that of one expert
    gated: bool = False  # whether an MLP has three matrices (SwiGLU) instead of two
    biases: bool = False  # whether all linear modules of a layer have biases
    qkv_biases: bool = False  # whether those of queries, keys and values have biases
    norm_biases: bool = False  # whether norms have biases, as in LayerNorm; RMSNorm has none
    norms: int = 2  # in a layer; 1 where attention and MLP share theirs
    head_norms: bool = False  # whether the heads of queries and those of keys have a norm, of head_width
    # Multi-head latent attention (DeepSeek-V2, DeepSeek-AI 2024) computes queries from query_rank numbers, and keys and
    # values from kv_rank numbers. position_width more numbers of each query head tell positions; all keys share theirs.
    query_rank: int = 0
    kv_rank: int = 0  # 0 for the usual attention
    position_width: int = 0
    learned_positions: bool = False
    tied: bool = False  # whether the head is the embedding's matrix
    classes: int = 0  # rows of a second embedding, for labels
    experts: int = 0
    active_experts: int = 0  # for each token
    dense_layers: int = 0  # layers before the first one with experts
    dense_ffn: int = 0  # the MLP's inner width in these layers; 0 for the same as an expert's
    shared_experts: int = 0  # experts that see every token, beside the others
    dropout: bool = False  # whether training uses dropout, whose masks are stored for the backward

    POSITIVE: ClassVar[tuple[str, ...]] = ("layers", "width", "heads", "vocab", "seq")

    def __post_init__(self) -> None:
        """Fill in the sizes that follow from others, and refuse, by a PlanError, those that contradict each other."""
        super().__post_init__()
        if self.head_width == 0 and self.width % self.heads != 0:
            refuse(
                f"{self.name}: a width of {self.width} does not divide among {self.heads} heads",
                "another number of heads, or head_width",
            )
        defaults = {"kv_heads": self.heads, "head_width": self.width // self.heads, "ffn": 4 * self.width}
        for field, default in defaults.items():
            if getattr(self, field) == 0:
                object.__setattr__(self, field, default)  # A frozen dataclass can set its own fields only in this way.

        if self.heads % self.kv_heads != 0:
            refuse(
                f"{self.name}: {self.heads} heads cannot share {self.kv_heads} kv_heads",
                "a divisor of heads as kv_heads",
            )
        if self.experts and not 1 <= self.active_experts <= self.experts:
            refuse(
                f"{self.name}: {self.active_experts} of {self.experts} experts cannot be active",
                "1 to experts as active_experts",
            )
        has_query_rank = self.query_rank > 0
        has_kv_rank = self.kv_rank > 0
        if has_query_rank != has_kv_rank:
            problem = f"{self.name}: query_rank is {self.query_rank}, and kv_rank is {self.kv_rank}"
            refuse(problem, "both for latent attention, or neither")

    @property
    def attention_width(self) -> int:
        """The width of all heads side by side. In most models it is the model's width."""
        return self.heads * self.head_width

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of attention's two products in one layer's forward, for one pair of tokens.

        Queries times keys, and scores times values, take 2 FLOPs each for every number of a head.
        """
        score_width = self.heads * (self.head_width + self.position_width)
        return 2 * score_width + 2 * self.attention_width

    @property
    def mlp_matrices(self) -> int:
        """How many matrices an MLP has."""
        if self.gated:
            return 3
        return 2

    @property
    def ffn_of_dense_layers(self) -> int:
        """The inner width of an MLP in a layer without experts."""
        return self.dense_ffn or self.ffn

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this number, from 0 on, has experts instead of one MLP."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def kinds_of_layers(self) -> dict[bool, int]:
        """{whether a layer has experts: how many layers}."""
        if self.experts == 0:
            return {False: self.layers}
        return {False: self.dense_layers, True: self.layers - self.dense_layers}

    def parameters(self, active: bool = False) -> int:
        """How many parameters the model has, or if ``active``, how many of them one token uses.

        GPT has Vh + sh + L(12h² + 13h) + 2h (Radford et al. 2019's code).
        Llama has L(2d·n_h·d_h + 2d·n_kv·d_h + 3df + 2d) + d + 2Vd.
        With E experts the MLP counts E times, and a router adds d·E.
        """
        return self.outer_parameters() + self.layer_parameters(active)

    def outer_parameters(self) -> int:
        """Parameters of the embeddings, the last norm and the head."""
        return sum(tensor.numbers for tensor in outer_tensors(self))

    def layer_parameters(self, active: bool = False) -> int:
        """Parameters of all layers together. If ``active``, only those experts count that one token uses."""
        total = 0
        for has_experts, layers in self.kinds_of_layers.items():
            total += layers * sum(tensor.numbers for tensor in layer_tensors(self, has_experts, active))
        return total

    def gemm_weights(self) -> int:
        """Weights by which a token is multiplied in all layers together: without biases, norms and the output layer."""
        total = 0
        for has_experts, layers in self.kinds_of_layers.items():
            total += layers * sum(matrix.numbers for matrix in matrices_of(self, has_experts))
        return total

    def expert_gemm_weights(self) -> int:
        """How many of ``gemm_weights`` belong to a token's routed experts."""
        if self.experts == 0:
            return 0
        one_expert = self.mlp_matrices * self.width * self.ffn
        return self.kinds_of_layers[True] * self.active_experts * one_expert

    def recomputed_share(self, recompute: str) -> float:
        """The share of the layers' matrix products that the backward computes again, by FLOPs, in 0..1.

        "full": all of them.
        "sac", checkpointing of operations: the second, the fourth and so on. The outputs of the others are kept.
        "selective" and "none": none of them. "selective" recomputes attention alone.
        """
        if recompute == "full":
            return 1.0
        if recompute == "sac":
            sizes = [matrix.numbers for matrix in matrices_of(self, has_experts=self.experts > 0)]
            recomputed = sizes[1::2]
            return sum(recomputed) / sum(sizes)
        return 0.0

    def flops_per_token(self, count: str = "6N+A", recompute: str = "none") -> float:
        """FLOPs of the forward and the backward for one token, by one of the counts that papers use.

        count: N are the parameters, of experts the active ones, E is one embedding's part of them, and A is attention's
        products of all pairs of tokens.
          "6N": Brown et al. 2020, Hoffmann et al. 2022.
          "6N+A": Chowdhery et al. 2022, appendix B.
          "6(N-E)+A", and "6(N-E)+A/2", which leaves out the pairs in which a token would see a later one.
          "gemm": the matrix products alone; 72BLsh²(1 + s/6h + V/12hL) for GPT (Narayanan et al. 2021, equation 2).
        recompute: "full" repeats the layers' forward, 96Bslh²(1 + s/6h + V/16lh) (Narayanan, equation 3).
          "selective" repeats attention, 72BLsh²(1 + s/3h + V/12hL) (Korthikanti et al. 2022, appendix A).
          "sac" repeats every second matrix product (see activations_per_layer).
        """
        # A forward takes a multiplication and an addition for each weight, and a backward twice as many.
        flops_per_weight = 6
        embedding_flops = flops_per_weight * self.vocab * self.width
        layer_flops = flops_per_weight * self.layer_parameters(active=True)
        outer_flops = flops_per_weight * self.outer_parameters()
        # Each token is in a pair with each token of its sample. The backward takes as long as two forwards.
        forwards = 3.0
        attention_flops = forwards * self.layers * self.seq * self.flops_per_pair
        if count == "6N":
            attention_flops = 0
        elif count == "6(N-E)+A":
            outer_flops -= embedding_flops
        elif count == "6(N-E)+A/2":
            outer_flops -= embedding_flops
            attention_flops /= 2
        elif count == "gemm":
            layer_flops = flops_per_weight * self.gemm_weights()
            outer_flops = embedding_flops  # those of the head, which has as many weights as an embedding
        elif count != "6N+A":
            refuse(f"{count!r} is not a count of FLOPs that the planner knows", f"one of {', '.join(FLOPS)}")

        # A forward is a third of forward and backward. So repeating all of it makes four thirds.
        if recompute == "full":
            return (layer_flops + attention_flops) * 4 / 3 + outer_flops
        if recompute == "selective":
            attention_flops *= 2  # as in the paper's formula
        return layer_flops * (1 + self.recomputed_share(recompute) / 3) + attention_flops + outer_flops


KEYS_AND_VALUES = ("key", "key bias", "value", "value bias")
MLP = ("gate", "gate bias", "up", "up bias", "down", "down bias")


@functools.cache
def outer_tensors(model: Model) -> tuple[Tensor, ...]:
    """Every parameter outside the layers, as PyTorch's modules hold it: embeddings, the last norm, and the head.

    Tensor parallelism divides the embedding and the head between their rows, which are the tokens of the vocabulary.
    """
    tensors = [Tensor("embedding", model.vocab, model.width, "rows")]
    if model.learned_positions:
        tensors.append(Tensor("positions", model.seq, model.width))
    if model.classes:
        tensors.append(Tensor("labels", model.classes, model.width))
    tensors += norms(model)
    if not model.tied:
        tensors.append(Tensor("head", model.vocab, model.width, "rows"))
    return tuple(tensors)


@functools.cache
def layer_tensors(model: Model, has_experts: bool, active: bool = False) -> tuple[Tensor, ...]:
    """Every parameter of one layer, with experts or without. Equal matrices of experts are one Tensor with ``copies``.

    active: whether only those experts count that one token uses.
    """
    width = model.width
    tensors = norms(model, model.norms)
    if model.head_norms:
        tensors.append(Tensor("head norm", model.head_width, copies=2))  # for queries and for keys
    if model.kv_rank:
        tensors += latent_queries_keys_and_values(model)
    else:
        tensors += queries_keys_and_values(model)
    tensors += linear("output", width, model.attention_width, "columns", model.biases)

    # The MLP: one, or as many equal ones as there are experts.
    ffn = model.ffn_of_dense_layers
    mlps = 1
    if has_experts:
        tensors.append(Tensor("router", model.experts, width))
        if model.biases:
            tensors.append(Tensor("router bias", model.experts))
        ffn = model.ffn
        if active:
            routed_experts = model.active_experts
        else:
            routed_experts = model.experts
        mlps = model.shared_experts + routed_experts
    if model.gated:
        tensors += linear("gate", ffn, width, "rows", model.biases, copies=mlps)
    tensors += linear("up", ffn, width, "rows", model.biases, copies=mlps)
    tensors += linear("down", width, ffn, "columns", model.biases, copies=mlps)
    return tuple(tensors)


def queries_keys_and_values(model: Model) -> list[Tensor]:
    """The matrices that make queries, keys and values, and their biases if they have any. Their rows are the heads."""
    width = model.width
    kv_width = model.head_width * model.kv_heads
    has_biases = model.biases or model.qkv_biases
    tensors = linear("query", model.attention_width, width, "rows", has_biases)
    tensors += linear("key", kv_width, width, "rows", has_biases)
    tensors += linear("value", kv_width, width, "rows", has_biases)
    return tensors


def latent_queries_keys_and_values(model: Model) -> list[Tensor]:
    """The tensors that make queries, keys and values in multi-head latent attention (DeepSeek-AI 2024, section 2.1).

    A "down" matrix makes few numbers of a token. The queries, keys and values are computed from these. There are no
    biases.
    """
    query_width = model.heads * (model.head_width + model.position_width)
    kv_width = model.heads * model.head_width
    return [
        Tensor("query down", model.query_rank, model.width),
        Tensor("query norm", model.query_rank),
        Tensor("query", query_width, model.query_rank, "rows"),
        Tensor("key and value down", model.kv_rank + model.position_width, model.width),
        Tensor("key and value norm", model.kv_rank),
        Tensor("key", kv_width, model.kv_rank, "rows"),
        Tensor("value", kv_width, model.kv_rank, "rows"),
    ]


def norms(model: Model, copies: int = 1) -> list[Tensor]:
    """The weights, and biases if the model has them, of so many norms."""
    tensors = [Tensor("norm", model.width, copies=copies)]
    if model.norm_biases:
        tensors.append(Tensor("norm bias", model.width, copies=copies))
    return tensors


def linear(name: str, rows: int, columns: int, split: str, bias: bool, copies: int = 1) -> list[Tensor]:
    """The weight of a linear module, and its bias if it has one; or those of several equal modules.

    split: whether tensor parallelism divides the "rows" or the "columns" of the weight. A bias has a number for each
    row, so it is divided only if the rows are.
    """
    tensors = [Tensor(name, rows, columns, split, copies)]
    if bias:
        split_of_bias = ""
        if split == "rows":
            split_of_bias = "rows"
        tensors.append(Tensor(f"{name} bias", rows, columns=1, split=split_of_bias, copies=copies))
    return tensors


@functools.cache
def matrices_of(model: Model, has_experts: bool) -> tuple[Tensor, ...]:
    """The matrices that multiply one token in a layer, in the order in which they do so.

    The matrices of the token's first expert are followed by those of its second expert, and so on. The order of
    layer_tensors is another one: the first matrices of all experts are one Tensor with ``copies``, and their second
    matrices are the next Tensor.
    """
    matrices_before_mlp = []
    matrices_of_expert = []  # or of the only MLP
    experts = 1
    for tensor in layer_tensors(model, has_experts, active=True):
        is_matrix = tensor.columns > 1
        if is_matrix and tensor.name in MLP:
            experts = tensor.copies
            matrices_of_expert.append(tensor._replace(copies=1))
        elif is_matrix:
            matrices_before_mlp.append(tensor)
    return (*matrices_before_mlp, *matrices_of_expert * experts)


Fields = dict[str, Any]
GPT: Fields = {"biases": True, "norm_biases": True, "learned_positions": True, "tied": True, "dropout": True}
LLAMA: Fields = {"gated": True}
QWEN: Fields = {"gated": True, "head_norms": True, "head_width": 128}


def family(common: Fields, seq: int, vocab: int, *rows: tuple[str, int, int, int, Fields]) -> dict[str, Fields]:
    """{name: fields} of models that differ only in their sizes, for the table of presets below.

    common, seq and vocab: what all models of the family have. rows: for each model its name, layers, width, heads, and
    further fields, which win over the common ones.
    """
    presets = {}
    for name, layers, width, heads, further_fields in rows:
        sizes = {"name": name, "layers": layers, "width": width, "heads": heads, "seq": seq, "vocab": vocab}
        presets[name] = {**common, **sizes, **further_fields}
    return presets


# Shapes from the papers and configuration files that book/recorded/published.csv names.
PRESETS: dict[str, Fields] = {
    **family(
        GPT, 1024, 50257,
        ("gpt2", 12, 768, 12, {}), ("gpt2-medium", 24, 1024, 16, {}),
        ("gpt2-large", 36, 1280, 20, {}), ("gpt2-xl", 48, 1600, 25, {}),
    ),
    **family(
        GPT, 2048, 51200,
        ("gpt-1.7b", 24, 2304, 24, {}), ("gpt-3.6b", 30, 3072, 32, {}), ("gpt-7.5b", 36, 4096, 32, {}),
        ("gpt-18b", 40, 6144, 48, {}), ("gpt-22b", 48, 6144, 64, {}), ("gpt-39b", 48, 8192, 64, {}),
        ("gpt-76b", 60, 10240, 80, {}), ("gpt-145b", 80, 12288, 96, {}), ("gpt-175b", 96, 12288, 96, {}),
        ("gpt-310b", 96, 16384, 128, {}), ("gpt-530b", 105, 20480, 128, {}), ("gpt-1t", 128, 25600, 160, {}),
    ),
    **family(
        LLAMA, 4096, 32000,
        ("llama2-7b", 32, 4096, 32, {"ffn": 11008}), ("llama2-13b", 40, 5120, 40, {"ffn": 13824}),
        ("llama2-70b", 80, 8192, 64, {"ffn": 28672, "kv_heads": 8}),
        ("mixtral-8x7b", 32, 4096, 32, {"ffn": 14336, "kv_heads": 8, "experts": 8, "active_experts": 2}),
    ),
    **family(
        LLAMA, 8192, 128256,
        ("llama3-8b", 32, 4096, 32, {"ffn": 14336, "kv_heads": 8}),
        ("llama3-70b", 80, 8192, 64, {"ffn": 28672, "kv_heads": 8}),
        ("llama3-405b", 126, 16384, 128, {"ffn": 53248, "kv_heads": 8}),
    ),
    **family(
        {**GPT, "dropout": False}, 2048, 50368,
        ("mpt-1b", 24, 2048, 16, {}), ("mpt-7b", 32, 4096, 32, {}),
        ("mpt-13b", 40, 5120, 40, {}), ("mpt-30b", 48, 7168, 56, {}),
    ),
    **family(
        {"gated": True, "tied": True, "norms": 1, "kv_heads": 1, "head_width": 256}, 2048, 256000,
        ("palm-8b", 32, 4096, 16, {}), ("palm-62b", 64, 8192, 32, {}), ("palm-540b", 118, 18432, 48, {}),
    ),
    **family(
        QWEN, 4096, 151936,
        ("qwen3-30b-a3b", 48, 2048, 32, {"ffn": 768, "kv_heads": 4, "experts": 128, "active_experts": 8}),
        ("qwen3-8b", 36, 4096, 32, {"ffn": 12288, "kv_heads": 8}),
        ("qwen3-32b", 64, 5120, 64, {"ffn": 25600, "kv_heads": 8}),
    ),
    # GPT-OSS attends to 128 tokens only in every second layer, which is not counted.
    **family(
        {"gated": True, "biases": True, "head_width": 64, "kv_heads": 8, "ffn": 2880, "active_experts": 4},
        4096, 201088,
        ("gpt-oss-20b", 24, 2880, 64, {"experts": 32}), ("gpt-oss-120b", 36, 2880, 64, {"experts": 128}),
    ),
    **family(
        {
            "gated": True, "head_width": 128, "query_rank": 1536, "kv_rank": 512, "position_width": 64,
            "dense_ffn": 18432, "ffn": 2048, "active_experts": 8, "shared_experts": 1,
        },
        4096, 129280,
        ("deepseek-v3", 61, 7168, 128, {"experts": 256, "dense_layers": 3}),
        ("kimi-k2", 61, 7168, 64, {"experts": 384, "dense_layers": 1, "vocab": 163840}),
    ),
    # The book's own: helpers/runtime/models.py.
    **family(
        {"biases": True, "norm_biases": True, "learned_positions": True, "classes": 10}, 64, 17,
        ("pixels", 4, 64, 4, {}),
    ),
}  # fmt: skip


def model_of(model: str | dict[str, Any] | Model) -> Model:
    """Make a Model from a preset's name or from a dict of fields, which may name a preset under "preset"."""
    return Model.of(with_preset(model, PRESETS, "model"))
