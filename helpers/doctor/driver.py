"""What the driver knows of a GPU: uncorrected errors of its memory, why its clocks are low, and its Xids.

``nvidia-smi`` tells the first two, the kernel's log of the host the third. A machine may lack either, or forbid it;
then the answer says why. What the texts mean is decided by pure functions, which the tests call with examples.
"""

import re
import subprocess
from dataclasses import dataclass

SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
# The reasons for low clocks were called clocks_throttle_reasons by older drivers.
PREFIXES = ("clocks_event_reasons", "clocks_throttle_reasons")
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d+),(.*)$", re.IGNORECASE | re.MULTILINE)
# The GPU needs a reset, its node a reboot, or a repair (the table of chapter 13b).
BROKEN = {48, 64, 74, 79, 95, 119, 120}
RECOVERY_ACTION = 154  # "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"


@dataclass(frozen=True)
class Health:
    """What the driver says of one GPU."""

    uncorrected_errors: int | None = None  # of the memory (ECC), since the last reset; None if it does not say
    slowdowns: tuple[str, ...] = ()  # why the clocks are far below normal, such as "hw_thermal_slowdown"
    xids: tuple[int, ...] = ()  # since the host booted, only those that say that the GPU is broken
    not_read: tuple[str, ...] = ()  # what could not be asked, and why


def health_of_gpu(uuid: str) -> Health:
    """What this host's driver says of the GPU with this UUID."""
    not_read = []
    try:
        answer = ask_nvidia_smi(uuid)
        bus_id, errors, slowdowns = parse_answer(answer)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Health(not_read=(f"nvidia-smi: {reason(error)}",))
    xids: tuple[int, ...] = ()
    try:
        xids = broken_xids(output_of(["dmesg"]), bus_id)
    except (OSError, subprocess.SubprocessError) as error:
        not_read.append(f"Xids in dmesg: {reason(error)}")
    return Health(errors, slowdowns, xids, tuple(not_read))


def ask_nvidia_smi(uuid: str) -> str:
    """A line of nvidia-smi: the GPU's place on the PCI bus, its uncorrected errors, and whether each slowdown is on."""
    error: subprocess.CalledProcessError | None = None
    for prefix in PREFIXES:
        fields = ["pci.bus_id", "ecc.errors.uncorrected.volatile.total"]
        fields += [f"{prefix}.{name}" for name in SLOWDOWNS]
        command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            return output_of(command)
        except subprocess.CalledProcessError as failed:  # perhaps it does not know these names
            error = failed
    assert error is not None
    raise error


def output_of(command: list[str]) -> str:
    """What a command prints. Raises if it fails, takes too long or is not there."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def parse_answer(answer: str) -> tuple[str, int | None, tuple[str, ...]]:
    """(PCI bus, uncorrected errors, slowdowns) of a line of nvidia-smi. Raises ValueError for any other text.

    For example ``00000000:1B:00.0, 0, Not Active, Active, Not Active, Not Active``.
    """
    cells = [cell.strip() for cell in answer.strip().split(",")]
    if len(cells) != 2 + len(SLOWDOWNS):
        raise ValueError(f"an answer of another form: {answer.strip()[:60]}")
    bus_id, errors, *active = cells
    uncorrected_errors = None
    if errors.isdecimal():  # "[N/A]" on a GPU without ECC
        uncorrected_errors = int(errors)
    slowdowns = [name for name, state in zip(SLOWDOWNS, active, strict=True) if state == "Active"]
    return bus_id, uncorrected_errors, tuple(slowdowns)


def broken_xids(kernel_log: str, bus_id: str) -> tuple[int, ...]:
    """The Xids of the GPU at this place that say that it is broken, each once.

    The kernel writes ``0000:1b:00`` for what nvidia-smi calls ``00000000:1B:00.0``.
    """
    place = bus_id.lower().partition(".")[0]
    found = []
    for gpu, number, text in XID.findall(kernel_log):
        xid = int(number)
        is_this_gpu = place.endswith(gpu.lower().partition(".")[0])
        needs_action = xid == RECOVERY_ACTION and not text.endswith("(None)")
        is_broken = xid in BROKEN or needs_action
        if is_this_gpu and is_broken and xid not in found:
            found.append(xid)
    return tuple(found)


def reason(error: Exception) -> str:
    """Why a command could not be asked, in a few words."""
    if isinstance(error, FileNotFoundError):
        return "there is no such command"
    if isinstance(error, subprocess.CalledProcessError):
        for words in (error.stderr, error.stdout):  # nvidia-smi writes its errors to its standard output
            if words and words.strip():
                return words.strip().splitlines()[-1][:80]
    return str(error).splitlines()[0][:80]
