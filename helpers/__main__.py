"""The command line, ``python -m helpers``: list, export, run and rehearse the chapters, plan a job, check a cluster."""

import os
import sys
import traceback

from helpers.command_line import Parser, positive, whole
from helpers.ranks.torchrun import folder_until_a_signal, run


def parse(arguments):
    """A command line, without the program's name, as (args, flags of the script). Wrong usage raises SystemExit(2)."""
    parser = Parser(
        prog="python -m helpers",
        description="World Size One's chapters as scripts for torchrun.",
    )
    chapter = "its number (4), its name (04_ddp or ddp), or the path of any notebook"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the chapters")
    command = commands.add_parser("export", help="write a chapter's script")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("chapter", nargs="?", metavar="CHAPTER", help=chapter)
    which.add_argument("--all", action="store_true", help="every chapter")
    command.add_argument("--out", default="scripts", metavar="DIR", help="the folder to write to (default: scripts)")
    command.add_argument("--force", action="store_true", help="overwrite a script that differs")
    command.add_argument("--allow-single", action="store_true", help="also a notebook whose ranks train a model each")
    command.add_argument(
        "--slurm", action="store_true", help="write what starts it on many nodes too: for Slurm, by hand, on Kubernetes"
    )
    sizes = {"--nodes": (whole, "N", 2), "--gpus-per-node": (whole, "N", 8), "--time": (str, "LIMIT", "04:00:00")}
    for flag, (kind, metavar, default) in sizes.items():
        command.add_argument(flag, type=kind, metavar=metavar, help=f"with --slurm (default: {default})")
    command = commands.add_parser("run", help="run a chapter's script on this machine")
    command.add_argument("chapter", metavar="CHAPTER", help=chapter)
    command.add_argument("--nproc", type=whole, default=2, metavar="N", help="how many ranks (default: 2)")
    command.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the script, after two dashes")
    from helpers.rehearsal import command as rehearsal

    command = commands.add_parser("rehearse", help="run a script's GPU path on pretended GPUs of this machine")
    rehearsal.add_arguments(command)
    command = commands.add_parser(
        "doctor",
        help="check the machines, the network and the collectives",
        description="Check what a training run will need: alone on this machine, or on all ranks under torchrun or "
        "srun. The exit status is 1 where something is wrong.",
    )
    command.add_argument(
        "--nproc", type=whole, metavar="N", help="without a launcher: how many ranks (default: one per GPU, or 2)"
    )
    command.add_argument(
        "--timeout", type=positive, default=60, metavar="S", help="seconds to wait for a rank (default: 60)"
    )
    command.add_argument(
        "--backend", choices=["gloo"], help="leave the GPUs out (default: NCCL where all ranks have one)"
    )
    command.add_argument("--plan", metavar="FILE", help="compare with a plan, written by: plan … --json > FILE")
    command.add_argument("--master", metavar="HOST[:PORT]", help="where rank 0 runs (default: the launcher's)")
    from helpers.planner import command as planner

    command = commands.add_parser("plan", help="what a job needs: memory, messages, time, failures, cost")
    planner.add_arguments(command)
    flags = []
    if arguments[:1] in (["run"], ["rehearse"]) and "--" in arguments:
        arguments, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    args = parser.parse_args(arguments)
    if args.command == "export":
        given = [flag for flag in sizes if getattr(args, flag[2:].replace("-", "_")) is not None]
        if given and not args.slurm:
            parser.error(f"{given[0]} is for --slurm, which writes what starts the script on many nodes: add it")
        cluster = {"nodes": args.nodes or 2, "gpus": args.gpus_per_node or 8, "time": args.time or "04:00:00"}
        args.cluster = cluster if args.slurm else None
    if getattr(args, "flags", None):
        parser.error(f"put two dashes before the script's flags: -- {' '.join(args.flags)}")
    return args, flags


def carry_out(args, flags, folder=None):
    """Carry out ``list``, ``export`` or ``run`` and return the exit status. ``run`` writes its script to ``folder``."""
    try:
        from helpers.export import chapters as commands  # here, because it takes a second or more
    except ModuleNotFoundError as error:
        needed = f"{args.command} needs {error.name}, which is not installed"
        print(f"error: {needed}. Try: pip install {error.name}", file=sys.stderr)
        return 1
    try:
        if args.command == "list":
            for name, title in commands.titles():
                print(f"{name:27}{title}")
        elif args.command == "export":
            chapter = None if args.all else args.chapter
            for target in commands.export(chapter, args.out, args.force, args.cluster, args.allow_single):
                print(target)
        else:
            [script] = commands.export(args.chapter, folder)
            return run(script, args.nproc, flags)
    except commands.ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_doctor(args, flags):
    """Start the doctor in this rank, or without a launcher on ranks of this machine; return the exit status.

    A rank ends in here, by os._exit. A normal exit could hang: it waits for the threads of a broken process group.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is loaded
    from helpers.doctor import examine as doctor
    from helpers.doctor import membership
    from helpers.doctor.plan import read_plan

    try:
        place = membership.find_place(args.master)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        plan = read_plan(args.plan) if args.plan else None
    except ValueError as error:
        if place.get("LOCAL_RANK", 0) == 0:  # one rank of a host says it
            print(f"error: {error}", file=sys.stderr)
        return 1
    if not place:
        if args.master:
            print("error: --master is for srun or torchrun, which start the ranks; leave it out here.", file=sys.stderr)
            return 2
        with folder_until_a_signal():
            return doctor.start_local(args.nproc, flags)
    status = 1
    try:
        status = doctor.run_rank(place, args.backend, args.timeout, plan)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(arguments):
    """Run a command line, without the program's name; return its exit status. Wrong usage raises SystemExit(2)."""
    args, flags = parse(arguments)
    try:
        if args.command == "doctor":
            return run_doctor(args, arguments[1:])
        if args.command == "plan":
            from helpers.planner.command import main as plan

            return plan(args)
        if args.command == "rehearse":
            from helpers.rehearsal.command import main as rehearse

            return rehearse(args, flags)
        if args.command != "run":
            return carry_out(args, flags)
        with folder_until_a_signal() as folder:
            return carry_out(args, flags, folder)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
