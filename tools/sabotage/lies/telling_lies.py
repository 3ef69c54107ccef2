"""What a lie is, and what the lies are told with."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIES: dict[str, "Lie"] = {}  # {name: Lie}, in the order of the chapters


@dataclass(frozen=True)
class Lie:
    """One wrong change. It patches a module, or it changes the text of the notebook that has to notice it.

    ``tell`` takes the module that has just been imported; or it takes the text of the notebook's file, and returns the
    changed text.
    """

    name: str
    says: str  # the lie in plain words
    chapters: list[str]  # numbers of chapters whose cells have to notice, such as "04" or "10b", or "cheat_sheet"
    words: str  # a pattern that has to match in the failing cell or in the prose around it
    module: str  # the module of torch or of helpers that the lie patches; empty if it changes the notebook
    tell: Callable

    @property
    def changes_notebook(self) -> bool:
        return self.module == ""


def lie(chapters: str, words: str, module: str = "", notebook: bool = False) -> Callable[[Callable], Callable]:
    """Register a function as a lie about a module or, with ``notebook=True``, about the notebook's own lines."""

    def register(function: Callable) -> Callable:
        if notebook == bool(module):
            raise ValueError(f"{function.__name__} has to change either a module or the notebook.")
        LIES[function.__name__] = Lie(
            name=function.__name__,
            says=" ".join((function.__doc__ or "").split()),
            chapters=chapters.split(),
            words=words,
            module=module,
            tell=function,
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
    """Call a function instead of an attribute of ``owner``: it takes the true one, then what its caller passes.

    It keeps the true one's attributes: torch uses them, and inspect.getsource shows the true source.
    """

    def put(function: Callable) -> None:
        true = getattr(owner, name)

        @functools.wraps(true)
        def call(*inputs: Any, **keywords: Any) -> Any:
            return function(true, *inputs, **keywords)

        setattr(owner, name, call)

    return put


def build_with(kind: Any, **options: Any) -> None:
    """Make a class take these options, whatever its caller passes."""

    @instead_of(kind, "__init__")
    def __init__(true: Any, self: Any, *inputs: Any, **keywords: Any) -> None:
        true(self, *inputs, **keywords | options)


def nothing(*inputs: Any, **keywords: Any) -> None:
    """Do nothing, in the place of any function or method."""


def give_ranks(agent: Any, change: Any) -> None:
    """Make torchrun's agent give each rank the environment that ``change`` returns for the right one."""

    @instead_of(agent, "start_processes")
    def start_processes(true: Any, *inputs: Any, envs: Any, **keywords: Any) -> Any:
        return true(*inputs, envs={rank: env | change(env) for rank, env in envs.items()}, **keywords)


def shard_with(module: Any, change: Any) -> None:
    """Make ``fully_shard`` take the options that ``change`` returns for the right ones."""

    @instead_of(module, "fully_shard")
    def fully_shard(true: Any, layer: Any, **options: Any) -> Any:
        return true(layer, **options | change(options))


C10D = "torch.distributed.distributed_c10d"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
DDP = "torch.nn.parallel.distributed"
SAMPLER = "torch.utils.data.distributed"
SCALER = "torch.amp.grad_scaler"
FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"
LAUNCH = "helpers.ranks.launch"
CHECKPOINT = "helpers.runtime.checkpoint"
STOP_REQUEST = "helpers.runtime.stop_request"
