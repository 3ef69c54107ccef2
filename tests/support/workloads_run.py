"""Chapter 11's script with a workload's functions in place of its own, and a probe that notes every loss.

A workload is a file of ``workloads/``: each of its top-level functions replaces the script's function of that name, and
what else it defines and imports is added. The probe writes a JSON line for each call of ``loss_sums``, and does what
the environment variable MISCHIEF asks for: ``poison [true, 4]`` makes the fourth batch of training nan on rank 0,
``stop [false, 1]`` stops the job in the first batch of a validation, ``stop_in_save`` in a save.
"""

import ast
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from forked import Forked, script_on_ranks

WORKLOADS = Path(__file__).parent / "workloads"
PROBE = '''
loss_sums_of_workload = loss_sums
torch_save = torch.save
calls = {True: 0, False: 0}  # of loss_sums, in training and in validations
mischief, _, moment = os.environ["MISCHIEF"].partition(" ")


def stop_the_job():
    """Send torchrun's agent SIGTERM, and wait until it has passed the signal on to this rank."""
    stop_request = signal.getsignal(signal.SIGTERM).__self__
    os.kill(os.getppid(), signal.SIGTERM)
    while not stop_request.received:
        time.sleep(0.01)


def loss_sums(model, batch, args):
    """The workload's, noted in full precision; then the mischief that the environment asks for."""
    calls[model.training] += 1
    now = os.environ["RANK"] == "0" and moment == json.dumps([model.training, calls[model.training]])
    if now and mischief == "poison":
        batch = tree_map(lambda x: x * math.nan if torch.is_tensor(x) and x.is_floating_point() else x, batch)
    sums = loss_sums_of_workload(model, batch, args)
    if model.training and not torch.is_grad_enabled():
        return sums  # the forward that only counts, of a loss with several terms
    numbers = {name: tree_map(lambda x: float(torch.as_tensor(x).detach()), pair) for name, pair in sums.items()}
    with open(f"{os.environ['PROBE']}.{os.environ['RANK']}", "a") as file:
        print(json.dumps({"training": model.training, "sums": numbers}), file=file)
    if now and mischief == "poison":
        total, count = sums["loss"]
        sums["loss"] = (total * math.nan, count)
    if now and mischief == "stop":
        from psutil import Process

        for worker in Process().children():  # torchrun signals process groups; the agent that forks does not
            worker.terminate()
        stop_the_job()
    return sums


def save_with_mischief(*arguments, **options):
    if mischief == "stop_in_save":
        stop_the_job()
    torch_save(*arguments, **options)


torch.save = save_with_mischief


'''

# An agent that forks its ranks, and was signalled, waits for their end, and they wait until it takes their result.
LEAVE = """    if os.environ["MISCHIEF"].startswith("stop"):
        os._exit(0)
"""


def with_workload(script, workload):
    """The text of a script with a workload's functions in place of its own, and with the probe."""
    script_lines = script.splitlines(keepends=True)
    workload_lines = workload.splitlines(keepends=True)
    functions = {node.name: node for node in ast.parse(script).body if isinstance(node, ast.FunctionDef)}
    first_function = first_line(next(iter(functions.values())))
    replacements = {}
    additions = []
    for node in ast.parse(workload).body:
        text = "".join(workload_lines[first_line(node) - 1 : node.end_lineno]) + "\n"
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            replacements[node.name] = text
        elif not isinstance(node, ast.Expr):  # the docstring
            additions.append(text)
    # The last function is replaced first, because a replacement moves the lines that follow it.
    for name, node in reversed(functions.items()):
        if name in replacements:
            script_lines[first_line(node) - 1 : node.end_lineno] = [replacements[name]]
    script_lines[first_function - 1 : first_function - 1] = additions
    last_lines = 'if __name__ == "__main__":'
    return "".join(script_lines).replace(last_lines, PROBE + last_lines) + LEAVE


def first_line(node):
    """The number of a statement's first line, which may be a decorator's."""
    numbers = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *numbers])


class Run:
    """A run of a script on some ranks, which are forked: it starts at once, and ``end`` waits."""

    def __init__(self, script, ranks, environment, *flags, mischief=""):
        flags = [str(flag) for flag in flags]
        number = len(list(script.parent.iterdir()))
        self.probe = script.parent / f"probe{number}"
        self.probe.touch()
        self.ranks = ranks
        self.accumulate = 1
        if "--accumulate" in flags:
            self.accumulate = int(flags[flags.index("--accumulate") + 1])
        variables = {**environment, "PROBE": str(self.probe), "MISCHIEF": mischief}
        self.fork = Forked(script_on_ranks(script, ranks, *flags), variables)

    def end(self, timeout=240, ok=True):
        """Wait. With ``ok`` the run has to succeed."""
        self.status, self.out, self.errors, self.left = self.fork.end(timeout)
        story = f"{self.status} {self.left}\n{self.out}{self.errors}"
        assert not self.left, story
        if ok:
            assert self.status == 0 and not re.search(r"\w+Warning\b", self.errors), story  # Python's, not DDP's
        return self

    def calls(self, training):
        """[[{name: [sum, count]} of each call of loss_sums] of each rank]."""
        notes = []
        for rank in range(self.ranks):
            path = Path(f"{self.probe}.{rank}")
            lines = []
            if path.exists():
                lines = path.read_text().splitlines()
            notes.append([json.loads(line) for line in lines])
        return [[note["sums"] for note in rank if note["training"] == training] for rank in notes]

    def losses(self):
        """The true loss of each step: all sums / all counts. A loss of several terms is the sum of their means."""
        ranks = [[call["loss"] for call in rank] for rank in self.calls(training=True)]
        assert len({len(rank) for rank in ranks}) == 1
        losses = []
        for first in range(0, len(ranks[0]), self.accumulate):
            pairs = []
            for rank in ranks:
                pairs += [
                    loss if isinstance(loss[0], list) else [loss] for loss in rank[first : first + self.accumulate]
                ]
            totals = torch.tensor(pairs, dtype=torch.float64).sum(0)  # [terms, 2]
            losses.append((totals[:, 0] / totals[:, 1]).sum().item())
        return losses

    def console(self):
        """{step: the loss that was printed}."""
        lines = [line.split(": loss ") for line in self.out.splitlines() if ": loss " in line]
        return {int(head.removeprefix("step ")): float(rest.split(",")[0]) for head, rest in lines}

    def result(self):
        [line] = [line for line in self.out.splitlines() if line.startswith("result ")]
        return json.loads(line.removeprefix("result "))

    def validation(self):
        """{name: (sum, count)} of the one validation of a run."""
        totals = defaultdict(lambda: [0.0, 0.0])
        for rank in self.calls(training=False):
            for call in rank:
                for name, (total, count) in call.items():
                    totals[name][0] += total
                    totals[name][1] += count
        return dict(totals)


def checkpoints(folder):
    return sorted(Path(folder).glob("step_*.pt"))


def newest(folder):
    """The state in a folder's newest checkpoint."""
    return torch.load(checkpoints(folder)[-1], weights_only=True)


def same_bits(one, other):
    """Whether two models' states are equal in all bits."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def gap(one, other):
    """The largest relative difference of two lists of losses."""
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(one, other, strict=True))
