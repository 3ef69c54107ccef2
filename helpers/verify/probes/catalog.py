"""The probes by name, in order of their value, and the sizes and names that predictions and probes share.

It imports neither torch nor a probe, because the command must not hold a GPU.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A probe: the function ``name`` in the module ``module``."""

    name: str
    module: str
    title: str
    seconds: float  # its time limit
    several_gpus: bool = False  # whether it needs more than one GPU; then it runs on one rank for each


PLANNED = Task(
    name="planned",
    module="helpers.verify.probes.planned",
    title="A step of GPT-2 medium under FSDP, beside the planner's",
    seconds=80,
)
PRECISION = Task(
    name="precision",
    module="helpers.verify.probes.precision",
    title="Chapter 5: a step in four number formats, width 4096",
    seconds=60,
)
RATES = Task(
    name="rates",
    module="helpers.verify.probes.products",
    title="Chapter 15: matrix products and the memory's speed",
    seconds=60,
)
MESSAGES = Task(
    name="messages",
    module="helpers.verify.probes.messages",
    title="Mistakes on purpose, and what they print",
    seconds=100,
)
LAUNCH = Task(
    name="launch",
    module="helpers.verify.probes.host",
    title="What the host needs to launch a kernel",
    seconds=40,
)
COPIES = Task(
    name="copies",
    module="helpers.verify.probes.host",
    title="Copies from the host",
    seconds=40,
)
RECOMPUTE = Task(
    name="recompute",
    module="helpers.verify.probes.memory",
    title="Activations kept, recomputed, and saved on the CPU",
    seconds=50,
)
CHECKPOINT = Task(
    name="checkpoint",
    module="helpers.verify.probes.checkpoint",
    title="A checkpoint of 2 GB: how long training stands still",
    seconds=60,
)
SHARED_GPU = Task(
    name="shared_gpu",
    module="helpers.verify.probes.sharing",
    title="Two ranks on one GPU, with gloo",
    seconds=50,
)
FLOAT8 = Task(
    name="float8",
    module="helpers.verify.probes.products",
    title="float8 beside bfloat16",
    seconds=40,
)
NCCL_MEMORY = Task(
    name="nccl_memory",
    module="helpers.verify.probes.memory",
    title="What an NCCL group takes of the GPU's memory",
    seconds=40,
)
BUS_BANDWIDTH = Task(
    name="bus_bandwidth",
    module="helpers.verify.probes.links",
    title="Bus bandwidth among the GPUs",
    seconds=60,
    several_gpus=True,
)
OVERLAP = Task(
    name="overlap",
    module="helpers.verify.probes.links",
    title="Communication beside computing, and waiting for a rank",
    seconds=60,
    several_gpus=True,
)

FIRST = (PLANNED, PRECISION, RATES, BUS_BANDWIDTH, OVERLAP)  # these run before the scripts
LATER = (MESSAGES, LAUNCH, COPIES, RECOMPUTE, CHECKPOINT, SHARED_GPU, FLOAT8, NCCL_MEMORY)

MATRIX = 8192  # rows of the largest square matrices
MESSAGE = 1 << 30  # bytes of the largest all-reduce
STEP_TIME = "time of a step"
PEAK = "peak memory of a step"
STATES = "parameters and optimizer"
MEMORY_SPEED = "memory, a copy of 4 GiB"


def product_name(dtype: str, size: int, data: str = "") -> str:
    """The name of a matrix product's figure, such as "bfloat16, 8192 x 8192, of ones"."""
    name = f"{dtype}, {size} x {size}"
    if data:
        name += f", {data}"
    return name


def all_reduce_name(size: int) -> str:
    """The name of the figure of an all-reduce of so many bytes, a power of two: "all-reduce, 4 MiB"."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
    for name, unit in units.items():
        if size >= unit:
            return f"all-reduce, {size // unit} {name}"
    return f"all-reduce, {size} B"
