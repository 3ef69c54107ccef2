"""torchrun with ranks that are forked from its agent, which has imported torch: ``forked_torchrun.py …``.

Arguments, agent, rendezvous, restarts and environment variables are torchrun's own. Two things differ:

- A forked rank has its imports done, which saves two seconds of a processor at each start. It leaves by os._exit,
  without atexit handlers, so use it to test what ranks do between their start and their end.
- A port that torchrun picks for a store on rank 0 stays reserved. Otherwise another program could take it before the
  store starts.

With ``--serve MODULE …`` it imports the modules, so that its ranks have them, and runs one job after the other. Each
line that it reads is a job's list of arguments, as JSON. When the job is over, it prints ``ended 0``, or ``ended 1`` if
the job has failed. These ranks do call what they have registered for their exit. Otherwise a rank that fails would wait
for its loader's workers, until the agent kills it after 30 seconds.
"""

import atexit
import importlib
import json
import runpy
import socket
import sys
from pathlib import Path

import torch._dynamo  # An optimizer's constructor imports it. Without this line, it would do so in every rank.
import torch.utils.data
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import api
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

held_sockets = []  # the socket that is bound to the port of the ranks that run now, or none


def get_held_port():
    """A free port for the store of the ranks that start next. A socket stays bound to it, so no program can take it.

    helpers.ranks.ports.hold_port says why the store can still listen there.
    """
    while held_sockets:
        held_sockets.pop().close()
    held_socket = socket.socket()
    held_sockets.append(held_socket)
    held_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held_socket.bind(("127.0.0.1", 0))
    _, port = held_socket.getsockname()
    return port


def run_script(script, *flags):
    """Run the script in this process as ``python script flags`` would."""
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    torch.distributed.set_debug_level_from_env()  # torch read the variable in the agent
    # A fork breaks the pool of threads. Without this line, autograd's threads would race to renew it.
    torch.set_num_threads(torch.get_num_threads())
    runpy.run_path(script, run_name="__main__")


def run_script_to_its_exit(script, *flags):
    """Run the script, and at its end what it has registered for the exit, as Python does in a new process."""
    atexit._clear()  # what the agent has registered is not the script's
    try:
        run_script(script, *flags)
    finally:
        atexit._run_exitfuncs()


def main(arguments, function=run_script):
    """Run torchrun with these arguments. Each rank calls ``function`` with the script and its flags.

    Exits with torchrun's report if a rank fails.
    """
    args = parse_args(arguments)
    config, _, _ = config_from_args(args)
    config.start_method = "fork"
    api.get_free_port = get_held_port
    try:
        elastic_launch(config, function)(args.training_script, *args.training_script_args)
    except ChildFailedError as error:
        sys.exit(str(error))


def serve(modules):
    """Import these modules. Then run a job for each line of stdin, as the head of this file says."""
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        status = 0
        try:
            main(json.loads(line), run_script_to_its_exit)
        except SystemExit as end:
            status = 1
            print(end.code, file=sys.stderr)
        print("ended", status, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        main(sys.argv[1:])
