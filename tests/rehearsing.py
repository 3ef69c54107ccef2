"""A rank of ``launch`` that becomes one of a rehearsal. Each rank imports this file, so it imports little itself."""

import atexit
import os

import torch.distributed as dist


class Left(BaseException):
    """In the place of os._exit: a rehearsed script has ended."""


def rehearse_rank(port, script, gpus, flags, folder):
    """This rank of ``launch`` becomes one of a rehearsal; return its exit status."""
    from helpers.rehearsal import rank

    def leave(status):
        raise Left(status)

    atexit._clear()  # the forkserver's, which would end this rank: a fresh process has none
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"REHEARSAL_GPUS": str(gpus), "REHEARSAL_FOLDER": folder, "REHEARSAL_JSON": f"{folder}/report.json"}
    rank.EXIT, end = leave, os._exit
    try:
        rank.main(script, flags)
    except Left as left:
        return left.args[0]
    finally:
        os._exit = end
