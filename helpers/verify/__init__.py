"""The whole book on a machine with GPUs: what gloo and a rehearsal promised, compared with what NCCL and GPUs did.

It gives ``python -m helpers verify`` its arguments and its work (``command``). Its steps are the probes
(``measuring``, ``probes``), the chapters' scripts and the doctor (``steps``, ``runs``); what they come to is a
``record`` and a ``page``. Of this project it imports ``helpers.command_line``, ``helpers.counts``, ``helpers.ranks``,
``helpers.planner``, ``helpers.export`` and ``helpers.rehearsal``; it starts the doctor. Only the export needs nbformat
and ruff, and where they are missing it is not needed.
"""
