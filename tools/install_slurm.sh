#!/bin/sh
# Install Debian's Slurm for the tests of the launch files, where apt is there and may be used without a password.
for program in slurmctld slurmd sbatch munged; do
    command -v "$program" >/dev/null || missing=$program
done
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "No Slurm here, and no apt-get to install it: its tests will be skipped." && exit 0
fi
if [ "$(id -u)" -eq 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "No Slurm here. Its tests need root too: sudo apt-get install slurmctld slurmd slurm-client munge" && exit 0
fi
echo "Installing Slurm for the tests of the launch files."
$as_root apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client munge iproute2 >/dev/null ||
    echo "apt-get could not install Slurm, so its tests will be skipped."
