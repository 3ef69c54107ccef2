"""Probes: short measurements of what the book says of GPUs, each in a process of its own with its own limit.

``catalog`` lists them, ``process`` is the program that runs one, and each other module has the functions of a few. Such
a function takes the device and yields a Figure or a Text as soon as it has it, so a probe that hangs leaves the others.
On "cpu" it runs with small sizes, which tries the program and its arithmetic: the figures mean nothing.
"""
