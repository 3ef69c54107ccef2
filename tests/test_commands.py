"""Each shell line that the project prints is run as printed, here or by another test, or a table says why it cannot be.

A line is typed in an empty folder or, where it is make's or pytest's, in a copy of the project. A GPU is a rank here.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from leftovers import wait_until
from printed import printed
from scripting import CHAPTERS, ROOT, export
from test_promises import LINES, LINES_FOR_BOTH_NODES, PLAN_OF_CHAPTER_15

from helpers.export.chapters import find_notebook, preflight

pytestmark = pytest.mark.timeout(900)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a line is run here, and what it must do."""

    prints: tuple[str, ...] = ()  # patterns of which each is found in what it prints
    writes: tuple[str, ...] = ()  # files and folders that it leaves
    typed: str = "{}"  # what is typed for it; {} is the line itself
    status: int = 0
    daily: bool = False  # what it starts takes long, and is tested on each push in another way
    never_prints: tuple[str, ...] = ()  # patterns of which none is found in what it prints


def selects(words):
    """The Way of a line of make that runs tests: here make only says which it would run, which has these words."""
    return Way((words,), typed="{} --dry-run")


def exports(*names, folder="scripts"):
    """The Way of a line that writes files with these names into a folder."""
    return Way(writes=tuple(f"{folder}/{name}" for name in names))


FIRST = find_notebook("00").stem
GROUPS = find_notebook("01").stem
DDP = find_notebook("04").stem
FSDP = find_notebook("06").stem
TRAINER = find_notebook("11").stem
CAPSTONE = find_notebook("16").stem
PREFLIGHT = preflight()
BATCH_FILE = f"../notebooks/{find_notebook('12c').name}"  # the page about it
# With this line a chapter begins to say how its script is started.
ENTER = "source .venv/bin/activate && python -m helpers export {} && cd scripts"
NEXT = f"{len(CHAPTERS):02}"
REHEARSED = "on 8 simulated GPUs"
REPLACED = {  # what a reader replaces: what it is here
    "=gpu": "=2",
    "NN_topic": FIRST,
    "CHAPTER=NN": "CHAPTER=00",
    "ADDRESS": str(ROOT),
    " ...": " --nproc-per-node=2 train.py",
}
WAYS = {  # the lines that this file runs
    "make help": Way(("make book", "make rehearse", "make lock")),
    "make check CHAPTER=04": Way(("what ran", r"\branks +[\d.]+ s +\d\d passed"), daily=True, never_prints=("failed",)),
    "make check CHAPTER=NN": selects(f'"notebooks/{FIRST}.ipynb" tests/test_chapters.py .* -k "{FIRST} or '),
    "make check": selects('-m "not ranks and not slow and not system and not daily" tests'),
    "make test": selects('-m "not slow and not system and not daily"'),
    "make test ALL=1": selects('--record-verified -m "not daily"'),
    "make test DAILY=1": selects("--record-verified *\\|\\|"),
    "LAB=all make test ARGS=tests/test_lab.py": Way(
        (r"lab\[notebooks/00", r"lab\[notebooks/16"), typed="PYTEST_ADDOPTS='--collect-only -q' {} STATIC=true"
    ),
    "pytest --nbval notebooks": Way(
        (f"{FIRST}.ipynb::", f"{CAPSTONE}.ipynb::", "template.ipynb::"),
        typed="PYTEST_ADDOPTS='--collect-only -q' {}",
    ),
    "make system": Way(
        ("This installs, with .*apt-get: .*chromium.* slurmctld", "nothing was installed"),
        typed="mkdir few; for p in make sh id; do ln -s $(type -P $p) few/$p; done; "
        "ln -s $(type -P true) few/apt-get; PATH=$PWD/few {}",
        status=2,
    ),
    "make publish ADDRESS=…": Way(
        (
            "Give the repository: make publish ADDRESS=",
            "jupyter-book build",
            'publish.py "https://github.com/OWNER/NAME"',
        ),
        typed="make publish || make publish ADDRESS=https://github.com/OWNER/NAME --dry-run",
    ),
    "make chapter NAME=NN_topic": Way(
        ("is a copy of the template", f"make check CHAPTER={NEXT}"),
        typed=f"cp _toc.yml before && make chapter NAME={NEXT}_topic "
        f"&& mv before _toc.yml && rm notebooks/{NEXT}_topic.ipynb",
    ),
    "make outputs ARGS=notebooks/NN_topic.ipynb": Way(
        typed=f"cp notebooks/{FIRST}.ipynb before && {{}} && cmp before notebooks/{FIRST}.ipynb",
        daily=True,
    ),
    "make run CHAPTER=04 NPROC=4": Way(('result .*"world_size": 4',), daily=True),
    "make soak CHAPTER=NN": Way(("2 ranks", "4 ranks"), typed="{} ARGS='--runs 1'", daily=True),
    "for i in $(seq 8); do dd if=/dev/zero of=/shared/runs/speed.$(hostname).$i bs=64M count=32 oflag=direct "
    "conv=fsync & done; wait": Way(  # 16 MB here
        (r"16777216 bytes.* copied, .*/s",),
        ("speed.1", "speed.8"),
        "for i in $(seq 8); do dd if=/dev/zero of=speed.$i bs=1M count=16 oflag=direct conv=fsync & done; wait",
    ),
    "make scripts": exports(*(f"{path.stem}.py" for path in CHAPTERS)),
    "python -m helpers verify --minutes 8 --out results": Way(  # There is no GPU here.
        ("error: .*GPU.*\n.+",), status=1, never_prints=("Traceback",)
    ),
    "python -m helpers verify --probes planned rates": Way(
        ("planned .*time of a step", "rates .*TFLOP/s"), ("verify/page.md",), "{} --rehearsal"
    ),
    "python -m helpers verify --chapters 04 06": Way(
        (f"{DDP} .*result as on gloo", f"{FSDP} .*result as on gloo"), ("verify/page.md",), "{} --rehearsal", daily=True
    ),
    "python -m helpers verify --rehearsal": Way(
        (f"{GROUPS} .*result as on gloo",), ("verify/page.md",), "{} --chapters 01", daily=True
    ),
    "python -m helpers list": Way((FIRST, CAPSTONE)),
    "python -m helpers export 04 --out DIR": exports(f"{DDP}.py", folder="DIR"),
    ENTER.format("00"): exports(f"{FIRST}.py"),
    "python -m helpers export 11 --slurm --nodes 2 --gpus-per-node 8 --time 04:00:00": exports(
        *(TRAINER + ending for ending in (".py", ".sbatch", ".slurm.sh", ".nodes.sh", ".k8s.yaml")), "alert.py"
    ),
    "python -m helpers rehearse 11 --gpus 8": Way(
        (REHEARSED, "the host waits for the GPU"), never_prints=("Traceback",), daily=True
    ),
    "python -m helpers rehearse 08 --gpus 8 --nodes 2": Way(
        ("on 16 simulated GPUs|2 nodes",), typed="{} --timeout 300 -- --layers 16 --micro-batches 16", daily=True
    ),
    "python -m helpers rehearse my_script.py --gpus 4 -- --lr 1": Way(("on 4 simulated GPUs",)),
    "python -m helpers rehearse -m package.train --gpus 4": Way(("on 4 simulated GPUs",), daily=True),
    "python -m helpers rehearse train.py --gpus 8": Way((REHEARSED,), daily=True),
    "python -m helpers plan llama3-70b h100 --gpus 512 --layout batch=1024": Way(
        ("layouts of .* 512 x h100", "ranked")
    ),
    "python -m helpers plan llama3-8b h100 --gpus 16 --layout batch=128": Way(("layouts of .* 16 x h100", "ranked")),
    "python -m helpers plan llama3-8b h100 --gpus 64 --layout batch=512": Way(("layouts of .*64 x h100", "ranked")),
    f"jupyter nbconvert --to torchrun notebooks/{DDP}.ipynb --output-dir jobs": Way(writes=(f"jobs/{DDP}.py",)),
    "git clone ADDRESS world-size-one && cd world-size-one": Way(writes=("world-size-one/Makefile",)),
    "mkdir -p runs/a": Way(writes=("runs/a",)),
    "ip -br addr": Way(("lo .*127.0.0.1",)),
    "torchrun --nproc-per-node=gpu train.py": Way(('"world_size": 2',)),
    "torchrun --nproc-per-node=2 train.py": Way(('"world_size": 2',)),
    "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ...": Way(('"world_size": 2',), daily=True),
    "TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO torchrun ...": Way((r"\[I.*TCPStore", '"world_size": 2'), daily=True),
    "PYTHONWARNINGS=error::FutureWarning torchrun --nproc-per-node=2 train.py": Way(
        ("FutureWarning.*: an old call", "old.py.*line 2"),  # two ranks print at once
        typed="""printf 'import warnings\nwarnings.warn("an old call", FutureWarning)\n' >old.py
        set -- {}; PYTHONWARNINGS=error::FutureWarning torchrun --nproc-per-node=2 old.py""",
        status=1,
    ),
}
SERVED = {"make serve": "World Size One", "make lab": "JupyterLab"}  # a line that serves a page: words of the page
SLURM = "test_slurm.py::test_"
TWO_HOSTS = "test_two_hosts.py::test_"
STATIC = "torchrun --nnodes=2 --node-rank={} --master-addr=HOST "
C10D = "--rdzv-backend=c10d {}--rdzv-endpoint=HOST:29500"


def which_test_of_two_hosts(line):
    """The test that runs a line which is typed on each of two nodes. With --nnodes=1:2, one node is enough."""
    if "--nnodes=1:2" in line:
        return f"{TWO_HOSTS}elastic_goes_on"
    return f"{TWO_HOSTS}a_worker_an_agent_a_link_are_lost"


TESTS = {  # by which other test a line is run, as "file::words that are in the file"
    "make book": "../.ci/run::make book &&",
    "make pages": "test_browser.py::test_the_measures_of_a_page_are_those_of_its_blocks",
    "make pdf": "test_pdf.py::test_every_page_of_the_toc_is_there_under_its_title_and_number",
    "make epub": "test_epub.py::test_each_chapter_is_there_with_its_code_and_outputs",
    "make translate LANGUAGE=de": "test_translation.py::test_the_command_lists_what_a_translator_has_to_do",
    "make translate LANGUAGE=de PAGE=book/glossary": (
        "test_translation.py::test_a_page_whose_translation_begins_gets_a_catalogue"
    ),
    "make gpu": "../Makefile::python -m helpers verify $(ARGS)",
    "make rehearse": "../.ci/run::part make rehearse",
    "make sabotage": "../.ci/run::part make sabotage",
    "make run CHAPTER=NN NPROC=4": "test_commands.py::make run CHAPTER=04 NPROC=4",
    "python -m helpers run 04 --nproc 4": "../Makefile::python -m helpers run $(or $(CHAPTER),04) --nproc $(NPROC)",
    "python -m helpers run 00 --nproc 2": rf"../notebooks/{FIRST}.ipynb::\"run\", \"00\", \"--nproc\", \"2\"",
    "python -m helpers doctor": "test_doctor.py::test_without_a_launcher_it_starts_two_ranks_here",
    "python -m helpers verify": "../Makefile::python -m helpers verify $(ARGS)",
    "python -m helpers export 04 --out jobs": "test_commands.py::python -m helpers export 04 --out DIR",
    "python -m helpers export 12": "test_commands.py::python -m helpers export {} && cd scripts",
    "python -m helpers export 11 && cd scripts": "test_commands.py::python -m helpers export {} && cd scripts",
    "python -m helpers export 16 --slurm --nodes=2 --gpus-per-node=8 --time=04:00:00": (
        "test_commands.py::python -m helpers export 11 --slurm"
    ),
    "python -m helpers export 11 --slurm --nodes 2 --out jobs": "test_commands.py::python -m helpers export 11 --slurm",
    "python -m helpers export 11 --slurm --nodes 2 --gpus-per-node 8 --time 04:00:00 --out jobs": (
        "test_commands.py::python -m helpers export 11 --slurm"
    ),
    "python -m torch.distributed.run": "test_torchrun.py::test_a_rank_that_raises_ends_the_job_and_is_named",
    "python -m helpers rehearse train.py --gpus 2": (
        "test_training_check.py::test_a_rehearsal_names_a_silent_mistake_and_fails_unless_it_is_allowed"
    ),
    "torchrun --nproc-per-node=gpu training_check.py train.py": (
        "test_training_check.py::test_a_script_runs_unchanged_under_the_check"
    ),
    "python -m helpers rehearse 7": "test_commands.py::test_a_rehearsal_of_defaults_ends_within_a_minute",
    "python -m helpers rehearse 8": "test_commands.py::test_a_rehearsal_of_defaults_ends_within_a_minute",
    "python -m helpers rehearse 9": "test_commands.py::test_a_rehearsal_of_defaults_ends_within_a_minute",
    PLAN_OF_CHAPTER_15: "test_promises.py::test_lines_of_one_node_in_their_order",
    "python -m helpers nccl-log logs/*.log": (
        "test_nccl_log.py::test_the_logs_of_all_ranks_name_the_rank_that_is_behind"
    ),
    "python -m helpers plan job.toml --json": "test_planner_command.py::test_a_file_becomes_a_plan",
    f"{STATIC.format(0)}--nproc-per-node=8 -m helpers doctor": f"{TWO_HOSTS}doctor_sees_both_hosts",
    f"{STATIC.format(1)}--nproc-per-node=8 -m helpers doctor": f"{TWO_HOSTS}doctor_sees_both_hosts",
    f"{STATIC.format(0)}--master-port=29500 --nproc-per-node=2 place.py": f"{TWO_HOSTS}two_kinds_of_rendezvous",
    f"{STATIC.format(1)}--master-port=29500 --nproc-per-node=1 place.py": f"{TWO_HOSTS}two_kinds_of_rendezvous",
    f"torchrun --nnodes=2 {C10D.format('--rdzv-id=JOB ')} --nproc-per-node=2 place.py": (
        f"{TWO_HOSTS}two_kinds_of_rendezvous"
    ),
    f"torchrun --nproc-per-node=8 --nnodes=2 --max-restarts=3 {C10D.format('')} train.py": (
        f"{TWO_HOSTS}a_worker_an_agent_a_link_are_lost"
    ),
    **{line: which_test_of_two_hosts(line) for line in LINES_FOR_BOTH_NODES},
    "srun python -m helpers doctor": f"{SLURM}doctor_under_srun",
    f"cd scripts && sbatch {TRAINER}.sbatch --epochs 50": f"{SLURM}a_job_that_is_stopped_preempted_and_loses_a_node",
    f"cd jobs && sbatch {TRAINER}.sbatch --epochs 50": f"{SLURM}a_job_that_is_stopped_preempted_and_loses_a_node",
    "python -m helpers export 12 --out jobs": rf"{BATCH_FILE}::\"export\", \"12\", \"--out\", \"jobs\"",
    f"cp {TRAINER}.py jobs": f"{BATCH_FILE}::shutil.copy(mine, scratch /",
    "scontrol show config | grep -E 'KillWait|PreemptParameters|SchedulerParameters'": (
        f"{SLURM}a_job_that_its_user_signals"
    ),
    "scontrol show partition | grep GraceTime": f"{SLURM}a_job_that_its_user_signals",
    "squeue --me": f"{SLURM}a_job_that_its_user_ends_does_not_come_back",
    "scancel JOB": f"{SLURM}a_job_that_its_user_ends_does_not_come_back",
    "scancel 4711": f"{SLURM}the_rollback_of_chapter_13b",
    f"cd {TRAINER}-4711 && mkdir good spoiled && mv step_00000060.pt good/": f"{SLURM}the_rollback_of_chapter_13b",
    "until [ -z \"$(squeue --noheader --jobs=4711 2>&1 | grep -v 'Invalid job id')\" ]; do sleep 5; done": (
        f"{SLURM}the_rollback_of_chapter_13b"
    ),
    "mv step_* spoiled/ && mv good/* .": f"{SLURM}the_rollback_of_chapter_13b",
    f"cd .. && JOB_FOLDER={TRAINER}-4711 sbatch {TRAINER}.sbatch --epochs 50 --seed 1 --allow-change seed": (
        f"{SLURM}the_rollback_of_chapter_13b"
    ),
    "scontrol requeue": f"{SLURM}the_node_of_the_root_cause_is_excluded_when_it_has_failed_twice",
    "scontrol show hostnames": f"{SLURM}a_job_that_is_stopped_preempted_and_loses_a_node",
    "sbatch --test-only FILE": f"{SLURM}slurm_reads_the_lines_that_a_reader_may_complete",
    "python -m helpers export 12 --slurm --nodes 2 --gpus-per-node 8 --time 00:10:00 && cd scripts "
    f"&& sbatch {PREFLIGHT}.sbatch": f"{SLURM}the_preflight_of_chapter_12",
    "python -m helpers export 12 --slurm --nodes 2 --gpus-per-node 8 --time 00:10:00 && cd scripts": (
        "test_commands.py::python -m helpers export 11 --slurm"
    ),
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": "test_promises.py::test_lines_of_one_node_in_their_order",
    "export GLOO_SOCKET_IFNAME=eth0": f"{TWO_HOSTS}a_name_that_means_the_loopback",
}
STACKS_OF_ALL_RANKS = (
    "srun --jobid=4711 --overlap --nodes=8 --ntasks-per-node=1 --output=stacks_%N.txt "
    'bash -c \'for pid in $(pgrep -f "[p]ython.*train.py"); '
    'do [ "$(cat /proc/$pid/comm)" = pt_data_worker ] && continue; '
    'echo "== $(hostname) $pid"; py-spy dump --pid $pid; done\'; cat stacks_*.txt > stacks.txt'
)
NOT_HERE = {  # why a line cannot be run here
    "make lock": "asks PyPI for the newest versions",
    "make PYTHON=python3.14 lab": "installs from PyPI; test_set_up.py tests which PyTorch is taken",
    "make PYTHON=python3.13 lab": "as make PYTHON=python3.14 lab",
    "make lab TORCH=2.14.1": "as make PYTHON=python3.14 lab",
    'make lab ARGS="--no-browser --port=8888"': "waits for a browser on another machine",
    "make test ALL=1 TORCH=2.16.0": "there is no PyTorch 2.16 yet",
    "make bench": "installs other libraries from PyPI, and needs an idle machine",
    "make bench ARGS=--record": "as make bench",
    "make bench ARGS=--trainer": "as make bench",
    "scontrol release": "the job is held by Slurm after a failed start, which no test makes happen",
    "make sabotage ARGS=--jobs=2": "takes hours; .ci/run daily runs it with one job",
    "make sabotage ARGS=no_sync_that_syncs": "test_sabotage.py tells three other lies; .ci/run daily tells this one",
    "export NCCL_SOCKET_IFNAME=eth0": "only NCCL reads it, on GPUs",
    "export NCCL_DEBUG=INFO": "only NCCL reads it, on GPUs",
    "ncclras -v": "asks the ranks of a job on NCCL",
    "export TORCH_FR_DUMP_TEMP_FILE=/shared/run7/rank_": "only NCCL's backends read it, on GPUs",
    "torchfrtrace /shared/run7 -p rank_": "compares what NCCL's backends write; chapter 14 compares gloo's",
    "py-spy dump --pid PID": "py-spy is not among the project's requirements",
    STACKS_OF_ALL_RANKS: "names a job of a cluster",
    "nvidia-smi -q -d ECC,PERFORMANCE": "asks the driver of an NVIDIA GPU",
    "nvidia-smi nvlink -e": "asks the driver of an NVIDIA GPU",
    "dcgmi diag -r 2": "belongs to NVIDIA's DCGM, which tests GPUs",
    "dcgmi diag -r 3": "belongs to NVIDIA's DCGM, which tests GPUs",
    """pdsh -w 'node[1-8]' "dmesg -T | grep -E 'NVRM: Xid|Out of memory'\"""": "reads other hosts' kernel messages",
    "sacct -j 4711 --duplicates -X -P --format=JobID,State,Start,End,ElapsedRaw": "the tests' Slurm has no accounting",
    "scontrol show job 4711 | grep -o 'mem=[^,]*'": "names a job of a cluster",
    f"tail -f {TRAINER}-JOB.out": "follows what a job of a cluster prints",
    "scontrol update JobId=4711 ExcNodeList=node5": "names a job and a node of a cluster",
    'scontrol update NodeName=node5 State=DRAIN Reason="Xid 48 and 95, GPU 9d:00"': "names a node of a cluster",
    "sbatch --exclude=node5 train.sbatch": "names a node of a cluster",
    'for pair in "n[1-2]" "n[3-4]" "n[5-6]" "n[7-8]"; do sbatch --export=ALL,NCCL_ALGO=RING --nodelist="$pair" '
    f"{PREFLIGHT}.sbatch --size 1073741824 --network-floor 40; done": "names nodes of a cluster",
    f'grep -e "^start" -e "Too slow" {PREFLIGHT}-*.out': "reads what these jobs print",
}


def commands_of_chapters():
    """By which test each torchrun line with a chapter's script is run: {line: test}."""
    tests = {}
    for line in LINES:
        if line.text in LINES_FOR_BOTH_NODES:  # they are in TESTS
            continue
        if line.nodes == 2:
            tests[line.text] = "test_promises.py::test_a_line_on_each_of_two_nodes"
        elif line.flags:
            tests[line.text] = "test_promises.py::test_lines_of_one_node_in_their_order"
        else:
            tests[line.text] = "test_scripts.py::test_chapter"
    return tests


def commands_of_exports():
    """By which test each line that exports a chapter's script is run: {line: test}. One of them is run: chapter 0's."""
    lines = {ENTER.format(path.stem[:2]) for path in CHAPTERS} - set(WAYS)
    return {line: "test_commands.py::def test_a_line_does_what_the_page_says" for line in lines & set(printed())}


def test_each_line_is_in_one_table_and_each_row_is_printed():
    run_by_tests = [TESTS, commands_of_chapters(), commands_of_exports()]
    rows = []
    for table in [WAYS, SERVED, NOT_HERE, *run_by_tests]:
        rows += table
    assert sorted(rows) == sorted(printed())

    for table in run_by_tests:
        for test in table.values():
            file, name = test.split("::")
            assert name in (ROOT / "tests" / file).read_text(), test


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where lines are typed."""

    project: Path  # a copy of the project, which shares its .venv: for lines of make and pytest
    reader: Path  # a reader's folder, with .venv, train.py, my_script.py, package/train.py and a notebook


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The Folders in which the lines of this file are typed, one after the other."""
    project = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "_build", "__pycache__", "scripts"))
    shutil.rmtree(project / "verify", ignore_errors=True)
    shutil.copytree(ROOT / ".ci", project / ".ci")  # tests read it
    (project / ".venv").symlink_to(Path(sys.prefix))
    for name in ("requirements.txt", "requirements.lock", "pyproject.toml"):
        os.utime(project / name, (0, 0))  # older than .venv, or make would install into it

    reader = tmp_path_factory.mktemp("reader")
    (reader / ".venv").symlink_to(Path(sys.prefix))
    export(GROUPS, reader / "train").rename(reader / "train.py")
    export(FIRST, reader / "my_script").rename(reader / "my_script.py")
    (reader / "package").mkdir()
    shutil.copy(reader / "my_script.py", reader / "package" / "train.py")
    (reader / "notebooks").mkdir()
    shutil.copy(find_notebook(DDP), reader / "notebooks")
    return Folders(project, reader)


# Variables of the environment, by their first letters, that this run of the tests has and a reader's shell has not.
OF_THIS_RUN = ("PYTEST", "MAKE", "ALL", "DAILY", "ARGS", "BUILT_BOOK", "CI", "MFLAGS", "PYTHONPATH")


def start(command, folder, output):
    """Start a shell that runs a command in a folder and prints to the file ``output``. Returns its process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_RUN)}
    environment["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"
    environment["OMP_NUM_THREADS"] = "1"
    environment["COLUMNS"] = "120"
    for name in ("CONFIG", "DATA", "RUNTIME"):
        environment[f"JUPYTER_{name}_DIR"] = str(output.parent / name)
    with output.open("w") as file:
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def lines_with_marks():
    """The lines of WAYS as parameters of a test. Those that take long have the mark "daily"."""
    parameters = []
    for line, way in WAYS.items():
        if way.daily:
            parameters.append(pytest.param(line, marks=pytest.mark.daily))
        else:
            parameters.append(line)
    return parameters


@pytest.mark.slow
@pytest.mark.parametrize("text", lines_with_marks())
def test_a_line_does_what_the_page_says(text, folders, tmp_path):
    way = WAYS[text]
    line = text
    for word, replacement in REPLACED.items():
        line = line.replace(word, replacement)
    command = way.typed.replace("{}", line)
    folder = folders.reader
    if re.search(r"\b(make|pytest) ", command):
        folder = folders.project
    output = tmp_path / "output"

    shell = start(command, folder, output)
    try:
        status = shell.wait(800)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)

    out = output.read_text()
    assert status == way.status, out
    for pattern in way.prints:
        assert re.search(pattern, out), f"{pattern}\n{out}"
    for pattern in way.never_prints:
        assert not re.search(pattern, out), f"{pattern}\n{out}"
    assert [name for name in way.writes if not (folder / name).exists()] == [], out


@pytest.mark.slow
@pytest.mark.parametrize("line", SERVED)
def test_a_page_is_served(line, folders, tmp_path):
    """`make serve` and `make lab` print an address, at which there is a page with the words in SERVED."""
    html = folders.project / "_build" / "html"
    html.mkdir(parents=True, exist_ok=True)
    (html / "index.html").write_text("World Size One")
    if line == "make serve":
        flags = "PORT=18765"
    else:
        flags = "ARGS='--no-browser --allow-root --port=0'"
    output = tmp_path / "output"

    def printed_addresses():
        return re.findall(r"http://127\.0\.0\.1:\d+/[^\s)]*", output.read_text())  # also within brackets

    def read_page():
        """The page at the last address that was printed; "" as long as nothing answers there."""
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(printed_addresses()[-1], timeout=20).read().decode()
        return ""

    shell = start(f"{line} {flags}", folders.project, output)
    try:
        assert wait_until(printed_addresses, 120), output.read_text()
        assert SERVED[line] in wait_until(read_page, 60), output.read_text()
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(60)


@pytest.mark.daily
@pytest.mark.parametrize("chapter", range(len(CHAPTERS)))
def test_a_rehearsal_of_defaults_ends_within_a_minute(chapter, folders, tmp_path):
    output = tmp_path / "output"
    shell = start(f"python -m helpers rehearse {chapter} --timeout 60", folders.reader, output)
    status = shell.wait(300)
    out = output.read_text()
    assert status == 0, out
    assert "Rehearsal on 2 simulated GPUs" in out
