"""The whole book on a machine with GPUs: what gloo and a rehearsal promised, compared with what NCCL and GPUs did.

It gives ``python -m helpers verify`` its arguments and its work (``command``). Of this project it imports
``helpers.command_line``, ``helpers.counts``, ``helpers.ranks``, ``helpers.export`` and ``helpers.rehearsal``; it starts
the doctor.
"""
