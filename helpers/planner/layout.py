"""How a job is divided among ranks, refused where it cannot be. Read by all of the planner."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from helpers.planner.cluster import Cluster
from helpers.planner.model import Model
from helpers.planner.records import LARGEST, PlanError, check_fields, from_table


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's dimensions, and what each step does. GPUs: dp · tp · pp · cp."""

    dp: int = 1  # ranks that see other samples
    tp: int = 1  # ranks that share each matrix
    pp: int = 1  # pipeline stages
    cp: int = 1  # ranks that share a sample's tokens
    ep: int = 1  # ranks that share the experts, taken from dp · cp
    zero: int = 0  # 0 for DDP, 1 to 3 for what dp · cp ranks share; 3 is FSDP
    shard: int = 0  # ranks that share it; 0 for all dp · cp, fewer for HSDP
    micro_batch: int = 1  # samples in one forward of one rank
    batch: int = 0  # samples in a step, all ranks together; 0 for one micro-batch each
    interleave: int = 1  # pieces of the model on each stage: v
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = False  # norms and dropout divided by tp, too
    attention: str = "flash"  # or "scores", which stores the s · s matrix
    dtype: str = "bfloat16"  # of matrix products
    offload: bool = False  # optimizer's state in the host's memory
    uneven_stages: bool = False  # layers need not divide by stages

    LIMITS: ClassVar[dict[str, tuple[int, float]]] = dict.fromkeys(
        ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"), (1, LARGEST)
    )
    CHOICES: ClassVar[dict[str, tuple]] = {
        "zero": (0, 1, 2, 3),
        "schedule": ("1f1b", "gpipe"),
        "recompute": ("none", "selective", "full"),
        "attention": ("flash", "scores"),
    }

    def __post_init__(self) -> None:
        check_fields(Layout, vars(self))
        if not self.batch:
            object.__setattr__(self, "batch", self.dp * self.micro_batch)
        if self.batch % (self.dp * self.micro_batch):
            raise PlanError(
                f"a batch of {self.batch} does not divide into {self.dp} x {self.micro_batch} (dp x micro_batch).\n"
                f"Give a multiple of {self.dp * self.micro_batch} as batch."
            )
        if self.shard and (self.data_ranks % self.shard or self.shard > self.data_ranks):
            raise PlanError(
                f"shard = {self.shard} does not divide dp x cp = {self.data_ranks}.\n"
                f"Give a divisor of {self.data_ranks}, or 0 for all."
            )
        if self.shard and not self.zero:
            raise PlanError(f"shard = {self.shard} shares nothing with zero = 0.\nGive zero = 3 for HSDP, or no shard.")
        if self.data_ranks % self.ep:
            raise PlanError(
                f"ep = {self.ep} does not divide dp x cp = {self.data_ranks}: experts are shared among these.\n"
                f"Give a divisor of {self.data_ranks} as ep."
            )
        if self.interleave > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise PlanError(
                f"interleave = {self.interleave} needs stages, and micro-batches ({self.micro_batches}) that divide by "
                f"pp = {self.pp}.\nGive interleave = 1, or another batch."
            )

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
    def micro_batches(self) -> int:
        """Forwards of one rank in a step: m."""
        return self.batch // (self.dp * self.micro_batch)

    def with_(self, **changes: Any) -> "Layout":
        """This layout with other numbers."""
        return replace(self, **changes)

    def stage_layers(self, model: Model) -> list[int]:
        """[layers of each pipeline stage]; where they do not divide, the middle stages have one more."""
        each, rest = divmod(model.layers, self.pp)
        first = (self.pp - rest) // 2
        return [each + (first <= stage < first + rest) for stage in range(self.pp)]

    def check(self, model: Model, cluster: Cluster | None = None) -> "Layout":
        """Raise a PlanError where this model on this cluster cannot be divided so; return the layout."""

        def refuse(what: str, hint: str) -> NoReturn:
            raise PlanError(f"{what}.\nGive {hint}.")

        if model.heads % self.tp:
            refuse(
                f"{model.heads} heads do not divide by tp = {self.tp}",
                f"one of {divisors(model.heads)} as tp",
            )
        if model.kv_heads % self.tp and self.tp % model.kv_heads:
            refuse(
                f"{model.kv_heads} kv_heads neither divide by tp = {self.tp} nor divide it",
                f"one of {divisors(model.kv_heads)} as tp",
            )
        if model.ffn % self.tp:
            refuse(f"an MLP of {model.ffn} does not divide by tp = {self.tp}", "a divisor of ffn as tp")
        stages = self.pp * self.interleave
        if stages > model.layers:
            refuse(
                f"{model.layers} layers cannot fill {stages} stages (pp x interleave)",
                f"at most {model.layers} as pp x interleave",
            )
        if model.layers % stages and not (self.uneven_stages and self.interleave == 1):
            refuse(
                f"{model.layers} layers do not divide into {stages} stages (pp x interleave)",
                f"a divisor of {model.layers}, or uneven_stages = true with interleave = 1",
            )
        pieces = self.cp * (self.tp if self.sequence_parallel else 1)
        if model.seq % pieces:
            refuse(
                f"{model.seq} tokens do not divide into {pieces} pieces",
                f"a divisor of {model.seq} as cp, or a multiple of {pieces} as the model's seq",
            )
        if self.ep > 1 and not model.experts:
            refuse(f"{model.name} has no experts to divide by ep = {self.ep}", "ep = 1")
        if model.experts % self.ep:
            refuse(
                f"{model.experts} experts do not divide by ep = {self.ep}",
                f"one of {divisors(model.experts)} as ep",
            )
        if cluster:
            cluster.peak(self.dtype)
            if self.gpus != cluster.gpus:
                refuse(
                    f"dp x tp x pp x cp = {self.dp} x {self.tp} x {self.pp} x {self.cp} = {self.gpus} is not the "
                    f"cluster's {cluster.gpus} GPUs",
                    f"sizes whose product is {cluster.gpus}",
                )
        return self


def divisors(number: int) -> str:
    """The divisors as text, the largest last."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def layout_of(layout: dict[str, Any] | Layout) -> Layout:
    """A Layout from a table of fields."""
    return layout if isinstance(layout, Layout) else from_table(Layout, layout)
