"""What the doctor's findings mean: the problems, each with the next thing to try, in a report of 80 columns.

Every function here only computes: it reads no file and no clock, and prints nothing.
"""

import textwrap
from statistics import harmonic_mean, mean, median

from helpers.command_line import aligned
from helpers.doctor.plan import compared

SLOW_CLOCK = 1.0  # seconds that clocks may differ: c10d's rendezvous and every log compare them
SLOW_RANK, SLOW_LINK = 2, 4  # times the median


def span(numbers):
    """Sorted numbers as text: ``0-3, 6`` for [0, 1, 2, 3, 6]."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def ranks(numbers):
    """``rank 2`` or ``ranks 0-3, 6``."""
    numbers = sorted(numbers)
    return f"rank{'s' if len(numbers) > 1 else ''} {span(numbers)}"


def by_value(answers):
    """{answer: the ranks that gave it} from {rank: answer}."""
    groups = {}
    for rank, answer in answers.items():
        groups.setdefault(answer, []).append(rank)
    return groups


def problems(found):
    """Yields what is wrong, as (the problem, the next thing to try). ``found`` is what ``examine`` returns."""
    infos = found["infos"]
    hosts = {rank: info["host"] for rank, info in infos.items()}

    came_late = [rank for rank, step in found["lost"].items() if step == "roll call"]
    if came_late:
        yield (
            f"{ranks(came_late)} of {found['world_size']} did not come within {found['timeout']:g} s.",
            "Did every node start it? Look at the missing rank's own output; where it starts slowly, --timeout 300.",
        )
    for rank, step in found["lost"].items():
        if step != "roll call":
            yield (
                f"Rank {rank} on {hosts[rank]} stopped answering in the step: {step}.",
                "It died or it hangs: look at its own output, and for the out-of-memory killer in its host's dmesg.",
            )

    for name in ("python", "torch", "NCCL"):
        values = by_value({rank: info[name] for rank, info in infos.items()})
        if len(values) > 1:
            told = "; ".join(f"{value or 'none'} on {ranks(having)}" for value, having in values.items())
            yield f"The ranks differ in {name}: {told}.", "Activate one and the same environment on every node."

    for host in dict.fromkeys(hosts.values()):
        locals_here = [info["local_rank"] for info in infos.values() if info["host"] == host]
        if len(set(locals_here)) < len(locals_here):
            yield (
                f"Ranks on {host} have equal local ranks ({', '.join(map(str, sorted(locals_here)))}).",
                "Set LOCAL_RANK to 0, 1, ... on each host, or let torchrun do it; give hosts different names.",
            )
    for gpu_id, sharing in by_value({rank: info["gpu_id"] for rank, info in infos.items()}).items():
        if gpu_id and len(sharing) > 1:
            yield (
                f"{ranks(sharing)} share one GPU, so everything was tried on gloo.",
                "Start one rank for each GPU: torchrun --nproc-per-node=gpu",
            )
    without = [rank for rank, info in infos.items() if not info["gpu_id"]]
    if 0 < len(without) < len(infos):
        yield (
            f"{ranks(without)} on {hosts[without[0]]} found no GPU, and others have one.",
            "Look there: nvidia-smi; CUDA_VISIBLE_DEVICES; python -c 'import torch; print(torch.cuda.is_available())'",
        )

    for name, affected in by_value(
        {rank: info["interface"] for rank, info in infos.items() if not info["address"]}
    ).items():
        yield (
            f"{ranks(affected)} should use the network interface {name}, which has no address.",
            "Put an interface that `ip -brief address` lists into GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.",
        )
    loopback = [rank for rank, info in infos.items() if (info["address"] or "").startswith(("127.", "::1"))]
    closed_in = loopback if len(set(hosts.values())) > 1 else []
    if closed_in:
        yield (
            f"{ranks(closed_in)} would listen on {infos[closed_in[0]]['address']}, which no other host can reach.",
            "Name the interface between the hosts: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0",
        )
    refused = {}
    for rank, reasons in found["unreached"].items():
        for peer, reason in reasons.items():
            if peer not in closed_in:
                refused.setdefault((rank, infos[peer]["host"], infos[peer]["interface"], reason), []).append(peer)
    groups = by_value({key: (tuple(peers), *key[1:]) for key, peers in refused.items()})
    for (peers, host, interface, reason), keys in groups.items():
        connecting = ranks(key[0] for key in keys)
        yield (
            f"{connecting} cannot connect to {ranks(peers)} on {host} ({interface}): {reason}.",
            "Open all TCP ports between the nodes, or choose another interface in GLOO_SOCKET_IFNAME.",
        )
    skews = {rank: skew for rank, skew in found["skews"].items() if abs(skew) > SLOW_CLOCK}
    for rank, skew in skews.items():
        way = "ahead of" if skew > 0 else "behind"
        yield (
            f"The clock of rank {rank} on {hosts[rank]} is {abs(skew):.1f} s {way} the first rank's.",
            "Start chrony or another NTP client there: rendezvous and logs compare the hosts' clocks.",
        )

    for step, errors in found["errors"].items():
        if step in found["lost"].values():
            continue  # this error only follows from the loss of a rank, which is told already
        told = "; ".join(f"on {ranks(raising)}: {text}" for text, raising in by_value(errors).items())
        yield (
            f"{step} failed {told}.",
            "Try --backend gloo: if that works, the fault is NCCL's. NCCL_DEBUG=INFO prints its log."
            if found["backend"] == "nccl"
            else "Name the hosts' common interface in GLOO_SOCKET_IFNAME; TORCH_DISTRIBUTED_DEBUG=DETAIL says more.",
        )
    for name, answers in found["collectives"].items():
        wrong = [rank for rank, answer in answers.items() if answer and not answer[0]]
        if wrong:
            yield (
                f"{name} gave a wrong result on {ranks(wrong)}.",
                "Take these hosts out one by one and repeat; then look at their GPUs, links and versions.",
            )
    for (a, b), (right, *_) in found["links"].items():
        if not right and not any({a, b} & set(errors) for errors in found["errors"].values()):
            yield (
                f"Data between ranks {a} and {b} arrives changed ({hosts[a]}, {hosts[b]}).",
                "Take one of the two hosts out and repeat; then look at its GPU and its link.",
            )
    if found["backend"] == "nccl":
        yield from scarce_memory(found)


def notes(found):
    """Yields what is not wrong but may explain slowness, as (the observation, the next thing to try)."""
    if found["backend"] != "nccl":
        yield from scarce_memory(found)
    for rank, info in found["infos"].items():
        for name, reason in info.get("unknown", {}).items():
            yield f"Rank {rank} could not find out its {name}: {reason}.", "Nothing else depends on it."
    alone = {rank: time for rank, time in found["alone"].items() if time}
    if alone and max(alone.values()) > SLOW_RANK * median(alone.values()):
        slowest = max(alone, key=alone.get)
        yield (
            f"Rank {slowest} on {found['infos'][slowest]['host']} computes far more slowly than the others.",
            "Look for another process, for heat (nvidia-smi -q -d PERFORMANCE), or for too few cores or threads.",
        )
    speeds = {pair: speed for pair, (_, _, speed) in found["links"].items()}
    if speeds and min(speeds.values()) * SLOW_LINK < median(speeds.values()):
        a, b = min(speeds, key=speeds.get)
        yield (
            f"The link of ranks {a} and {b} has far less bandwidth than the others.",
            "Look at the hosts' links; links between hosts are slower than those within one.",
        )


def scarce_memory(found):
    """Yields each host with too little shared memory, as (the problem, the next thing to try)."""
    little = {info["host"]: info["memory"] for info in found["infos"].values() if info["memory"] is not None}
    for host, free in little.items():
        if free < 1e9:
            yield (
                f"{host} has only {free / 1e6:.0f} MB of shared memory; data loaders and NCCL use it.",
                "In a container: docker run --shm-size=8g, or --ipc=host",
            )


def short(number):
    """A number as text with three digits, or with all digits before the point: ``0.0123``, ``1.23``, ``1234``."""
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def who_is_where(infos):
    """A table of the ranks' hosts, devices and interfaces; neighbouring ranks that share all three share a line."""
    groups = []
    for rank, info in sorted(infos.items()):
        kind = info["device"] and info["device"].partition(":")[0]
        key = info["host"], kind, info["model"], info["interface"], info["address"]
        if not groups or groups[-1][0] != key:
            groups.append((key, [], []))
        groups[-1][1].append(rank)
        groups[-1][2].append(info["local_rank"])
    rows = [["rank", "local", "host", "device", "interface"]]
    for (host, kind, model, interface, address), numbers, locals_here in groups:
        devices = [info["device"].partition(":")[2] for info in map(infos.get, numbers) if info["device"]]
        device = f"cuda:{span(sorted(map(int, devices)))} {model}" if kind == "cuda" else f"{kind}"
        cells = span(numbers), span(sorted(locals_here)), host[:20], device[:24], f"{interface} {address or ''}"
        rows.append([text[:28] for text in cells])
    return aligned(rows, left=range(5))


def table_of_collectives(found):
    """A table of each collective: right or not, latency in microseconds, bus bandwidth in GB/s.

    The bus bandwidth is that of nccl-tests, doc/PERFORMANCE.md: it does not depend on the number of ranks.
    """
    count = len(found["members"])
    share = (count - 1) / count
    factors = {"all_reduce": 2 * share, "broadcast": 1, "reduce": 1}  # bus bandwidth / algorithm bandwidth
    rows = [["collective", "right", "us (4 KiB)", f"GB/s busbw ({'64' if found['device'] == 'cuda' else '4'} MiB)"]]
    for name, answers in found["collectives"].items():
        given = [answer for answer in answers.values() if answer]
        right = "yes" if len(given) == len(answers) and all(answer[0] for answer in given) else "NO"
        rows.append([name, right, "", ""])
        if given and count > 1:
            rows[-1][2] = f"{1e6 * mean(answer[1] for answer in given):.0f}"
            algbw = harmonic_mean([answer[2] for answer in given])  # as bytes divided by the mean of the ranks' times
            rows[-1][3] = short(algbw * factors.get(name, share) / 1e9)
    return aligned(rows, left=[0, 1])


def table_of_links(found):
    """A table of every pair's bandwidth and latency; [] for more ranks than a screen has room for."""
    members, links = found["members"], found["links"]
    if len(members) > 8:
        return []
    rows = [["", *map(str, members)]]
    for a in members:
        row = [f"rank {a}"]
        for b in members:
            right, time, speed = links.get((min(a, b), max(a, b)), (False, None, None))
            value = "-" if a == b else "none" if time is None else short(speed / 1e9) if a < b else f"{1e6 * time:.0f}"
            row.append(value + ("" if right or a == b or time is None else "!"))
        rows.append(row)
    return ["", "pairs: GB/s above the diagonal, microseconds below", *aligned(rows, left=[0])]


def slowest(found):
    """Yields lines on the slowest rank and the slowest pair, as (label, text)."""
    alone = {rank: time for rank, time in found["alone"].items() if time}
    if len(alone) > 1:
        rank = max(alone, key=alone.get)
        ratio = alone[rank] / median(alone.values())
        yield "slowest", f"rank {rank} computes in {ratio:.2f} times the median"
    if len(links := found["links"]) > 1:
        a, b = min(links, key=lambda pair: links[pair][2])
        middle = median(speed for _, _, speed in links.values())
        yield "", f"ranks {a} and {b}: {short(links[a, b][2] / 1e9)} GB/s, the median pair {short(middle / 1e9)}"


def report(found):
    """(the report's text, the exit status: 0 if nothing is wrong, or 1) of what ``examine`` found."""
    infos, members = found["infos"], found["members"]
    hosts = len({info["host"] for info in infos.values()})
    free = [info["memory"] for info in infos.values() if info["memory"] is not None]
    versions = {
        name: sorted({info[name] for info in infos.values() if info[name]}) for name in ("python", "torch", "NCCL")
    }
    apart = 1e3 * (max(found["skews"].values()) - min(found["skews"].values()))
    listening = sum(bool(info["address"]) for info in infos.values())
    tries, shut = listening * (len(infos) - 1), sum(len(reasons) for reasons in found["unreached"].values())
    host, port = found["master"]
    pairs, right = len(members) * (len(members) - 1) // 2, sum(link[0] for link in found["links"].values())
    facts = [
        ("versions", ", ".join(f"{name} {' and '.join(given)}" for name, given in versions.items() if given)),
        ("memory", f"{min(free) / 1e9:.1f} GB of shared memory free" if free else "shared memory: not known here"),
        ("store", f"{host}:{port}, reached by {len(infos)} of {found['world_size']}"),
        ("tcp", f"{tries - shut} of {tries} connections between ranks open" if tries else "one rank: no connections"),
        ("clocks", f"at most {apart:.0f} ms apart" if apart > 1 else "less than 1 ms apart"),
        ("links", f"{right} of {pairs} pairs right" if pairs else "one rank: no links"),
        *slowest(found),
    ]
    count = found["world_size"]
    lines = [f"{count} rank{'s' * (count > 1)} on {hosts} host{'s' * (hosts > 1)}, {found['backend']}", ""]
    lines += [*who_is_where(infos), "", *(f"{label:10}{text}" for label, text in facts), ""]
    lines += table_of_collectives(found) if found["collectives"] else ["no process group: no collective was tried"]
    if len(members) > 1 and found["links"]:
        lines += table_of_links(found)
    lines.append("")
    wrong = list(problems(found))
    if plan := found["plan"]:
        against = list(compared(found))
        lines.append(f"the plan of {plan['model']} on {plan['ranks']} x {plan['gpu']}")
        lines += [*(line for line, *_ in against), ""]
        wrong += [(what, remedy) for _, what, remedy in against if what]
    for label, entries in (("WRONG", wrong), ("note", list(notes(found)))):
        for what, remedy in entries:
            what = "R" + what[1:] if what.startswith("rank") else what
            lines += textwrap.wrap(what, 80, initial_indent=f"{label:7}", subsequent_indent=" " * 7)
            lines += textwrap.wrap(remedy, 80, initial_indent="  try: ", subsequent_indent=" " * 7)
    if wrong:
        lines.append(f"{len(wrong)} problem{'s' * (len(wrong) > 1)} found")
    else:
        lines.append("Nothing is wrong here.")
    return "\n".join(lines), int(bool(wrong))
