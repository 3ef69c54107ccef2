"""The rehearsal: a script's GPU path on a CPU, with the errors that GPUs and NCCL would raise, and a count by line.

``command`` starts the ranks for ``python -m helpers rehearse``. In each of them ``rank`` first patches torch, then runs
the script, and last writes the ``report``. What it patches:

- ``devices``, ``gpus``: how many GPUs there are, and what torch.cuda answers;
- ``tensor``, ``placement``: tensors that say they are on a GPU, and how they get there and back;
- ``nccl``, ``call_order``: process groups, and whether all ranks call the same collectives;
- ``wrappers``: DDP, DTensor and modules;
- ``events``: what the script does that somebody watches. An observer that looks for a mistake is called there.

Of this project it imports ``helpers.command_line``, ``helpers.counts``, ``helpers.ranks`` and, to write a chapter's
script, ``helpers.export``.
"""
