"""What starts an exported script on many nodes: a batch file for Slurm, plain torchrun lines, a Job for Kubernetes.

Beside them is alert.py, which watches a job under Slurm.

The texts are in templates/, as a reader gets them, but for the values and the blocks that not every script needs.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from helpers.command_line import as_argument
from helpers.export.notebook import ExportError

# Seconds before a job's time is over at which its ranks are told to save and stop. Slurm may do it a minute earlier.
STOP_BEFORE = 180
# Seconds that torchrun's agents wait for agents of other nodes, which may be slow to start. By default an agent reads
# the store for 60 seconds (read_timeout) before it gives up.
LATE = 900
CPUS_PER_GPU = 4  # for a rank and the processes that load its data
# Characters of a name in Kubernetes. A name may have 63, and Kubernetes adds to the name of a job to name its pods.
LONGEST_NAME = 40

TEMPLATES = Path(__file__).parent / "templates"
# {how the name of a launch file ends, behind the script's name: its template}
TEMPLATE_OF = {
    ".sbatch": "slurm.sbatch",
    ".slurm.sh": "slurm.sh",  # functions of the batch file, for what is rare
    ".nodes.sh": "nodes.sh",
    ".k8s.yaml": "k8s.yaml",
}
ALERT = "alert.py"  # watches a job that saves. It is the same for every script, so it has the name of its template.
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
    time: str = "04:00:00"  # Slurm's limit of the job's time, in hours, minutes and seconds


def launch_files(name: str, script: str, allocation: Allocation, preflight: str) -> dict[str, str]:
    """Fill in the templates for a script: {file name: text} of what starts it on the nodes of an allocation.

    ``name`` is the script's name without .py, ``script`` its text, and ``preflight`` the name of the script that checks
    every link first, if it is in the job's folder. Raises ExportError for a name that a shell would split.
    """
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ExportError(f"{name!r} has characters that a shell reads in its own way.\nRename it for --slurm.")
    abilities = abilities_of(script)
    values = template_values(name, abilities, allocation, preflight)
    texts = {}
    for suffix, template in TEMPLATE_OF.items():
        texts[name + suffix] = ENVIRONMENT.get_template(template).render(values)
    if abilities.resumes:
        texts[ALERT] = (TEMPLATES / ALERT).read_text(encoding="utf-8")
    return texts


@dataclass(frozen=True)
class Abilities:
    """What a script can do when it is started on a cluster. The templates ask for it only then."""

    resumes: bool  # It saves checkpoints, and goes on from the last one.
    stops: bool  # At a signal it saves, ends, and writes the file `stopped`.
    chooses_backend: bool  # It has the flag --backend.


def abilities_of(script: str) -> Abilities:
    """Read off a script's text what it can do: by its flags, and by the class from helpers/runtime that it uses."""
    resumes = '"--checkpoint-dir"' in script and '"--resume"' in script
    return Abilities(
        resumes=resumes,
        stops=resumes and "StopRequest(" in script,
        chooses_backend='"--backend"' in script,
    )


def template_values(name: str, abilities: Abilities, allocation: Allocation, preflight: str) -> dict[str, Any]:
    """The variables of the templates, for a script of this name (without .py) and what it can do."""
    backend = ""  # what the lines add to the script's arguments
    if abilities.chooses_backend:
        # With this flag a node without its GPUs fails at once. A later flag wins, so the reader can add --backend gloo.
        backend = " --backend nccl"
    return {
        **asdict(allocation),
        # Files, and how a shell takes their names.
        "script_name": f"{name}.py",
        "file": as_argument(f"{name}.py"),
        "batch_file": as_argument(f"{name}.sbatch"),
        "functions_file": f"{name}.slurm.sh",
        "nodes_file": as_argument(f"{name}.nodes.sh"),
        "k8s_file": as_argument(f"{name}.k8s.yaml"),
        "preflight": f"{preflight}.py",
        "is_check": name == preflight,
        # The job.
        "job_name": name.lstrip("-"),  # With a dash, the name of the job's folder would be taken for an option.
        "label": kubernetes_name(name),
        "last": allocation.nodes - 1,  # the number of the last node
        "cpus": allocation.gpus_per_node * CPUS_PER_GPU,  # of a node
        "stop_before": STOP_BEFORE,
        "late": LATE,
        # What the script can do.
        "resumes": abilities.resumes,
        "stops": abilities.stops,
        "backend": backend,
    }


def kubernetes_name(name: str) -> str:
    """Make of a name one that DNS, and so Kubernetes, allows: lower-case letters, digits and dashes, a letter first.

    A name without any letter becomes "training".
    """
    with_dashes = re.sub(r"[^a-z0-9]+", "-", name.lower())
    from_first_letter = with_dashes.lstrip("0123456789-")
    allowed = from_first_letter[:LONGEST_NAME].strip("-")
    return allowed or "training"
