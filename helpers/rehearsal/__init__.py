"""The rehearsal: a script's GPU path on a CPU, with the errors that GPUs and NCCL would raise, and a count by line.

It gives ``python -m helpers rehearse`` its arguments and its work (``command``). Of this project it imports
``helpers.command_line``, ``helpers.counts``, ``helpers.ranks`` and, to write a chapter's script, ``helpers.export``.
"""
