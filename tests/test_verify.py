"""The verification of the book on GPUs, rehearsed here: with planted differences, each of which it must name."""

import json
import time
import zipfile
from dataclasses import asdict

import pytest
import recorded
from scripting import ROOT

from helpers.verify import sources, steps
from helpers.verify.archive import LARGEST, keep_logs
from helpers.verify.command import keep_earlier
from helpers.verify.compare import differences
from helpers.verify.machine import Machine, obstacle
from helpers.verify.order import ordered, probes_of
from helpers.verify.page import page
from helpers.verify.record import Figure, Prediction, Probe, Record, Step, read
from helpers.verify.runs import ENDING, Launcher, OutOfTime, Run, cause, threads_of_a_rank

SCRIPT = """\
import json
import os
import time

import torch
import torch.distributed as dist

gpu = torch.cuda.is_available()
observed = gpu and torch.cuda.get_sync_debug_mode() == 1
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
loss = torch.ones((), device=device)
dist.all_reduce(loss)
dist.barrier()
PLANTED
result = {"world_size": dist.get_world_size(), "loss": loss.item()}
if dist.get_rank() == 0:
    print("result", json.dumps(result), flush=True)
dist.destroy_process_group()
"""
# Lines in the place of PLANTED. `gpu` is true in the run on GPUs and in the rehearsal; `observed` in the former only.
EQUAL = "torch.ones(2).to(device)"
DIFFERS = """\
loss += gpu
if observed:
    loss.item()
    dist.all_reduce(torch.ones(1, device=device))"""
HANGS = """\
if observed or not gpu:
    time.sleep(1000)"""


@pytest.mark.daily
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_planted_differences_are_named(helpers, tmp_path):
    scripts = []
    for name, planted in (("equal", EQUAL), ("differs", DIFFERS), ("hangs", HANGS)):
        script = tmp_path / f"{name}.py"
        script.write_text(SCRIPT.replace("PLANTED", planted))
        scripts.append(script)
    out = tmp_path / "out"
    options = ["--rehearsal", "--out", out, "--minutes", "60", "--timeout", "90"]
    status, printed, errors = helpers("verify", *options, "--chapters", *scripts)
    assert (status, errors) == (1, ""), printed
    assert sorted(path.name for path in out.iterdir()) == ["logs.zip", "page.md", "results.json"]

    shown = [line for line in printed.splitlines() if line.startswith(("doctor", "equal", "differs"))]
    seconds_of_step = r" +\d+ s "  # They differ each time, so they are not compared.
    recorded.compare("verify", "\n".join(shown), "python -m pytest tests/test_verify.py", [seconds_of_step])

    text = (out / "page.md").read_text()
    assert text.startswith("# The book on GPUs: rehearsed, not run on a GPU\n")
    for line in (
        "- differs: differs.py:19 waits: 1 times on GPUs, 0 as rehearsed, outside of the steps",
        "- differs: differs.py:20 allreduce (NCCL): 1 times on GPUs, 0 as rehearsed, outside of the steps",
        "- differs: loss is 3.0 on GPUs and 2.0 on gloo (tolerance 0.01)",
        "- hangs: on gloo it hung: rank 0: at line 18 in hangs.py: time.sleep(1000)",
        "`torchrun --nproc-per-node=2 equal.py` | world_size 2, loss 2 |",
    ):
        assert line in text, text
    agreed = text.partition("## What agreed")[2]
    assert "- equal: result as on gloo; 3 waits and 2 collectives as rehearsed" in agreed
    assert "- differs" not in agreed

    record = read(out / "results.json")
    assert record.steps["equal"].result["loss"] == 2
    assert record.predictions["planned"][0].name == "time of a step"


@pytest.mark.ranks
def test_a_start_that_cannot_be_is_two_lines(helpers, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for words, message in (
        (["--out", file / "out"], "is no folder: Not a directory."),
        (["--chapters", "99"], "no chapter"),
        (["--chapters", "04"], "nvidia-smi"),  # This machine has no GPU.
    ):
        status, out, errors = helpers("verify", "--out", tmp_path, *words)
        assert (status, out) == (1, "")
        assert errors.startswith("error: ")
        assert message in errors
        assert errors.count("\n") == 2


def test_more_gpus_than_there_are_cannot_be_verified():
    machine = Machine(["H100", "H100"], driver="570.86", torch="2.13.0", cuda="12.8", nccl="2.28.9", python="3.12.3")
    assert obstacle(machine, requested_gpus=2) == ""
    assert obstacle(machine, requested_gpus=4).startswith("This machine has 2 GPUs, and --gpus asks for 4.\n")


# --- comparisons ------------------------------------------------------------------------------------------------------


def run(trouble="", loss=1.0, waits=0):
    """The record of a run of a script, whose first line has waited so many times for the GPU."""
    row = {"line": "x.py:1", "kind": "wait", "what": "item", "count": waits, "in_steps": waits}
    return Run(trouble, result={"loss": loss}, seconds=1.0, memory=[2_000_000], lines=[row])


def differences_of(on_gpus=None, on_gloo=None, rehearsed=None, tolerance=0.01):
    """The differences of three runs. Those that are not given are all alike."""
    return differences(on_gpus or run(), on_gloo or run(), rehearsed or run(), tolerance)


def test_runs_that_agree_have_no_differences():
    assert differences_of(on_gpus=run(waits=3), rehearsed=run(waits=3)) == []
    assert differences_of(on_gpus=run(loss=1.04), on_gloo=run(loss=1.0), tolerance=0.05) == []


def test_what_differed_between_runs():
    more_waits = differences_of(on_gpus=run(waits=2), rehearsed=run(waits=1))
    assert more_waits == ["x.py:1 waits: 2 times on GPUs, 1 as rehearsed, in the steps"]

    another_loss = differences_of(on_gpus=run(loss=float("nan")))
    assert another_loss == ["loss is nan on GPUs and 1.0 on gloo (tolerance 0.01)"]

    failed_on_gpus = differences_of(on_gpus=run("failed: NCCL Error 5"))
    assert failed_on_gpus == ["on GPUs it failed: NCCL Error 5; the rehearsal accepted it"]

    failed_elsewhere = differences_of(on_gloo=run("failed: A"), rehearsed=run("failed: B"))
    assert failed_elsewhere == ["on GPUs it ran, and the rehearsal failed: B", "on gloo it failed: A"]


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (
            "[rank1]: Traceback\n[rank1]: torch.cuda.OutOfMemoryError: CUDA out of memory\n  ChildFailedError:",
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
        ),
        ("E failed\nSignal 9 (SIGKILL) received by PID 12\n--", "Signal 9 (SIGKILL) received by PID 12"),
        ("", "no message"),
    ],
)
def test_the_cause_of_a_failure_is_a_line_of_its_output(printed, line):
    assert cause(printed) == line


# --- programs ---------------------------------------------------------------------------------------------------------


def launcher(folder, seconds=200):
    """A Launcher for one rank of a rehearsed verification, whose steps all end after so many seconds."""
    return Launcher(ranks=1, rehearsal=True, folder=folder, end=time.monotonic() + seconds)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('ok      a: fine')", []),
        ("print('FAILED  b: odd'); raise SystemExit(1)", ["FAILED  b: odd"]),
        ("raise ValueError('no torch')", ["ValueError: no torch"]),
        ("import time; time.sleep(1000)", ["it hung for 3 s"]),
    ],
)
def test_each_failed_check_of_launch_is_a_difference(program, expected, tmp_path):
    script = tmp_path / "checks.py"
    script.write_text(program)
    step = steps.launch_checks(launcher(tmp_path), script, timeout=3)
    assert step.differences == expected
    assert steps.LAUNCH_CHECKS.exists()


def test_ranks_of_runs_at_once_share_the_cores(monkeypatch):
    monkeypatch.setattr("helpers.verify.runs.usable_cores", lambda: 16)
    assert threads_of_a_rank(ranks=1, at_once=1) == 16
    assert threads_of_a_rank(ranks=2, at_once=3) == 2
    assert threads_of_a_rank(ranks=8, at_once=3) == 1, "no rank is without a thread"


def test_nothing_runs_past_the_end_of_all_steps(tmp_path):
    timeout = 60
    with_one_second = launcher(tmp_path, seconds=ENDING + 1)
    start = time.monotonic()
    with pytest.raises(OutOfTime):
        with_one_second.python(["-c", "import time; time.sleep(100)"], "cut", timeout)
    assert time.monotonic() - start < timeout


# --- the page and the record ------------------------------------------------------------------------------------------

STEP_TIME = Prediction("time of a step", "ms", value=124.6, low=105.6, high=199.3)
STEP_TIME_FIRST = Prediction("time of a step", "ms", value=100.0, version="planned first")
RECORD = Record(
    facts={"machine": "8 x H100; driver 570.86, PyTorch 2.13.0", "commit": "abc"},
    predictions={"planned": [STEP_TIME, STEP_TIME_FIRST], "rates": [Prediction("bfloat16", "TFLOP/s", 580.0)]},
    probes={
        "planned": Probe("A step", [Figure("time of a step", 130.04, "ms"), Figure("reserved", 20.0, "GB")]),
        "messages": Probe("Mistakes", texts={"two ranks": "Duplicate GPU\n```\nline"}, trouble="hung: still"),
    },
    steps={
        "one": Step(
            differences=[],
            summary="as on gloo",
            command="torchrun one.py",
            result={"loss": 1.0},
            script_seconds=[1.0, 2.0],
            memory=[2_000_000, 2_000_000],
        ),
        "two": Step(differences=["on GPUs it hung"], summary="", command="torchrun two.py"),
    },
)


def test_the_page_has_what_was_predicted_measured_and_printed_what_agreed_and_what_differed():
    text = page(RECORD, missing=["other"])
    assert text.startswith("# The book on GPUs: 8 x H100\n")
    for line in (
        "Not run yet: other.",
        "| bfloat16 | not measured | TFLOP/s | 580 |  |",
        "| time of a step | 130 | ms | 124.6 (105.6 to 199.3) | 1.04 |",
        "| time of a step, planned first | 130 | ms | 100 | 1.30 |",
        "| reserved | 20 | GB |  |  |",
        "| `torchrun one.py` | loss 1 | 1.0, 2.0 | 2, 2 |",
        "- two: on GPUs it hung",
        "- messages: hung: still",
        "- one: as on gloo",
        "### two ranks\n\n````text\nDuplicate GPU",
    ):
        assert line in text, text


def test_a_record_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(asdict(RECORD)))
    assert read(path) == RECORD


@pytest.mark.parametrize("text", ["", "[]", '{"facts": {}}'])
def test_another_file_is_not_read_as_a_record(text, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="results.json is not a record of a verification"):
        read(path)


# --- order and files --------------------------------------------------------------------------------------------------


def test_the_most_valuable_steps_come_first():
    """First what is predicted, then what programs print; then two scripts and a probe in turn, and the doctor last."""
    all_probes = probes_of(None, gpus=1)
    names = ordered(all_probes, scripts=["a", "b", "c"])
    assert names[:9] == ["planned", "precision", "rates", "messages", "a", "b", "launch", "c", "copies"]
    assert names[-2:] == ["doctor", "launch on GPUs"]


def test_links_are_measured_where_there_are_two_gpus():
    def names_of_probes(requested, gpus):
        return {probe.name for probe in probes_of(requested, gpus)}

    all_probes = None
    only_with_two_gpus = names_of_probes(all_probes, gpus=2) - names_of_probes(all_probes, gpus=1)
    assert only_with_two_gpus == {"bus_bandwidth", "overlap"}
    assert names_of_probes(["rates", "overlap"], gpus=1) == {"rates"}


def test_logs_are_one_archive_with_the_ends_of_long_ones(tmp_path):
    logs = tmp_path / "logs"
    (logs / "one").mkdir(parents=True)
    (logs / "one" / "rank0.json").write_text("{}")
    (logs / "long.out").write_text("beginning" + "x" * LARGEST)
    keep_logs(logs, tmp_path)
    with zipfile.ZipFile(tmp_path / "logs.zip") as archive:
        assert sorted(archive.namelist()) == ["long.out", "one/rank0.json"]
        assert archive.read("long.out") == b"x" * LARGEST


def test_a_second_run_keeps_the_files_of_the_first(tmp_path):
    (tmp_path / "results-1.json").write_text("first")
    (tmp_path / "results.json").write_text("second")
    (tmp_path / "page.md").write_text("second")
    keep_earlier(tmp_path)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files == {"results-1.json": "first", "results-2.json": "second", "page-2.md": "second"}


def test_scripts_that_were_made_elsewhere(tmp_path):
    with pytest.raises(ValueError, match="No script can be exported without ruff, and .* has none.\nInstall nbformat"):
        sources.made_script("04", "ruff", tmp_path)
    (tmp_path / "04_topic.py").touch()
    assert sources.made_script("4", "ruff", tmp_path) == tmp_path / "04_topic.py"
    with pytest.raises(ValueError, match="There is no script of a chapter '99' in .*\nThere are: 04_topic"):
        sources.made_script("99", "ruff", tmp_path)


def test_the_commit_of_a_copy_without_git(tmp_path, monkeypatch):
    """git says the commit of a repository. In a copy without git it is read from the file COMMIT."""
    if (ROOT / ".git").exists():
        commit = sources.commit().removesuffix("-dirty")
        assert len(commit) >= 7

    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "COMMIT", tmp_path / "COMMIT")
    assert sources.commit() == "unknown"
    (tmp_path / "COMMIT").write_text("fb68594-dirty\n")
    assert sources.commit() == "fb68594-dirty"
