"""Run the whole book on a machine with GPUs, and compare what NCCL and GPUs do with gloo and with a rehearsal.

``command`` has the arguments and the work of ``python -m helpers verify``. Its steps are the probes (``measuring``,
``probes``), and the chapters' scripts and the doctor (``steps``, ``runs``). The results are a ``record`` and a
``page``. Of this project it imports ``helpers.command_line``, ``helpers.counts``, ``helpers.ranks``,
``helpers.planner``, ``helpers.export`` and ``helpers.rehearsal``; it starts the doctor. Only the export needs nbformat
and ruff, and where they are missing it is not needed.
"""
