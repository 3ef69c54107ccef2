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
        return 2 if any(word.startswith("--nnodes") for word in self.launcher) else 1

    @property
    def ranks(self) -> int:
        """How many ranks it starts on a node here."""
        [number] = [word.partition("=")[2] for word in self.launcher if word.startswith("--nproc-per-node")]
        return 2 if number == "gpu" else int(number)

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


def printed_lines() -> list[Line]:
    """All torchrun lines that start a chapter's script, of pages and of the scripts' own first lines."""
    lines = []
    for text in printed():
        match = re.fullmatch(r"(?:NCCL_\w+=\w+ )?torchrun (.* )?(?:\S*/)?(\d\d_\w+)\.py(?: (.*))?", text)
        if match is not None:
            launcher, chapter, flags = match.groups(default="")
            lines.append(Line(text, tuple(launcher.split()), chapter, flags))
    return lines


LINES = printed_lines()
CHAPTERS_WITH_LINES = sorted({line.chapter for line in LINES})
FIRST_OF_TWO = [line for line in LINES if "--node-rank=0" in line.launcher]
ELSEWHERE = {  # lines with c10d on each of two nodes: test_two_hosts.py runs both kinds of rendezvous with restarts
    line.text for line in LINES if line.nodes == 2 and "--rdzv-backend=c10d" in line.launcher
}
PLAN_OF_CHAPTER_15 = (
    "python -m helpers plan llama3-8b cluster.toml --layout dp=16,zero=3,batch=128,recompute=sac --job tokens=1e11"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return stand_alone(tmp_path_factory.mktemp("path"))


@pytest.fixture
def script(tmp_path):
    """A function that writes a chapter's script into this test's empty folder."""
    return lambda chapter: export(chapter, tmp_path / "empty")


def agent(line, script, launcher, environment):
    """A fork that is one node's torchrun."""
    launcher = [word.replace("HOST", "127.0.0.1").replace("=gpu", "=2") for word in launcher]
    if line.nodes == 2:
        launcher = [word.replace("--nproc-per-node=8", "--nproc-per-node=2") for word in launcher]
    folder = str(script.parent)
    flags = [flag.replace("/shared", folder) for flag in line.flags_here()]
    return Forked(Work("forked_torchrun", "main", [*launcher, str(script), *flags], folder), environment)


def run_on_one_node(line, script, environment):
    """Run a line of one node to its end, in forks of this process if it has few ranks. Returns how it ended."""
    if line.ranks > MOST_FORKED_RANKS:
        return torchrun(script, line.ranks, environment, *line.flags_here(), timeout=TIMEOUT)
    launcher = [word for word in line.launcher if word != "--standalone"]  # AT_ADDRESS takes its place
    return agent(line, script, [*launcher, *AT_ADDRESS], environment).end(TIMEOUT)


def check(line, ended, folder):
    """Check that a line left no process, did what its chapter says of it, and trained as well as the defaults."""
    status, out, errors, left = ended
    assert status == 0 and not left, f"{line.text}\n{out}{errors}"
    if line.facts.prints:
        assert re.search(line.facts.prints, out, re.MULTILINE), f"{line.text}\n{out}"
    if line.facts.writes:
        path = folder / line.facts.writes
        files = path.rglob("*") if path.is_dir() else [path]
        assert sum(file.stat().st_size for file in files if file.is_file()) > 100, f"{line.text} left no {path}"
    if line.facts.trains:
        assert unmet(FACTS[line.chapter].script.result, result(out)) == [], f"{line.text}\n{out}"


def check_command(words, folder):
    """Check that ``python -m helpers WORDS`` succeeds in a folder. Returns what it printed."""
    status, out, errors, left = forked(Work("helpers.__main__", "main", words, str(folder)), ENVIRONMENT, 700)
    assert status == 0 and not left, f"{' '.join(words)}\n{out}{errors}"
    return out


def check_plan(folder):
    """Chapter 15 prints its plan behind a line that measures a cluster: it plans for what was measured."""
    cluster = tomllib.loads((folder / "cluster.toml").read_text())["cluster"]
    ranks = cluster["gpus_per_node"] * cluster["nodes"]
    plan = PLAN_OF_CHAPTER_15.replace("dp=16", f"dp={ranks},dtype=float32")  # the only type that a CPU is timed in
    out = check_command(plan.split()[3:], folder)
    assert re.search(r"without failures +[\d,.]+ +days", out), out


def test_chapters_say_something_of_printed_lines_alone():
    described = {(chapter, line.flags) for chapter, facts in FACTS.items() for line in facts.script.lines}
    assert described <= {(line.chapter, line.flags) for line in LINES}


def test_a_line_of_one_node_has_its_line_of_the_other():
    firsts = {line.text for line in FIRST_OF_TWO}
    seconds = {text.replace("--node-rank=0", "--node-rank=1") for text in firsts}
    assert {line.text for line in LINES if line.nodes == 2} - ELSEWHERE <= firsts | seconds


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
@pytest.mark.parametrize("line", FIRST_OF_TWO, ids=lambda line: line.chapter)
def test_a_line_on_each_of_two_nodes(line, alone, script):
    path = script(line.chapter)
    (path.parent / "runs" / "b").mkdir(parents=True)
    with hold_port() as port:
        first = [*line.launcher, f"--master-port={port}"]
        second = [word.replace("--node-rank=0", "--node-rank=1") for word in first]
        nodes = [agent(line, path, launcher, alone) for launcher in (first, second)]
        first_end, second_end = [node.end(TIMEOUT) for node in nodes]
    status, out, errors, left = second_end
    assert status == 0 and not left, out + errors
    check(line, first_end, path.parent)
    assert result(first_end[1])["world_size"] == 4
