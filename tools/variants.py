"""Run some of the tests as they would run on other machines, and print a table: other locales, homes, users, folders.

    python tools/variants.py tests/test_process_group.py -k plain
    python tools/variants.py --only Turkish,nohup --nbval notebooks/01_process_groups.ipynb
    python tools/variants.py --only "many at once" --nbval --dist loadfile --no-loadscope-reorder -n 4

Arguments that are not options of this file go to pytest. It needs Linux. For another user it needs to be root, and that
user has to be able to read the interpreter. For Turkish it needs the package locales. The table has no line for a
variant that cannot run here.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

ROOT, IS_ROOT = Path(__file__).parents[1], os.getuid() == 0
NOBODY = 65534
# All that do not contradict each other: the whole suite takes long, and one run of it has them all, in "an é space".
TOGETHER = ["host without address", "umask 077", "nohup", "Turkish", "UTC+14", "space in TMPDIR", "random hashes"]
TOGETHER += ["no OMP_NUM_THREADS", "matplotlib's fonts"]


def under(command):
    """The words to put before a command line, so that a shell's command runs first."""
    return ["sh", "-c", f'{command} && exec "$@"', "sh"]


def apart(namespace, command):
    """The words to put before a command line, so that it runs in new namespaces, after a shell's command there."""
    return ["unshare", *([] if IS_ROOT else ["--map-root-user"]), f"--{namespace}", *under(command)]


def variants(folder):
    """{name: (words before the command, environment variables, working folder)}. A variable that is None is unset."""
    turkish = ["localedef", "-i", "tr_TR", "-f", "UTF-8", folder / "tr_TR.UTF-8"]
    locale = shutil.which("localedef") and subprocess.run(turkish, capture_output=True).returncode == 0
    elsewhere, spaced, others = (folder / name for name in ("an é space", "a b", "other"))
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        sys.exit(f"variants run in copies of what git lists here: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        for copy in (elsewhere, others / "tree"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    spaced.mkdir()
    (others / "tmp").mkdir()
    (folder / "closed").mkdir(mode=0o555)
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if IS_ROOT else []
    if IS_ROOT:
        subprocess.run(["chown", "-R", str(NOBODY), others], check=True)
    readable = subprocess.run([*user, "test", "-x", sys.executable]).returncode == 0
    own = {"TMPDIR": str(others / "tmp")}
    fonts = folder / "fonts.conf"
    fonts.write_text(f"<fontconfig><dir>{matplotlib.get_data_path()}/fonts/ttf</dir></fontconfig>\n")
    found = {
        "as it is": ([], {}, ROOT),
        "Turkish": locale and ([], {"LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "LOCPATH": str(folder)}, ROOT),
        "C locale": ([], {"LANG": "C", "LC_ALL": "C"}, ROOT),
        "UTC+14": ([], {"TZ": "Pacific/Kiritimati"}, ROOT),
        "UTC-3:30": ([], {"TZ": "America/St_Johns"}, ROOT),
        "host without address": (apart("uts", "hostname nowhere.invalid"), {}, ROOT),
        "no network": (apart("net", "ip link set lo up"), {}, ROOT),
        "space in TMPDIR": ([], {"TMPDIR": str(spaced)}, ROOT),
        "umask 077": (under("umask 077"), {}, ROOT),
        "an é space/": ([], {}, elsewhere),
        "OMP_NUM_THREADS=1": ([], {"OMP_NUM_THREADS": "1"}, ROOT),
        "no OMP_NUM_THREADS": ([], {"OMP_NUM_THREADS": None}, ROOT),
        "random hashes": ([], {"PYTHONHASHSEED": "random"}, ROOT),
        "nohup": (under("trap '' HUP"), {}, ROOT),
        "another user": IS_ROOT and readable and (user, {"HOME": str(others), **own}, others / "tree"),
        "matplotlib's fonts": ([], {"FONTCONFIG_FILE": str(fonts)}, ROOT),
        "no home": readable and (user, {"HOME": "/nonexistent", **own}, others / "tree"),
        "closed home": readable and (user, {"HOME": str(folder / "closed"), **own}, others / "tree"),
    }
    found = {name: variant for name, variant in found.items() if variant}
    together = [found[name] for name in TOGETHER if name in found]
    words, changes, _ = zip(*together, strict=True)
    merged = {key: value for change in changes for key, value in change.items()}
    return found | {"many at once": (sum(words, []), merged, elsewhere)}


def main(arguments):
    only = arguments[1].split(",") if arguments[:1] == ["--only"] else []
    pytest = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments[2 if only else 0 :]]
    failed = False
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for name, (before, changes, cwd) in variants(Path(folder)).items():
            if only and name not in only:
                continue
            environment = {**os.environ, "PYTHONPATH": str(cwd), **changes}
            environment = {key: value for key, value in environment.items() if value is not None}
            done = subprocess.run([*before, *pytest], cwd=cwd, env=environment, capture_output=True, text=True)
            lines = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr).strip().splitlines() or ["no output"]
            print(f"{name:22}{lines[-1].strip('= ')}", flush=True)
            print(*("    " + line for line in lines if re.match("(FAILED|ERROR) .*::", line)), sep="\n", end="")
            failed = failed or done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
