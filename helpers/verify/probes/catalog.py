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
    seconds: float  # its limit
    several_gpus: bool = False  # whether it needs more than one; then every GPU has a rank


PLANNED = Task(
    "planned", "helpers.verify.probes.planned", "A step of GPT-2 medium under FSDP, beside the planner's", 80
)
PRECISION = Task(
    "precision", "helpers.verify.probes.precision", "Chapter 5: a step in four number formats, width 4096", 60
)
RATES = Task("rates", "helpers.verify.probes.products", "Chapter 15: matrix products and the memory's speed", 60)
MESSAGES = Task("messages", "helpers.verify.probes.messages", "Mistakes on purpose, and what they print", 100)
LAUNCH = Task("launch", "helpers.verify.probes.host", "What the host needs to launch a kernel", 40)
COPIES = Task("copies", "helpers.verify.probes.host", "Copies from the host", 40)
RECOMPUTE = Task("recompute", "helpers.verify.probes.memory", "Activations kept, recomputed, and saved on the CPU", 50)
CHECKPOINT = Task(
    "checkpoint", "helpers.verify.probes.checkpoint", "A checkpoint of 2 GB: how long training stands still", 60
)
SHARED_GPU = Task("shared_gpu", "helpers.verify.probes.sharing", "Two ranks on one GPU, with gloo", 50)
FLOAT8 = Task("float8", "helpers.verify.probes.products", "float8 beside bfloat16", 40)
NCCL_MEMORY = Task("nccl_memory", "helpers.verify.probes.memory", "What an NCCL group takes of the GPU's memory", 40)
BUS_BANDWIDTH = Task(
    "bus_bandwidth", "helpers.verify.probes.links", "Bus bandwidth among the GPUs", 60, several_gpus=True
)
OVERLAP = Task(
    "overlap",
    "helpers.verify.probes.links",
    "Communication beside computing, and waiting for a rank",
    60,
    several_gpus=True,
)

FIRST = (PLANNED, PRECISION, RATES, BUS_BANDWIDTH, OVERLAP)  # before the scripts
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
    """The name of the figure of an all-reduce of so many bytes, a power of two."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"all-reduce, {size // unit} {name}"
    return f"all-reduce, {size} B"
