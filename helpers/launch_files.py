"""What starts an exported script on several nodes: a batch file for Slurm, plain torchrun lines, a Job for Kubernetes.

``launch_files(script, name, nodes, gpus, time)`` gives all three as text. Each is a plain file to read and to change.
"""

import re
from string import Template

STOP_BEFORE = 180  # seconds before the time limit at which Slurm asks the script to stop; it may be 60 s early
SAVE_WITHIN = 150  # seconds from that signal until torchrun kills what still runs
SHORTEST = 10  # minutes

SBATCH = """\
#!/bin/bash
# In a folder that all nodes see: sbatch $name.sbatch [flags of the script]
#SBATCH --job-name=$name --output=%x-%j.out --open-mode=append
#SBATCH --nodes=$nodes --ntasks-per-node=1 --gpus-per-node=$gpus --cpus-per-task=$cpus
#SBATCH --time=$time
$requeue
# source .venv/bin/activate  # the environment with torch, unless it is active when you submit
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0  # where nodes have several networks; their names: ip -br addr
export OMP_NUM_THREADS=1  # for each rank; the other cores are for its data loader
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks may read the addresses of dead ones
HEAD=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
export RENDEZVOUS=$$HEAD:$$((20000 + SLURM_JOB_ID % 10000)) START=$${SLURM_RESTART_COUNT:-0}
export WORK=$${WORK:-$$SLURM_JOB_NAME-$$SLURM_JOB_ID}  # $work; another job's, to go on with it
mkdir -p "$$WORK" && rm -f "$$WORK/stopped"
echo "start $$START on $$SLURM_JOB_NODELIST"

# One agent a node. It starts the node's ranks, starts all ranks again when one fails, and passes signals on to them.
srun --kill-on-bad-exit=1 --cpus-per-task="$$SLURM_CPUS_PER_TASK" bash -c 'exec torchrun \\
  --nnodes="$$SLURM_NNODES" --nproc-per-node=$gpus --max-restarts=3 --local-addr="$$SLURMD_NODENAME" \\
  --rdzv-backend=c10d --rdzv-endpoint="$$RENDEZVOUS" --rdzv-id="$$SLURM_JOB_ID.$$START" \\
  --rdzv-conf=is_host="$$((SLURM_NODEID == 0))" \\
  --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout=$save_within \\
  --log-dir="$$WORK/logs/$$SLURMD_NODENAME" --redirects=3 --tee=0:3 \\
  $file$resume "$$@"' torchrun "$$@"
"""
REQUEUE = """\
#SBATCH --signal=USR1@$stop_before  # this long before the time is up, to every rank
#SBATCH --requeue  # start again where a node is lost

"""
REQUEUE_ANEW = "#SBATCH --no-requeue  # this script would start anew\n\n"
GO_ON = """\
status=$?

# The script leaves this file where it stopped because of a signal, with work left: time limit or preemption.
if [ -e "$WORK/stopped" ] && [ "$START" -lt 100 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
