"""A plan and a search as HTML, for the book's page and for a notebook. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from html import escape

from helpers.planner.description import Row, answer, as_argument, memory_of_stage, of_time
from helpers.planner.layout import Layout
from helpers.planner.plan import Plan
from helpers.planner.records import PlanError
from helpers.planner.search import GIB, Search


def plan_html(plan: Plan, command: str) -> str:
    """The answer, memory by kind, and the command that prints all of the plan."""
    verdict, *rows = answer(plan).rows
    css_class = "fits" if plan.fits else "too-large"
    items = [f'<li class="{css_class}">{row_html(verdict)}</li>']
    items += [f"<li>{row_html(row)}</li>" for row in rows]
    if plan.next.layout:
        items.append(f"<li>{button(plan.next.layout, 'try it')}</li>")

    memory = memory_of_stage(plan, plan.fullest)
    kinds = {row.label: plan.stages[plan.fullest][row.label] for row in memory.rows if row.label != "total"}
    cells = [[escape(row.label), row.value] for row in memory.rows]
    for number in range(len(kinds)):
        cells[number][0] = f'<i class="kind-{number}"></i>' + cells[number][0]
    return "\n".join(
        [
            bar_html(kinds, plan.cluster.memory),
            f"<ul>{''.join(items)}</ul>",
            table_html([memory.title, plan.conventions.memory], cells),
            f"<pre><code>{escape(command)}</code></pre>",
        ]
    )


def search_html(search: Search) -> str:
    """The ten fastest layouts that fit, each with a button that takes it over, and why not their neighbours."""
    if not search.fits:
        return error_html(search.error())
    rows = []
    for fit in search.fits[:10]:
        times = [of_time(seconds) for seconds in (fit.seconds, fit.step.low, fit.step.high)]
        memory = f"{fit.bytes / GIB:.1f}"
        rows.append([escape(fit.layout.summary), *times, memory, button(fit.layout, "use")])
    table = table_html(["layout", "a step", "from", "to", "GiB", "take over"], rows)
    items = "".join(f"<li>{escape(line)}</li>" for line in (*search.reasons(), search.margin))
    return f"<p>{escape(search.counts)}</p>{table}<ul>{items}</ul>"


def error_html(error: Exception) -> str:
    """What is wrong, and the next step."""
    message = "A number is too large or too small.\nGive a real job's."
    if isinstance(error, PlanError):
        message = str(error)
    problem, _, hint = message.partition("\n")
    return f'<p class="planner-error" role="alert"><strong>{escape(problem)}</strong> {escape(hint)}</p>'


def row_html(row: Row) -> str:
    if not row.value:
        return f"<strong>{escape(row.label)}:</strong> {escape(row.reason)}"
    statement = f"<strong>{escape(row.label)}: {escape(row.value)} {escape(row.unit)}</strong>"
    return f"{statement} {escape(row.reason)}".strip()


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """A table. The cells of its rows are HTML; all columns but the first are numbers."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def bar_html(kinds: Mapping[str, float], limit: float) -> str:
    """Memory by kind, drawn against the GPU's limit: a strip for each kind, and a mark where the memory ends."""
    percent = 100 / max(sum(kinds.values()), limit)
    strips = ""
    for number, (kind, size) in enumerate(kinds.items()):
        strips += f'<i class="kind-{number}" style="width:{size * percent:.3f}%" title="{escape(kind)}"></i>'
    mark = f'<b style="left:{limit * percent:.3f}%"></b>'
    return f'<div class="planner-bar" aria-hidden="true">{strips}{mark}</div>'


def button(layout: Layout, label: str) -> str:
    """A button that puts a layout into the form's inputs. The page ignores fields without an input."""
    fields = escape(as_argument(asdict(layout)))
    return f'<button type="button" data-layout="{fields}">{label}</button>'
