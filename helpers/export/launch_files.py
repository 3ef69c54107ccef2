"""What starts an exported script on many nodes: a batch file for Slurm, plain torchrun lines, a Job for Kubernetes.

The texts are in templates/, as a reader gets them, but for the values and the blocks that not every script needs.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from helpers.command_line import as_argument
from helpers.export.notebook import ExportError

STOP_BEFORE = 180  # seconds before the time limit at which Slurm warns the ranks; it may be a minute early
LATE = 900  # seconds that agents wait at a store for others; by default 60 for the store itself (read_timeout)
CPUS_PER_GPU = 4  # for a rank and the processes that load its data

TEMPLATES = Path(__file__).parent / "templates"
TEMPLATE_OF = {".sbatch": "slurm.sbatch", ".nodes.sh": "nodes.sh", ".k8s.yaml": "k8s.yaml"}
ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,  # a line that is only {% if … %} leaves nothing behind
    lstrip_blocks=True,
    comment_start_string="{*",  # {# would be bash's: ${#name} is a length
    comment_end_string="*}",
)


@dataclass(frozen=True)
class Allocation:
    """What a job asks of a cluster."""

    nodes: int = 2
    gpus_per_node: int = 8
    time: str = "04:00:00"  # Slurm's limit


def launch_files(name: str, script: str, allocation: Allocation, preflight: str) -> dict[str, str]:
    """{file name: text} of what starts a script, the text of NAME.py, on the nodes of an allocation.

    ``preflight`` is the name of the script that checks every link first, if it is in the job's folder.
    Raises ExportError for a name that a shell would split.
    """
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ExportError(f"{name!r} has characters that a shell reads in its own way.\nRename it for --slurm.")
    resumes = '"--checkpoint-dir"' in script and '"--resume"' in script
    stops = resumes and "StopRequest(" in script  # at a signal such a script saves, and writes the file `stopped`
    # With this flag a node without its GPUs fails at once. A later flag wins, so the reader can add --backend gloo.
    backend = " --backend nccl" if '"--backend"' in script else ""
    values = {
        **asdict(allocation),
        "file": as_argument(f"{name}.py"),
        "script_name": f"{name}.py",
        "batch_file": as_argument(f"{name}.sbatch"),
        "nodes_file": as_argument(f"{name}.nodes.sh"),
        "k8s_file": as_argument(f"{name}.k8s.yaml"),
        "job_name": name.lstrip("-"),  # the job's folder begins with it
        "label": kubernetes_name(name),
        "last": allocation.nodes - 1,
        "cpus": allocation.gpus_per_node * CPUS_PER_GPU,
        "stop_before": STOP_BEFORE,
        "late": LATE,
        "stops": stops,
        "resumes": resumes,
        "is_check": name == preflight,
        "preflight": f"{preflight}.py",
        "backend": backend,
    }
    return {name + suffix: ENVIRONMENT.get_template(file).render(values) for suffix, file in TEMPLATE_OF.items()}


def kubernetes_name(name: str) -> str:
    """A name that DNS and so Kubernetes allow: lower-case letters, digits and dashes, with a letter first."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return words.lstrip("0123456789-")[:40].strip("-") or "training"
