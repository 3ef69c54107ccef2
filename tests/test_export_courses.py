"""Notebooks as courses have them, which train in one process: what is refused, and what becomes of a corrected one."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from scripting import TOLERANCE, export, result, stand_alone, torchrun

from helpers.export.notebook import ExportError
from helpers.export.script import script_from_notebook

IMPORTS = """\
import json
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset"""
# The course's notebook is its only rank, so it says so itself. torchrun would say it to each rank of a script.
SETTINGS = """\
backend = "gloo"
rank = 0
world_size = 1
meeting_place = tempfile.NamedTemporaryFile(delete=False)
init_method = f"file://{meeting_place.name}\""""
START = "dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)"
TRAIN = """\
torch.manual_seed(0)
inputs = torch.randn(32, 4)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
loader = DataLoader(data, batch_size=16 // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    for batch, target in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()"""
SAVE = """\
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
    loss = nn.functional.mse_loss(model.module(inputs), inputs.sum(dim=1, keepdim=True)).item()
    print("result", json.dumps({"loss": round(loss, 3), "world_size": world_size}))"""
END = "dist.destroy_process_group()\nos.unlink(meeting_place.name)"
COURSE = [IMPORTS, SETTINGS, START, TRAIN, SAVE, END]


def notebook(cells):
    """A notebook of these cells of code."""
    return new_notebook(cells=[new_code_cell(cell) for cell in cells])


def refusal(cells):
    """The message with which the export refuses a notebook of these cells. It has one line."""
    with pytest.raises(ExportError) as error:
        script_from_notebook(notebook(cells), "course")
    [line] = str(error.value).splitlines()
    return line


@pytest.mark.ranks
def test_a_course_in_one_process_is_refused_until_each_rank_has_its_number(tmp_path):
    message = refusal(COURSE)
    assert message.startswith("course, cell 3: `dist.init_process_group(backend, init_method=init_method, ")
    assert "fixes init_method=f'file://" in message
    assert "rank=0, world_size=1, which torchrun says to each rank" in message
    assert message.endswith("Leave it out, and read dist.get_rank() and dist.get_world_size() after the call.")

    # Who only leaves the arguments out would have rank 0 everywhere, so that all ranks save the file.
    start = "dist.init_process_group(backend)"
    message = refusal([IMPORTS, SETTINGS, start, TRAIN, SAVE, END])
    assert message.startswith(
        "course, cell 2: `rank = 0` gives every rank the same rank. Write rank = dist.get_rank(), after"
    )

    # Who also reads the numbers gets a script, which trains the same model on one rank and on two.
    start += "\nrank = dist.get_rank()\nworld_size = dist.get_world_size()"
    path = tmp_path / "course.ipynb"
    nbformat.write(notebook([IMPORTS, SETTINGS, start, TRAIN, SAVE, END]), path)
    script = export(path, tmp_path)
    losses = []
    for nproc in (1, 2):
        status, out, errors, processes_left = torchrun(script, nproc, stand_alone(tmp_path))
        assert status == 0, errors
        assert not processes_left
        numbers = result(out)
        assert numbers["world_size"] == nproc
        losses.append(numbers["loss"])
    loss_on_one_rank, loss_on_two_ranks = losses
    assert loss_on_one_rank == pytest.approx(loss_on_two_ranks, abs=TOLERANCE)


DDP = "from torch.nn.parallel import DistributedDataParallel\n"
DIST = "import os\nimport torch.distributed as dist\n"
REFUSED = {  # {what: (cells, words of the message)}
    "numbers in a dict": (
        [DIST + "config = {'rank': 0, 'world_size': 1}", "dist.init_process_group('gloo', **config)"],
        "cell 2: `dist.init_process_group('gloo', **config)` fixes rank=0, world_size=1, which torchrun says",
    ),
    "numbers in a call of dict": (
        [DIST + "config = dict(backend='gloo', rank=0)", "dist.init_process_group(**config)"],
        "cell 2: `dist.init_process_group(**config)` fixes rank=0, which",
    ),
    "numbers by position": (
        [DIST + "dist.init_process_group('gloo', 'env://', None, 1, 0)"],
        "cell 1: `dist.init_process_group('gloo', 'env://', None, 1, 0)` fixes rank=0, world_size=1, which",
    ),
    "numbers by a function's arguments": (
        [DIST + "def setup(rank, n):\n    dist.init_process_group('gloo', rank=rank, world_size=n)", "setup(0, 1)"],
        "cell 1: `def setup(rank, n):` fixes rank=0, world_size=1, which",
    ),
    "numbers by a function's defaults": (
        [DIST + "def setup(rank=0):\n    dist.init_process_group('gloo', rank=rank)", "setup()"],
        "cell 1: `def setup(rank=0):` fixes rank=0, which",
    ),
    "an address in a variable": (
        [DIST + "url = 'tcp://localhost:12355'", "dist.init_process_group('gloo', init_method=url)"],
        "cell 2: `dist.init_process_group('gloo', init_method=url)` fixes init_method='tcp://localhost:12355', which",
    ),
    "a store": (
        [DIST + "store = dist.HashStore()", "dist.init_process_group('gloo', store=store, rank=0, world_size=1)"],
        "fixes rank=0, world_size=1, store=dist.HashStore(), which",
    ),
    "an environment variable from a variable": (
        [DIST + "port = '12355'", "os.environ['MASTER_PORT'] = port\ndist.init_process_group('gloo')"],
        "cell 2: `os.environ['MASTER_PORT'] = port` fixes MASTER_PORT, which is torchrun's to say. Leave it out.",
    ),
    "the same number of ranks everywhere": (
        [DIST + "rank, world_size = 3, 4\ndist.init_process_group('gloo')\nprint(rank, world_size)"],
        "cell 1: `rank, world_size = 3, 4` gives every rank the same world_size. Write world_size = dist.get_world",
    ),
    "the same local rank everywhere": (
        [DIST + "local_rank = 0\ndist.init_process_group('gloo')\nprint(local_rank)"],
        'cell 1: `local_rank = 0` gives every rank the same local_rank. Write local_rank = int(os.environ["LOCAL',
    ),
    "a training that nobody averages": (
        [DIST + "from torch import nn\ndist.init_process_group()\nmodel = nn.Linear(1, 1)", "model.loss.backward()"],
        "cell 2: `model.loss.backward()` trains, but no cell exchanges gradients: N ranks would train N models. Wrap",
    ),
    "torchrun in a cell": (
        ["import subprocess\nsource = 'dist.init_process_group()'", "subprocess.run(['torchrun', 'train.py'])"],
        "cell 2: `subprocess.run(['torchrun', 'train.py'])` starts ranks by torchrun, and the exported script",
    ),
    "torchrun in a variable": (
        ["import os\ncommand = 'python -m torch.distributed.run train.py'", "os.system(command)"],
        "cell 2: `os.system(command)` starts ranks by torch.distributed.run, and the exported script is started by",
    ),
    "a start that is only a text": (
        ["source = 'torch.distributed.init_process_group()'\nprint(source)"],
        "course starts no process group: N ranks would train N models",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    cells, words = REFUSED[case]
    assert words in refusal(cells)


FINE = {  # {what: cells}
    "numbers of the environment": [
        DIST + "rank = int(os.environ['RANK'])\nworld_size = int(os.environ.get('WORLD_SIZE', 1))",
        "dist.init_process_group('gloo', rank=rank, world_size=world_size)",
    ],
    "numbers for a notebook without a process group": [
        DIST + "rank, size = 0, 1",
        "dist.init_process_group()\nif dist.is_initialized():\n    rank, size = dist.get_rank(), dist.get_world_size()",
    ],
    "the rank of a matrix": [DIST + "dist.init_process_group('gloo', rank=-1)\nrank = 8\nprint(rank)"],
    "an address that torchrun says": [DIST + "url = 'env://'\ndist.init_process_group('gloo', init_method=url)"],
    "another package may average": [DIST + "import accelerate\ndist.init_process_group()\naccelerate.loss.backward()"],
    "gradients that a cell averages": [
        DIST + "dist.init_process_group()\nloss = 1\nloss.backward()\ndist.all_reduce(loss.grad)"
    ],
    "a model in DDP": [DDP + DIST + "dist.init_process_group()\nDistributedDataParallel(1).loss.backward()"],
    "another program": ["import subprocess\nsubprocess.run(['nvidia-smi'])", DIST + "dist.init_process_group()"],
    "a text about torchrun": [DIST + "dist.init_process_group()\nprint('torchrun train.py')"],
}


@pytest.mark.parametrize("case", FINE)
def test_fine(case):
    script = script_from_notebook(notebook(FINE[case]), "course")
    compile(script, "course.py", "exec")  # raises SyntaxError if it is not Python
