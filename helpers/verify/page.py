"""The page of a verification, as Markdown: a function of its record and of the steps that are left."""

from collections.abc import Iterable, Sequence

from helpers.verify.compare import UNCOMPARED
from helpers.verify.order import PROBES
from helpers.verify.record import Figure, Prediction, Probe, Record, Step

COLUMNS_WITHOUT_PREDICTIONS = ("what", "measured", "unit")
COLUMNS_OF_PREDICTIONS = ("predicted", "measured / predicted")


def page(record: Record, missing: Sequence[str]) -> str:
    """The page about a verification, whose ``record`` may be incomplete. ``missing`` names the steps that have not run.

    First come the probes for which there are predictions, then what differed and what agreed, then the other probes.
    """
    if "rehearsed" in record.facts:
        subject = "rehearsed, not run on a GPU"
    else:
        machine = record.facts["machine"]  # such as "8 x NVIDIA H200; driver 570.86, PyTorch 2.15.0, …"
        subject = machine.split(";")[0]
    sections = [f"# The book on GPUs: {subject}", table(["what", "value"], record.facts.items())]
    if missing:
        sections.append(f"Not run yet: {', '.join(missing)}.")
    for name, predictions in record.predictions.items():
        not_run = Probe(PROBES[name].title)
        sections += sections_of_probe(record.probes.get(name, not_run), predictions)
    sections += [
        "## What differed from gloo, the pages' backend, and from the rehearsal",
        differences(record),
        "## What agreed",
        agreements(record),
        UNCOMPARED.strip(),
        "## Scripts",
        "The observer's counting takes some of the seconds.",
        scripts_table(record.steps.values()),
    ]
    for name, probe in record.probes.items():
        if name not in record.predictions:
            sections += sections_of_probe(probe, predictions=[])
    return "\n\n".join(sections) + "\n"


# --- Markdown ---------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown. A cell may hold any text: a | in it is escaped, and a newline becomes a space."""
    rule = "|".join(["---"] * len(head))
    lines = [f"| {' | '.join(head)} |", f"| {rule} |"]
    for row in rows:
        cells = []
        for text in row:
            on_one_line = text.replace("\n", " ")
            cells.append(on_one_line.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bullets(lines: Sequence[str], without: str) -> str:
    """The lines as a list in Markdown, or the text ``without`` if there are none."""
    if not lines:
        return without
    return "\n".join(f"- {line}" for line in lines)


def fenced(text: str, head: str = "text") -> str:
    """Write a text as a block of code in Markdown. Its fence is longer than any row of backticks in the text.

    ``head`` follows the first fence. It is the block's language or, on a page of the book, a directive.
    """
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{head}\n{text.strip()}\n{fence}"


def rounded(number: float) -> str:
    """A number with four significant digits, and with commas from 1,000 on."""
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


# --- figures beside their predictions ---------------------------------------------------------------------------------


def figures_table(figures: Sequence[Figure], predictions: Sequence[Prediction]) -> str:
    """Write a table of measured figures in Markdown: first those that were predicted, each beside its prediction.

    A prediction for which nothing was measured has a row, too. If there are no predictions, their columns are left out.
    """
    if not predictions:
        return table(COLUMNS_WITHOUT_PREDICTIONS, [cells_of_figure(figure) for figure in figures])

    measured = {figure.name: figure.value for figure in figures}
    rows = []
    for prediction in predictions:
        rows.append(row_of_prediction(prediction, measured.get(prediction.name)))
    predicted_names = {prediction.name for prediction in predictions}
    for figure in figures:
        if figure.name not in predicted_names:
            rows.append([*cells_of_figure(figure), "", ""])
    return table([*COLUMNS_WITHOUT_PREDICTIONS, *COLUMNS_OF_PREDICTIONS], rows)


def cells_of_figure(figure: Figure) -> list[str]:
    """A figure's cells in the columns that every table has: ["bfloat16", "580", "TFLOP/s"]."""
    return [figure.name, rounded(figure.value), figure.unit]


def row_of_prediction(prediction: Prediction, measured: float | None) -> list[str]:
    """A row with a prediction and the number that was measured for it, or None if none was."""
    what = prediction.name
    if prediction.version:
        what = f"{prediction.name}, {prediction.version}"
    if measured is None:
        return [what, "not measured", prediction.unit, interval_of(prediction), ""]
    ratio = f"{measured / prediction.value:.2f}"
    return [what, rounded(measured), prediction.unit, interval_of(prediction), ratio]


def interval_of(prediction: Prediction) -> str:
    """A prediction, and its interval if it has one: ``124.6 (105.6 to 199.3)``."""
    if prediction.low is None or prediction.high is None:
        return rounded(prediction.value)
    return f"{rounded(prediction.value)} ({rounded(prediction.low)} to {rounded(prediction.high)})"


# --- the page's other sections ----------------------------------------------------------------------------------------


def differences(record: Record) -> str:
    """A list of the steps' differences, and of the probes that failed or hung."""
    lines = []
    for name, step in record.steps.items():
        lines += [f"{name}: {difference}" for difference in step.differences]
    for name, probe in record.probes.items():
        if probe.trouble:
            lines.append(f"{name}: {probe.trouble}")
    return bullets(lines, without="Nothing.")


def agreements(record: Record) -> str:
    """A list of the steps in which nothing differed."""
    lines = [f"{name}: {step.summary}" for name, step in record.steps.items() if not step.differences]
    return bullets(lines, without="Nothing yet.")


def scripts_table(steps: Iterable[Step]) -> str:
    """Write a table of the chapters' scripts: what each printed, how long it took, and its memory.

    The doctor and the checks of ``launch`` are steps, too, but they are no scripts and have no row.
    """
    rows = []
    for step in steps:
        is_script = bool(step.script_seconds)
        if not is_script:
            continue
        result = ", ".join(f"{name} {number:g}" for name, number in step.result.items())
        seconds = ", ".join(f"{number:.1f}" for number in step.script_seconds)
        peak_megabytes = ", ".join(f"{peak / 1e6:.0f}" for peak in step.memory)
        rows.append([f"`{step.command}`", result, seconds, peak_megabytes])
    return table(["command", "result on GPUs", "seconds on GPUs, on gloo", "peak MB of the ranks"], rows)


def sections_of_probe(probe: Probe, predictions: Sequence[Prediction]) -> list[str]:
    """The parts of the page about one probe: its title, what went wrong, its figures, and what programs printed."""
    sections = [f"## {probe.title}"]
    if probe.trouble:
        sections.append(f"It {probe.trouble}.")
    if probe.figures or predictions:
        sections.append(figures_table(probe.figures, predictions))
    for title, text in probe.texts.items():
        sections.append(f"### {title}")
        sections.append(fenced(text or "(nothing)"))
    return sections
