"""Chapter 11's script with a workload's functions in place of its own, and a probe that records every loss.

A workload is a file of ``workloads/``: each of its top-level functions replaces the script's function of that name, and
what else it defines and imports is added. The probe writes a JSON line for each call of ``loss_sums``, and does what
the environment variable MISCHIEF asks for. A call is named by whether it is of training, and by its number:

- ``poison [true, 4]`` makes the fourth batch of training nan on rank 0;
- ``stop [false, 1]`` stops the job in the first batch of a validation;
- ``stop_in_save`` stops it in a save.
"""

import ast
import json
import re
from pathlib import Path

import scripting
import torch
from forked import Forked, script_on_ranks

WORKLOADS = Path(__file__).parent / "workloads"
PROBE = '''
loss_sums_of_workload = loss_sums
torch_save = torch.save
num_calls = {True: 0, False: 0}  # of loss_sums, in training and in validations
mischief, _, moment = os.environ["MISCHIEF"].partition(" ")  # such as "poison" and "[true, 4]"


def stop_the_job():
    """Send torchrun's agent SIGTERM, and wait until it has passed the signal on to this rank."""
    stop_request = signal.getsignal(signal.SIGTERM).__self__
    os.kill(os.getppid(), signal.SIGTERM)
    while not stop_request.received:
        time.sleep(0.01)


def nan_if_float(value):
    """A tensor of floats becomes nan, and anything else stays as it is."""
    if torch.is_tensor(value) and value.is_floating_point():
        return value * math.nan
    return value


def as_float(number):
    return float(torch.as_tensor(number).detach())


def loss_sums(model, batch, args):
    """Call the workload's loss_sums, write what it returned to a file of this rank, and do the mischief."""
    num_calls[model.training] += 1
    is_moment = json.dumps([model.training, num_calls[model.training]]) == moment
    asked_for = None
    if is_moment and os.environ["RANK"] == "0":
        asked_for = mischief

    if asked_for == "poison":
        batch = tree_map(nan_if_float, batch)
    sums = loss_sums_of_workload(model, batch, args)
    only_counts = model.training and not torch.is_grad_enabled()
    if only_counts:
        # For a loss of several terms, the trainer calls loss_sums once more, without gradients, to add up its counts.
        return sums

    record = {"training": model.training, "sums": tree_map(as_float, sums)}
    with open(f"{os.environ['PROBE']}.{os.environ['RANK']}", "a") as file:
        print(json.dumps(record), file=file)

    if asked_for == "poison":
        total, count = sums["loss"]
        sums["loss"] = (total * math.nan, count)
    if asked_for == "stop":
        from psutil import Process

        # torchrun signals the process groups of its ranks, with their workers. The agent that forks does not.
        for worker in Process().children():
            worker.terminate()
        stop_the_job()
    return sums


def save_with_mischief(*arguments, **options):
    if mischief == "stop_in_save":
        stop_the_job()
    torch_save(*arguments, **options)


torch.save = save_with_mischief


'''

# The last lines of the script. A rank that was stopped must exit here: an agent that forks its ranks, and got a signal,
# waits for them to end, while they wait for it to take their result.
EXIT_IF_STOPPED = """    if os.environ["MISCHIEF"].startswith("stop"):
        os._exit(0)
"""


def with_workload(script, workload):
    """The text of a script with a workload's functions in place of its own, and with the probe.

    The workload's other statements, such as imports and classes, go before the script's first function.
    """
    script_lines = script.splitlines(keepends=True)
    workload_lines = workload.splitlines(keepends=True)
    functions = [node for node in ast.parse(script).body if isinstance(node, ast.FunctionDef)]
    names = {function.name for function in functions}

    replacements = {}
    additions = []
    for node in ast.parse(workload).body:
        text = "".join(workload_lines[first_line(node) - 1 : node.end_lineno]) + "\n"
        is_docstring = isinstance(node, ast.Expr)
        if isinstance(node, ast.FunctionDef) and node.name in names:
            replacements[node.name] = text
        elif not is_docstring:
            additions.append(text)

    # The last function is replaced first, because a replacement moves the lines that follow it.
    for function in reversed(functions):
        if function.name in replacements:
            script_lines[first_line(function) - 1 : function.end_lineno] = [replacements[function.name]]
    before_functions = first_line(functions[0]) - 1
    script_lines[before_functions:before_functions] = additions

    main_guard = 'if __name__ == "__main__":'
    return "".join(script_lines).replace(main_guard, PROBE + main_guard) + EXIT_IF_STOPPED


def first_line(node):
    """The number of a statement's first line, which may be a decorator's."""
    numbers = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *numbers])


class Run:
    """A run of a script on forked ranks. It starts at once; ``end`` waits for its end, and then the results are there.

    ``out`` is what the run printed. The other results are read from the files of the probe, one for each rank.
    """

    def __init__(self, script, ranks, environment, *flags, mischief=""):
        flags = [str(flag) for flag in flags]
        number_of_files = len(list(script.parent.iterdir()))
        self.probe = script.parent / f"probe{number_of_files}"  # a name that no earlier run has taken
        self.probe.touch()
        self.ranks = ranks
        self.accumulate = 1
        if "--accumulate" in flags:
            self.accumulate = int(flags[flags.index("--accumulate") + 1])
        variables = {**environment, "PROBE": str(self.probe), "MISCHIEF": mischief}
        self.fork = Forked(script_on_ranks(script, ranks, *flags), variables)

    def end(self, timeout=240, ok=True):
        """Wait for the end. No process may be left; with ``ok`` the run also has to succeed, without a warning."""
        status, self.out, errors, left = self.fork.end(timeout)
        report = f"{status} {left}\n{self.out}{errors}"
        assert not left, report
        if ok:
            warning = re.search(r"\w+Warning\b", errors)  # "UserWarning" and the like of Python, not DDP's "Warning:"
            assert status == 0 and not warning, report
        return self

    def calls(self, training):
        """What ``loss_sums`` returned in training, or in validations: for each rank a list of {name: [sum, count]}."""
        calls_of_ranks = []
        for rank in range(self.ranks):
            calls = []
            path = Path(f"{self.probe}.{rank}")
            if path.exists():
                for line in path.read_text().splitlines():
                    record = json.loads(line)
                    if record["training"] == training:
                        calls.append(record["sums"])
            calls_of_ranks.append(calls)
        return calls_of_ranks

    def losses(self):
        """The true loss of each step: all sums / all counts of its micro-batches on all ranks.

        If the loss has several terms, it is the sum of their means.
        """
        calls_of_ranks = self.calls(training=True)
        num_calls = len(calls_of_ranks[0])
        assert all(len(calls) == num_calls for calls in calls_of_ranks)

        losses = []
        for first in range(0, num_calls, self.accumulate):
            terms_of_step = []  # [ranks * micro-batches, terms, 2]
            for calls in calls_of_ranks:
                for call in calls[first : first + self.accumulate]:
                    terms_of_step.append(terms_of(call["loss"]))
            sums, counts = torch.tensor(terms_of_step, dtype=torch.float64).sum(dim=0).T  # [terms] each
            losses.append((sums / counts).sum().item())
        return losses

    def printed_losses(self):
        """{step: loss} of the lines that the run printed, such as ``step 3: loss 1.25, norm 0.5``."""
        losses = {}
        for line in self.out.splitlines():
            match = re.match(r"step (\d+): loss ([^,]+)", line)
            if match:
                losses[int(match[1])] = float(match[2])
        return losses

    def result(self):
        """The numbers that the run printed at its end: {name: number}."""
        return scripting.result(self.out)

    def validation_totals(self):
        """{name: (sum, count)} over all batches and ranks, of a run with a single validation."""
        sums = {}
        counts = {}
        for calls in self.calls(training=False):
            for call in calls:
                for name, (batch_sum, batch_count) in call.items():
                    sums[name] = sums.get(name, 0.0) + batch_sum
                    counts[name] = counts.get(name, 0.0) + batch_count
        return {name: (sums[name], counts[name]) for name in sums}


def terms_of(loss):
    """The (sum, count) of each term of a loss, which ``loss_sums`` gives as one such pair or as a list of several."""
    if isinstance(loss[0], (list, tuple)):
        return loss
    return [loss]


def checkpoints(folder):
    """The paths of a folder's checkpoints, the oldest first."""
    return sorted(Path(folder).glob("step_*.pt"))


def newest(folder):
    """The state in a folder's newest checkpoint."""
    return torch.load(checkpoints(folder)[-1], weights_only=True)


def same_bits(one, other):
    """Whether two models' states are equal in all bits."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def relative_difference(losses, expected_losses):
    """The largest of the relative differences of two lists of losses."""
    differences = []
    for loss, expected in zip(losses, expected_losses, strict=True):
        scale = max(abs(expected), 1e-9)
        differences.append(abs(loss - expected) / scale)
    return max(differences)
