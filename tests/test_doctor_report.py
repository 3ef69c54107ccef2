"""What the doctor makes of findings, of a plan, and of a launcher's variables: no process is started here."""

import json
import re
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from slurm_cluster import STEP

from helpers.doctor import facts, membership, trials
from helpers.doctor.facts import Facts
from helpers.doctor.findings import Findings, notes, problems, span
from helpers.doctor.membership import Place, find_place
from helpers.doctor.plan import read_plan
from helpers.doctor.report import report
from helpers.doctor.trials import Speeds, Trial
from helpers.planner.plan import plan
from helpers.planner.report import tables

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def flat(text):
    """A text without its line breaks."""
    return re.sub(r"\s+", " ", text)


# --- a launcher's variables -------------------------------------------------------------------------------------------


def set_variables(monkeypatch, variables):
    """Set these environment variables of a launcher, and no others; None: not set."""
    for name in LAUNCHED | STEP:
        monkeypatch.delenv(name, raising=False)
        if variables.get(name) is not None:
            monkeypatch.setenv(name, variables[name])


IN_STEP = Place(9, 16, 1, "gpu07", 23456)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, None),
        (LAUNCHED, Place(1, 2, 1, "node1", 29500)),
        (STEP, IN_STEP),
        ({**STEP, "MASTER_PORT": "29501"}, replace(IN_STEP, port=29501)),
        ({**STEP, "MASTER_ADDR": "node4"}, replace(IN_STEP, host="node4")),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in Slurm is not a rank
        ({**STEP, "SLURM_STEP_ID": None}, None),
        ({**STEP, **LAUNCHED}, Place(1, 2, 1, "node1", 29500)),  # torchrun goes before Slurm
        ({**STEP, "SLURM_STEP_NODELIST": "node1,node2"}, replace(IN_STEP, host="node1")),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[7]"}, replace(IN_STEP, host="gpu7")),
        ({**STEP, "SLURM_STEP_NODELIST": "rack2-gpu[001,004-9]-ib,other"}, replace(IN_STEP, host="rack2-gpu001-ib")),
        ({**STEP, "SLURM_STEP_NODELIST": "rack[1,3]-node[3-4,7]x,gpu[1-2]"}, replace(IN_STEP, host="rack1-node3x")),
    ],
)
def test_place(environment, place, monkeypatch):
    set_variables(monkeypatch, environment)
    assert find_place() == place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "Of a launcher's variables, WORLD_SIZE is missing."),
        ({"MASTER_ADDR": "", "MASTER_PORT": None}, "Of a launcher's variables, MASTER_ADDR is missing."),
        ({"RANK": None}, "Of a launcher's variables, RANK is missing."),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one', which is not a number from 0 to 65535."),
        ({"MASTER_PORT": "29500.0"}, "MASTER_PORT is '29500.0', which is not a number from 0"),
        ({"RANK": "-1"}, "RANK is '-1', which is not a number from 0"),
        ({"RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2: ranks count from 0."),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is '65536', which is not a number from 0 to 65535."),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(change, message, monkeypatch, helpers):
    set_variables(monkeypatch, {**LAUNCHED, **change})
    status, _, error = helpers("doctor")
    assert status == 1 and error.startswith(f"error: {message}")
    assert "\nStart the ranks with torchrun or srun; for this" in error


@pytest.mark.parametrize("seconds", ["soon", "-1", "0", "nan"])
def test_a_timeout_that_cannot_be(seconds, helpers):
    status, _, error = helpers("doctor", "--timeout", seconds)
    assert status == 2 and f"'{seconds}' is not a number of seconds above 0" in error


# --- what findings mean -----------------------------------------------------------------------------------------------


def findings(count=4, hosts=1, gpus=False, **changes):
    """The findings of healthy ranks, with ``changes``: of its fields, or of one rank's facts, as in rank2={...}."""
    local = count // hosts
    on_gpu = {"model": "H100 80GB HBM3", "NCCL": "2.28.3"} if gpus else {}
    per_rank = {
        rank: Facts(
            host=f"node{rank // local}",
            port=50000 + rank,
            local_rank=rank % local,
            device=f"cuda:{rank % local}" if gpus else "cpu",
            gpu_id=f"GPU {rank}" if gpus else "",
            interface="eth0",
            address=f"10.0.0.{rank // local}",
            python="3.12.1",
            torch="2.13.0",
            memory=int(64e9),
            device_memory=int(84e9),
            **on_gpu,
        )
        for rank in range(count)
    }
    for rank in range(count):
        per_rank[rank] = replace(per_rank[rank], **changes.pop(f"rank{rank}", {}))
    names = "broadcast scatter gather reduce all_gather all_reduce reduce_scatter all_to_all".split()
    healthy = Findings(
        world_size=count,
        timeout=60.0,
        master="node0:29500",
        backend="nccl" if gpus else "gloo",
        device="cuda" if gpus else "cpu",
        facts=per_rank,
        members=list(range(count)),
        unreached={rank: {} for rank in range(count)},
        clocks=dict.fromkeys(range(count), 0.0),
        collectives={name: dict.fromkeys(range(count), Trial(True, 1e-4, 2e9)) for name in names},
        links={pair: Trial(True, 1e-4, 1e9) for pair in combinations(range(count), 2)},
        alone=dict.fromkeys(range(count), 3e12),
    )
    return replace(healthy, **changes)


def test_busbw_is_that_of_nccl_tests():
    text, _ = report(findings(4))
    rows = {row[0]: float(row[1]) for row in re.findall(r"(?m)^(\w+) +yes .* ([\d.]+)$", text)}
    ring = dict.fromkeys(["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"], 1.5)
    assert rows == {"broadcast": 2, "reduce": 2, "all_reduce": 3, **ring}  # algbw 2; 2 (n-1)/n, (n-1)/n or 1 of it


@pytest.mark.parametrize("count, hosts", [(1, 1), (2, 2), (8, 1), (16, 2), (256, 32)])
@pytest.mark.parametrize("gpus", [False, True])
def test_reports_fit_a_screen(count, hosts, gpus):
    text, status = report(findings(count, hosts, gpus))
    lines = text.splitlines()
    assert status == 0 and max(map(len, lines)) <= 80 and len(lines) < 40 + hosts and "note " not in text
    first, last = count // hosts * (hosts - 1), count - 1
    assert f"{span(range(first, last + 1))} " in text and f"node{hosts - 1} " in text


LITTLE = {"rank0": {"memory": 64e6}, "rank1": {"memory": 64e6}}
ALONE = {0: 3e12, 1: 3e12, 2: 1e12, 3: 3e12}
TIMED_OUT = {**dict.fromkeys((0, 1), {2: "timed out", 3: "timed out"}), 2: {}, 3: {}}
PAIRS = {pair: Trial(True, 1e-4, 1e9) for pair in combinations(range(4), 2)}
BETWEEN = PAIRS | {(a, b): Trial(True, 1e-4, 1e8) for a in (0, 1) for b in (2, 3)}  # slower, and as it should be
WRONG, SLOW = Trial(False, 1e-4, 1e9), Trial(True, 1e-4, 1e8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lost": {2: "roll call", 3: "roll call"}}, "Ranks 2-3 of 4 did not come within 60 s."),
        ({"lost": {2: "all_reduce"}}, "Rank 2 on node1 stopped answering in the step: all_reduce."),
        ({"rank3": {"python": "3.11.9"}}, "The ranks differ in python: 3.12.1 on ranks 0-2; 3.11.9 on rank 3."),
        ({"rank3": {"NCCL": "2.27.1"}}, "differ in NCCL: none on ranks 0-2; 2.27.1 on rank 3."),
        ({"rank1": {"local_rank": 0}}, "Ranks on node0 have equal local ranks (0, 0)."),
        ({"rank1": {"interface": "ib7", "address": None}}, "Rank 1 should use the network interface ib7, which has no"),
        ({"rank2": {"address": "127.0.1.1"}}, "Rank 2 would listen on 127.0.1.1, which no other host can reach."),
        ({"unreached": TIMED_OUT}, "Ranks 0-1 cannot connect to ranks 2-3 on node1 (eth0): timed out."),
        ({"clocks": {0: 0.0, 2: -7.3}}, "The clock of rank 2 on node1 is 7.3 s behind the first rank's."),
        ({"errors": {"gather": {1: "odd", 2: "odd", 3: "late"}}}, "gather failed on ranks 1-2: odd; on rank 3: late."),
        ({"links": {**PAIRS, (1, 3): WRONG}}, "Data between ranks 1 and 3 arrives changed (node0, node1)."),
        ({"gpus": True, "rank1": {"gpu_id": "GPU 0"}}, "Ranks 0-1 share one GPU, so everything was tried on gloo."),
        ({"gpus": True, "rank3": {"gpu_id": ""}}, "Rank 3 on node1 found no GPU, and others have one."),
        ({"gpus": True, "errors": {"gather": {1: "odd"}}}, "gather failed on rank 1: odd. try: Try --backend gloo"),
        ({"gpus": True, **LITTLE}, "WRONG node0 has only 64 MB of shared memory; data loaders and NCCL use it."),
        (LITTLE, "note node0 has only 64 MB of shared memory; data loaders and NCCL use it."),
        (
            {"rank1": {"fault": "ECC error"}},
            "The GPU of rank 1 on node0 does not answer: ECC error. try: Look there: nv",
        ),
        ({"alone": ALONE}, "note Rank 2 on node1 computes far more slowly than the others."),
        ({"alone": ALONE}, "slowest rank 2 computes in 3.00 times the median"),
        ({"links": {**PAIRS, (1, 3): SLOW}}, "note The link of ranks 1 and 3 has far less bandwidth"),
        ({"links": {**PAIRS, (1, 3): SLOW}, "gpus": True}, "WRONG The link of ranks 1 and 3 has far less bandwidth"),
        ({"links": {**BETWEEN, (0, 1): SLOW}, "gpus": True}, "WRONG The link of ranks 0 and 1 has far less bandwidth"),
        ({"links": {**PAIRS, (1, 3): SLOW}}, "ranks 1 and 3: 0.1 GB/s, the median pair 1"),
    ],
)
def test_a_problem_or_a_note_in_plain_words(changes, message):
    """With two ranks on each of two hosts, each change makes one problem or one note, which has a remedy."""
    world = findings(4, 2, **changes)
    text, status = report(world)
    assert status == len(problems(world)) == 1 - len(notes(world)) and text.count("\n  try: ") == 1
    assert message in flat(text) and text.endswith("\n1 problem found" if status else "\nNothing is wrong here.")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_meets_once(count):
    rounds = list(trials.rounds_of_pairs(count))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == (count + count % 2 - 1 if count > 1 else 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[/torch/gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:63", "Connection closed by peer"),
        ("[enforce fail at /build/gloo/linux.cc:42] . Unable to find address for: x0", ". Unable to find address"),
        ("../csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled system error", ", unhandled system error"),
        ("", "RuntimeError"),
    ],
)
def test_errors_lose_their_paths(text, message):
    plain = membership.plain(RuntimeError(text))
    assert "/" not in plain and plain.startswith(message)


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9,eth0")
    assert facts.choose_interface(torch.device("cpu"), "127.0.0.1") == ("nowhere9", None)


def test_facts_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", uuid="1234", total_memory=84_000_000_000, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    own = facts.facts_of_rank(Place(3, 4, 3, "127.0.0.1", 29500), 50000, None)
    assert (own.device, own.model, own.gpu_id, own.NCCL) == ("cuda:1", "H100 80GB HBM3", "1234", "2.28.3")
    assert own.device_memory == properties.total_memory and not own.fault and not own.no_code
    on_cpu = facts.facts_of_rank(Place(3, 4, 3, "127.0.0.1", 29500), 50000, "gloo")
    assert (on_cpu.device, on_cpu.model, on_cpu.gpu_id, on_cpu.NCCL) == ("cpu", "", "", "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", mock.Mock(side_effect=RuntimeError("CUDA error: odd")))
    broken = facts.facts_of_rank(Place(3, 4, 3, "127.0.0.1", 29500), 50000, None)
    assert (broken.device, broken.gpu_id, broken.fault) == ("cuda:1", "", "CUDA error: odd")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), "sm_80 sm_90", True),
        ((8, 9), "sm_80 sm_90", True),  # a later minor version
        ((8, 0), "sm_86", False),
        ((12, 0), "sm_80 sm_90 sm_100", False),
        ((12, 0), "sm_90 compute_90", True),
        ((12, 0), "sm_90a compute_90a", False),
        ((10, 3), "sm_100f", True),
        ((10, 3), "sm_100a", False),
    ],
)
def test_a_card_that_is_newer_than_the_build(capability, architectures, runs, monkeypatch):
    properties = SimpleNamespace(name="NVIDIA X", uuid="1", total_memory=1, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(torch.cuda, "get_arch_list", architectures.split)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    own = facts.facts_of_rank(Place(0, 1, 0, "127.0.0.1", 29500), 50000, None)
    assert (own.no_code == "") == runs
    found = [text for text, _ in problems(Findings(1, 60, "node1:29500", "nccl", "cuda", {0: own}, [0]))]
    assert any("has no code for its GPU, sm_" in text for text in found) == (not runs)


# --- a plan -----------------------------------------------------------------------------------------------------------

# What `python -m helpers plan … --json` writes.
PLAN = tables(plan("gpt2", {"preset": "h100", "nodes": 2, "gpus_per_node": 2}, {"dp": 2, "tp": 2, "batch": 8}))
SPEEDS = Speeds(matmul=700e12, in_node=350e9, between=40e9)


def compare(folder, of_plan, gpus=True, speeds=SPEEDS, rank_2=SPEEDS):
    """The report of four ranks on two hosts, compared with PLAN, of which ``of_plan`` changes tables; its status."""
    path = folder / "plan.json"
    path.write_text(json.dumps(PLAN | {name: PLAN[name] | table for name, table in of_plan.items()}))
    each = {**dict.fromkeys(range(4), speeds), 2: rank_2}
    text, status = report(findings(4, 2, gpus, speeds=each), read_plan(path))
    assert max(map(len, text.splitlines())) <= 80
    return text, status


def test_a_cluster_that_has_what_a_plan_counts_on(tmp_path):
    text, status = compare(tmp_path, {})
    assert status == 0 and text.endswith("Nothing is wrong here.")
    assert text.partition("\nthe plan of gpt2 on 4 x h100\n")[2].splitlines()[:6] == [
        "ranks     has 4, the plan counts on 4",
        "nodes     has 2, the plan counts on 2",
        "memory    has 84 GB on rank 0, the plan counts on 80",
        "matmul    has 700 TFLOP/s in bfloat16 on rank 0, the plan counts on 989",
        "in a node has 350 GB/s on rank 0, the plan counts on 450",
        "between   has 40 GB/s on rank 0, the plan counts on 50",
    ]


RANK_2 = "and rank 2 has less than 50% of it. try: Look at that rank's host; or plan again with [cluster]"


@pytest.mark.parametrize(
    ("of_plan", "of_rank_2", "message"),
    [
        ({"layout": {"dp": 8}}, {}, "The plan counts on 16 ranks, and here are 4."),
        ({"cluster": {"nodes": 1}}, {}, "The plan counts on 1 nodes, and here are 2."),
        ({"memory": {"limit": 90e9}}, {}, "The plan counts on 90 GB memory, and rank 0 has less of it. try: Look at"),
        ({"memory": {"limit": 90e9}}, {}, "or plan again with [cluster] memory = 8.4e+10"),
        ({}, {"matmul": 4e14}, f"on 989 TFLOP/s in bfloat16 matmul, {RANK_2} peaks.bfloat16 = 4e+14"),
        ({}, {"in_node": 12e9}, f"The plan counts on 450 GB/s in a node, {RANK_2} link_in_node = 1.2e+10"),
        ({}, {"between": 2e9}, f"The plan counts on 50 GB/s between, {RANK_2} link_between = 2e+09"),
    ],
)
def test_what_a_plan_counts_on_and_is_not_there(of_plan, of_rank_2, message, tmp_path):
    text, status = compare(tmp_path, of_plan, rank_2=replace(SPEEDS, **of_rank_2))
    assert status == 1 and message in flat(text)


def test_what_is_not_known_is_no_problem(tmp_path):
    changes = {"layout": {"dtype": "float8"}}
    text, status = compare(tmp_path, changes, speeds=replace(SPEEDS, matmul=None), rank_2=None)
    assert status == 0 and "matmul    was not tried, the plan counts on 989" in text


def test_ranks_on_cpus_share_the_memory_of_their_host(tmp_path):
    text, status = compare(tmp_path, {"cluster": {"gpu": "cpu"}}, gpus=False)
    assert status == 1 and "memory    has 42 GB on rank 0, the plan counts on 80" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{} holds no plan (FileNotFoundError: [Errno 2] No such file or directory"),
        (json.dumps(PLAN)[:100], "{} holds no plan (JSONDecodeError: "),
        ("[1, 2]", "{} holds no plan (TypeError: "),
        (json.dumps({**PLAN, "layout": {"dp": "two"}}), "{} holds no plan (ValueError: "),
        (json.dumps({**PLAN, "memory": {}}), "{} holds no plan (KeyError: 'limit')."),
    ],
)
def test_a_file_that_is_not_a_plan(text, message, tmp_path, monkeypatch, helpers):
    set_variables(monkeypatch, {})
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    status, _, error = helpers("doctor", "--plan", path)
    assert status == 1 and error.startswith(f"error: {message.format(path)}") and error.count("\n") == 2
    assert "Write one: python -m helpers plan MODEL CLUSTER" in error
