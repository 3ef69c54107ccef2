"""N real ranks on this machine: ``launch`` and ``%%ranks`` for notebooks, and torchrun in this process for commands.

All but rank.py is for the process that starts ranks. It imports helpers.source alone of this project.
"""
