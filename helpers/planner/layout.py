"""How a job is divided among ranks. What cannot be divided is refused. Read by all of the planner."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from helpers.planner.cluster import Cluster
from helpers.planner.model import Model
from helpers.planner.records import Record, refuse

OUTER_LAYERS = 2  # the embedding and the head, where stages count each of them as a layer


@dataclass(frozen=True)
class Layout(Record):
    """The sizes of the mesh's dimensions, and what each step does. There are dp · tp · pp · cp GPUs."""

    dp: int = 1  # ranks that see different samples
    tp: int = 1  # ranks that share each matrix
    pp: int = 1  # pipeline stages
    cp: int = 1  # ranks that share a sample's tokens
    ep: int = 1  # ranks that share the experts, taken from dp · cp
    # The stage of ZeRO says what the dp · cp ranks share: nothing with 0, as in DDP, and everything with 3, as in FSDP.
    zero: Literal[0, 1, 2, 3] = 0
    shard: int = 0  # among how many ranks it is shared: 0 for all dp · cp ranks, fewer for HSDP
    micro_batch: int = 1  # samples in one forward of one rank
    batch: int = 0  # samples in a step of all ranks together; 0 for one micro-batch on each
    interleave: int = 1  # how many parts of the model each stage has
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    # What the backward computes again: nothing, attention's scores, whole operations, or whole layers.
    recompute: Literal["none", "selective", "sac", "full"] = "none"
    sequence_parallel: bool = False  # whether the tp ranks also divide the tokens of norms and dropout
    attention: Literal["flash", "scores"] = "flash"  # "scores" stores the s · s matrix
    dtype: str = "bfloat16"  # of matrix products; with float8, only of those in the layers' linear modules
    offload: bool = False  # whether the optimizer's state is in the host's memory
    uneven_stages: bool = False  # whether stages, or their parts, may have different numbers of layers
    outer_layers: bool = False  # whether stages count the embedding and the head as a layer each

    POSITIVE: ClassVar[tuple[str, ...]] = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave")

    def __post_init__(self) -> None:
        """Refuse, by a PlanError, sizes that cannot be divided by each other, whatever the model and the cluster are.

        A batch of 0 becomes one micro-batch on each data-parallel rank.
        """
        super().__post_init__()
        samples = self.dp * self.micro_batch  # of one micro-batch on all data-parallel ranks
        if self.batch == 0:
            object.__setattr__(self, "batch", samples)  # A frozen dataclass can set its own fields only in this way.
        if self.batch % samples != 0:
            refuse(
                f"a batch of {self.batch} does not divide into {self.dp} x {self.micro_batch} (dp x micro_batch)",
                f"a multiple of {samples} as batch",
            )

        ranks = self.data_ranks
        if self.shard and ranks % self.shard != 0:
            refuse(f"shard = {self.shard} does not divide dp x cp = {ranks}", f"a divisor of {ranks}, or 0 for all")
        if self.shard and self.zero == 0:
            refuse(f"shard = {self.shard} shares nothing with zero = 0", "zero = 3 for HSDP, or no shard")

        if ranks % self.ep != 0:
            problem = f"ep = {self.ep} does not divide dp x cp = {ranks}: experts are shared among these"
            refuse(problem, f"a divisor of {ranks} as ep")

        # An interleaved schedule takes the micro-batches in groups of pp (Narayanan et al. 2021, section 2.2).
        if self.interleave > 1 and (self.pp == 1 or self.micro_batches % self.pp != 0):
            refuse(
                f"interleave = {self.interleave} needs stages, and micro-batches ({self.micro_batches}) "
                f"that divide by pp = {self.pp}",
                "interleave = 1, or another batch",
            )

    @property
    def gpus(self) -> int:
        """How many GPUs the job has, with one rank on each."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """How many ranks average their gradients: those that see different samples, or different tokens of a sample."""
        return self.dp * self.cp

    @property
    def sharers(self) -> int:
        """Among how many ranks ZeRO shares the states; 1 without ZeRO."""
        if self.zero == 0:
            return 1
        return self.shard or self.data_ranks

    @property
    def norm_sharers(self) -> int:
        """Among how many ranks norms and dropout are divided: tp with sequence parallelism, otherwise 1."""
        if self.sequence_parallel:
            return self.tp
        return 1

    @property
    def micro_batches(self) -> int:
        """How many forwards a rank does in a step."""
        return self.batch // (self.dp * self.micro_batch)

    @property
    def recomputes_layers(self) -> bool:
        """Whether the backward runs a layer's forward again: all of it, or the operations whose output was not kept."""
        return self.recompute in ("full", "sac")

    @property
    def element_bytes(self) -> int:
        """Bytes of a number between two operations. It is in bfloat16 if matrix products use float8."""
        if self.dtype in ("float32", "tf32"):
            return 4
        return 2

    @property
    def attention_dtype(self) -> str:
        """The type in which attention and the head multiply: torchtitan and Megatron-LM use no float8 for these."""
        if self.dtype == "float8":
            return "bfloat16"
        return self.dtype

    @property
    def summary(self) -> str:
        """The layout in a line: sizes that differ from those on one GPU, the micro-batch, and what is recomputed.

        For example "dp 8, tp 2, zero 3, micro-batch 1, recompute full".
        """
        sizes_on_one_gpu = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0, "shard": 0, "interleave": 1}
        words = []
        for name, size_on_one_gpu in sizes_on_one_gpu.items():
            size = getattr(self, name)
            if size > size_on_one_gpu:
                words.append(f"{name} {size}")
        words.append(f"micro-batch {self.micro_batch}")
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        return ", ".join(words)

    def tokens(self, model: Model) -> int:
        """Tokens in one forward of one rank."""
        return self.micro_batch * model.seq // self.cp

    @property
    def typical_stages(self) -> list[int]:
        """The numbers of the first, the second and the last pipeline stage, or fewer in a shorter pipeline.

        Only the first stage has the embedding, and only the last one has the head. The second stands for all stages
        between them, which are alike unless their numbers of layers differ (``uneven_stages``).
        """
        last = self.pp - 1
        second = min(1, last)
        return sorted({0, second, last})

    def stage_layers(self, model: Model) -> list[int]:
        """How many layers each pipeline stage has, in all of its parts of the model together."""
        layers = [0] * self.pp
        for part, size in enumerate(self.part_layers(model)):
            layers[part % self.pp] += size
        return layers

    def part_layers(self, model: Model) -> list[int]:
        """How many layers each of the pp · interleave parts of the model has, in the model's order: such as [3, 4, 3].

        With p stages, stage i has the parts i, p + i, 2p + i and so on (Narayanan et al. 2021, section 2.2). If the
        layers do not divide evenly, parts in the middle have one more, as in torchtitan's generate_split_points (commit
        9dec370).

        With outer_layers the embedding counts as a layer of the first part and the head as one of the last, so these
        have one fewer of the model's layers (account_for_embedding_in_pipeline_split and
        account_for_loss_in_pipeline_split of Megatron-LM).
        """
        parts = self.pp * self.interleave
        layers_per_part, remaining_layers = divmod(self.counted_layers(model), parts)
        sizes = [layers_per_part] * parts
        first_larger_part = (parts - remaining_layers) // 2
        for part in range(first_larger_part, first_larger_part + remaining_layers):
            sizes[part] += 1
        if self.outer_layers:
            sizes[0] -= 1
            sizes[-1] -= 1
        return sizes

    def counted_layers(self, model: Model) -> int:
        """How many layers are divided among the stages: with outer_layers the embedding and the head are two more."""
        if self.outer_layers:
            return model.layers + OUTER_LAYERS
        return model.layers

    def layers_of(self, model: Model, stage: int) -> list[int]:
        """The numbers, from 0, of the layers that a stage has in all of its parts of the model.

        The parts are dealt out to the stages in turn: stage 1 of 4 has the parts 1, 5, 9 and so on (see
        ``part_layers``).
        """
        layers: list[int] = []
        first_of_part = 0
        for part, size in enumerate(self.part_layers(model)):
            if part % self.pp == stage:
                layers += range(first_of_part, first_of_part + size)
            first_of_part += size
        return layers

    def check(self, model: Model, cluster: Cluster | None = None) -> Self:
        """Raise a PlanError if this layout cannot divide a model, or does not fit a cluster; return the layout.

        It fits a cluster of as many GPUs as the layout has, whose GPUs have a peak for the layout's types.
        """
        self.check_tensors(model)
        self.check_stages(model)
        self.check_sequence(model)
        self.check_experts(model)
        if cluster:
            cluster.peak(self.dtype)
            cluster.peak(self.attention_dtype)
            if self.gpus != cluster.gpus:
                product = f"dp x tp x pp x cp = {self.dp} x {self.tp} x {self.pp} x {self.cp} = {self.gpus}"
                refuse(f"{product} is not the cluster's {cluster.gpus} GPUs", f"sizes whose product is {cluster.gpus}")
        return self

    def check_tensors(self, model: Model) -> None:
        """Raise a PlanError if tensor parallelism cannot divide the heads or the MLP evenly.

        If there are fewer heads of keys and values than ranks, each head is copied to equally many ranks.
        """
        tp = self.tp
        if model.heads % tp != 0:
            refuse(f"{model.heads} heads do not divide by tp = {tp}", f"one of {divisors(model.heads)} as tp")
        can_be_divided = model.kv_heads % tp == 0
        can_be_copied = tp % model.kv_heads == 0
        if not can_be_divided and not can_be_copied:
            problem = f"{model.kv_heads} kv_heads neither divide by tp = {tp} nor divide it"
            refuse(problem, f"one of {divisors(model.kv_heads)} as tp")
        if model.ffn % tp != 0:
            refuse(f"an MLP of {model.ffn} does not divide by tp = {tp}", "a divisor of ffn as tp")

    def check_stages(self, model: Model) -> None:
        """Raise a PlanError if a pipeline stage would have no layer, or if the layers do not divide evenly.

        With ``uneven_stages`` they need not divide evenly. With ``outer_layers`` the embedding and the head count as
        layers. With an interleaved schedule a stage has several parts, and the same is true of each part.
        """
        parts = self.pp * self.interleave
        if parts > model.layers or 0 in self.part_layers(model):
            refuse(f"{model.layers} layers cannot fill {parts} stages (pp x interleave)", "fewer stages")

        layers = self.counted_layers(model)
        divide_evenly = layers % parts == 0
        if divide_evenly or self.uneven_stages:
            return
        layers_with_outer_ones = model.layers + OUTER_LAYERS
        if layers_with_outer_ones % parts == 0:
            suggested_option = "outer_layers = true"
        else:
            suggested_option = "uneven_stages = true"
        problem = f"{layers} layers do not divide into {parts} stages (pp x interleave)"
        refuse(problem, f"a divisor of {layers}, or {suggested_option}")

    def check_sequence(self, model: Model) -> None:
        """Raise a PlanError if context and sequence parallelism cannot divide a sample's tokens evenly."""
        parts = self.cp * self.norm_sharers
        if model.seq % parts != 0:
            hint = f"a divisor of {model.seq} as cp, or a multiple of {parts} as the model's seq"
            refuse(f"{model.seq} tokens do not divide into {parts} parts", hint)

    def check_experts(self, model: Model) -> None:
        """Raise a PlanError if expert parallelism has no experts to divide, or cannot divide them evenly."""
        ep = self.ep
        if ep > 1 and model.experts == 0:
            refuse(f"{model.name} has no experts to divide by ep = {ep}", "ep = 1")
        if model.experts % ep != 0:
            refuse(f"{model.experts} experts do not divide by ep = {ep}", f"one of {divisors(model.experts)} as ep")


def divisors(number: int) -> str:
    """The divisors of a number as text, the largest last: "1, 2, 4" for 4."""
    found = [str(size) for size in range(1, number + 1) if number % size == 0]
    return ", ".join(found)
