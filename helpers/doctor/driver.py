"""What the driver knows about a GPU: uncorrected errors of its memory, why its clocks are low, and its Xids.

Xids are the driver's numbers for errors of a GPU. They are in the host's kernel log; the rest is asked of
``nvidia-smi``. A machine may lack either of them or forbid to read it; then the answer says why. Pure functions decide
what the texts mean, so that the tests can call them with examples.
"""

import re
import subprocess
from dataclasses import dataclass

# Reasons for low clocks that nvidia-smi can be asked about, and what newer and older drivers write before their names.
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
NEWER_PREFIX = "clocks_event_reasons"
OLDER_PREFIX = "clocks_throttle_reasons"
# A line of the kernel's log: the GPU's place on the PCI bus, the number of the Xid, and a text. For example
# "[ 100.1] NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, GPU has fallen off the bus."
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d+),(.*)$", re.IGNORECASE | re.MULTILINE)
# Xids after which the GPU needs a reset, its node a reboot, or the hardware a repair (the table of chapter 13b).
BROKEN = {48, 64, 74, 79, 95, 119, 120}
RECOVERY_ACTION = 154  # "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
LONGEST_REASON = 80  # characters


@dataclass(frozen=True)
class Health:
    """What the driver says about one GPU."""

    uncorrected_errors: int | None = None  # of the memory (ECC), since the last reset; None if it does not say
    slowdowns: tuple[str, ...] = ()  # why the clocks are far below normal, such as "hw_thermal_slowdown"
    xids: tuple[int, ...] = ()  # those since the host booted that mean that the GPU is broken
    not_read: tuple[str, ...] = ()  # what could not be read, and why


@dataclass(frozen=True)
class SmiAnswer:
    """What nvidia-smi says about one GPU."""

    bus_id: str  # the GPU's place on the PCI bus, such as "00000000:1B:00.0"
    uncorrected_errors: int | None  # None for a GPU without ECC
    slowdowns: tuple[str, ...]  # those of SLOWDOWNS that are active


def health_of_gpu(uuid: str) -> Health:
    """What this host's driver says about the GPU with this UUID: by nvidia-smi, and in the kernel's log."""
    try:
        answer = parse_answer(ask_nvidia_smi(uuid))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Health(not_read=(f"nvidia-smi: {reason(error)}",))

    xids: tuple[int, ...] = ()
    not_read: tuple[str, ...] = ()
    try:
        kernel_log = output_of(["dmesg"])
        xids = broken_xids(kernel_log, answer.bus_id)
    except (OSError, subprocess.SubprocessError) as error:
        not_read = (f"Xids in dmesg: {reason(error)}",)
    return Health(
        uncorrected_errors=answer.uncorrected_errors,
        slowdowns=answer.slowdowns,
        xids=xids,
        not_read=not_read,
    )


def ask_nvidia_smi(uuid: str) -> str:
    """Ask nvidia-smi about one GPU, and return the line that it prints, which ``parse_answer`` reads."""
    try:
        return query_nvidia_smi(uuid, NEWER_PREFIX)
    except subprocess.CalledProcessError:  # Perhaps the driver is older and does not know these names.
        return query_nvidia_smi(uuid, OLDER_PREFIX)


def query_nvidia_smi(uuid: str, prefix: str) -> str:
    """Run nvidia-smi for a GPU's bus id, its uncorrected errors, and each slowdown, by names with this prefix."""
    fields = ["pci.bus_id", "ecc.errors.uncorrected.volatile.total"]
    fields += [f"{prefix}.{name}" for name in SLOWDOWNS]
    return output_of(["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])


def output_of(command: list[str]) -> str:
    """What a command prints. Raises an error if it fails, takes too long or does not exist."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def parse_answer(line: str) -> SmiAnswer:
    """Read the line that ``ask_nvidia_smi`` returns. Raises ValueError for any other text.

    For example ``00000000:1B:00.0, 0, Not Active, Active, Not Active, Not Active``: the GPU's place on the PCI bus, the
    number of uncorrected errors, and the state of each of SLOWDOWNS.
    """
    cells = [cell.strip() for cell in line.strip().split(",")]
    if len(cells) != 2 + len(SLOWDOWNS):
        raise ValueError(f"an answer of another form: {line.strip()[:60]}")
    bus_id, errors, *states = cells
    uncorrected_errors = None
    if errors.isdecimal():  # It is "[N/A]" on a GPU without ECC.
        uncorrected_errors = int(errors)
    slowdowns = [name for name, state in zip(SLOWDOWNS, states, strict=True) if state == "Active"]
    return SmiAnswer(bus_id, uncorrected_errors, tuple(slowdowns))


def broken_xids(kernel_log: str, bus_id: str) -> tuple[int, ...]:
    """The numbers of the Xids by which the kernel's log says that one GPU is broken, each number once.

    ``bus_id`` is nvidia-smi's name for the GPU's place, such as ``00000000:1B:00.0``. The kernel's log has a shorter
    one, ``0000:1b:00``.
    """
    place = bus_id.lower().partition(".")[0]  # "00000000:1b:00"
    found = []
    for place_in_log, number, text in XID.findall(kernel_log):
        xid = int(number)
        is_this_gpu = place.endswith(place_in_log.lower().partition(".")[0])
        needs_action = xid == RECOVERY_ACTION and not text.endswith("(None)")
        is_broken = xid in BROKEN or needs_action
        if is_this_gpu and is_broken and xid not in found:
            found.append(xid)
    return tuple(found)


def reason(error: Exception) -> str:
    """Why a command failed, in a line of at most 80 characters."""
    if isinstance(error, FileNotFoundError):
        return "there is no such command"
    if isinstance(error, subprocess.CalledProcessError):
        for output in (error.stderr, error.stdout):  # nvidia-smi writes its errors to its standard output.
            if output and output.strip():
                last_line = output.strip().splitlines()[-1]
                return last_line[:LONGEST_REASON]
    first_line = str(error).splitlines()[0]
    return first_line[:LONGEST_REASON]
