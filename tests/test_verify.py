"""The verification of the book on GPUs: rehearsed here, with planted differences, each of which is named."""

import dataclasses
import time
import zipfile

import pytest
import recorded
import torch
from scripting import ROOT

from helpers.export.facts import Script
from helpers.verify import command, sources
from helpers.verify.archive import LARGEST, keep_logs
from helpers.verify.compare import differences
from helpers.verify.machine import Machine, obstacle
from helpers.verify.order import ordered, probes_of
from helpers.verify.page import page
from helpers.verify.record import Figure, Prediction, Probe, Record, Step, beside, read, write
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
PLANTED = {
    "equal": "torch.ones(2).to(device)",
    "differs": "loss += gpu\nif observed:\n    loss.item()\n    dist.all_reduce(torch.ones(1, device=device))",
    "hangs": "if observed or not gpu:\n    time.sleep(1000)",
}


@pytest.mark.daily
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_planted_differences_are_named_and_what_has_ended_is_kept(helpers, tmp_path):
    scripts = {name: tmp_path / f"{name}.py" for name in PLANTED}
    for name, lines in PLANTED.items():
        scripts[name].write_text(SCRIPT.replace("PLANTED", lines))
    hanging = scripts.pop("hangs")
    command = ["verify", "--rehearsal", "--out", tmp_path / "out", "--chapters", *scripts.values()]
    status, out, errors = helpers(*command)
    progress = {line[:26].strip(): line[26:].strip() for line in out.splitlines()}
    assert (status, errors) == (1, ""), out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs.zip", "page.md", "results.json"]
    nccl = "pretended"  # as PyTorch's build for CPUs has none
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    assert "2 x pretended GPU" in progress["machine"] and f"NCCL {nccl}, " in progress["machine"]
    assert "nothing is wrong" in progress["doctor"]
    assert progress["equal"].endswith("result as on gloo; 3 waits and 2 collectives as rehearsed")
    assert "DIFFERS differs.py:19 waits: 1 times on GPUs" in progress["differs"] and "2 more" in progress["differs"]
    shown = [line for line in out.splitlines() if line.startswith(("doctor", *scripts))]
    recorded.compare("verify", "\n".join(shown), "python -m pytest tests/test_verify.py", [r" +\d+ s "])

    status, out, errors = helpers(*command, hanging, "--timeout", "40")
    again = {line[:26].strip(): line[26:].strip() for line in out.splitlines()}
    kept = ["machine", "doctor", *scripts]
    assert [again[name] for name in kept] == [progress[name].partition(" s  ")[2] or progress[name] for name in kept]
    assert status == 1 and "on GPUs it hung: rank" in again["hangs"] and "time.sleep(1000)" in again["hangs"]
    [on_gloo] = [line for line in (tmp_path / "out" / "page.md").read_text().splitlines() if "on gloo it hung" in line]
    assert on_gloo.startswith("- hangs: on gloo it hung: rank 0: at line 18 in hangs.py: time.sleep(1000)")
    text = (tmp_path / "out" / "page.md").read_text()
    for line in (
        "- differs: differs.py:19 waits: 1 times on GPUs, 0 as rehearsed, outside of the steps",
        "- differs: differs.py:20 allreduce (NCCL): 1 times on GPUs, 0 as rehearsed, outside of the steps",
        "- differs: loss is 3.0 on GPUs and 2.0 on gloo (tolerance 0.01)",
        "`torchrun --nproc-per-node=2 equal.py` | world_size 2, loss 2 |",
    ):
        assert line in text, text
    assert text.startswith("# The book on GPUs: rehearsed, not run on a GPU\n")
    agreed = text.partition("## What agreed")[2]
    assert "- equal: result as on gloo; 3 waits and 2 collectives as rehearsed" in agreed and "- differs" not in agreed
    record = read(tmp_path / "out" / "results.json")
    assert record.facts["rehearsed"].startswith("on pretended GPUs") and record.steps["equal"].result["loss"] == 2
    assert record.predictions["planned"][0].name == "time of a step"


@pytest.mark.ranks
def test_a_machine_without_gpus_and_a_wrong_start(helpers, tmp_path):
    status, out, errors = helpers("verify", "--out", tmp_path, "--chapters", "04")
    assert (status, out) == (1, "") and errors.startswith("error: ") and errors.count("\n") == 2
    assert helpers("verify", "--rehearsal", "--record", "--out", tmp_path)[0] == 1
    assert "no chapter" in helpers("verify", "--out", tmp_path, "--chapters", "99")[2]


NONE = Machine([], "570.86", "2.13.0", "12.8", "", "3.12.3")
MACHINES = [
    (dataclasses.replace(NONE, driver=""), "nvidia-smi is missing"),
    (dataclasses.replace(NONE, cuda=""), "build for CPUs"),
    (dataclasses.replace(NONE, error="The NVIDIA driver on your system is too old (found 12000)"), "570.86 is too old"),
    (NONE, "PyTorch sees no GPU: none is visible"),
    (dataclasses.replace(NONE, gpus=["H100"] * 2), "This machine has 2 GPUs, and --gpus asks for 4"),
]


@pytest.mark.parametrize(("machine", "words"), MACHINES, ids=[words for _, words in MACHINES])
def test_what_stops_a_machine_is_said_in_two_lines(machine, words):
    text = obstacle(machine, 4)
    assert words in text and text.count("\n") == 1


def run(trouble="", loss=1.0, **counts):
    rows = [{"line": "x.py:1", "kind": "wait", "what": what, "count": n, "in_steps": n} for what, n in counts.items()]
    return Run(trouble, "", {"loss": loss}, 1.0, [2_000_000], rows)


def test_differences():
    assert differences(run(item=2, mask=1), run(), run(item=3), 0.01) == []
    assert differences(run(loss=1.04), run(), run(), 0.05) == []
    [line] = differences(run(item=2), run(), run(item=1), 0.01)
    assert line == "x.py:1 waits: 2 times on GPUs, 1 as rehearsed, in the steps"
    [line] = differences(run(loss=float("nan")), run(), run(), 0.01)
    assert line.startswith("loss is nan on GPUs and 1.0 on gloo")
    [line] = differences(run("failed: NCCL Error 5"), run(), run(), 0.01)
    assert line == "on GPUs it failed: NCCL Error 5; the rehearsal accepted it"
    lines = differences(run(), run("failed: A"), run("failed: B"), 0.01)
    assert lines == ["on GPUs it ran, and the rehearsal failed: B", "on gloo it failed: A"]


def test_the_cause_of_a_failure():
    lines = ["[rank1]: Traceback", "[rank1]: torch.cuda.OutOfMemoryError: CUDA out of memory", "  ChildFailedError:"]
    assert cause("\n".join(lines)) == "torch.cuda.OutOfMemoryError: CUDA out of memory"
    assert cause("E failed\nSignal 9 (SIGKILL) received by PID 12\n--") == "Signal 9 (SIGKILL) received by PID 12"
    assert cause("") == "no message" and len(cause("RuntimeError: " + "x" * 1000)) == 301


MACHINE = str(dataclasses.replace(NONE, gpus=["H100"] * 8))


def test_a_page_of_real_gpus():
    steps = {"one": Step(9.0, [], "as on gloo", "torchrun one.py", {"loss": 1.0}, [1.0, 2.0], [2_000_000] * 2)}
    steps["02, speed"] = Step(9.0, ["on GPUs it hung"], "", "torchrun 02.py", printed="all_reduce 480 GB/s\n")
    step = Figure("time of a step", 130.04, "ms", 124.6, 105.6, 199.3)
    probes = {
        "planned": Probe("A step", 20.0, [step, Figure("reserved", 20.0, "GB")]),
        "messages": Probe(
            "Mistakes", 9.0, texts={"two ranks": "Duplicate GPU\n```\nline"}, trouble="hung: it still ran"
        ),
    }
    predictions = {"planned": [Prediction("time of a step", "ms", 124.6, 105.6, 199.3)]}
    predictions["rates"] = [Prediction("bfloat16", "TFLOP/s", 580.0)]
    record = Record({"machine": MACHINE, "commit": "abc"}, steps, probes, predictions)
    text = page(record, ["other"], {"one": 0.01, "other": 0.2})
    assert text.startswith("# The book on GPUs: 8 x H100\n") and "run yet: other" in text
    for line in (
        "| planned: time of a step | 124.6 (105.6 to 199.3) | 130 | ms | 1.04 |",
        "| rates: bfloat16 | 580 | not measured | TFLOP/s |  |",
        "| time of a step | 130 | ms | 124.6 (105.6 to 199.3) | 1.04 |",
        "| `torchrun one.py` | loss 1 | 1.0, 2.0 | 2, 2 |",
        "- 02, speed: on GPUs it hung",
        "- messages: hung: it still ran",
        "- one: as on gloo",
        "### two ranks\n\n````text\nDuplicate GPU",
        "480 GB/s\n```\n",
        "The tolerance of results is 0.01, and 0.2 in other. Not compared:",
    ):
        assert line in text, text


def test_a_page_before_anything_has_run():
    text = page(Record({"machine": "not examined yet"}), ["one"], {})
    assert "Not run yet: one." in text and "the planner does not know this GPU" in text and "Nothing yet." in text


def test_a_record_is_read_as_it_was_written(tmp_path):
    probe = Probe("Rates", 3.0, [Figure("bfloat16", 700.5, "TFLOP/s", 580.0)], {"a": "b"}, "failed: x")
    record = Record({"machine": "m"}, {"one": Step(1.0, [], "", "torchrun")}, {"rates": probe})
    record.predictions = {"rates": [Prediction("bfloat16", "TFLOP/s", 580.0)]}
    write(record, tmp_path / "results.json")
    assert read(tmp_path / "results.json") == record
    for text in ("", "[]", '{"facts": {}}', '{"facts": {}, "steps": {"a": {}}, "probes": {}}'):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(ValueError, match="broken.json is not a record of a verification"):
            read(tmp_path / "broken.json")


def test_a_record_and_its_page_are_copied_for_the_book(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "LIBRARY", tmp_path)
    record = Record({"machine": MACHINE}, {"one": Step(1.0, [], "as on gloo", "torchrun one.py")})
    command.Results(tmp_path / "out", record, ["one", "two"], {}, "2026-11-28-8-gpus").write()
    names = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert {*names} == {"page.md", "results.json"}
    assert (tmp_path / "2026-11-28-8-gpus.md").read_text() == names["page.md"]
    assert (tmp_path / "2026-11-28-8-gpus.json").read_text() == names["results.json"]


@pytest.mark.parametrize("again", [False, True])
def test_steps_of_another_commit_run_again(again, tmp_path, capsys):
    def results(commit, steps):
        return command.Results(tmp_path, Record({"machine": MACHINE, "commit": commit}, steps), ["one", "two"], {}, "")

    results("abc", {"one": Step(1.0, [], "as on gloo", "torchrun one.py")}).write()
    same = results("abc", {})
    same.take_up(again)
    assert same.missing == (["one", "two"] if again else ["two"])
    other = results("def", {})
    other.take_up(again)
    assert other.missing == ["one", "two"]
    assert "is of another machine or commit: all steps run again" in capsys.readouterr().out


def test_a_figure_gets_its_prediction():
    predictions = [Prediction("other", "ms", 1.0), Prediction("step", "ms", 100.0, 90.0, 120.0)]
    figure = beside(Figure("step", 110.0, "ms"), predictions)
    assert figure == Figure("step", 110.0, "ms", 100.0, 90.0, 120.0) and figure.ratio == pytest.approx(1.1)
    assert beside(Figure("new", 1.0, "ms"), predictions).ratio is None


def test_the_most_valuable_steps_come_first_and_one_rank_measures_no_links(tmp_path):
    scripts = {tmp_path / f"{name}.py": Script() for name in "abc"}
    scripts[tmp_path / "d.py"] = Script(speed_flags="--largest 8")
    alone = ordered(probes_of(None, 1), scripts, doctor=True, ranks=1)
    assert alone[:4] == ["planned", "precision", "rates", "messages"]
    assert alone[4:10] == ["a", "b", "launch", "c", "d", "copies"] and alone[-1] == "doctor"
    assert not {"bus_bandwidth", "overlap", "d, speed"} & {*alone}
    together = ordered(probes_of(None, 2), scripts, doctor=True, ranks=2)
    assert {*together} - {*alone} == {"bus_bandwidth", "overlap", "d, speed"}
    assert ordered(probes_of(["rates", "overlap"], 1), {}, doctor=False, ranks=1) == ["rates"]
    assert ordered(probes_of([], 1), scripts, doctor=True, ranks=1) == ["a", "b", "c", "d", "doctor"]


def launcher(folder, seconds, **options):
    return Launcher(1, True, folder, time.monotonic() + seconds, **options)


def test_nothing_runs_past_the_end_of_all_steps(tmp_path):
    endless = ["-c", "import time; time.sleep(100)"]
    assert launcher(tmp_path, 60).python(endless, "hangs", 1).status is None  # its own limit came first
    start = time.monotonic()
    with pytest.raises(OutOfTime):
        launcher(tmp_path, ENDING + 1).python(endless, "cut", 60)
    assert time.monotonic() - start < ENDING + 1
    with pytest.raises(OutOfTime):
        launcher(tmp_path, ENDING).python(["-c", "print(1)"], "late", 60)


def test_runs_at_once_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16), raising=False)
    assert [threads_of_a_rank(1, 3), threads_of_a_rank(2, 3), threads_of_a_rank(2, 1)] == [5, 2, 8]
    assert threads_of_a_rank(8, 3) == 1
    script = tmp_path / "threads.py"
    script.write_text('import os\n\nprint("result", "{\\"threads\\": %s}" % os.environ["OMP_NUM_THREADS"])\n')
    assert launcher(tmp_path, 60).run("gloo", script, [], 50, at_once=3).result == {"threads": 5}
    assert launcher(tmp_path, 60, threads="7").run("gloo", script, [], 50, at_once=3).result == {"threads": 7}


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
    for name in ("4", "04", "topic", "04_topic"):
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
