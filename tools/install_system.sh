#!/bin/sh
# Install what the tests use beside Python packages, with Debian's apt: chromium (pages, PDF), Slurm and shellcheck
# (launch files) and npm (the planner's page).
set -eu
missing=""
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
    [ -d "/Applications/Google Chrome.app" ] || missing="chromium"
for program in slurmctld slurmd sbatch munged ip; do
    command -v $program >/dev/null || { missing="$missing slurmctld slurmd slurm-client munge iproute2" && break; }
done
for program in shellcheck npm; do
    command -v $program >/dev/null || missing="$missing $program"
done
[ -n "$missing" ] || { echo "chromium, Slurm, shellcheck and npm are installed." && exit 0; }

if ! command -v apt-get >/dev/null; then
    echo "Missing:$missing. Without apt-get this cannot install them; tests that need them are skipped." >&2 && exit 1
fi
as_root=""
[ "$(id -u)" -eq 0 ] || as_root="sudo"
echo "This installs, with $as_root apt-get: $missing"
if [ -n "${CI:-}${YES:-}" ]; then
    :
elif [ -t 0 ]; then
    printf "Go ahead? [y/N] "
    read -r answer
    case "$answer" in [yY]*) ;; *) echo "Nothing was installed." >&2 && exit 1 ;; esac
else
    echo "Nobody to ask, so nothing was installed. To go ahead: make system YES=1" >&2 && exit 1
fi
export DEBIAN_FRONTEND=noninteractive
$as_root apt-get update -qq
# shellcheck disable=SC2086  # the names are to be split
$as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
