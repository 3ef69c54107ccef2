"""Each printed torchrun line of a chapter's script is run: ranks for GPUs, local agents for nodes, and a rehearsal.

A GPU is a rank here, HOST is 127.0.0.1, a folder that all nodes see is this test's. What a line's comment promises is
in PROMISES; every other line has to train as well as the script's defaults do. In SMALLER are the flags that a line has
here in place of its own, with the reason. What test_scripts.py runs (the defaults on a node) is not run again.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import AT_ADDRESS, Forked, Work, forked
from printed import printed
from scripting import ROOT, export, result, stand_alone, torchrun
from test_scripts import GOOD_ENOUGH

from helpers.ranks.ports import hold_port

HERE = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(900)

SMALLER = {  # flags as printed: (flags here, why)
    "--largest 268435456": ("--largest 4194304", "each of 54 checks would move a quarter of a gigabyte through gloo"),
    "--size 268435456": ("--size 1048576", "the same, for all-reduces that are timed"),
    "--width 128 --layers 4 --save model.safetensors": (
        "--width 64 --save model.safetensors",
        "its rehearsal takes minutes where other work goes on",
    ),
    "--width 128 --layers 4 --load model.safetensors --offload": (
        "--width 64 --load model.safetensors --offload",
        "the same",
    ),
    "--width 4096 --layers 48 --dtype bfloat16 --recompute --meta": (
        "--width 64 --dtype bfloat16 --recompute --meta",
        "9.7 billion parameters take 155 GB",
    ),
    "--width 4096 --layers 48 --dtype bfloat16 --check 0 --recompute --offload": (
        "--width 64 --layers 4 --dtype bfloat16 --check 0 --recompute --offload",
        "9.7 billion parameters take 155 GB",
    ),
    "--bench-width 4096": ("--bench-width 64 --bench-batch 64 --bench-steps 2", "two cores take minutes for a step"),
    "--width 4096 --batch-size 480 --out traces": (
        "--width 512 --batch-size 480 --out traces",
        "two cores take a minute for a step",
    ),
    "--matrix 8192 --message 268435456 --save cluster.toml": (
        "--matrix 512 --message 1048576 --save cluster.toml",
        "two cores take a minute for a product of such matrices",
    ),
    "--steps 300": ("--steps 60", "three hundred steps take minutes"),
}


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

    def flags_here(self) -> list[str]:
        return shlex.split(SMALLER.get(self.flags, (self.flags,))[0])


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


def straggler(out: str, folder: Path) -> None:
    assert re.search(r"(?m)^slowest: rank 2, by [\d.]+ ms in each step \(a straggler\)$", out), out


def traces(out: str, folder: Path) -> None:
    assert list((folder / "traces").iterdir())


def weights(name: str) -> Callable[[str, Path], None]:
    def check(out: str, folder: Path) -> None:
        assert (folder / name).stat().st_size > 100

    return check


def plan_of_the_cluster(out: str, folder: Path) -> None:
    """The next line of chapter 15 plans for the cluster that this one has measured."""
    cluster = tomllib.loads((folder / "cluster.toml").read_text())["cluster"]
    ranks = cluster["gpus_per_node"] * cluster["nodes"]
    here = PLAN_OF_CHAPTER_15.replace("dp=16", f"dp={ranks},dtype=float32")  # the only type that a CPU is timed in
    words = here.split()[3:]
    status, out, errors, _ = forked(Work("helpers.__main__", "main", words, str(folder)), HERE)
    assert status == 0 and re.search(r"(?m)^run: 1e\+11 tokens, .* days", out), out + errors


PROMISES: dict[str, Callable[[str, Path], None]] = {
    "--slow-rank 2": straggler,
    "--width 4096 --batch-size 480 --out traces": traces,
    "--batch-size 384 --lr 0.4 --epochs 32 --save digits.pt": weights("digits.pt"),
    "--width 128 --layers 4 --save model.safetensors": weights("model.safetensors"),
    "--tp 2 --save model.safetensors": weights("model.safetensors"),
    "--matrix 8192 --message 268435456 --save cluster.toml": plan_of_the_cluster,
}

# Lines that end before the training does, or train longer than GOOD_ENOUGH says.
PARTS = {"--state state.pt --stop-after 20", "--width 4096 --batch-size 480 --out traces", "--steps 300"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return stand_alone(tmp_path_factory.mktemp("path"))


@pytest.fixture
def script(tmp_path):
    """A function that writes a chapter's script into this test's empty folder."""
    return lambda chapter: export(ROOT / "notebooks" / f"{chapter}.ipynb", tmp_path / "empty")


def agent(line, script, launcher, environment):
    """A fork that is one node's torchrun."""
    words = [word.replace("HOST", "127.0.0.1").replace("=gpu", "=2") for word in launcher]
    folder = script.parent
    flags = [flag.replace("/shared", str(folder)) for flag in line.flags_here()]
    return Forked(Work("forked_torchrun", "main", [*words, str(script), *flags], str(folder)), environment)


def check(line, ended, folder):
    """Check that a line left nothing and did what its comment says, and trained as well as the script's defaults."""
    status, out, errors, left = ended
    assert status == 0 and not left, f"{line.text}\n{out}{errors}"
    PROMISES.get(line.flags, lambda *_: None)(out, folder)
    assert line.flags in PARTS or GOOD_ENOUGH[line.chapter](result(out)), f"{line.text}\n{out}"


def test_tables_name_printed_lines():
    assert SMALLER.keys() | PROMISES.keys() | PARTS <= {line.flags for line in LINES}
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
