"""What starts an exported script on many nodes: a batch file for Slurm, plain torchrun lines, a Job for Kubernetes.

``launch_files(name, script, nodes, gpus, time)`` returns the texts. They are short, so that readers can change them.
"""

import re
from string import Template

from helpers.export.notebook import ExportError

STOP_BEFORE = 180  # seconds before the time limit at which Slurm warns the ranks; it may be a minute early
SHORTEST = 10  # minutes: the least time limit for a script that is warned
CPUS_PER_GPU = 4  # for a rank and the processes that load its data
CHECK = "12_multi_node"  # the chapter whose script checks every link

# In these texts, $name is filled in by this module, and $$name becomes the shell's own $name.
SLURM = """\
#!/bin/bash
# In a folder that all nodes see:  sbatch $name.sbatch [flags of the script]
#SBATCH --job-name=$name --output=%x-%j.out --open-mode=append
#SBATCH --nodes=$nodes --ntasks-per-node=1 --gpus-per-node=$gpus --cpus-per-task=$cpus
#SBATCH --time=$time$requeue

# ---- your cluster: remove the first "# " of what you need, and replace the capitals
# #SBATCH --account=ACCOUNT --partition=PARTITION
# #SBATCH --mem=0  # all memory of each node
# module purge && module load MODULE
# source .venv/bin/activate  # the environment that has torch, unless it is active when you submit
# CONTAINER="--container-image=IMAGE --container-mounts=$$PWD --container-workdir=$$PWD"  # pyxis
# CONTAINER="apptainer exec --nv --bind $$PWD IMAGE.sif"  # Apptainer
# BIND="--numa-binding=node"  # each rank on the processor that its GPU is connected to
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0  # on nodes with several networks; `ip -br addr` lists them
$preflight# ----

export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED=1  # without it, torchrun shows a rank's lines late, some kilobytes at a time
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it, ranks that start again may read dead ranks' addresses
export WORK=$${WORK:-$$SLURM_JOB_NAME-$$SLURM_JOB_ID}  # $work
export START=$${SLURM_RESTART_COUNT:-0}
# The addresses by which Slurm reaches the nodes. Their names in Slurm may mean nothing to the other nodes.
show=$$(scontrol --oneliner show node "$$SLURM_JOB_NODELIST")
export ADDRESSES=$$(grep -o " NodeAddr=[^ ]*" <<< "$$show" | cut -d= -f2)
export MEET=$$(head -n 1 <<< "$$ADDRESSES"):$$((20000 + SLURM_JOB_ID % 10000))
mkdir -p "$$WORK"$unmark
echo "start $$START on $$SLURM_JOB_NODELIST"

agents() {  # One torchrun a node. It starts the node's ranks, and starts all nodes' ranks again when one fails.
  srun --kill-on-bad-exit=1 --cpus-per-task="$$SLURM_CPUS_PER_TASK" $$CONTAINER bash -c '$deaf
    addresses=($$ADDRESSES)
    exec torchrun --nnodes="$$SLURM_NNODES" --nproc-per-node=$gpus --max-restarts=3 \\
      --rdzv-backend=c10d --rdzv-endpoint="$$MEET" --rdzv-id="$$SLURM_JOB_ID.$$START" \\
      --rdzv-conf=is_host="$$((SLURM_NODEID == 0))" --local-addr="$${addresses[SLURM_NODEID]}" \\
      --log-dir="$$WORK/logs/$$SLURMD_NODENAME" --redirects=3 --tee=0:3 \\
      $signals"$$@"' torchrun $$BIND "$$@"
}
$check$before
agents $file$backend$resume "$$@"
"""
PREFLIGHT = """\
# PREFLIGHT="-m helpers doctor"  # runs before the script; without this line, 12_multi_node.py, if it is in the folder
"""
RUN_PREFLIGHT = """
# Before anything is loaded: do all ranks meet, and do they add up right? If not, the job ends here.
PREFLIGHT=$${PREFLIGHT-$$(ls 12_multi_node.py 2>/dev/null)}
[ -z "$$PREFLIGHT" ] || agents --max-restarts=0 --rdzv-id="preflight.$$SLURM_JOB_ID.$$START" $$PREFLIGHT || exit
"""
REQUEUE = "\n#SBATCH --requeue  # start again when a node is lost"
SIGNAL = f"\n#SBATCH --signal=USR1@{STOP_BEFORE}  # at least so many seconds before the end, every rank is told to stop"
DEAF = """
    trap "" USR1 TERM  # Slurm sends them to all processes: torchrun goes on, and so do ranks that do not train yet"""
BEFORE = """
newest() { ls -d "$WORK"/step_* 2>/dev/null | grep -E "/step_[0-9]+(\\.pt)?$" | sort -V | tail -n 1; }
before=$(newest)
"""
EARLY = """
# --signal is fixed when the job is handed in. If saves take long, the ranks are told earlier: one minute before the
# end, and three times the newest save. That took from the file's birth to its renaming, if the file system keeps both.
early() {
  ends=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) && [ "$ends" ] && ends=$(date +%s -d "$ends") || return
  while sleep 5; do
    read -r born renamed < <(stat -c "%W %Z" "$(newest)" 2>/dev/null) && [ "$born" -gt 0 ] || continue
    [ $((ends - $(date +%s))) -gt $((60 + 3 * (renamed - born))) ] || break
  done
  scancel --signal=USR1 "$SLURM_JOB_ID"
}
early & early=$!
"""
GO_ON = """\
status=$$?
$hush
# Start again$told after a failure,
# if there is a newer checkpoint than at this start: a job that only crashes ends.
if $stopped{ [ "$$status" -ne 0 ] && [ "$$(newest)" != "$$before" ]; } && [ "$$START" -lt 100 ]; then
  scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$status"
"""

NODES = """\
#!/bin/bash
# Without a scheduler: on every node, with the name or address of node 0 and the number of this node, 0 to $last:
#   bash $name.nodes.sh static HOST NUMBER [flags of the script]
#   bash $name.nodes.sh c10d HOST NUMBER [flags of the script]
[ $$# -ge 3 ] || { sed -n 2,4p "$$0" >&2; exit 2; }
how=$$1 host=$$2 node=$$3 && shift 3
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0  # on nodes with several networks; `ip -br addr` lists them
export OMP_NUM_THREADS=1
case $$how in
static)  # Every node is told its number. A rank that fails ends the job.
  exec torchrun --nnodes=$nodes --nproc-per-node=$gpus --node-rank="$$node" \\
    --master-addr="$$host" --master-port=29500 $file$backend "$$@" ;;
c10d)  # The nodes find their numbers at HOST. When a rank fails, all start again$anew.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it, they may read dead ranks' addresses
  exec torchrun --nnodes=$nodes --nproc-per-node=$gpus --max-restarts=3 --rdzv-id=$label \\
    --rdzv-backend=c10d --rdzv-endpoint="$$host:29500" --rdzv-conf=is_host="$$((node == 0))" \\
    $file$backend "$$@" ;;
*) echo "The first word is static or c10d, not $$how." >&2; exit 2 ;;
esac
"""

KUBERNETES = """\
# kubectl create configmap $label --from-file=$file
# kubectl apply -f $name.k8s.yaml
# kubectl logs -f job/$label
#
# Your cluster: replace the capitals, and remove the "# " of what you need.
apiVersion: v1
kind: Service
metadata:
  name: $label
spec:
  clusterIP: None  # only names for its pods: $label-0.$label and so on
  publishNotReadyAddresses: true  # pods look each other up before they are ready
  selector:
    job-name: $label
---
apiVersion: batch/v1
kind: Job
metadata:
  name: $label
  # labels: {kueue.x-k8s.io/queue-name: QUEUE}  # all pods at once or none (a gang), by Kueue
spec:
  completionMode: Indexed  # pods have numbers, and a pod that is lost comes back with its number and its name
  completions: $nodes
  parallelism: $nodes
  backoffLimit: 100
  template:
    spec:
      subdomain: $label
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: $stop_before  # a minute and three times a save; 30 more than --shutdown-timeout
      # schedulerName: volcano  # a gang, by Volcano: with the annotation scheduling.k8s.io/group-name: PODGROUP
      containers:
        - name: torchrun
          image: REGISTRY/IMAGE:TAG  # yours: with torch, scikit-learn (the digits), and what else the script needs
          # securityContext: {capabilities: {add: [IPC_LOCK]}}  # RDMA cards read memory that stays in its place
          env:
            - name: OMP_NUM_THREADS
              value: "1"
            - name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE
              value: "1"
          command:
            - bash
            - -c
            - |
              torchrun --nnodes=$nodes --nproc-per-node=$gpus --max-restarts=3 \\
                $patient--rdzv-backend=c10d --rdzv-endpoint=$label-0.$label:29500 \\
                --rdzv-id=$label --rdzv-conf=is_host=$$((JOB_COMPLETION_INDEX == 0)) \\
                --local-addr=$label-$$JOB_COMPLETION_INDEX.$label \\
                /mnt/script/$file$backend$resume &
              agent=$$!
              trap 'kill -$tell $$agent' TERM  # Kubernetes tells this shell alone, and torchrun tells the ranks
              while kill -0 $$agent 2>/dev/null; do wait $$agent; status=$$?; done
$stopped              exit $$status
          resources:
            requests:
              cpu: $cpus
              # memory: 512Gi
            limits:
              nvidia.com/gpu: $gpus
              # rdma/NAME: 1  # InfiniBand or RoCE, as `kubectl describe node` names it; rdma/hca_shared_devices_a, say
          volumeMounts:
            - {name: script, mountPath: /mnt/script}
            - {name: work, mountPath: /mnt/work}
            - {name: memory, mountPath: /dev/shm}
      volumes:
        - name: script
          configMap: {name: $label}
        - name: work  # for checkpoints: one volume that all pods write to (ReadWriteMany)
          persistentVolumeClaim: {claimName: $label-work}
        - name: memory  # data loaders and NCCL share memory; the default is 64 MiB
          emptyDir: {medium: Memory}
"""
# torchrun passes this signal on and waits so long for the ranks. SIGTERM would mean to them that a peer has failed.
PATIENT = f"--signals-to-handle=SIGUSR1 --shutdown-timeout={STOP_BEFORE - 30} \\\n{16 * ' '}"
STOPPED = """\
              # Told to stop, with work left: this pod is to start again, and the others with it.
              [ ! -e /mnt/work/stopped ] || exit 1
"""


def launch_files(name, script, nodes, gpus, time):
    """{file name: text} of the files that start a script on ``nodes`` nodes with ``gpus`` ranks each.

    ``script`` is the text of NAME.py. ``time`` is Slurm's limit, such as "04:00:00". Raises ExportError for a text
    that is not a time limit, for one that is too short to stop in, and for a name that a shell would split.
    """
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise ExportError(f"{name!r} has characters that a shell reads in its own way.\nRename it for --slurm.")
    resumes = all(f'"--{flag}"' in script for flag in ("checkpoint-dir", "resume"))
    stops = resumes and "StopRequest(" in script  # at a signal such a script saves, and writes the file `stopped`
    if minutes(time) < SHORTEST and stops:
        raise ExportError(
            f"--time {time} is too short: {STOP_BEFORE // 60} minutes before its end the ranks are told to stop.\n"
            f"Give {SHORTEST} minutes or more: --time 00:{SHORTEST}:00"
        )
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("0123456789-")[:40].strip("-") or "training"
    values = {
        "name": name,
        "file": f"{name}.py",
        "label": label,
        "nodes": nodes,
        "last": nodes - 1,
        "gpus": gpus,
        "cpus": gpus * CPUS_PER_GPU,
        "time": time,
        "stop_before": STOP_BEFORE,
        # With this flag a node without its GPUs fails at once. A later flag wins, so the reader can add --backend gloo.
        "backend": " --backend nccl" if '"--backend"' in script else "",
    }
    slurm = {
        "requeue": (SIGNAL if stops else "") + (REQUEUE if resumes else "\n#SBATCH --no-requeue"),
        "work": "checkpoints and logs; to go on with others: WORK=FOLDER sbatch …" if resumes else "logs",
        "unmark": ' && rm -f "$WORK/stopped"' if stops else "",
        "deaf": DEAF if stops else "",
        "signals": "--signals-to-handle=SIGINT " if stops else "",
        "preflight": "" if name == CHECK else PREFLIGHT,
        "check": "" if name == CHECK else Template(RUN_PREFLIGHT).substitute(),
        "before": (BEFORE if resumes else "") + (EARLY if stops else ""),
        "resume": ' --checkpoint-dir "$WORK" --resume' if resumes else "",
    }
    again = {
        "told": " where the script was told to stop with work left (it left `stopped` behind), and" if stops else "",
        "hush": 'kill "$early" 2>/dev/null\n' if stops else "",
        "stopped": '[ -e "$WORK/stopped" ] || ' if stops else "",
    }
    kubernetes = {
        "patient": PATIENT if stops else "",
        "tell": "USR1" if stops else "TERM",
        "resume": " --checkpoint-dir /mnt/work --resume" if resumes else "",
        "stopped": STOPPED if stops else "",
    }
    anew = ": give --checkpoint-dir and --resume" if resumes else ""
    return {
        f"{name}.sbatch": Template(SLURM).substitute(values, **slurm)
        + (Template(GO_ON).substitute(again) if resumes else ""),
        f"{name}.nodes.sh": Template(NODES).substitute(values, anew=anew),
        f"{name}.k8s.yaml": Template(KUBERNETES).substitute(values, **kubernetes),
    }


def minutes(time):
    """The minutes of a time limit in one of Slurm's formats. Raises ExportError for other texts and for zero."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time, re.ASCII)
    days, *clock = found.groups("") if found else [""]
    clock = [int(part) for part in clock if part]
    units = [60, 1, 1 / 60] if days or len(clock) == 3 else [1, 1 / 60]  # Slurm reads "90" and "90:00" as minutes
    limit = int(days or 0) * 24 * 60 + sum(number * unit for number, unit in zip(clock, units, strict=False))
    if not limit:
        raise ExportError(
            f"--time {time} is not a time limit.\nGive hours, minutes and seconds: 04:00:00, or 2-12:00:00"
        )
    return limit
