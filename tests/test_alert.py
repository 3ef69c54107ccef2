"""alert.py, which `export --slurm` writes beside the batch file: what it says of a job, and that it says it once.

And the other line of chapter 13b that asks squeue: the one that waits until a job is gone.
"""

import importlib.util
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from helpers.export.chapters import find_notebook
from helpers.export.launch_files import ALERT, TEMPLATES

FILE = TEMPLATES / ALERT
NOW = datetime(2026, 11, 13, 7, 30)


@pytest.fixture(scope="module")
def alert():
    """The file as a module. It is a template, and not a part of the package, so it is imported by its path."""
    specification = importlib.util.spec_from_file_location("alert", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules["alert"] = module  # a dataclass looks its own module up there
    specification.loader.exec_module(module)
    yield module
    del sys.modules["alert"]


@pytest.fixture
def names(alert):
    """A function that returns the names of the troubles that alert.py finds in a job, such as ``["HANGS", "OLD"]``.

    Called without arguments, it takes a job without trouble: it has run for two days, its last 30 steps took two
    seconds each, and it saved 50 minutes ago. ``names(newest_save=None)`` is the same job, but without a checkpoint.
    """
    steps = []
    for number in range(30, 0, -1):
        steps.append(alert.LogLine(NOW - timedelta(seconds=2 * number), 2.0))
    healthy = {
        "entry": alert.QueueEntry("RUNNING", NOW - timedelta(days=2), "None"),
        "log": steps,
        "newest_save": NOW - timedelta(minutes=50),
    }
    limits = alert.Limits(step_seconds=2.0, save_hours=1, silent_minutes=15)

    def find(**differences):
        job = alert.Job(now=NOW, **{**healthy, **differences})
        return [trouble.name for trouble in alert.find_troubles(job, limits)]

    return find


def minutes_ago(minutes):
    return NOW - timedelta(minutes=minutes)


def test_a_job_that_trains_and_saves_has_no_trouble(names):
    assert names() == []


def test_a_job_that_is_not_in_the_queue_has_ended(names):
    assert names(entry=None) == ["ENDED"]


@pytest.mark.parametrize("reason", ["launch failed requeued held", "JobHeldUser", "BadConstraints"])
def test_a_job_that_waits_for_a_person_is_held(names, alert, reason):
    assert names(entry=alert.QueueEntry("PENDING", None, reason)) == ["HELD"]


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "REQUEUED"])
def test_a_job_that_waits_for_nodes_may_have_an_old_log_and_an_old_checkpoint(names, alert, state):
    waiting = alert.QueueEntry(state, None, "Resources")
    old_log = [alert.LogLine(minutes_ago(300), 2.0)]
    assert names(entry=waiting, log=old_log, newest_save=minutes_ago(300)) == []


# With the limit of 15 minutes, a job that has been silent for 14 has no trouble, and one that has for 16 hangs.
@pytest.mark.parametrize(("minutes", "expected"), [(14, []), (16, ["HANGS"])])
def test_silence_counts_from_the_last_line_of_the_log(names, alert, minutes, expected):
    last_line = alert.LogLine(minutes_ago(minutes), 2.0)
    assert names(log=[last_line]) == expected


@pytest.mark.parametrize(("minutes", "expected"), [(14, []), (16, ["HANGS"])])
def test_silence_counts_from_the_last_start_if_no_line_came_after_it(names, alert, minutes, expected):
    started = alert.QueueEntry("RUNNING", minutes_ago(minutes), "None")
    line_before_the_start = alert.LogLine(minutes_ago(300), 2.0)
    assert names(entry=started, log=[line_before_the_start]) == expected
    assert names(entry=started, log=[]) == expected


def test_a_job_without_a_log_has_its_own_message_after_the_same_time(names, alert):
    assert names(log=None) == ["NO LOG"]
    assert names(log=None, entry=alert.QueueEntry("RUNNING", minutes_ago(5), "None")) == []


@pytest.mark.parametrize(
    ("seconds_of_steps", "expected"),
    [
        pytest.param([2.3] * 20, ["SLOW"], id="slow"),
        pytest.param([2.1] * 20, [], id="five percent are no alarm"),
        pytest.param([2.3] * 19, [], id="too few steps to say"),
        pytest.param([2.0] * 11 + [60.0] * 9, [], id="nine of twenty steps saved"),
        pytest.param([2.3] * 30 + [2.0] * 20, [], id="slow until twenty steps ago"),
    ],
)
def test_slow_is_the_median_of_twenty_lines(names, alert, seconds_of_steps, expected):
    """A step of this job should take two seconds."""
    log = [alert.LogLine(minutes_ago(0), seconds) for seconds in seconds_of_steps]
    assert names(log=log) == expected


def test_a_checkpoint_is_old_after_an_hour(names):
    assert names(newest_save=minutes_ago(61)) == ["OLD"]
    assert names(newest_save=None) == ["OLD"]  # it started two days ago


def test_each_start_of_a_job_has_an_hour_for_its_first_checkpoint(names, alert):
    started = alert.QueueEntry("RUNNING", minutes_ago(50), "None")
    assert names(newest_save=minutes_ago(300), entry=started) == []
    assert names(newest_save=None, entry=started) == []


def test_an_old_checkpoint_is_a_trouble_beside_others(names, alert):
    silent_since_then = [alert.LogLine(minutes_ago(300), 2.0)]
    assert names(log=silent_since_then, newest_save=minutes_ago(300)) == ["HANGS", "OLD"]


def test_squeues_line_is_read(alert):
    assert alert.read_entry("") is None
    assert alert.read_entry("\n") is None
    pending = alert.read_entry("PENDING N/A launch failed requeued held\n")
    assert pending == alert.QueueEntry("PENDING", None, "launch failed requeued held")
    running = alert.read_entry("RUNNING 2026-11-10T08:00:00 None\n")
    assert running == alert.QueueEntry("RUNNING", datetime(2026, 11, 10, 8), "None")


def test_a_line_that_is_half_written_is_left_out(alert, tmp_path):
    log = tmp_path / "alive.log"
    assert alert.read_log(log) is None
    log.write_text("")
    assert alert.read_log(log) == []
    log.write_text("2026-11-13T07:29:57 step 8000 seconds 2.0000\n2026-11-13T07:29:59 step 80")
    assert alert.read_log(log) == [alert.LogLine(datetime(2026, 11, 13, 7, 29, 57), 2.0)]


def test_files_and_folders_count_as_checkpoints(alert, tmp_path):
    assert alert.find_newest_save(tmp_path / "none") is None

    file = tmp_path / "step_00000010.pt"
    file.touch()
    os.utime(file, (1000, 1000))
    assert alert.find_newest_save(tmp_path) == datetime.fromtimestamp(1000)

    folder = tmp_path / "step_00000020"
    folder.mkdir()
    os.utime(folder, (2000, 2000))
    assert alert.find_newest_save(tmp_path) == datetime.fromtimestamp(2000)


# --- the command ------------------------------------------------------------------------------------------------------

# Lines of a shell script that stands in for squeue: Slurm's controller is down, or does not know the job; the job runs,
# or is held.
DOWN = "echo call >> calls; echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
RUNS = "echo RUNNING $(date +%Y-%m-%dT%H:%M:%S) None"
HELD = "echo PENDING N/A JobHeldUser"


def write_program(path, script):
    """Write a program, a shell script with these lines, and make it executable."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def environment_with_programs(folder):
    """This process's environment, in which the programs of a folder are found before all others."""
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def say(tmp_path):
    """A function that runs alert.py once, as a cron job does, and returns what it prints.

    Its argument is what squeue does at that time, such as HELD. What alert.py has said, it keeps for the next call.
    """
    (tmp_path / "jobs").mkdir()
    command = [sys.executable, FILE, "4711", "jobs/run", "--step-seconds=2", "--save-hours=1", "--pause=0"]

    def run(script_of_squeue):
        write_program(tmp_path / "squeue", script_of_squeue)
        environment = environment_with_programs(tmp_path)
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        return done.stdout

    return run


def test_a_trouble_is_told_once_and_again_after_it_was_gone(say, tmp_path):
    assert say(HELD) == "job 4711: HELD: JobHeldUser. It waits for a person, not for nodes\n"
    assert say(HELD) == ""
    assert say(RUNS) == ""
    assert say(HELD).startswith("job 4711: HELD")
    assert say(UNKNOWN) == "job 4711: ENDED: it is not in the queue any more\n"
    assert say("true") == ""  # Slurm may say nothing of a job that has ended
    assert (tmp_path / "jobs" / "run.said").read_text() == "ENDED"


def test_squeue_is_asked_three_times_before_it_has_failed(say, tmp_path):
    assert say(DOWN) == "job 4711: NO ANSWER: squeue failed three times\n"
    assert (tmp_path / "calls").read_text().split() == ["call", "call", "call"]
    down_once_then_runs = f"if [ -e tried ]; then {RUNS}; exit; fi; touch tried; {DOWN}"
    assert say(down_once_then_runs) == ""


# --- chapter 13b's rollback -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_answer", [UNKNOWN, "exit 0"], ids=["forgotten", "ended"])
def test_the_rollback_waits_until_squeue_says_that_the_job_is_gone(last_answer, tmp_path):
    """An error of squeue is no such answer: while the controller is down, the job may still save.

    The line that waits, ``until …``, asks squeue again and again. Here the job runs, then the controller is down, then
    the job completes, and only the fourth answer says that it is gone.
    """
    page = json.loads(find_notebook("13b").read_text())
    [source] = ["".join(cell["source"]) for cell in page["cells"] if cell["id"] == "spike-why"]
    [line_that_waits] = [line for line in source.splitlines() if line.startswith("until ")]
    answers = f"""\
echo call >> calls
case $(wc -l < calls) in
  1) echo '4711 gpu trainer me R 1:00 8 node[1-8]' ;;
  2) echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1 ;;
  3) echo '4711 gpu trainer me CG 1:10 8 node[1-8]' ;;
  *) {last_answer} ;;
esac"""
    write_program(tmp_path / "squeue", answers)
    write_program(tmp_path / "sleep", "")  # takes no time

    command = ["bash", "-e", "-c", line_that_waits]
    environment = environment_with_programs(tmp_path)
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=30)

    assert (tmp_path / "calls").read_text().split() == ["call", "call", "call", "call"]
