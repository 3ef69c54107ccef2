"""N real ranks on this machine: ``launch`` and ``%%ranks`` for notebooks, and torchrun in this process for commands.

Everything here is for the process that starts ranks, except for rank.py and serialization.py, which the ranks run as
well. It imports helpers.source, for the names that a cell reads, and nothing else of this project.
"""
