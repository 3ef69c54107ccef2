"""``python -m helpers nccl-log``, which takes its functions from the notebook of the page on NCCL's log."""

import pytest

from helpers.doctor.nccl_log import PAGE, READERS, functions_of

# Logs of three ranks: by what paths they are connected, rank 1 waiting for an all-reduce, and rank 2 that is behind.
PATHS = """
n1:42:61 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:43:62 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0
"""
WAITING = """
[rank1]:[E1125 ProcessGroupNCCL.cpp:757] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=458, \
OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.
[rank1]:[E1125 ProcessGroupNCCL.cpp:2395] [PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work \
sequence id: 458 PG status: last enqueued work: 460, last started work: -1, last completed work: 457
""".replace("\\\n", "")
LATE = """
[rank2]:[E1125 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a \
collective timeout from rank 1 and we will try our best to dump the debug info. Last enqueued NCCL work: 457, last \
completed NCCL work: 457.
""".replace("\\\n", "")


@pytest.fixture
def logs(tmp_path):
    """A function that writes each text into a file, as the log of a rank, and returns the paths."""

    def write(*texts):
        paths = []
        for number, text in enumerate(texts):
            path = tmp_path / f"rank{number}.log"
            path.write_text(text)
            paths.append(path)
        return paths

    return write


def test_the_logs_of_all_ranks_name_the_rank_that_is_behind(helpers, logs):
    status, out, _ = helpers("nccl-log", *logs(PATHS + WAITING, LATE))
    assert status == 0
    assert "who waits:\n  number 458 was not called by\n  rank 2: 457\n" in out
    assert "paths:\n  0 -> 1: P2P/CUMEM\n  1 -> 2: NET/IB\n" in out
    assert "advice:\n  through host memory: nvidia-peermem?\n" in out


def test_what_a_log_does_not_have_is_said(helpers, logs):
    status, out, _ = helpers("nccl-log", *logs(PATHS))
    assert status == 0
    assert "who waits: these logs have no such lines" in out


def test_logs_that_say_nothing_of_the_group_are_refused(helpers, logs):
    status, out, _ = helpers("nccl-log", "--group", "7", *logs(WAITING + LATE))
    assert status == 1
    assert out.count("these logs have no such lines") == 3


def test_a_log_of_another_program_is_refused(helpers, logs):
    status, _, errors = helpers("nccl-log", *logs("step 3: loss 2.31\n"))
    assert status == 1
    assert errors == "error: no line is NCCL's or its watchdog's.\nGive the whole logs of all ranks.\n"


def test_only_what_the_functions_use_is_executed(capsys):
    functions = functions_of(PAGE, READERS)
    assert set(functions) == set(READERS)
    printed = capsys.readouterr().out  # Other cells of the page would print.
    assert printed == ""
    assert "LOG" not in functions["transports"].__globals__  # the example log of the page
