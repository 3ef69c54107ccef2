"""The rehearsal: a script's GPU path on a CPU, with the errors that GPUs and NCCL would raise, and a count by line.

``command`` starts the ranks for ``python -m helpers rehearse``. In each of them ``rank`` first patches torch, then runs
the script, and last writes the ``report``. What it patches:

- ``devices``, ``gpus``: how many GPUs there are, and what torch.cuda answers;
- ``tensor``, ``placement``: tensors that say they are on a GPU, and how they get there and back;
- ``nccl``, ``call_order``: process groups, and whether all ranks call the same collectives;
- ``wrappers``: DDP, DTensor and modules;
- ``events``: what the script does that is counted;
- ``mistakes``: what it does that may be a mistake without an error. The command compares the ranks at the end.

Of this project it imports ``helpers.training_check``, ``helpers.command_line``, ``helpers.counts``, ``helpers.ranks``
and, to write a chapter's script, ``helpers.export``.
"""
