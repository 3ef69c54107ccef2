"""What pages say of environment variables: the list names each that they use, and printed lines set what they need."""

import re

import nbformat
import pytest
from conftest import ROOT

LIST = ROOT / "notebooks" / "environment_variables.ipynb"
PAGES = [*sorted(ROOT.glob("notebooks/*.ipynb")), *sorted(ROOT.glob("book/*.md"))]
# Environment variables, such as NCCL_DEBUG. Other words in capitals, such as MAX_STEPS, have none of these first parts.
VARIABLE = re.compile(
    r"\b(?:ATEN|CUBLAS|CUDA|DNNL|FLASH|GLOO|KINETO|MKL|NCCL|OMP|PYTORCH|SLURM|SLURMD|TORCH|TORCHELASTIC|TORCHINDUCTOR|USE)"
    r"_[A-Z0-9][A-Z0-9_]*[A-Z0-9]\b"
)
BASH_BLOCK = re.compile(r"^```bash\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def text_of(page):
    """All cells of a notebook, without their outputs, or a page of Markdown."""
    if page.suffix == ".md":
        return page.read_text(encoding="utf-8")
    return "\n".join(cell.source for cell in nbformat.read(page, as_version=4).cells)


def variables_with_row(text):
    """The variables in the first column of the tables of a page: NCCL_DEBUG of the row "| `NCCL_DEBUG` | … |"."""
    variables = set()
    for line in text.splitlines():
        if line.startswith("| `"):
            first_column = line.split("|")[1]
            variables.update(VARIABLE.findall(first_column))
    return variables


def test_the_list_of_variables_names_each_that_a_page_uses():
    text = text_of(LIST)
    with_row = variables_with_row(text)
    assert len(with_row) > 60
    # Older names of a variable, and what one implementation also reads, are in a sentence or in another column.
    in_text = {name for name in VARIABLE.findall(text) if f"`{name}`" in text}
    listed = with_row | in_text
    missing = {}
    for page in PAGES:
        if page == LIST:
            continue
        names = set(VARIABLE.findall(text_of(page))) - listed
        if names:
            missing[page.name] = sorted(names)
    assert missing == {}, "write a row for each into notebooks/environment_variables.ipynb"


def restarting_lines(block):
    """Yields (line, the lines above it) for each line of a block of shell lines that lets torchrun restart ranks."""
    lines = block.replace("\\\n", " ").splitlines()  # a line that ends with a backslash continues on the next one
    for number, line in enumerate(lines):
        if re.search(r"--max-restarts=[1-9]", line):
            yield line, lines[:number]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_printed_line_that_restarts_ranks_gives_them_a_store_of_their_own(page):
    """Otherwise a restarted rank may read the addresses of dead ones, and hang. And all its agents must meet again."""
    for block in BASH_BLOCK.findall(text_of(page)):
        for line, lines_above in restarting_lines(block):
            assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in lines_above, line
            assert "--standalone" in line or "--rdzv-backend=c10d" in line, line


def test_a_line_without_the_variable_is_found():
    block = "export A=1\ntorchrun --standalone \\\n  --max-restarts=3 train.py\n"
    [(line, lines_above)] = restarting_lines(block)
    assert line == "torchrun --standalone    --max-restarts=3 train.py"
    assert lines_above == ["export A=1"]
    assert list(restarting_lines("torchrun --max-restarts=0 train.py")) == []
