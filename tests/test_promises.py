"""Each printed torchrun line of a chapter's script is run: ranks for GPUs, local agents for nodes, and a rehearsal.

A GPU is a rank here, HOST is 127.0.0.1, a folder that all nodes see is this test's. What a line promises, and with
which flags it is run on two cores, its notebook says under ``script.lines`` (helpers/export/facts.py). Every line has
to train as well as the script's defaults do, unless it is said there that it does not. What test_scripts.py runs (the
defaults on a node) is not run again.
"""

import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import AT_ADDRESS, Forked, Work, forked
from printed import printed
from scripting import CHAPTERS, export, result, stand_alone, torchrun

from helpers.export.facts import facts_at, unmet
from helpers.ranks.ports import hold_port

HERE = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(900)

FACTS = {path.stem: facts_at(path) for path in CHAPTERS}


@dataclass(frozen=True)
class Line:
    """A printed torchrun line: its launcher's words, its script, and its flags."""

    text: str
    launcher: tuple[str, ...]
    chapter: str
    flags: str

    @property
    def nodes(self) -> int:
        return 2 if any(word.startswith("--nnodes") for word in self.launcher) else 1

    @property
    def ranks(self) -> int:
        [number] = [word.partition("=")[2] for word in self.launcher if word.startswith("--nproc-per-node")]
        return 2 if number == "gpu" else int(number)

    @property
    def facts(self):
        """What the chapter says of this line."""
        return FACTS[self.chapter].line(self.flags)

    def flags_here(self) -> list[str]:
        return shlex.split(self.facts.here or self.flags)


def printed_lines() -> list[Line]:
    """All torchrun lines that start a chapter's script, of pages and of the scripts' own first lines."""
    lines = []
    for text in printed():
        words = text.split()
        scripts = [place for place, word in enumerate(words) if re.search(r"\d\d_\w+\.py$", word)]
        if words[0] == "torchrun" and scripts:
            [place] = scripts
            lines.append(Line(text, tuple(words[1:place]), Path(words[place]).stem, " ".join(words[place + 1 :])))
    return lines


LINES = printed_lines()
CHAPTERS_WITH_LINES = sorted({line.chapter for line in LINES})
FIRST_OF_TWO = [line for line in LINES if "--node-rank=0" in line.launcher]
ELSEWHERE = {  # lines with c10d on each of two nodes: test_two_hosts.py runs both kinds of rendezvous with restarts
    line.text for line in LINES if line.nodes == 2 and "--rdzv-backend=c10d" in line.launcher
}


PLAN_OF_CHAPTER_15 = "python -m helpers plan llama3-8b cluster.toml --layout dp=16,zero=3,batch=128 --job tokens=1e11"


def plan_of_the_cluster(folder: Path) -> None:
    """Chapter 15 prints this line behind one that measures a cluster: it plans for what was measured."""
    cluster = tomllib.loads((folder / "cluster.toml").read_text())["cluster"]
    ranks = cluster["gpus_per_node"] * cluster["nodes"]
    here = PLAN_OF_CHAPTER_15.replace("dp=16", f"dp={ranks},dtype=float32")  # the only type that a CPU is timed in
    words = here.split()[3:]
    status, out, errors, _ = forked(Work("helpers.__main__", "main", words, str(folder)), HERE)
    assert status == 0 and re.search(r"(?m)^run: 1e\+11 tokens, .* days", out), out + errors


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return stand_alone(tmp_path_factory.mktemp("path"))


@pytest.fixture
def script(tmp_path):
    """A function that writes a chapter's script into this test's empty folder."""
    return lambda chapter: export(chapter, tmp_path / "empty")


def agent(line, script, launcher, environment):
    """A fork that is one node's torchrun."""
    words = [word.replace("HOST", "127.0.0.1").replace("=gpu", "=2") for word in launcher]
    folder = script.parent
    flags = [flag.replace("/shared", str(folder)) for flag in line.flags_here()]
    return Forked(Work("forked_torchrun", "main", [*words, str(script), *flags], str(folder)), environment)


def check(line, ended, folder):
    """Check that a line left no process, did what its chapter says of it, and trained as well as the defaults."""
    status, out, errors, left = ended
    assert status == 0 and not left, f"{line.text}\n{out}{errors}"
    if line.facts.prints:
        assert re.search(line.facts.prints, out, re.MULTILINE), f"{line.text}\n{out}"
    if line.facts.writes:
        assert size(folder / line.facts.writes) > 100, f"{line.text} left no {line.facts.writes}"
    if line.facts.trains:
        assert unmet(FACTS[line.chapter].script.result, result(out)) == [], f"{line.text}\n{out}"


def size(path):
    """The bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def test_chapters_say_something_of_printed_lines_alone():
    said = {(chapter, line.flags) for chapter, facts in FACTS.items() for line in facts.script.lines}
    assert said - {(line.chapter, line.flags) for line in LINES} == set()
    assert [line.flags for facts in FACTS.values() for line in facts.script.lines if line.here and not line.why] == []
    assert {line.text for line in LINES if line.nodes == 2} - ELSEWHERE <= {
        text for line in FIRST_OF_TWO for text in (line.text, line.text.replace("--node-rank=0", "--node-rank=1"))
    }


@pytest.mark.daily
@pytest.mark.parametrize("chapter", CHAPTERS_WITH_LINES)
def test_lines_of_one_node_in_their_order(chapter, alone, script):
    """In one folder, as a reader types them: a line may go on from what an earlier line wrote."""
    path = script(chapter)
    (path.parent / "runs" / "a").mkdir(parents=True)  # chapter 10 prints this line
    for line in LINES:
        if line.chapter == chapter and line.nodes == 1 and line.flags:
            launcher = [word for word in line.launcher if word != "--standalone"] + AT_ADDRESS
            environment = {**alone, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if chapter[:2] == "13" else alone
            if line.ranks > 4:  # now and then one of eight ranks that are forked from an agent hangs at its start
                ended = torchrun(path, line.ranks, environment, *line.flags_here(), timeout=600)
            else:
                ended = agent(line, path, launcher, environment).end(600)
            check(line, ended, path.parent)
            if line.facts.writes == "cluster.toml":
                plan_of_the_cluster(path.parent)
            rehearsed = "--nproc-per-node=gpu" in line.launcher and "--max-restarts=3" not in line.launcher
            if rehearsed:
                words = ["rehearse", path.name, "--gpus", str(line.ranks), "--timeout", "600", "--", *line.flags_here()]
                status, out, errors, left = forked(Work("helpers.__main__", "main", words, str(path.parent)), HERE, 700)
                assert status == 0 and not left, f"{' '.join(words)}\n{out}{errors}"


@pytest.mark.daily
@pytest.mark.parametrize("line", FIRST_OF_TWO, ids=lambda line: line.chapter)
def test_a_line_on_each_of_two_nodes(line, alone, script):
    path = script(line.chapter)
    (path.parent / "runs" / "b").mkdir(parents=True)
    with hold_port() as port:
        second = [word.replace("--node-rank=0", "--node-rank=1") for word in line.launcher]
        nodes = [agent(line, path, [*words, f"--master-port={port}"], alone) for words in (line.launcher, second)]
        first, other = (node.end(600) for node in nodes)
    assert other[0] == 0 and not other[3], other
    check(line, first, path.parent)
    assert result(first[1])["world_size"] == 4
