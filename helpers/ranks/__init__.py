"""N real ranks on this machine, for notebooks and for commands.

- ``launch`` calls a function on fresh ranks, and ``magic`` runs a cell there (``%%ranks``). ``pickler`` carries the
  function, ``preload`` is imported by the forkserver, and ``rank`` is what each rank does.
- ``collecting`` finds out what becomes of ranks, ``messages`` says it, and ``live`` shows a long call's newest lines.
- ``processes`` starts the processes of a command, waits for them and ends them; ``leash`` lets them end with it.
- ``older_torch`` gives an older PyTorch the newer names of its functions.
- ``torchrun`` runs a script under torchrun, and ends everything at a Ctrl-C.

Of this project it imports ``helpers.source`` and, for a rank that is checked, ``helpers.training_check``.
"""
