"""How a job is divided among ranks, refused where it cannot be. Read by all of the planner."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from helpers.planner.cluster import Cluster
from helpers.planner.model import Model
from helpers.planner.records import LARGEST, Record, refuse

BYTES = {"float32": 4, "tf32": 4}  # others 2: with float8, matrices are multiplied, not kept
ENDS = 2  # the embedding and the head, where stages count them as a layer each


@dataclass(frozen=True)
class Layout(Record):
    """Sizes of the mesh's dimensions, and what each step does. GPUs: dp · tp · pp · cp."""

    dp: int = 1  # ranks that see other samples
    tp: int = 1  # ranks that share each matrix
    pp: int = 1  # pipeline stages
    cp: int = 1  # ranks that share a sample's tokens
    ep: int = 1  # ranks that share the experts, taken from dp · cp
    zero: Literal[0, 1, 2, 3] = 0  # 0 for DDP, 1 to 3 for what dp · cp ranks share; 3 is FSDP
    shard: int = 0  # ranks that share it; 0 for all dp · cp, fewer for HSDP
    micro_batch: int = 1  # samples in one forward of one rank
    batch: int = 0  # samples in a step, all ranks together; 0 for one micro-batch each
    interleave: int = 1  # pieces of the model on each stage: v
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    recompute: Literal["none", "selective", "sac", "full"] = "none"  # attention's scores; whole operations; layers
    sequence_parallel: bool = False  # norms and dropout divided by tp, too
    attention: Literal["flash", "scores"] = "flash"  # "scores" stores the s · s matrix
    dtype: str = "bfloat16"  # of matrix products; with float8, of the layers' linear ones alone
    offload: bool = False  # optimizer's state in the host's memory
    uneven_stages: bool = False  # layers need not divide by stages
    outer_layers: bool = False  # stages count the embedding and the head as a layer each

    LIMITS: ClassVar[dict[str, tuple[float, float]]] = dict.fromkeys(
        ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"), (1, LARGEST)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        samples, ranks = self.dp * self.micro_batch, self.data_ranks
        if not self.batch:
            object.__setattr__(self, "batch", samples)
        if self.batch % samples:
            what = f"a batch of {self.batch} does not divide into {self.dp} x {self.micro_batch} (dp x micro_batch)"
            refuse(what, f"a multiple of {samples} as batch")
        if self.shard and ranks % self.shard:
            refuse(f"shard = {self.shard} does not divide dp x cp = {ranks}", f"a divisor of {ranks}, or 0 for all")
        if self.shard and not self.zero:
            refuse(f"shard = {self.shard} shares nothing with zero = 0", "zero = 3 for HSDP, or no shard")
        if ranks % self.ep:
            what = f"ep = {self.ep} does not divide dp x cp = {ranks}: experts are shared among these"
            refuse(what, f"a divisor of {ranks} as ep")
        if self.interleave > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            what = f"micro-batches ({self.micro_batches}) that divide by pp = {self.pp}"
            refuse(f"interleave = {self.interleave} needs stages, and {what}", "interleave = 1, or another batch")

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks whose gradients are averaged: a sample's tokens are also divided among cp."""
        return self.dp * self.cp

    @property
    def sharers(self) -> int:
        """Ranks that share states under ZeRO."""
        return (self.shard or self.data_ranks) if self.zero else 1

    @property
    def norm_sharers(self) -> int:
        """Ranks that divide norms and dropout, which tensor parallelism alone does not divide."""
        return self.tp if self.sequence_parallel else 1

    @property
    def micro_batches(self) -> int:
        """Forwards of one rank in a step: m."""
        return self.batch // (self.dp * self.micro_batch)

    @property
    def element_bytes(self) -> int:
        """Bytes of a number that is computed with."""
        return BYTES.get(self.dtype, 2)

    @property
    def other_dtype(self) -> str:
        """That of attention and the head: torchtitan and Megatron-LM multiply the layers' linear ones in float8."""
        return "bfloat16" if self.dtype == "float8" else self.dtype

    def tokens(self, model: Model) -> int:
        """Tokens in one forward of one rank."""
        return self.micro_batch * model.seq // self.cp

    def stage_layers(self, model: Model) -> list[int]:
        """[layers of each pipeline stage]; where they do not divide, the middle stages have one more.

        outer_layers: the first has one fewer, and so has the last (account_for_embedding_in_pipeline_split and
        account_for_loss_in_pipeline_split of Megatron-LM).
        """
        each, rest = divmod(model.layers + ENDS * self.outer_layers, self.pp)
        first = (self.pp - rest) // 2
        sizes = [each + (first <= stage < first + rest) for stage in range(self.pp)]
        for end in (0, -1):
            sizes[end] -= self.outer_layers
        return sizes

    def layers_of(self, model: Model, stage: int) -> range:
        """The numbers of a stage's layers."""
        sizes = self.stage_layers(model)
        start = sum(sizes[:stage])
        return range(start, start + sizes[stage])

    def check(self, model: Model, cluster: Cluster | None = None) -> Self:
        """Raise a PlanError where this model on this cluster cannot be divided so; return the layout."""
        heads, kv_heads, layers, tp, ep = model.heads, model.kv_heads, model.layers, self.tp, self.ep
        if heads % tp:
            refuse(f"{heads} heads do not divide by tp = {tp}", f"one of {divisors(heads)} as tp")
        if kv_heads % tp and tp % kv_heads:
            what = f"{kv_heads} kv_heads neither divide by tp = {tp} nor divide it"
            refuse(what, f"one of {divisors(kv_heads)} as tp")
        if model.ffn % tp:
            refuse(f"an MLP of {model.ffn} does not divide by tp = {tp}", "a divisor of ffn as tp")
        stages = self.pp * self.interleave
        if stages > layers or 0 in self.stage_layers(model):
            what = f"{layers} layers cannot fill {stages} stages (pp x interleave)"
            refuse(what, f"at most {layers - ENDS * self.outer_layers} as pp x interleave")
        placed = layers + ENDS * self.outer_layers
        if placed % stages and not (self.uneven_stages and self.interleave == 1):
            ends_fit = (layers + ENDS) % stages == 0
            other = "outer_layers = true" if ends_fit else "uneven_stages = true with interleave = 1"
            what = f"{placed} layers do not divide into {stages} stages (pp x interleave)"
            refuse(what, f"a divisor of {placed}, or {other}")
        pieces = self.cp * self.norm_sharers
        if model.seq % pieces:
            hint = f"a divisor of {model.seq} as cp, or a multiple of {pieces} as the model's seq"
            refuse(f"{model.seq} tokens do not divide into {pieces} pieces", hint)
        if ep > 1 and not model.experts:
            refuse(f"{model.name} has no experts to divide by ep = {ep}", "ep = 1")
        if model.experts % ep:
            refuse(f"{model.experts} experts do not divide by ep = {ep}", f"one of {divisors(model.experts)} as ep")
        if cluster:
            cluster.peak(self.dtype), cluster.peak(self.other_dtype)
        if cluster and self.gpus != cluster.gpus:
            product = f"dp x tp x pp x cp = {self.dp} x {tp} x {self.pp} x {self.cp} = {self.gpus}"
            refuse(f"{product} is not the cluster's {cluster.gpus} GPUs", f"sizes whose product is {cluster.gpus}")
        return self


def divisors(number: int) -> str:
    """The divisors as text, the largest last."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
