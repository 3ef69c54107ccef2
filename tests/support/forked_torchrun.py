"""torchrun with ranks that are forked from its agent, which has imported torch: ``forked_torchrun.py …``.

Arguments, agent, rendezvous, restarts and variables are torchrun's own, but a port that it picks for a store on rank 0
stays reserved: another program could take it before the store starts. A forked rank has its imports done, which saves
two seconds of a processor at each start. Use it to test what ranks do between their start and their end: a forked rank
leaves by os._exit, without atexit handlers. With ``--serve MODULE …`` it imports the modules, which ranks then have,
and runs one job after the other: each line that it reads is a list of arguments, as JSON, and it prints ``ended`` with
the job's status, 0 or 1, when the job is over. These ranks do call what they have registered for their exit: else a
rank that fails would wait for its loader's workers, until the agent kills it after 30 seconds.
"""

import atexit
import importlib
import json
import runpy
import socket
import sys
from pathlib import Path

import torch._dynamo  # else every rank would: an optimizer's constructor imports it
import torch.utils.data
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import api
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

holders = []


def get_held_port():
    """A port for the store of the ranks that start next, which stays bound as in helpers.ranks.ports.hold_port."""
    while holders:
        holders.pop().close()
    holders.append(socket.socket())
    holders[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holders[0].bind(("127.0.0.1", 0))
    return holders[0].getsockname()[1]


def run_script(script, *flags):
    """Run the script in this process as ``python script flags`` would."""
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    torch.distributed.set_debug_level_from_env()  # torch read the variable in the agent
    torch.set_num_threads(torch.get_num_threads())  # else autograd's threads race to renew the pool that a fork breaks
    runpy.run_path(script, run_name="__main__")


def run_script_to_its_exit(script, *flags):
    """Run the script, and at its end what it has registered for the exit, as Python does in a new process."""
    atexit._clear()  # what the agent has registered is not the script's
    try:
        run_script(script, *flags)
    finally:
        atexit._run_exitfuncs()


def main(arguments, function=run_script):
    args = parse_args(arguments)
    config, _, _ = config_from_args(args)
    config.start_method = "fork"
    api.get_free_port = get_held_port
    try:
        elastic_launch(config, function)(args.training_script, *args.training_script_args)
    except ChildFailedError as error:
        sys.exit(str(error))


def serve(modules):
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
