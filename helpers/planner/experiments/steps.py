"""Fifteen published steps of FSDP, stages, long sequences and float8 on H100s and H200s, planned beside their numbers.

A row of book/recorded/steps.csv has model, cluster, layout and conventions (the insides of TOML tables), tokens a
second and GPU, GiB of the fullest GPU (or nothing), and a source. Nothing is fitted to these rows.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from helpers.planner.experiments.published import rows_of
from helpers.planner.plan import Plan, plan

ROWS = Path(__file__).parents[3] / "book" / "recorded" / "steps.csv"
TABLES = ("model", "cluster", "layout", "conventions")


@dataclass(frozen=True)
class PublishedStep:
    """A published step and its plan."""

    what: str
    plan: Plan
    published: float  # tokens a second and GPU
    gib: float  # of the fullest GPU; 0 where none was published
    source: str

    @property
    def planned(self) -> float:
        return self.plan.tokens / self.plan.step.seconds / self.plan.layout.gpus

    @property
    def speed(self) -> float:
        """Planned tokens a second beside the published ones: above 1 where the plan is too fast."""
        return self.planned / self.published

    @property
    def held(self) -> bool:
        """Whether the published step lies in the plan's interval."""
        seconds = self.plan.step.seconds * self.speed
        return self.plan.step.low <= seconds <= self.plan.step.high

    @property
    def planned_gib(self) -> float:
        return self.plan.bytes / 2**30

    @property
    def memory(self) -> float:
        """Planned GiB beside the published ones, or 0."""
        return self.planned_gib / self.gib if self.gib else 0


def published_steps() -> list[PublishedStep]:
    """The rows, planned."""
    steps = []
    for row in rows_of(ROWS):
        tables = [tomllib.loads(f"table = {{{row[name]}}}")["table"] for name in TABLES]
        gib = float(row["gib"]) if row["gib"] else 0.0
        steps.append(PublishedStep(row["what"], plan(*tables), float(row["tokens"]), gib, row["source"]))
    return steps
