"""``python -m helpers doctor`` in each rank: try everything that a training run will need, and say what is wrong."""

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import torch
import torch.distributed as dist

from helpers.doctor.membership import GRACE, Hopeless, Ward, open_store, plain
from helpers.doctor.report import report

SMALL, LARGE = 1 << 10, {"cpu": 1 << 20, "cuda": 1 << 24}  # numbers of 4 bytes: 4 KiB; 4 MiB, on GPUs 64 MiB
KNOCK = 5  # seconds to wait for another rank's address to answer


# --- who is here ------------------------------------------------------------------------------------------------------


def choose_interface(device, master):
    """(interface, its address) that the backend will use: the one in its variable, or what it would pick itself.

    gloo takes the address of the host's own name; for NCCL, which ranks them, this is the one that leads to ``master``.
    """
    addresses = {}
    for name, entries in psutil.net_if_addrs().items():
        found = sorted(
            (entry.family, entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        if found:
            addresses[name] = found[0][1].partition("%")[0]
    variable = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    if wanted := os.environ.get(variable, "").split(",")[0].strip("="):
        name = next((name for name in addresses if name == wanted), wanted)
        if device.type == "cuda":
            name = next((name for name in addresses if name.startswith(wanted)), name)  # NCCL takes prefixes
        return name, addresses.get(name)
    try:
        if device.type == "cuda":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))  # sends nothing
                address = probe.getsockname()[0]
        else:
            address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"  # what gloo falls back on
    default = "loopback" if address.startswith("127.") else "no interface"
    return next((name for name, own in addresses.items() if own == address), default), address


def facts(place, backend):
    """What this rank knows about itself, for JSON; what could not be found out is None."""
    gpus = 0 if backend == "gloo" else torch.cuda.device_count()
    device = torch.device("cuda", place["LOCAL_RANK"] % gpus) if gpus else torch.device("cpu")
    on_gpu = device.type == "cuda"
    interface = partial(choose_interface, device, place["MASTER_ADDR"])
    questions = {
        "host": lambda: socket.gethostname().split(".")[0],
        "local_rank": lambda: place["LOCAL_RANK"],
        "device": lambda: str(device),
        "model": lambda: torch.cuda.get_device_name(device).removeprefix("NVIDIA ") if on_gpu else "",
        "chip": lambda: str(torch.cuda.get_device_properties(device).uuid) if on_gpu else "",
        "interface": lambda: interface()[0],
        "address": lambda: interface()[1],
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        "memory": lambda: shutil.disk_usage("/dev/shm").free if sys.platform == "linux" else None,
    }
    found = {}
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except Exception as error:
            found[name] = None
            found.setdefault("unknown", {})[name] = plain(error)
    return found


# --- what they try ----------------------------------------------------------------------------------------------------


def knock(doors):
    """(rank, why) for each of {rank: (address, port)} that takes no connection."""

    def answers(door):
        try:
            socket.create_connection(door, timeout=KNOCK).close()
        except OSError as error:
            return str(error.strerror or error)

    with ThreadPoolExecutor(32) as pool:
        reasons = zip(doors, pool.map(answers, doors.values()), strict=True)
        return [(rank, reason) for rank, reason in reasons if reason]


def within_reach(members, doors, closed):
    """The ranks that all reach each other, taken in order. A group with others would hang in its start."""
    chosen = []
    for rank in members:
        if doors[rank][0] and not any(rank in closed[other] or other in closed[rank] for other in chosen):
            chosen.append(rank)
    return chosen or members


def seconds(call, rounds, device, together):
    """Seconds of one call: the mean of ``rounds`` in a row, best of 3."""
    tries = []
    for _ in range(3):
        together()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(rounds):
            finish(call(), device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        tries.append((time.perf_counter() - start) / rounds)
    return min(tries)


def finish(works, device):
    """Wait for what a call has started. On a GPU the clock waits instead, for all calls: they run in order."""
    for work in works if isinstance(works, list) else [works]:
        if device.type != "cuda" and work is not None:
            work.wait()


def collectives(part, device):
    """{name: (call, output, expected)} with ``part`` float32 numbers for each rank; output None: no result here."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(world_size * part, device=device).view(world_size, part) % 7 + 1.0  # exact in float32
    factors = torch.arange(1.0, world_size + 1, device=device)[:, None]
    mine = (pattern * (rank + 1)).flatten()
    total, spread = (pattern * factors.sum()).flatten(), (pattern * factors).flatten()
    own = mine.chunk(world_size)[rank].clone()
    copied, reduced, summed = (mine.clone() for _ in range(3))
    gathered, everything, swapped = (torch.zeros_like(mine) for _ in range(3))
    scattered, own_sum = torch.zeros_like(own), torch.zeros_like(own)
    outbox, inbox = (list(x.chunk(world_size)) if rank == 0 else None for x in (mine, gathered))
    # The names that torch had before 2.13, for the cluster that is behind.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    alone = {"async_op": True}
    return {
        "broadcast": (lambda: dist.broadcast(copied, 0, **alone), copied, pattern.flatten()),
        "scatter": (lambda: dist.scatter(scattered, outbox, 0, **alone), scattered, pattern[rank]),
        "gather": (lambda: dist.gather(own, inbox, 0, **alone), gathered if rank == 0 else None, spread),
        "reduce": (lambda: dist.reduce(reduced, 0, **alone), reduced if rank == 0 else None, total),
        "all_gather": (lambda: all_gather(everything, own, **alone), everything, spread),
        "all_reduce": (lambda: dist.all_reduce(summed, **alone), summed, total),
        "reduce_scatter": (lambda: reduce_scatter(own_sum, mine, **alone), own_sum, total.chunk(world_size)[rank]),
        "all_to_all": (
            lambda: dist.all_to_all_single(swapped, mine, **alone),
            swapped,
            (pattern[rank] * factors).flatten(),
        ),
    }


def try_collective(name, device):
    """(right, seconds with 4 KiB, bytes per second with 4 MiB or 64 MiB on a rank) of one collective."""
    right, times, world_size = True, [], dist.get_world_size()
    for numbers, rounds in ((SMALL, 5), (LARGE[device.type], 2)):
        part = -(-numbers // world_size)
        call, output, expected = collectives(part, device)[name]
        call().wait()
        right = right and (output is None or torch.equal(output, expected))
        times.append(seconds(call, rounds, device, dist.barrier))
    return right, times[0], 4 * part * world_size / times[1]


def rounds_of_pairs(count):
    """Each pair of range(count) once, in rounds of pairs that share nobody: the circle method of tournaments."""
    seats = list(range(count + count % 2))
    for _ in seats[1:]:
        pairs = [tuple(sorted((seats[k], seats[-1 - k]))) for k in range(len(seats) // 2)]
        yield [pair for pair in pairs if pair[1] < count]
        seats.insert(1, seats.pop())


def try_link(peer, device):
    """(right, seconds with 4 KiB, bytes per second each way) of an exchange with one peer, both ways at once."""
    right, times = True, []
    for numbers, rounds in ((SMALL, 5), (LARGE[device.type], 2)):
        pattern = torch.arange(numbers, device=device) % 7 + 1.0
        mine, theirs = pattern * (dist.get_rank() + 1), torch.zeros_like(pattern)

        def exchange(mine=mine, theirs=theirs):
            return dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])

        for work in exchange():
            work.wait()
        right = right and torch.equal(theirs, pattern * (peer + 1))
        times.append(seconds(exchange, rounds, device, lambda: None))
    return right, times[0], 4 * numbers / times[1]


def try_alone(device):
    """Seconds of one matrix product, which every rank computes for itself: best of 15."""
    size = 4096 if device.type == "cuda" else 384
    x = torch.ones(size, size, device=device)

    def product():
        torch.mm(x, x)

    return min(seconds(product, 1, device, lambda: None) for _ in range(5))


# --- the visit --------------------------------------------------------------------------------------------------------


def try_links(ward):
    """{(rank, rank): [right, seconds, bytes per second]} of every pair of members, by the slower of its two."""
    links, members = {}, ward.members
    for number, pairs in enumerate(rounds_of_pairs(len(members)), 1):
        pairs = [(members[a], members[b]) for a, b in pairs if {members[a], members[b]} <= set(ward.members)]
        peers = {a: b for a, b in pairs} | {b: a for a, b in pairs}

        def talk(peer):
            if peer is None:
                return None  # this rank sits out
            try:
                return try_link(ward.members.index(peer), ward.device)
            except Exception as error:
                raise RuntimeError(f"with rank {peer}: {plain(error)}") from None

        if not ward.ready:
            break
        found = ward.attempt(f"round {number} of the links", partial(talk, peers.get(ward.rank)))
        for pair in pairs:
            if both := [found[rank] for rank in pair if found.get(rank)]:
                right, times, speeds = zip(*both, strict=True)
                links[pair] = [all(right) and len(both) == 2, max(times), min(speeds)]
    return links


def examine(ward, place, backend):
    """Try everything with the other ranks and return what was found, for ``diagnosis``; the same on every rank."""
    known = facts(place, backend)
    with contextlib.ExitStack() as doors:
        with contextlib.suppress(OSError, TypeError):  # no address of this host: the others will find it closed
            family = socket.AF_INET6 if ":" in known["address"] else socket.AF_INET
            door = socket.create_server((known["address"], 0), family=family, backlog=4096)
            known["port"] = doors.enter_context(door).getsockname()[1]
        people = ward.agree("roll call", known, ward.timeout)
        doorplates = {rank: (them["address"], them.get("port", 9)) for rank, them in people.items()}
        others = {rank: door for rank, door in doorplates.items() if door[0] and rank != ward.rank}
        closed = ward.attempt("connecting by TCP", lambda: knock(others))
        closed = {rank: dict(refusals or ()) for rank, refusals in closed.items()}
    ward.keep(within_reach(ward.members, doorplates, closed))
    chips = [them["chip"] for them in people.values()]
    if all(chips) and len(set(chips)) == len(chips):
        ward.backend, ward.device = "nccl", torch.device(known["device"])
        torch.cuda.set_device(ward.device)
    backend = ward.backend
    ward.start_group()
    tried = {}
    for name in collectives(1, torch.device("cpu")) if ward.ready else []:
        if ward.ready:
            tried[name] = ward.attempt(name, partial(try_collective, name, ward.device))
    links = try_links(ward)
    speeds = ward.attempt("computing alone", partial(try_alone, ward.device))
    skews = ward.agree("the end", ward.skew)
    return {
        "world_size": place["WORLD_SIZE"],
        "timeout": ward.timeout,
        "master": (place["MASTER_ADDR"], place["MASTER_PORT"]),
        "backend": backend,
        "device": ward.device.type,
        "people": people,
        "members": ward.members,
        "lost": ward.lost,
        "errors": ward.errors,
        "closed": closed,
        "collectives": tried,
        "links": links,
        "alone": speeds,
        "skews": skews,
    }


def visit(place, backend=None, timeout=60):
    """Examine this rank's world; the leader prints the report. The exit status: 0 where nothing is wrong, or 1."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout is an exception then, and no abort
    rank, server = place["RANK"], f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}"
    status, story = 1, None
    try:
        store, serves = open_store(place, timeout)
        ward = Ward(store, rank, place["WORLD_SIZE"], timeout)
        try:
            text, status = report(examine(ward, place, backend))
            if ward.rank == ward.leader:
                print(text, flush=True)
            ward.agree("goodbye", None)
        except Hopeless as error:
            story = error
        store.set(f"gone/{rank}", "")
        if serves:  # until the last has left
            ward.arrives(["goodbye/all"], time.monotonic() + 5 * timeout)
            ward.arrives([f"gone/{member}" for member in ward.members], time.monotonic() + GRACE)
    except Hopeless as error:
        story = error
    except dist.DistError as error:
        story = f"The store at {server} went away ({plain(error)}). Look at the output of the rank that served it."
    if story:
        print(f"rank {rank} on {socket.gethostname()}: {story}", file=sys.stderr, flush=True)
        return 1
    if status and "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun tells a long story of each rank that fails or is stopped: one for each host is enough.
        status = int(place["LOCAL_RANK"] == 0)
        time.sleep(0.5 * status)
    return status


def start_local(nproc, flags):
    """Start the doctor on ``nproc`` ranks of this machine, as torchrun would, and return the worst exit status."""
    nproc = nproc or torch.cuda.device_count() or 2
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    started = []
    for rank in range(nproc):
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "helpers", "doctor", *flags]
        started.append(subprocess.Popen(command, env=environment, process_group=0))  # Ctrl-C is for this process alone
    failed = [rank for rank, process in enumerate(started) if process.wait()]
    print("\nThat was this machine alone. On a cluster, start it in every rank:")
    print("  torchrun ... -m helpers doctor    or    srun python -m helpers doctor")
    return int(bool(failed))
