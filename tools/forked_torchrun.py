"""torchrun with ranks that are forked from its agent, which has imported torch: ``python tools/forked_torchrun.py …``.

Arguments, agent, rendezvous, restarts and variables are torchrun's own. A forked rank has its imports done, which saves
two seconds of a processor at each start. Use it to test what ranks do between their start and their end: a forked rank
leaves by os._exit, without atexit handlers.
"""

import runpy
import sys
from pathlib import Path

import torch._dynamo  # else every rank would: an optimizer's constructor imports it
import torch.utils.data
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def be_a_rank(script, *flags):
    """Run the script in this process as ``python script flags`` would."""
    sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent)
    torch.distributed.set_debug_level_from_env()  # torch read the variable in the agent
    runpy.run_path(script, run_name="__main__")


def main(arguments):
    args = parse_args(arguments)
    config, _, _ = config_from_args(args)
    config.start_method = "fork"
    elastic_launch(config, be_a_rank)(args.training_script, *args.training_script_args)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ChildFailedError as error:
        sys.exit(str(error))
