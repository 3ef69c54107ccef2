"""Each printed torchrun line of a chapter's script is run: ranks for GPUs, local agents for nodes, and a rehearsal.

A GPU is a rank here, HOST is 127.0.0.1, and a folder that all nodes see is this test's. What a line promises, and with
which flags it is run on two cores, is in its notebook under ``script.lines`` (helpers/export/facts.py). Every line has
to train as well as the script's defaults do, unless the notebook says that it does not. The line of a node with the
defaults is left to test_scripts.py.
"""

import os
import re
import shlex
import tomllib
from dataclasses import dataclass

import pytest
from forked import AT_ADDRESS, Forked, Work, forked
from printed import printed
from scripting import CHAPTERS, export, result, stand_alone, torchrun

from helpers.export.facts import facts_at, unmet
from helpers.ranks.ports import hold_port

pytestmark = pytest.mark.timeout(900)

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TIMEOUT = 600  # seconds of a line
MOST_FORKED_RANKS = 4  # Now and then one of eight ranks that are forked from an agent hangs at its start.
FACTS = {path.stem: facts_at(path) for path in CHAPTERS}


@dataclass(frozen=True)
class Line:
    """A printed torchrun line: ``torchrun LAUNCHER CHAPTER.py FLAGS``, where a variable for NCCL may stand in front."""

    text: str
    launcher: tuple[str, ...]
    chapter: str
    flags: str

    @property
    def nodes(self) -> int:
        """On how many nodes it is typed. A line that names their number names two."""
        if any(word.startswith("--nnodes") for word in self.launcher):
            return 2
        return 1

    @property
    def ranks(self) -> int:
        """How many ranks a line of one node starts here, where ``--nproc-per-node=gpu`` means two."""
        [option] = [word for word in self.launcher if word.startswith("--nproc-per-node=")]
        number = option.removeprefix("--nproc-per-node=")
        if number == "gpu":
            return 2
        return int(number)

    @property
    def facts(self):
        """What the chapter says of this line."""
        return FACTS[self.chapter].line(self.flags)

    @property
    def has_defaults(self) -> bool:
        """Whether it starts the script without flags, so with the defaults."""
        return self.flags == ""

    @property
    def restarts(self) -> bool:
        """Whether torchrun starts the ranks again when one of them fails."""
        return "--max-restarts=3" in self.launcher

    def flags_here(self) -> list[str]:
        """The flags with which the line is run in this test: on gloo, or what the chapter gives for a small machine."""
        on_a_cpu = self.flags.replace("--backend nccl", "--backend gloo")
        return shlex.split(self.facts.here or on_a_cpu)


# Such as: NCCL_DEBUG=INFO torchrun --nproc-per-node=gpu scripts/04_topic.py --epochs 2
TORCHRUN_LINE = re.compile(
    r"(?:NCCL_\w+=\w+ )?torchrun (?P<launcher>.* )?(?:\S*/)?(?P<chapter>\d\d_\w+)\.py(?: (?P<flags>.*))?"
)


def printed_lines() -> list[Line]:
    """All torchrun lines that start a chapter's script, of pages and of the scripts' own first lines."""
    lines = []
    for text in printed():
        match = TORCHRUN_LINE.fullmatch(text)
        if match is not None:
            parts = match.groupdict(default="")
            launcher = tuple(parts["launcher"].split())
            lines.append(Line(text, launcher, parts["chapter"], parts["flags"]))
    return lines


LINES = printed_lines()
CHAPTERS_WITH_LINES = sorted({line.chapter for line in LINES})
LINES_OF_NODE_0 = [line for line in LINES if "--node-rank=0" in line.launcher]
# The same line is typed on each of two nodes. test_two_hosts.py runs them: both kinds of rendezvous, with restarts.
LINES_FOR_BOTH_NODES = {line.text for line in LINES if line.nodes == 2 and "--rdzv-backend=c10d" in line.launcher}
PLAN_OF_CHAPTER_15 = (
    "python -m helpers plan llama3-8b cluster.toml --layout dp=16,zero=3,batch=128,recompute=sac --job tokens=1e11"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The environment variables of a reader's machine, on which scripts find nothing of this project."""
    return stand_alone(tmp_path_factory.mktemp("path"))


@pytest.fixture
def script(tmp_path):
    """A function that writes a chapter's script into this test's empty folder."""

    def write(chapter):
        return export(chapter, tmp_path / "empty")

    return write


def start_agent(line, script, launcher, environment):
    """Start one node's torchrun in a fork of this process, with the words of a printed line adapted to this machine."""
    adapted = []
    for word in launcher:
        word = word.replace("HOST", "127.0.0.1").replace("=gpu", "=2")
        if line.nodes == 2:
            word = word.replace("--nproc-per-node=8", "--nproc-per-node=2")
        adapted.append(word)
    folder = str(script.parent)
    flags = [flag.replace("/shared", folder) for flag in line.flags_here()]
    return Forked(Work("forked_torchrun", "main", [*adapted, str(script), *flags], folder), environment)


def run_on_one_node(line, script, environment):
    """Run a line of one node to its end, in forks of this process if it has few ranks. Returns how it Ended."""
    if line.ranks > MOST_FORKED_RANKS:
        return torchrun(script, line.ranks, environment, *line.flags_here(), timeout=TIMEOUT)
    launcher = [word for word in line.launcher if word != "--standalone"]  # AT_ADDRESS takes its place
    return start_agent(line, script, [*launcher, *AT_ADDRESS], environment).end(TIMEOUT)


def size_of(path):
    """The bytes of a file, or of all files below a folder; 0 if there is nothing at the path."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
        return sum(file.stat().st_size for file in files)
    if path.is_file():
        return path.stat().st_size
    return 0


def check(line, ended, folder):
    """Check that a line left no process, did what its chapter says of it, and trained as well as the defaults.

    ``ended`` says how the line Ended, which ran in ``folder``.
    """
    promised = line.facts
    report = f"{line.text}\n{ended.out}{ended.errors}"
    assert ended.status == 0, report
    assert not ended.left, report
    if promised.prints:
        assert re.search(promised.prints, ended.out, re.MULTILINE), report
    if promised.writes:
        assert size_of(folder / promised.writes) > 100, f"{line.text} left no {promised.writes}"
    if promised.trains:
        conditions = FACTS[line.chapter].script.result  # such as {"accuracy": "> 0.9"}
        assert unmet(conditions, result(ended.out)) == [], report


def check_command(words, folder):
    """Check that ``python -m helpers WORDS`` succeeds in a folder and leaves no process. Returns what it printed."""
    ended = forked(Work("helpers.__main__", "main", words, str(folder)), ENVIRONMENT, timeout=700)
    report = f"{' '.join(words)}\n{ended.out}{ended.errors}"
    assert ended.status == 0, report
    assert not ended.left, report
    return ended.out


def check_plan(folder):
    """Check that chapter 15's command can plan for the cluster that an earlier line has measured into cluster.toml."""
    cluster = tomllib.loads((folder / "cluster.toml").read_text())["cluster"]
    ranks = cluster["gpus_per_node"] * cluster["nodes"]
    plan = PLAN_OF_CHAPTER_15.replace("dp=16", f"dp={ranks},dtype=float32")  # the only type that a CPU is timed in
    words = plan.removeprefix("python -m helpers ").split()
    out = check_command(words, folder)
    assert re.search(r"without failures +[\d,.]+ +days", out), out


def test_chapters_say_something_of_printed_lines_alone():
    described = set()
    for chapter, facts in FACTS.items():
        described |= {(chapter, line.flags) for line in facts.script.lines}
    assert described <= {(line.chapter, line.flags) for line in LINES}


def test_a_line_of_one_node_has_its_line_of_the_other():
    of_node_0 = {line.text for line in LINES_OF_NODE_0}
    of_node_1 = {text.replace("--node-rank=0", "--node-rank=1") for text in of_node_0}
    of_two_nodes = {line.text for line in LINES if line.nodes == 2}
    assert of_two_nodes - LINES_FOR_BOTH_NODES <= of_node_0 | of_node_1


@pytest.mark.daily
@pytest.mark.parametrize("chapter", CHAPTERS_WITH_LINES)
def test_lines_of_one_node_in_their_order(chapter, alone, script):
    """They run in one folder, as a reader types them, because a line may continue what an earlier line wrote."""
    path = script(chapter)
    folder = path.parent
    (folder / "runs" / "a").mkdir(parents=True)  # Chapter 10's lines write to this folder.

    lines = [line for line in LINES if line.chapter == chapter]
    environment = alone
    if any(line.restarts for line in lines):
        # Otherwise restarted ranks read the addresses of dead ranks from the store that torchrun shares with its ranks.
        # Chapter 13 explains it, and its readers export the variable before they type such a line.
        environment = {**alone, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    for line in lines:
        if line.nodes > 1 or line.has_defaults:
            continue  # Other tests run these.
        ended = run_on_one_node(line, path, environment)
        check(line, ended, folder)
        writes_a_cluster_to_plan_for = line.facts.writes == "cluster.toml"
        if writes_a_cluster_to_plan_for:
            check_plan(folder)
        has_a_rank_for_each_gpu = "--nproc-per-node=gpu" in line.launcher
        if has_a_rank_for_each_gpu and not line.restarts:  # A rehearsal restarts nothing.
            options = ["--gpus", str(line.ranks), "--timeout", str(TIMEOUT), "--", *line.flags_here()]
            check_command(["rehearse", path.name, *options], folder)


@pytest.mark.daily
@pytest.mark.parametrize("line", LINES_OF_NODE_0, ids=lambda line: line.chapter)
def test_a_line_on_each_of_two_nodes(line, alone, script):
    """``line`` is typed on node 0, and on node 1 the same line with --node-rank=1. Two ranks of each train together."""
    path = script(line.chapter)
    (path.parent / "runs" / "b").mkdir(parents=True)
    with hold_port() as port:
        launcher_of_node_0 = [*line.launcher, f"--master-port={port}"]
        launcher_of_node_1 = [word.replace("--node-rank=0", "--node-rank=1") for word in launcher_of_node_0]
        node_0 = start_agent(line, path, launcher_of_node_0, alone)
        node_1 = start_agent(line, path, launcher_of_node_1, alone)
        end_of_node_0 = node_0.end(TIMEOUT)
        end_of_node_1 = node_1.end(TIMEOUT)

    report_of_node_1 = end_of_node_1.out + end_of_node_1.errors
    assert end_of_node_1.status == 0, report_of_node_1
    assert not end_of_node_1.left, report_of_node_1
    check(line, end_of_node_0, path.parent)
    assert result(end_of_node_0.out)["world_size"] == 4
