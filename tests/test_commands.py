"""Each shell line that the project prints is run as printed, here or by another test, or a table says why it cannot be.

``PYTHONPATH=.:tools:tests/support python tests/test_commands.py`` prints the table of all lines as Markdown. A line is
typed in an empty folder or, where it is make's or pytest's, in a copy of the project. A GPU is a rank here.
"""

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
from leftovers import soon
from printed import printed
from scripting import CHAPTERS, ROOT, export
from test_promises import ELSEWHERE as ON_TWO_NODES
from test_promises import LINES, PLAN_OF_CHAPTER_15

from helpers.export.chapters import find_notebook, preflight

pytestmark = pytest.mark.timeout(900)


@dataclasses.dataclass(frozen=True)
class Way:
    """What a line must say or, after "!", must not; the files that it leaves; what is typed for it, if not itself."""

    says: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    typed: str = "{}"
    status: int = 0
    daily: bool = False  # what it starts is long, and tested on each push in another way


def collecting(*says, daily=False):
    return Way(says, typed="PYTEST_ADDOPTS='--collect-only -q' {}", daily=daily)


def exports(*names, folder="scripts"):
    return Way(files=tuple(f"{folder}/{name}" for name in names))


def launch_files(chapter, folder="scripts"):
    return exports(*(chapter + ending for ending in (".py", ".sbatch", ".nodes.sh", ".k8s.yaml")), folder=folder)


WITHOUT_A_GPU = Way(("error: .*GPU.*\n.+", "!Traceback"), status=1)
FIRST, GROUPS, DDP, FSDP, TRAINER, CAPSTONE = (
    find_notebook(number).stem for number in ("00", "01", "04", "06", "11", "16")
)
PREFLIGHT = preflight()
NEXT = f"{len(CHAPTERS):02}"
REHEARSED = "on 8 pretended GPUs"
PLACES = {  # what a reader replaces: what it is here
    "=gpu": "=2",
    "NN_topic": FIRST,
    "CHAPTER=NN": "CHAPTER=00",
    "ADDRESS": str(ROOT),
    " ...": " --nproc-per-node=2 train.py",
}
WAYS = {
    "make help": Way(("make book", "make rehearse", "make lock")),
    "make check CHAPTER=04": Way(("what ran", r"\branks +[\d.]+ s +\d\d passed", "!failed"), daily=True),
    "make check CHAPTER=NN": collecting(
        f"{FIRST}.ipynb",
        "test_chapters.py: ",
        "test_scripts.py: 2",
        "test_notebooks.py: 1",
        "test_commands.py: 1",
        daily=True,
    ),
    "make check": collecting("test_house", "test_planner", "!test_scripts", "!test_browser", "!ipynb", daily=True),
    "make test": collecting(
        f"{FIRST}.ipynb::", f"{CAPSTONE}.ipynb::", "test_chapter", "test_process_group", "!test_slurm", "!test_pdf"
    ),
    "make test ALL=1": collecting(
        f"{CAPSTONE}.ipynb::",
        "test_browser",
        "test_two_hosts",
        "test_slurm",
        "test_a_kill_at",
        "!test_a_lie_is_noticed",
    ),
    "make test DAILY=1": collecting("test_slurm", "test_lines_of_one_node", "test_25_kills", "test_a_lie_is_noticed"),
    "LAB=all make test ARGS=tests/test_lab.py": collecting(r"lab\[notebooks/00", r"lab\[notebooks/16"),
    "pytest --nbval notebooks": collecting(f"{FIRST}.ipynb::", f"{CAPSTONE}.ipynb::", "template.ipynb::"),
    "make system": Way(
        ("This installs, with .*apt-get: .*chromium.* slurmctld", "nothing was installed"),
        typed="mkdir few; for p in make sh id; do ln -s $(type -P $p) few/$p; done; "
        "ln -s $(type -P true) few/apt-get; PATH=$PWD/few {}",
        status=2,
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
    "make run CHAPTER=04 NPROC=4": Way(('result .*"world_size": 4',)),
    "make run CHAPTER=NN NPROC=4": Way(('result .*"world_size": 4',)),
    "make soak CHAPTER=NN": Way(("2 ranks", "4 ranks"), typed="{} ARGS='--runs 1'", daily=True),
    "make scripts": exports(*(f"{path.stem}.py" for path in CHAPTERS)),
    "make gpu": dataclasses.replace(WITHOUT_A_GPU, status=2),
    "python -m helpers verify": WITHOUT_A_GPU,
    "python -m helpers verify --minutes 8 --out results": WITHOUT_A_GPU,
    "python -m helpers verify --probes planned rates": Way(
        ("planned .*time of a step", "rates .*TFLOP/s"), ("verify/page.md",), "{} --rehearsal"
    ),
    "python -m helpers verify --chapters 04 06 --again": Way(
        (f"{DDP} .*result as on gloo", f"{FSDP} .*result as on gloo"), ("verify/page.md",), "{} --rehearsal", daily=True
    ),
    "python -m helpers verify --rehearsal": Way(
        (f"{GROUPS} .*result as on gloo",), ("verify/page.md",), "{} --chapters 01"
    ),
    "python -m helpers list": Way((FIRST, CAPSTONE)),
    "python -m helpers export 04 --out DIR": exports(f"{DDP}.py", folder="DIR"),
    "python -m helpers export 04 --out jobs": exports(f"{DDP}.py", folder="jobs"),
    "python -m helpers export 00": exports(f"{FIRST}.py"),
    "python -m helpers export 12": exports(f"{PREFLIGHT}.py"),
    "python -m helpers export 11 --slurm --nodes 2 --gpus-per-node 8 --time 04:00:00": launch_files(TRAINER),
    "python -m helpers export 16 --slurm --nodes=2 --gpus-per-node=8 --time=04:00:00": launch_files(CAPSTONE),
    "python -m helpers export 11 --slurm --nodes 2 --out jobs": launch_files(TRAINER, "jobs"),
    "python -m helpers run 04 --nproc 4": Way(('result .*"world_size": 4',)),
    "python -m helpers doctor": Way(("2 ranks on 1 host", "Nothing is wrong here|note|WRONG")),
    "python -m helpers rehearse 11 --gpus 8": Way((REHEARSED, "the host waits for the GPU", "!Traceback")),
    "python -m helpers rehearse 08 --gpus 8 --nodes 2": Way(
        ("on 16 pretended GPUs|2 nodes",), typed="{} --timeout 300 -- --layers 16 --micro-batches 16", daily=True
    ),
    "python -m helpers rehearse my_script.py --gpus 4 -- --lr 1": Way(("on 4 pretended GPUs",)),
    "python -m helpers rehearse -m package.train --gpus 4": Way(("on 4 pretended GPUs",)),
    "python -m helpers rehearse train.py --gpus 8": Way((REHEARSED,)),
    "python -m helpers plan llama3-70b h100 --gpus 512 --layout batch=1024": Way(
        ("layouts of .* 512 x h100", "ranked")
    ),
    "python -m helpers plan llama3-8b h100 --gpus 64 --layout batch=512": Way(("layouts of .*64 x h100", "ranked")),
    f"jupyter nbconvert --to torchrun notebooks/{DDP}.ipynb --output-dir jobs": Way(files=(f"jobs/{DDP}.py",)),
    "git clone ADDRESS world-size-one && cd world-size-one": Way(files=("world-size-one/Makefile",)),
    "mkdir -p runs/a": Way(files=("runs/a",)),
    "ip -br addr": Way(("lo .*127.0.0.1",)),
    "torchrun --nproc-per-node=gpu train.py": Way(('"world_size": 2',)),
    "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ...": Way(('"world_size": 2',)),
    "TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO torchrun ...": Way((r"\[I.*TCPStore", '"world_size": 2')),
    "PYTHONWARNINGS=error::FutureWarning torchrun --nproc-per-node=2 train.py": Way(
        ("FutureWarning.*: an old call", "old.py.*line 2"),  # two ranks print at once
        typed="""printf 'import warnings\nwarnings.warn("an old call", FutureWarning)\n' >old.py
        set -- {}; PYTHONWARNINGS=error::FutureWarning torchrun --nproc-per-node=2 old.py""",
        status=1,
    ),
}
SERVED = {"make serve": "World Size One", "make lab": "JupyterLab"}  # its page
SLURM, TWO_HOSTS = "test_slurm.py::test_", "test_two_hosts.py::test_"
STATIC = "torchrun --nnodes=2 --node-rank={} --master-addr=HOST "
C10D = "--rdzv-backend=c10d {}--rdzv-endpoint=HOST:29500"
TESTS = {  # by which other test a line is run
    "make book": "../.ci/run::make book &&",
    "make pages": "test_pages.py::test_each_chapter_is_measured_and_has_code_and_a_picture",
    "make pdf": "test_pdf.py::test_every_page_of_the_toc_is_there_under_its_title_and_number",
    "make rehearse": "../.ci/run::part make rehearse",
    "make sabotage": "../.ci/run::part make sabotage",
    "torchrun --nproc-per-node=1": "test_promises.py::test_lines_of_one_node_in_their_order",
    "python -m torch.distributed.run": "test_torchrun.py::test_a_rank_that_raises_ends_the_job_and_is_named",
    "python -m helpers rehearse 7": "test_commands.py::test_a_rehearsal_of_defaults_ends_within_a_minute",
    "python -m helpers rehearse 8": "test_commands.py::test_a_rehearsal_of_defaults_ends_within_a_minute",
    "python -m helpers rehearse 9": "test_commands.py::test_a_rehearsal_of_defaults_ends_within_a_minute",
    PLAN_OF_CHAPTER_15: "test_promises.py::test_lines_of_one_node_in_their_order",
    "python -m helpers plan job.toml --json": "test_planner_command.py::test_a_file_becomes_a_plan",
    f"{STATIC.format(0)}--nproc-per-node=gpu -m helpers doctor": f"{TWO_HOSTS}doctor_sees_both_hosts",
    f"{STATIC.format(0)}--master-port=29500 --nproc-per-node=2 place.py": f"{TWO_HOSTS}two_kinds_of_rendezvous",
    f"{STATIC.format(1)}--master-port=29500 --nproc-per-node=1 place.py": f"{TWO_HOSTS}two_kinds_of_rendezvous",
    f"torchrun --nnodes=2 {C10D.format('--rdzv-id=JOB ')} --nproc-per-node=2 place.py": (
        f"{TWO_HOSTS}two_kinds_of_rendezvous"
    ),
    f"torchrun --nproc-per-node=gpu --nnodes=2 --max-restarts=3 {C10D.format('')} train.py": (
        f"{TWO_HOSTS}a_worker_an_agent_a_link_are_lost"
    ),
    **{
        text: TWO_HOSTS + ("elastic_goes_on" if "--nnodes=1:2" in text else "a_worker_an_agent_a_link_are_lost")
        for text in ON_TWO_NODES
    },
    "srun python -m helpers doctor": f"{SLURM}doctor_under_srun",
    f"cd scripts && sbatch {TRAINER}.sbatch --epochs 50": f"{SLURM}a_job_that_is_stopped_preempted_and_loses_a_node",
    "scontrol requeue": f"{SLURM}a_job_that_is_stopped_preempted_and_loses_a_node",
    "scontrol show hostnames": f"{SLURM}a_job_that_is_stopped_preempted_and_loses_a_node",
    "sbatch --test-only FILE": f"{SLURM}slurm_reads_the_lines_that_a_reader_may_complete",
    "python -m helpers export 12 --slurm --nodes 2 --gpus-per-node 8 --time 00:10:00 && cd scripts "
    f"&& sbatch {PREFLIGHT}.sbatch": f"{SLURM}the_preflight_of_chapter_12",
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": "test_promises.py::test_lines_of_one_node_in_their_order",
    "export GLOO_SOCKET_IFNAME=eth0": f"{TWO_HOSTS}a_name_that_means_the_loopback",
}
NOT_HERE = {  # why a line cannot be run here
    "make lock": "asks PyPI for the newest versions",
    "make PYTHON=python3.14 lab": "installs from PyPI; test_set_up.py tests which PyTorch is taken",
    "make lab TORCH=2.14.1": "as make PYTHON=python3.14 lab",
    "make test ALL=1 TORCH=2.16.0": "there is no PyTorch 2.16 yet",
    "make bench": "installs other libraries from PyPI, and takes an hour of an idle machine",
    "make bench ARGS=\"--only '4 ranks'\"": "as make bench",
    "make bench ARGS=--record": "as make bench",
    "make sabotage ARGS=--jobs=2": "takes hours; .ci/run daily runs it with one job",
    "make sabotage ARGS=no_sync_that_syncs": "test_sabotage.py tells three other lies; .ci/run daily tells this one",
    "make sabotage ARGS=--clean=04": "each cell of chapter 4 is a test already",
    "make gpu ARGS=--record": "needs a GPU: a rehearsal is not recorded, see test_verify.py",
    "export NCCL_SOCKET_IFNAME=eth0": "only NCCL reads it, on GPUs",
    "export NCCL_DEBUG=INFO": "only NCCL reads it, on GPUs",
    "export NCCL_ALGO=RING": "only NCCL reads it, on GPUs",
    "py-spy dump --pid PID": "py-spy is not among the project's requirements",
}


def of_chapters():
    """{line: the test that runs it}, of torchrun lines with a chapter's script."""
    tests = {}
    for line in LINES:
        name = "lines_of_one_node_in_their_order" if line.nodes == 1 else "a_line_on_each_of_two_nodes"
        plain = line.nodes == 1 and not line.flags
        tests[line.text] = "test_scripts.py::test_chapter" if plain else f"test_promises.py::test_{name}"
    return {text: test for text, test in tests.items() if text not in ON_TWO_NODES}


def test_each_line_is_in_one_table_and_each_row_is_printed():
    tables = [WAYS, SERVED, TESTS, NOT_HERE, of_chapters()]
    rows = [text for table in tables for text in table]
    assert sorted(rows) == sorted(printed())
    for test in {*TESTS.values(), *of_chapters().values()}:
        file, name = test.split("::")
        assert name in (ROOT / "tests" / file).read_text(), test


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A copy of the project, which shares .venv, and a reader's folder with scripts and a notebook."""
    project, reader = tmp_path_factory.mktemp("copy") / "project", tmp_path_factory.mktemp("reader")
    generated = {"_build", "__pycache__", str(ROOT / "scripts"), str(ROOT / "verify")}
    shutil.copytree(
        ROOT, project, ignore=lambda at, names: [n for n in names if n[0] == "." or {n, f"{at}/{n}"} & generated]
    )
    (project / ".venv").symlink_to(Path(sys.prefix))
    for name in ("requirements.txt", "requirements.lock", "pyproject.toml"):
        os.utime(project / name, (0, 0))  # .venv is ready
    (reader / "package").mkdir()
    for chapter, name in ((GROUPS, "train.py"), (FIRST, "my_script.py")):
        export(chapter, reader / name[:-3]).rename(reader / name)
    shutil.copy(reader / "my_script.py", reader / "package" / "train.py")
    (reader / "notebooks").mkdir()
    shutil.copy(find_notebook(DDP), reader / "notebooks")
    return project, reader


def started(command, folders, output):
    """A shell that runs a command in its folder; its output goes to a file."""
    mine = ("PYTEST", "MAKE", "ALL", "DAILY", "ARGS", "BUILT_BOOK", "CI", "MFLAGS", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    environment |= {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    environment |= {f"JUPYTER_{name}_DIR": str(output.parent / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    folder = folders[0] if re.search(r"\b(make|pytest) ", command) else folders[1]
    with output.open("w") as file:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "start_new_session": True}
        return subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment, **pipes), folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[pytest.mark.daily] if way.daily else []) for text, way in WAYS.items()]
)
def test_a_line_keeps_its_word(text, folders, tmp_path):
    way, words = WAYS[text], text
    for place, other in PLACES.items():
        words = words.replace(place, other)
    process, folder = started(way.typed.replace("{}", words), folders, tmp_path / "output")
    try:
        status = process.wait(800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    out = (tmp_path / "output").read_text()
    assert status == way.status, out
    for pattern in way.says:
        assert bool(re.search(pattern.lstrip("!"), out)) != pattern.startswith("!"), f"{pattern}\n{out}"
    assert [name for name in way.files if not (folder / name).exists()] == [], out


@pytest.mark.slow
@pytest.mark.parametrize("text", SERVED)
def test_a_page_is_served(text, folders, tmp_path):
    (folders[0] / "_build" / "html").mkdir(parents=True, exist_ok=True)
    (folders[0] / "_build" / "html" / "index.html").write_text("World Size One")
    flags = "PORT=18765" if text == "make serve" else "ARGS='--no-browser --allow-root --port=0'"
    process, _ = started(f"{text} {flags}", folders, tmp_path / "output")
    try:
        url = r"http://127\.0\.0\.1:\d+/\S*"
        addresses = soon(lambda: re.findall(url, (tmp_path / "output").read_text()), 120)
        assert addresses, (tmp_path / "output").read_text()

        def page():
            try:
                return urllib.request.urlopen(addresses[-1], timeout=20).read().decode()
            except OSError:
                return ""

        assert SERVED[text] in soon(page, 60), addresses
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.daily
@pytest.mark.parametrize("chapter", range(len(CHAPTERS)))
def test_a_rehearsal_of_defaults_ends_within_a_minute(chapter, folders, tmp_path):
    process, _ = started(f"python -m helpers rehearse {chapter} --timeout 60", folders, tmp_path / "output")
    status, out = process.wait(300), (tmp_path / "output").read_text()
    assert status == 0 and "Rehearsal on 2 pretended GPUs" in out, out


def table():
    """The table of all lines as Markdown: the line, how it is run, and where it is printed."""
    chapters = of_chapters()
    smaller = {line.text: line.facts.here for line in LINES if line.facts.here}
    for text, pages in printed().items():
        if text in WAYS:
            how = "run" if WAYS[text].typed == "{}" else f"run: `{' '.join(WAYS[text].typed.split())}`"
        elif text in NOT_HERE:
            how = f"cannot be run here: {NOT_HERE[text]}"
        else:
            how = TESTS.get(text) or chapters.get(text) or "test_commands.py::test_a_page_is_served"
            how += f"; here `{smaller[text]}`" if text in smaller else ""
        yield f"| `{text}` | {how} | {', '.join(pages)} |".replace("{}", "…")


if __name__ == "__main__":
    print("| command | how it is run | where printed |\n|---|---|---|")
    print("\n".join(table()))
