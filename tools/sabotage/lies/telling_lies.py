"""The record of a lie, which is a planted fault, and the functions with which lies change torch and helpers."""

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
        return self.module == ""


def lie(chapters: str, words: str, module: str = "", notebook: bool = False) -> Callable[[Callable], Callable]:
    """Register the decorated function as a lie, which patches ``module`` or, with ``notebook=True``, the notebook.

    ``chapters``: the chapters whose cells have to notice it, with spaces between them. ``words``: see ``Lie``.
    """

    def register(function: Callable) -> Callable:
        if notebook == bool(module):
            raise ValueError(f"{function.__name__} has to change either a module or the notebook.")
        LIES[function.__name__] = Lie(
            name=function.__name__,
            description=" ".join((function.__doc__ or "").split()),
            chapters=chapters.split(),
            words=words,
            module=module,
            apply=function,
        )
        return function

    return register


def swap(text: str, old: str, new: str, times: int = 1) -> str:
    """The text with ``new`` in place of ``old``. Raises LookupError unless ``old`` occurs ``times`` times."""
    count = text.count(old)
    if count != times:
        raise LookupError(f"it quotes a line that the notebook has {count} times, not {times}: {old}")
    return text.replace(old, new)


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of ``owner``. Raises AttributeError if it has none of this name."""
    getattr(owner, name)
    setattr(owner, name, value)


def instead_of(owner: Any, name: str) -> Callable[[Callable], None]:
    """Put the decorated function in the place of the function or method ``owner.name``.

    It is called with the original function, and then with the arguments of its caller. It gets the original's
    attributes, because torch uses them, and so inspect.getsource shows the original's source.
    """

    def put(function: Callable) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*inputs: Any, **keywords: Any) -> Any:
            return function(original, *inputs, **keywords)

        setattr(owner, name, call)

    return put


def build_with(kind: Any, **options: Any) -> None:
    """Give these options to the constructor of a class, whatever its caller passes."""

    @instead_of(kind, "__init__")
    def __init__(original: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords | options)


def nothing(*inputs: Any, **keywords: Any) -> None:
    """Do nothing, in the place of any function or method."""


def give_ranks(agent: Any, change: Any) -> None:
    """Change the environment that torchrun's agent gives each rank: ``change`` returns the variables to replace."""

    @instead_of(agent, "start_processes")
    def start_processes(original: Any, *inputs: Any, envs: Any, **keywords: Any) -> Any:
        return original(*inputs, envs={rank: env | change(env) for rank, env in envs.items()}, **keywords)


def shard_with(module: Any, change: Any) -> None:
    """Change the options of ``fully_shard``. ``change`` gets the caller's options, and returns those to replace."""

    @instead_of(module, "fully_shard")
    def fully_shard(original: Any, layer: Any, **options: Any) -> Any:
        return original(layer, **options | change(options))


C10D = "torch.distributed.distributed_c10d"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
DDP = "torch.nn.parallel.distributed"
SAMPLER = "torch.utils.data.distributed"
SCALER = "torch.amp.grad_scaler"
FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
LAUNCH = "helpers.ranks.launch"
CHECKPOINT = "helpers.runtime.checkpoint"
STOP_REQUEST = "helpers.runtime.stop_request"
