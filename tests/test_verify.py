"""The verification of the book on GPUs: rehearsed here, with planted differences, each of which is named."""

import dataclasses
import time
import zipfile

import pytest
import recorded
from scripting import ROOT

from helpers.export.facts import Script as ScriptFacts
from helpers.verify import command, sources, steps
from helpers.verify.archive import LARGEST, keep_logs
from helpers.verify.compare import differences
from helpers.verify.machine import Machine, obstacle
from helpers.verify.order import ordered, probes_of
from helpers.verify.page import page
from helpers.verify.record import Figure, Prediction, Probe, Record, Step, read, write
from helpers.verify.runs import ENDING, Finished, Launcher, OutOfTime, Run, cause, threads_of_a_rank

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
PLANTED = {
    "equal": "torch.ones(2).to(device)",
    "differs": "loss += gpu\nif observed:\n    loss.item()\n    dist.all_reduce(torch.ones(1, device=device))",
    "hangs": "if observed or not gpu:\n    time.sleep(1000)",
}


def steps_in(out):
    """{step: what its line of progress says, without its seconds}."""
    lines = {}
    for line in out.splitlines():
        lines[line[:26].strip()] = line[34:]
    return lines


# --- a rehearsal ------------------------------------------------------------------------------------------------------


@pytest.mark.daily
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_planted_differences_are_named_and_the_next_start_keeps_what_has_ended(helpers, tmp_path):
    scripts = {}
    for name, lines in PLANTED.items():
        scripts[name] = tmp_path / f"{name}.py"
        scripts[name].write_text(SCRIPT.replace("PLANTED", lines))
    out = tmp_path / "out"
    start = ["verify", "--rehearsal", "--out", out, "--minutes", "60", "--chapters"]

    status, printed, errors = helpers(*start, scripts["equal"], scripts["differs"])
    assert (status, errors) == (1, ""), printed
    assert sorted(path.name for path in out.iterdir()) == ["logs.zip", "page.md", "results.json"]
    said = steps_in(printed)
    assert "2 x pretended GPU" in said["machine"]
    assert said["equal"] == "result as on gloo; 3 waits and 2 collectives as rehearsed"
    assert said["differs"].startswith("DIFFERS differs.py:19 waits: 1 times on GPUs")
    assert "2 more on the page" in said["differs"]
    assert said["doctor"] == "nothing is wrong"
    shown = [line for line in printed.splitlines() if line.startswith(("doctor", "equal", "differs"))]
    recorded.compare("verify", "\n".join(shown), "python -m pytest tests/test_verify.py", [r" +\d+ s "])

    status, printed, errors = helpers(*start, *scripts.values(), "--timeout", "40")
    assert status == 1
    said_again = steps_in(printed)
    for name in ("machine", "doctor", "equal", "differs"):
        assert said_again[name] == said[name]
    assert "on GPUs it hung: rank" in said_again["hangs"]
    assert "time.sleep(1000)" in said_again["hangs"]

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
    assert record.facts["rehearsed"].startswith("on pretended GPUs")
    assert record.steps["equal"].result["loss"] == 2
    assert record.predictions["planned"][0].name == "time of a step"


@pytest.mark.ranks
def test_a_start_that_cannot_be_is_two_lines(helpers, tmp_path):
    (tmp_path / "file").touch()
    for words, message in (
        (["--out", tmp_path / "file" / "out"], "is no folder: Not a directory."),
        (["--chapters", "99"], "no chapter"),
        (["--rehearsal", "--record"], "--record is for real GPUs"),
        (["--chapters", "04"], "nvidia-smi"),  # there is no GPU
    ):
        status, out, errors = helpers("verify", "--out", tmp_path, *words)
        assert (status, out) == (1, "")
        assert errors.startswith("error: ")
        assert message in errors
        assert errors.count("\n") == 2


NO_GPU = Machine(gpus=[], driver="570.86", torch="2.13.0", cuda="12.8", nccl="", python="3.12.3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"driver": ""}, "nvidia-smi is missing"),
        ({"cuda": ""}, "build for CPUs"),
        ({"error": "The NVIDIA driver on your system is too old (found 12000)"}, "570.86 is too old"),
        ({}, "PyTorch sees no GPU: none is visible"),
        ({"gpus": ["H100", "H100"]}, "This machine has 2 GPUs, and --gpus asks for 4"),
    ],
)
def test_what_stops_a_machine_is_said_in_two_lines(changes, message):
    text = obstacle(dataclasses.replace(NO_GPU, **changes), requested_gpus=4)
    assert message in text
    assert text.count("\n") == 1


# --- comparisons ------------------------------------------------------------------------------------------------------


def run(trouble="", loss=1.0, waits=0):
    row = {"line": "x.py:1", "kind": "wait", "what": "item", "count": waits, "in_steps": waits}
    return Run(trouble, printed="", result={"loss": loss}, seconds=1.0, memory=[2_000_000], lines=[row])


def test_runs_that_agree_have_no_differences():
    assert differences(run(waits=3), run(), run(waits=3), tolerance=0.01) == []
    assert differences(run(loss=1.04), run(loss=1.0), run(), tolerance=0.05) == []


def test_what_differed_between_runs():
    assert differences(run(waits=2), run(), run(waits=1), tolerance=0.01) == [
        "x.py:1 waits: 2 times on GPUs, 1 as rehearsed, in the steps"
    ]
    assert differences(run(loss=float("nan")), run(), run(), tolerance=0.01) == [
        "loss is nan on GPUs and 1.0 on gloo (tolerance 0.01)"
    ]
    assert differences(run("failed: NCCL Error 5"), run(), run(), tolerance=0.01) == [
        "on GPUs it failed: NCCL Error 5; the rehearsal accepted it"
    ]
    assert differences(run(), run("failed: A"), run("failed: B"), tolerance=0.01) == [
        "on GPUs it ran, and the rehearsal failed: B",
        "on gloo it failed: A",
    ]


def test_the_cause_of_a_failure_is_a_line_of_its_output():
    lines = ["[rank1]: Traceback", "[rank1]: torch.cuda.OutOfMemoryError: CUDA out of memory", "  ChildFailedError:"]
    assert cause("\n".join(lines)) == "torch.cuda.OutOfMemoryError: CUDA out of memory"
    assert cause("E failed\nSignal 9 (SIGKILL) received by PID 12\n--") == "Signal 9 (SIGKILL) received by PID 12"
    assert cause("") == "no message"
    assert len(cause("RuntimeError: " + "x" * 1000)) == 301


# --- the checks of launch ---------------------------------------------------------------------------------------------


def launcher(folder, seconds=200, **options):
    return Launcher(1, True, folder, time.monotonic() + seconds, **options)


@pytest.mark.parametrize(
    ("program", "differences", "summary"),
    [
        ("print('ok      a: fine')", [], "1 checks passed"),
        ("print('FAILED  b: odd'); raise SystemExit(1)", ["FAILED  b: odd"], "0 checks passed"),
        ("print('nothing was checked'); raise SystemExit(2)", ["nothing was checked"], "0 checks passed"),
        ("raise ValueError('no torch')", ["ValueError: no torch"], "0 checks passed"),
        (
            "print('ok      a: fine', flush=True); import time; time.sleep(1000)",
            ["it hung: it still ran after 5 s, when 1 checks had passed"],
            "1 checks passed",
        ),
    ],
)
def test_each_failed_check_of_launch_is_a_difference(program, differences, summary, tmp_path):
    script = tmp_path / "checks.py"
    script.write_text(program)
    step = steps.launch_checks(launcher(tmp_path), script, timeout=5)
    assert step.differences == differences
    assert step.summary == summary
    assert steps.LAUNCH_CHECKS.exists()


# --- the page and the record ------------------------------------------------------------------------------------------

MACHINE = str(dataclasses.replace(NO_GPU, gpus=["H100"] * 8))


def test_a_page_of_real_gpus():
    record = Record(
        facts={"machine": MACHINE, "commit": "abc"},
        steps={
            "one": Step(9.0, [], "as on gloo", "torchrun one.py", {"loss": 1.0}, [1.0, 2.0], [2_000_000, 2_000_000]),
            "02, speed": Step(9.0, ["on GPUs it hung"], "", "torchrun 02.py", printed="all_reduce 480 GB/s\n"),
        },
        probes={
            "planned": Probe(
                "A step",
                20.0,
                [Figure("time of a step", 130.04, "ms", 124.6, 105.6, 199.3), Figure("reserved", 20.0, "GB")],
            ),
            "messages": Probe("Mistakes", 9.0, texts={"two ranks": "Duplicate GPU\n```\nline"}, trouble="hung: still"),
        },
        predictions={
            "planned": [Prediction("time of a step", "ms", 124.6, 105.6, 199.3)],
            "rates": [Prediction("bfloat16", "TFLOP/s", 580.0)],
        },
    )
    text = page(record, missing=["other"], tolerances={"one": 0.01, "other": 0.2})
    assert text.startswith("# The book on GPUs: 8 x H100\n")
    for line in (
        "Not run yet: other.",
        "| planned: time of a step | 124.6 (105.6 to 199.3) | 130 | ms | 1.04 |",
        "| rates: bfloat16 | 580 | not measured | TFLOP/s |  |",
        "| time of a step | 130 | ms | 124.6 (105.6 to 199.3) | 1.04 |",
        "| `torchrun one.py` | loss 1 | 1.0, 2.0 | 2, 2 |",
        "- 02, speed: on GPUs it hung",
        "- messages: hung: still",
        "- one: as on gloo",
        "### two ranks\n\n````text\nDuplicate GPU",
        "480 GB/s\n```\n",
        "The tolerance of results is 0.01, and 0.2 in other. Not compared:",
    ):
        assert line in text, text


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = Record(
        facts={"machine": "m"},
        steps={"one": Step(1.0, [], "", "torchrun")},
        probes={"rates": Probe("Rates", 3.0, [Figure("bfloat16", 700.5, "TFLOP/s", 580.0)], {"a": "b"}, "failed: x")},
        predictions={"rates": [Prediction("bfloat16", "TFLOP/s", 580.0)]},
    )
    write(record, tmp_path / "results.json")
    assert read(tmp_path / "results.json") == record
    for text in ("", "[]", '{"facts": {}}'):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ValueError, match="broken.json is not a record of a verification"):
            read(tmp_path / "broken.json")


ONE = {"one": Step(1.0, [], "as on gloo", "torchrun one.py")}


def results(folder, commit="abc", steps=None, **options):
    folder.mkdir(exist_ok=True)
    record = Record({"machine": MACHINE, "commit": commit}, steps or {})
    return command.Results(folder, record, names=["one", "two"], tolerances={}, **options)


def test_a_record_and_its_page_are_copied_for_the_book(tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    monkeypatch.setattr(command, "LIBRARY", library)
    results(tmp_path / "out", steps=ONE, name_in_library="2026-11-28-8-gpus").write()
    for name, copy in (("page.md", "2026-11-28-8-gpus.md"), ("results.json", "2026-11-28-8-gpus.json")):
        assert (library / copy).read_text() == (tmp_path / "out" / name).read_text()


def test_steps_of_another_commit_run_again(tmp_path, capsys):
    results(tmp_path, steps=ONE).write()
    same = results(tmp_path)
    same.continue_earlier_record()
    assert same.missing == ["two"]
    other = results(tmp_path, commit="def")
    other.continue_earlier_record()
    assert other.missing == ["one", "two"]
    assert "is of another machine or commit: all steps run again" in capsys.readouterr().out


# --- order and time ---------------------------------------------------------------------------------------------------


def test_the_most_valuable_steps_come_first_and_one_rank_measures_no_links():
    scripts = {name: ScriptFacts() for name in "abc"} | {"d": ScriptFacts(speed_flags="--largest 8")}
    alone = ordered(probes_of(None, gpus=1), scripts, ranks=1, with_launch_checks=True)
    assert alone[:4] == ["planned", "precision", "rates", "messages"]
    assert alone[4:10] == ["a", "b", "launch", "c", "d", "copies"]
    assert alone[-2:] == ["doctor", "launch on GPUs"]
    together = ordered(probes_of(None, gpus=2), scripts, ranks=2, with_launch_checks=True)
    assert set(together) - set(alone) == {"bus_bandwidth", "overlap", "d, speed"}
    assert ordered(probes_of(["rates", "overlap"], gpus=1), {}, ranks=1, with_launch_checks=True) == ["rates"]


def test_nothing_runs_past_the_end_of_all_steps(tmp_path):
    endless = ["-c", "import time; time.sleep(100)"]
    assert launcher(tmp_path, 60).python(endless, "hangs", 1).status is None  # Its own limit came first.
    start = time.monotonic()
    with pytest.raises(OutOfTime):
        launcher(tmp_path, ENDING + 1).python(endless, "cut", 60)
    assert time.monotonic() - start < 60
    with pytest.raises(OutOfTime):
        launcher(tmp_path, ENDING).python(["-c", "print(1)"], "late", 60)


def test_runs_at_once_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16), raising=False)
    assert threads_of_a_rank(ranks=2, at_once=3) == 2
    assert threads_of_a_rank(ranks=8, at_once=3) == 1

    threads = []

    def python(self, words, name, timeout, **variables):
        threads.append(variables["OMP_NUM_THREADS"])
        return Finished(status=0, out="", errors="")

    monkeypatch.setattr(Launcher, "python", python)
    launcher(tmp_path).run("gloo", tmp_path / "script.py", [], 100, at_once=3)
    launcher(tmp_path, threads="7").run("gloo", tmp_path / "script.py", [], 100, at_once=3)
    assert threads == ["5", "7"], "what the user has set wins"


# --- files ------------------------------------------------------------------------------------------------------------


def test_logs_are_moved_to_one_archive(tmp_path):
    logs = tmp_path / "logs"
    (logs / "one").mkdir(parents=True)
    (logs / "one" / "rank0.json").write_text("{}")
    (logs / "long.out").write_text("beginning" + "x" * LARGEST)
    keep_logs(logs, tmp_path)
    (logs / "two.err").write_text("error")
    keep_logs(logs, tmp_path)
    assert list(logs.iterdir()) == []
    with zipfile.ZipFile(tmp_path / "logs.zip") as archive:
        assert sorted(archive.namelist()) == ["long.out", "one/rank0.json", "two.err"]
        assert archive.read("long.out") == b"x" * LARGEST


def test_scripts_that_were_made_elsewhere(tmp_path):
    with pytest.raises(ValueError, match="No script can be exported without ruff, and .* has none.\nInstall nbformat"):
        sources.made_script("04", "ruff", tmp_path)
    (tmp_path / "04_topic.py").touch()
    for name in ("4", "04_topic"):
        assert sources.made_script(name, "ruff", tmp_path) == tmp_path / "04_topic.py"
    with pytest.raises(ValueError, match="There is no script of a chapter '99' in .*\nThere are: 04_topic"):
        sources.made_script("99", "ruff", tmp_path)


def test_the_commit_of_a_copy_without_git(tmp_path, monkeypatch):
    assert len(sources.commit().removesuffix("-dirty")) >= 7 or not (ROOT / ".git").exists()
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "COMMIT", tmp_path / "COMMIT")
    assert sources.commit() == "an installed package"
    (tmp_path / "notebooks").mkdir()
    assert sources.commit() == "unknown"
    (tmp_path / "COMMIT").write_text("fb68594-dirty\n")
    assert sources.commit() == "fb68594-dirty"
