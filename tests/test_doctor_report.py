"""What the doctor makes of findings, of a plan, and of a launcher's variables: no process is started here."""

import json
import re
from dataclasses import replace
from itertools import chain, combinations
from types import SimpleNamespace

import pytest
import torch
from slurm_cluster import STEP

from helpers.doctor import driver, facts, membership, trials
from helpers.doctor.driver import Health
from helpers.doctor.facts import Facts, Interface
from helpers.doctor.findings import Findings
from helpers.doctor.membership import LaunchedRank, read_launcher
from helpers.doctor.plan import read_plan
from helpers.doctor.problems import notes, problems, span
from helpers.doctor.report import report
from helpers.doctor.trials import COLLECTIVES, Speeds, Trial
from helpers.export.chapters import find_notebook
from helpers.planner.plan import plan
from helpers.planner.report import tables

WIDTH = 80  # characters of a line of the report


def unwrapped(text):
    """A text without its line breaks."""
    return re.sub(r"\s+", " ", text)


# --- a launcher's variables -------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
RANK_OF_TORCHRUN = LaunchedRank(rank=1, world_size=2, local_rank=1, host="node1", port=29500)
RANK_OF_SLURM = LaunchedRank(rank=9, world_size=16, local_rank=1, host="gpu07", port=23456)  # STEP is its variables.


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, None),
        (TORCHRUN, RANK_OF_TORCHRUN),
        (STEP, RANK_OF_SLURM),
        ({**STEP, "MASTER_ADDR": "node4", "MASTER_PORT": "29501"}, replace(RANK_OF_SLURM, host="node4", port=29501)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell in Slurm is not a rank
        ({**STEP, **TORCHRUN}, RANK_OF_TORCHRUN),  # torchrun in a step
    ],
)
def test_the_launchers_variables(environment, launched):
    """The variables of torchrun and of srun give the same record; without a launcher there is none."""
    assert read_launcher(environment) == launched


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1,node2", "node1"),
        ("rack[1,3]-node[3-4,7]x,gpu[1-2]", "rack1-node3x"),
    ],
)
def test_the_first_host_of_slurms_node_list(nodes, host):
    assert membership.first_host(nodes) == host


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": ""}, "A launcher's variable is missing, or is no number: RANK=1, WORLD_SIZE=, "),
        ({"RANK": "2"}, "RANK is not below WORLD_SIZE, or there is no such port: RANK=2, WORLD_SIZE=2, "),
    ],
)
def test_the_variables_are_shown_where_one_is_missing_or_wrong(change, message, monkeypatch, helpers):
    variables = {**TORCHRUN, **change}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    status, _, error = helpers("doctor")

    assert status == 1
    assert error.startswith(f"error: {message}")
    assert "\nStart the ranks with torchrun or srun; for this" in error


# --- what a rank knows about itself -----------------------------------------------------------------------------------

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "10.1.0.7"}  # {interface: its address}


@pytest.mark.parametrize(
    ("device", "variable", "expected"),
    [
        (CPU, "eth1,eth0", Interface("eth1", "10.1.0.7")),  # The user names two: the first one counts.
        (CPU, "nowhere9", Interface("nowhere9", None)),  # The host has no such interface.
        (CPU, "", Interface("loopback", "127.0.1.1")),  # gloo takes the address of the host's name.
        (GPU, "eth", Interface("eth0", "10.0.0.7")),  # For NCCL the beginning of a name is enough.
        (GPU, "", Interface("eth0", "10.0.0.7")),  # It is the one that leads to the master.
    ],
)
def test_the_interface_that_a_backend_takes(device, variable, expected, monkeypatch):
    """``variable`` is what the user has set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to."""
    fake_network(monkeypatch)
    for backend in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{backend}_SOCKET_IFNAME", variable)
    assert facts.choose_interface(device, "node0") == expected


def fake_network(monkeypatch):
    """Give this host the interfaces of ADDRESSES, a name that is a loopback address, and eth0 towards its master."""
    monkeypatch.setattr(facts, "addresses_by_interface", lambda: ADDRESSES)
    monkeypatch.setattr(facts, "address_of_own_name", lambda: "127.0.1.1")
    monkeypatch.setattr(facts, "address_towards", lambda host: ADDRESSES["eth0"])


def test_facts_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="1234", total_memory=84e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    health = Health(uncorrected_errors=0)
    monkeypatch.setattr(facts, "health_of_gpu", {"1234": health}.get)
    launched = LaunchedRank(rank=3, world_size=4, local_rank=3, host="127.0.0.1", port=29500)

    on_gpu = facts.facts_of_rank(launched, port=50000, backend=None)
    assert on_gpu.device == "cuda:1"  # There are two GPUs, so local rank 3 shares one with local rank 1.
    assert on_gpu.gpu_model == "H100 80GB HBM3"
    assert on_gpu.gpu_id == "1234"
    assert on_gpu.nccl == "2.28.3"
    assert on_gpu.device_memory == 84e9
    assert on_gpu.unsupported_gpu == "sm_90, only for sm_80"
    assert on_gpu.health == health

    on_cpu = facts.facts_of_rank(launched, port=50000, backend="gloo")
    assert on_cpu.device == "cpu"
    assert on_cpu.gpu_id == ""

    def broken_driver(device):
        raise RuntimeError("CUDA error: odd")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken_driver)
    on_broken_gpu = facts.facts_of_rank(launched, port=50000, backend=None)
    assert on_broken_gpu.device == "cuda:1"
    assert on_broken_gpu.gpu_id == ""
    assert on_broken_gpu.gpu_error == "CUDA error: odd"


# A fake nvidia-smi of an older driver: it knows one GPU, and not the newer name of the reasons for low clocks.
NVIDIA_SMI = """#!/bin/sh
case "$*" in *--id=GPU-1234*) ;; *) echo "no GPU of this name"; exit 6 ;; esac
case "$*" in *clocks_event_reasons*) echo "not a valid field to query." ; exit 2 ;; esac
echo "00000000:9D:00.0, 3, Active, Not Active, Not Active, Active"
"""
KERNEL_LOG = """\
[  100.1] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.
[  100.2] NVRM: Xid (PCI:0000:9d:00): 31, pid='<unknown>', MMU Fault
[  100.3] NVRM: Xid (PCI:0000:9d:00): 48, An uncorrectable double bit error
[  100.4] NVRM: Xid (PCI:0000:9d:00): 48, An uncorrectable double bit error
[  100.5] NVRM: Xid (PCI:0000:9d:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)
"""


@pytest.fixture
def fake_command(tmp_path, monkeypatch):
    """A function that makes a shell script the command of this name. No other commands are found."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def fake(name, script):
        path = folder / name
        path.write_text(script)
        path.chmod(0o755)

    return fake


def test_what_the_driver_says_of_one_gpu(fake_command, tmp_path):
    log = tmp_path / "log"
    log.write_text(KERNEL_LOG)
    fake_command("nvidia-smi", NVIDIA_SMI)
    fake_command("dmesg", f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {log}\n')

    health = driver.health_of_gpu("1234")
    slowdowns = ("hw_slowdown", "sw_thermal_slowdown")
    assert health == Health(uncorrected_errors=3, slowdowns=slowdowns, xids=(48,))

    health = driver.health_of_gpu("99")
    assert health.not_read == ("nvidia-smi: no GPU of this name",)


def test_a_recovery_action_is_a_bad_xid():
    action = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    log = f"{KERNEL_LOG}[  100.6] NVRM: Xid (PCI:0000:9d:00): 154, {action}\n"
    assert driver.broken_xids(log, bus_id="00000000:9D:00.0") == (48, 154)


def test_what_the_driver_does_not_say(fake_command):
    """On a machine without nvidia-smi; on one whose dmesg is forbidden and whose GPU has no ECC; on an unknown one."""
    health = driver.health_of_gpu("1234")
    assert health == Health(not_read=("nvidia-smi: there is no such command",))

    without_ecc = NVIDIA_SMI.replace("9D:00.0, 3, Active", "9D:00.0, [N/A], Not Active")
    forbidden = "#!/bin/sh\necho 'dmesg: read kernel buffer failed: Operation not permitted' >&2\nexit 1\n"
    fake_command("nvidia-smi", without_ecc)
    fake_command("dmesg", forbidden)
    health = driver.health_of_gpu("1234")
    assert health.uncorrected_errors is None
    assert health.slowdowns == ("sw_thermal_slowdown",)
    assert health.not_read == ("Xids in dmesg: dmesg: read kernel buffer failed: Operation not permitted",)
    text = report(findings(2, gpus=True, rank0={"health": health})).text
    assert "driver    uncorrected memory errors: 0, counted by 1 of 2 GPUs" in text
    assert "not read: Xids in dmesg: dmesg: read kernel buffer failed: Operation not permitted" in text

    fake_command("nvidia-smi", "#!/bin/sh\necho another form\n")
    health = driver.health_of_gpu("1234")
    assert health.not_read == ("nvidia-smi: an answer of another form: another form",)


def test_the_doctor_and_chapter_13b_agree_which_xids_are_bad():
    chapter = find_notebook("13b").read_text()
    numbers = ", ".join(str(number) for number in sorted(driver.BROKEN))
    assert f"BROKEN = {{{numbers}}}" in chapter


# --- what findings mean -----------------------------------------------------------------------------------------------

FAST_LINK = Trial(right=True, seconds=1e-4, speed=1e9)
SLOW_LINK = Trial(right=True, seconds=1e-4, speed=1e8)
WRONG_LINK = Trial(right=False, seconds=1e-4, speed=1e9)


def healthy_facts(rank, ranks_per_host, gpus):
    """The facts of a healthy rank, with a GPU of its own or on the CPU."""
    host, local_rank = divmod(rank, ranks_per_host)
    on_cpu = Facts(
        host=f"node{host}",
        port=50000 + rank,
        local_rank=local_rank,
        device="cpu",
        interface="eth0",
        address=f"10.0.0.{host}",
        python="3.12.1",
        torch="2.13.0",
        shared_memory=int(64e9),
        device_memory=int(84e9),
    )
    if not gpus:
        return on_cpu
    return replace(
        on_cpu,
        device=f"cuda:{local_rank}",
        gpu_model="H100 80GB HBM3",
        gpu_id=f"GPU {rank}",
        nccl="2.28.3",
        health=Health(uncorrected_errors=0),
    )


def findings(count=4, hosts=1, gpus=False, **changes):
    """The findings on ``count`` healthy ranks, with some changes.

    A change is that of a field, such as lost={2: "roll call"}, or of some facts of a rank, as in rank2={"host": "a"}.
    """
    facts_by_rank = {}
    for rank in range(count):
        changed_facts = changes.pop(f"rank{rank}", {})
        facts_by_rank[rank] = replace(healthy_facts(rank, count // hosts, gpus), **changed_facts)
    trial = Trial(right=True, seconds=1e-4, speed=2e9)
    healthy = Findings(
        world_size=count,
        timeout=60.0,
        store_address="node0:29500",
        backend="nccl" if gpus else "gloo",
        device="cuda" if gpus else "cpu",
        facts=facts_by_rank,
        members=list(range(count)),
        unreachable={rank: {} for rank in range(count)},
        clock_offsets=dict.fromkeys(range(count), 0.0),
        collectives={name: dict.fromkeys(range(count), trial) for name in COLLECTIVES},
        links=links(count),
        compute_speeds=dict.fromkeys(range(count), 3e12),
    )
    return replace(healthy, **changes)


def links(count=4, **changes):
    """The links between all pairs of ranks: fast ones, apart from those of ``changes``, as in ranks_1_3=SLOW_LINK."""
    link_of_pair = dict.fromkeys(combinations(range(count), 2), FAST_LINK)
    for name, link in changes.items():
        _, first, second = name.split("_")
        link_of_pair[int(first), int(second)] = link
    return link_of_pair


def test_busbw_is_that_of_nccl_tests():
    """Among n ranks the bus bandwidth is the algorithm bandwidth, here 2 GB/s, times a factor.

    The factor is 2 (n - 1) / n for an all-reduce, 1 for a broadcast and a reduce, and (n - 1) / n for all others.
    """
    text = report(findings(4)).text
    rows = re.findall(r"(?m)^(\w+) +yes .* ([\d.]+)$", text)  # "all_reduce  yes  100  3"
    bandwidths = {name: float(bandwidth) for name, bandwidth in rows}
    assert bandwidths.pop("all_reduce") == 3
    assert bandwidths.pop("broadcast") == 2
    assert bandwidths.pop("reduce") == 2
    assert set(bandwidths.values()) == {1.5}


@pytest.mark.parametrize(("count", "hosts", "gpus"), [(1, 1, False), (8, 1, True), (256, 32, True)])
def test_reports_of_healthy_ranks_fit_a_screen(count, hosts, gpus):
    result = report(findings(count, hosts, gpus))
    assert result.problems == 0
    assert "note " not in result.text

    lines = result.text.splitlines()
    assert max(len(line) for line in lines) <= WIDTH
    assert len(lines) < 40 + hosts

    ranks_per_host = count // hosts
    ranks_of_last_host = span(range(count - ranks_per_host, count))  # such as "248-255"
    row_of_last_host = rf"(?m)^{ranks_of_last_host} .* node{hosts - 1} "
    assert re.search(row_of_last_host, result.text)


LITTLE_MEMORY = {"rank0": {"shared_memory": 64e6}, "rank1": {"shared_memory": 64e6}}
SLOW_RANK = {"compute_speeds": {0: 3e12, 1: 3e12, 2: 1e12, 3: 3e12}}
TIMED_OUT = {2: "timed out", 3: "timed out"}
# Ranks 0 and 1 are on one host, ranks 2 and 3 on another. Links between hosts are slower, as they should be.
SLOW_BETWEEN_HOSTS = dict.fromkeys(["ranks_0_2", "ranks_0_3", "ranks_1_2", "ranks_1_3"], SLOW_LINK)


PROBLEMS = [  # what is changed in the findings of healthy ranks, and what the report says then
    ({"lost": {2: "roll call", 3: "roll call"}}, "Ranks 2-3 of 4 did not come within 60 s."),
    ({"lost": {2: "all_reduce"}}, "Rank 2 on node1 stopped answering in the step: all_reduce."),
    ({"rank3": {"python": "3.11.9"}}, "The ranks differ in python: 3.12.1 on ranks 0-2; 3.11.9 on rank 3."),
    ({"rank1": {"interface": "ib7", "address": None}}, "Rank 1 should use the network interface ib7, which has no"),
    ({"rank2": {"address": "127.0.1.1"}}, "Rank 2 would listen on 127.0.1.1, which no other host can reach."),
    (
        {"unreachable": {0: TIMED_OUT, 1: TIMED_OUT, 2: {}, 3: {}}},
        "Ranks 0-1 cannot connect to ranks 2-3 on node1 (eth0): timed out.",
    ),
    ({"clock_offsets": {0: 0.0, 2: -7.3}}, "The clock of rank 2 on node1 is 7.3 s behind the first rank's."),
    ({"errors": {"gather": {1: "odd", 2: "odd", 3: "late"}}}, "gather failed on ranks 1-2: odd; on rank 3: late."),
    ({"links": links(ranks_1_3=WRONG_LINK)}, "Data between ranks 1 and 3 arrives changed (node0, node1)."),
    ({"gpus": True, "rank1": {"gpu_id": "GPU 0"}}, "Ranks 0-1 share one GPU, so everything was tried on gloo."),
    ({"gpus": True, "rank3": {"gpu_id": ""}}, "Rank 3 on node1 found no GPU, and others have one."),
    ({"gpus": True, "errors": {"gather": {1: "odd"}}}, "gather failed on rank 1: odd. try: Try --backend gloo"),
    ({"rank1": {"gpu_error": "ECC error"}}, "The GPU of rank 1 on node0 does not answer: ECC error. try: Look"),
    ({"rank1": {"unsupported_gpu": "sm_90, only for sm_80"}}, "of rank 1 on node0 has no code for its GPU, sm_90"),
    (
        {"gpus": True, "rank1": {"health": Health(uncorrected_errors=2)}},
        "The memory of the GPU of rank 1 on node0 has uncorrected errors: 2 since its last reset.",
    ),
    ({"gpus": True, **LITTLE_MEMORY}, "node0 has only 64 MB of shared memory"),
    (
        {"gpus": True, "links": links(**SLOW_BETWEEN_HOSTS, ranks_0_1=SLOW_LINK)},
        "The link of ranks 0 and 1 has far less bandwidth",
    ),
]

NOTES = [
    (
        {"gpus": True, "rank3": {"health": Health(0, slowdowns=("hw_slowdown", "hw_thermal_slowdown"))}},
        "The clocks of the GPU of rank 3 on node1 are slowed down: hw_slowdown, hw_thermal_slowdown.",
    ),
    (
        {"gpus": True, "rank3": {"health": Health(0, xids=(48, 95))}},
        "The GPU of rank 3 on node1 had Xid 48, 95 since the host booted.",
    ),
    (LITTLE_MEMORY, "node0 has only 64 MB of shared memory; data loaders and NCCL use it."),
    (SLOW_RANK, "Rank 2 on node1 computes far more slowly than the others."),
    ({"links": links(ranks_1_3=SLOW_LINK)}, "The link of ranks 1 and 3 has far less bandwidth"),
]


@pytest.mark.parametrize(("changes", "message"), PROBLEMS)
def test_what_breaks_a_job_is_one_problem(changes, message):
    changed = findings(count=4, hosts=2, **changes)
    assert len(problems(changed)) == 1
    assert notes(changed) == []

    text = report(changed).text
    assert message in unwrapped(text)
    assert text.endswith("\n1 problem found")
    assert_one_advice_and_no_wide_line(text)


@pytest.mark.parametrize(("changes", "message"), NOTES)
def test_what_only_slows_a_job_is_one_note(changes, message):
    changed = findings(count=4, hosts=2, **changes)
    assert problems(changed) == []
    assert len(notes(changed)) == 1

    text = report(changed).text
    assert f"note {message}" in unwrapped(text)
    assert text.endswith("\nNothing is wrong here.")
    assert_one_advice_and_no_wide_line(text)


def assert_one_advice_and_no_wide_line(text):
    assert text.count("\n  try: ") == 1
    assert max(len(line) for line in text.splitlines()) <= WIDTH


@pytest.mark.parametrize("count", [1, 5, 8])
def test_every_pair_of_ranks_meets_once_and_no_rank_twice_in_a_round(count):
    all_pairs = []
    for pairs_of_round in trials.rounds_of_pairs(count):
        all_pairs += pairs_of_round
        ranks_of_round = list(chain.from_iterable(pairs_of_round))
        assert len(set(ranks_of_round)) == len(ranks_of_round)
    assert sorted(all_pairs) == list(combinations(range(count), 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[/torch/gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:63", "Connection closed by peer"),
        ("../csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled system error", ", unhandled system error"),
    ],
)
def test_errors_lose_the_paths_of_torchs_sources(text, message):
    shown = membership.plain(RuntimeError(text))
    assert "/" not in shown
    assert shown.startswith(message)


# --- a plan -----------------------------------------------------------------------------------------------------------

# What `python -m helpers plan … --json` writes.
PLAN = tables(plan("gpt2", {"preset": "h100", "nodes": 2, "gpus_per_node": 2}, {"dp": 2, "tp": 2, "batch": 8}))
SPEEDS = Speeds(matmul=700e12, in_node=350e9, between=40e9)


def report_beside_plan(folder, gpus=True, layout=None, **speeds_of_rank_2):
    """The report of four ranks on two hosts, compared with PLAN.

    layout: fields of the plan's layout that are changed. speeds_of_rank_2: in what rank 2 is unlike the others.
    """
    changed_layout = {**PLAN["layout"], **(layout or {})}
    path = folder / "plan.json"
    path.write_text(json.dumps({**PLAN, "layout": changed_layout}))

    speeds = dict.fromkeys(range(4), SPEEDS)
    speeds[2] = replace(SPEEDS, **speeds_of_rank_2)
    found = findings(count=4, hosts=2, gpus=gpus, plan_speeds=speeds)
    return report(found, read_plan(path))


def test_a_cluster_that_has_what_a_plan_counts_on(tmp_path):
    result = report_beside_plan(tmp_path)
    assert result.text.endswith("Nothing is wrong here.")
    _, _, comparisons = result.text.partition("\nthe plan of gpt2 on 4 x h100\n")
    assert comparisons.splitlines()[:6] == [
        "ranks     has 4 here, the plan counts on 4",
        "nodes     has 2 here, the plan counts on 2",
        "memory    has 84 GB on rank 0, the plan counts on 80",
        "matmul    has 700 TFLOP/s in bfloat16 on rank 0, the plan counts on 989",
        "in a node has 350 GB/s on rank 0, the plan counts on 450",
        "between   has 40 GB/s on rank 0, the plan counts on 50",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": {"dp": 8}}, "The plan counts on 16 (ranks), and here is 4. try: Start as many"),
        ({"gpus": False}, "The plan counts on 80 (memory), and on rank 0 is 42 GB. try: Look at that rank's host"),
        ({"between": 2e9}, "The plan counts on 50 (between), and on rank 2 is 2 GB/s, less than 50% of it. try: Look"),
    ],
)
def test_what_a_plan_counts_on_and_is_not_there(changes, message, tmp_path):
    result = report_beside_plan(tmp_path, **changes)
    assert result.problems == 1
    assert message in unwrapped(result.text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{} holds no plan (FileNotFoundError: [Errno 2] No such file or directory"),
        (json.dumps({**PLAN, "memory": {}}), "{} holds no plan (KeyError: 'limit')."),
    ],
)
def test_a_file_that_is_not_a_plan(text, message, tmp_path, helpers):
    """A text of None is for a file that does not exist. In the message {} stands for the file."""
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)

    status, _, error = helpers("doctor", "--plan", path)

    assert status == 1
    assert error.startswith(f"error: {message.format(path)}")
    assert "\nWrite one: python -m helpers plan MODEL CLUSTER" in error
    assert error.count("\n") == 2
