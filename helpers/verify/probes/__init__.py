"""Probes: short measurements of what the book says of GPUs, each in a process of its own with its own limit.

``catalog`` lists them, ``process`` is the program that runs one, and each other module has the functions of a few. Such
a function takes the device and yields each Figure or Text as soon as it has it, so that nothing is lost if it hangs
later. On "cpu" it runs with small sizes, to try the program and its arithmetic: the figures mean nothing.
"""
