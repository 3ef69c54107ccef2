"""What pages say of environment variables: the list names each that they use, and printed lines set what they need."""

import re

import nbformat
import pytest
from conftest import ROOT

LIST = ROOT / "notebooks" / "environment_variables.ipynb"
PAGES = [*sorted(ROOT.glob("notebooks/*.ipynb")), *sorted(ROOT.glob("book/*.md"))]
# Words that are environment variables by their first part. What only looks like one has another first part.
VARIABLE = re.compile(
    r"\b(?:ATEN|CUBLAS|CUDA|DNNL|FLASH|GLOO|KINETO|MKL|NCCL|OMP|PYTORCH|SLURM|SLURMD|TORCH|TORCHELASTIC|TORCHINDUCTOR|USE)"
    r"_[A-Z0-9][A-Z0-9_]*[A-Z0-9]\b"
)
FENCE = re.compile(r"^```bash\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def text_of(page):
    """All cells of a notebook, without their outputs, or a page of Markdown."""
    if page.suffix == ".md":
        return page.read_text(encoding="utf-8")
    return "\n".join(cell.source for cell in nbformat.read(page, as_version=4).cells)


def rows(text):
    """The variables that stand in the first column of a table."""
    firsts = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for first in firsts for name in VARIABLE.findall(first)}


def test_the_list_of_variables_names_each_that_a_page_uses():
    text = text_of(LIST)
    # Older names of a variable, and what one implementation also reads, stand in a sentence or in another column.
    listed = rows(text) | {name for name in VARIABLE.findall(text) if f"`{name}`" in text}
    assert len(rows(text)) > 60
    missing = {}
    for page in PAGES:
        if page == LIST:
            continue
        names = set(VARIABLE.findall(text_of(page))) - listed
        if names:
            missing[page.name] = sorted(names)
    assert missing == {}, "write a row for each into notebooks/environment_variables.ipynb"


def restarting_lines(fence):
    """Each line of a bash block that restarts ranks, with what stands before it in the block."""
    lines = fence.replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines):
        if re.search(r"--max-restarts=[1-9]", line):
            yield line, lines[:number]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_printed_line_that_restarts_ranks_gives_them_a_store_of_their_own(page):
    """Otherwise a restarted rank may read the addresses of dead ones, and hang. And all its agents must meet again."""
    for fence in FENCE.findall(text_of(page)):
        for line, before in restarting_lines(fence):
            assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in before, line
            assert "--standalone" in line or "--rdzv-backend=c10d" in line, line


def test_a_line_without_the_variable_is_found():
    fence = "export A=1\ntorchrun --standalone \\\n  --max-restarts=3 train.py\n"
    assert list(restarting_lines(fence)) == [("torchrun --standalone    --max-restarts=3 train.py", ["export A=1"])]
    assert list(restarting_lines("torchrun --max-restarts=0 train.py")) == []
