"""torchrun whose ranks are forked from its agent, which has imported torch: ``python tools/forked_torchrun.py ...``.

Arguments, agent, rendezvous, restarts and variables are torchrun's own. Each start of a rank saves the processor's two
seconds that its imports take. It is for tests of what ranks do after their start and before their end: a forked rank
leaves by os._exit, without atexit handlers. With ``--serve`` it runs one job after the other: each line that it reads
is a list of arguments, as JSON, and ``ended`` with the job's status, 0 or 1, is the line that it then prints.
"""

import json
import runpy
import sys
from pathlib import Path

import torch._dynamo  # an optimizer's constructor imports it
import torch.utils.data
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args


def be_a_rank(script, *flags):
    """Become what ``python script flags`` is."""
    sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent)
    torch.distributed.set_debug_level_from_env()  # torch read it when the agent imported it
    runpy.run_path(script, run_name="__main__")


def main(arguments):
    args = parse_args(arguments)
    config, _, _ = config_from_args(args)
    config.start_method = "fork"
    elastic_launch(config, be_a_rank)(args.training_script, *args.training_script_args)


def serve():
    for line in sys.stdin:
        status = 0
        try:
            main(json.loads(line))
        except ChildFailedError as error:
            status = 1
            print(error, file=sys.stderr)
        print("ended", status, flush=True)


if __name__ == "__main__":
    try:
        serve() if sys.argv[1:] == ["--serve"] else main(sys.argv[1:])
    except ChildFailedError as error:
        sys.exit(str(error))
