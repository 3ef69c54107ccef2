"""A cluster examined: ``python -m helpers doctor`` finds what would stop a training run, and says what to try.

It gives the command line one command, ``doctor.command``, and the book nothing else. It runs where only torch and
psutil are installed, so of this package it imports ``helpers.command_line`` alone, and of ``helpers.ranks`` what starts
processes.
"""
