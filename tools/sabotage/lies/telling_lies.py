"""What a lie is, a bug that is planted in torch, helpers or a chapter, and the functions that plant one.

``@lie`` registers a function as one. ``instead_of``, ``replace``, ``build_with``, ``give_ranks`` and ``shard_with``
patch a module, and ``swap`` changes the text of a notebook.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIES: dict[str, "Lie"] = {}  # {name: Lie}, in the order of the chapters


@dataclass(frozen=True)
class Lie:
    """A planted fault. It patches a module, or it changes the text of the notebook that has to notice it.

    ``apply`` takes the module that has just been imported, and patches it. Or it takes the text of the notebook's file,
    and returns the changed text.
    """

    name: str
    description: str  # the fault in plain words
    chapters: list[str]  # numbers of chapters whose cells have to notice, such as "04" or "10b", or "cheat_sheet"
    words: str  # a regular expression for the subject: it has to match the failing cell or the prose around it
    module: str  # the module of torch or of helpers that the lie patches; empty if it changes the notebook
    apply: Callable

    @property
    def changes_notebook(self) -> bool:
        """Whether the fault is planted in the chapter's notebook, and not in a module."""
        return self.module == ""


def lie(chapters: str, words: str, module: str = "", notebook: bool = False) -> Callable[[Callable], Callable]:
    """Register the decorated function as a lie, that is a bug that it plants, under its own name in ``LIES``.

    For example, this function plants a bug that a cell of chapter 2 and one of chapter 12 have to notice::

        @lie("02 12", words="barrier", module="torch.distributed.distributed_c10d")
        def barrier_does_not_wait(c10d):
            c10d.barrier = lambda *inputs, **keywords: None

    It gets the module that ``module`` names, and patches it. With ``notebook=True`` in place of ``module`` it gets the
    text of the chapter's notebook, and returns the changed text. Its docstring is the bug's line in the book. ``words``
    is a regular expression that has to match the failing cell or the prose around it. Raises ValueError unless exactly
    one of ``module`` and ``notebook`` is given.
    """
    changes_module = module != ""
    if changes_module == notebook:
        raise ValueError(f"A lie changes either a module or the notebook, not module={module!r}, notebook={notebook}.")

    def register(plant_the_bug: Callable) -> Callable:
        docstring = plant_the_bug.__doc__ or ""
        name = plant_the_bug.__name__
        LIES[name] = Lie(
            name=name,
            description=" ".join(docstring.split()),  # on one line
            chapters=chapters.split(),
            words=words,
            module=module,
            apply=plant_the_bug,
        )
        return plant_the_bug

    return register


def swap(text: str, old: str, new: str, times: int = 1) -> str:
    """Change a line of a notebook: return ``text`` with ``new`` in place of ``old``.

    Raises LookupError unless ``old`` occurs exactly ``times`` times, because then the line that a lie quotes has been
    reworded, or is no longer the only one, and the lie would plant nothing, or another fault.
    """
    count = text.count(old)
    if count != times:
        raise LookupError(f"it quotes a line that the notebook has {count} times, not {times}: {old}")
    return text.replace(old, new)


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of a module or a class, ``owner``.

    Raises AttributeError if there is no such attribute. Otherwise a lie about a function that was renamed would add an
    attribute that nothing reads, and plant no fault.
    """
    getattr(owner, name)
    setattr(owner, name, value)


def instead_of(owner: Any, name: str, waits: bool = False) -> Callable[[Callable], None]:
    """Replace the function or method ``owner.name`` by the decorated function, which gets the original as well.

    ``owner`` is a module or a class. The decorated function gets the original function as its first argument, and then
    the arguments of the caller::

        @instead_of(torch.distributed, "all_reduce")
        def all_reduce(original, tensor, *inputs, **keywords):
            return original(tensor * 2, *inputs, **keywords)

    Set ``waits`` if ranks may hang in the function. When ranks hang, this project's ``launch`` prints at which line of
    the reader's code they wait, and it takes lines of this file and of the decorated function for the reader's. So with
    ``waits`` these lines claim to be in the original's file, which belongs to a library.
    """

    def replace_by(replacement: Callable) -> None:
        original = getattr(owner, name)

        # wraps copies the original's name and docstring, which torch reads, and a reference to the original, so that
        # inspect.getsource shows a chapter the original's source.
        @functools.wraps(original)
        def call_replacement(*inputs: Any, **keywords: Any) -> Any:
            return replacement(original, *inputs, **keywords)

        if waits:
            file_of_original = original.__code__.co_filename
            for function in (replacement, call_replacement):
                function.__code__ = function.__code__.replace(co_filename=file_of_original)
        setattr(owner, name, call_replacement)

    return replace_by


def call_with(owner: Any, name: str, **options: Any) -> None:
    """Make ``owner.name`` ignore what its callers choose: it always gets these keyword arguments."""

    @instead_of(owner, name)
    def call(original: Any, *inputs: Any, **keywords: Any) -> Any:
        return original(*inputs, **keywords | options)


def build_with(kind: Any, **options: Any) -> None:
    """Make a class ignore what its callers choose: its constructor always gets these keyword arguments."""
    call_with(kind, "__init__", **options)


def nothing(*inputs: Any, **keywords: Any) -> None:
    """Do nothing. A lie puts this function in the place of one whose work is to be left out."""


def give_ranks(agent: Any, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Change the environment variables that torchrun gives its ranks.

    ``agent`` is the module ``AGENT``, whose ``start_processes`` starts the ranks with ``envs``, {rank: its variables}.
    ``change`` gets one rank's variables, and returns those to replace.
    """

    @instead_of(agent, "start_processes")
    def start_processes(original: Any, *inputs: Any, envs: dict[int, dict[str, str]], **keywords: Any) -> Any:
        changed = {}
        for rank, variables in envs.items():
            changed[rank] = variables | change(variables)
        return original(*inputs, envs=changed, **keywords)


def shard_with(module: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the options of ``fully_shard`` in the module ``FSDP``.

    ``change`` gets the options with which a chapter calls it, and returns those to replace.
    """

    @instead_of(module, "fully_shard")
    def fully_shard(original: Any, layer: Any, **options: Any) -> Any:
        return original(layer, **options | change(options))


# The modules that several lies patch.
C10D = "torch.distributed.distributed_c10d"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
DDP = "torch.nn.parallel.distributed"
SAMPLER = "torch.utils.data.distributed"
SCALER = "torch.amp.grad_scaler"
FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
LAUNCH = "helpers.ranks.launch"
CHECKPOINT = "helpers.runtime.checkpoint"
STOP_REQUEST = "helpers.runtime.stop_request"
