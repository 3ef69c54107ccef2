# {{ batch_file }} reads this file. Its functions handle what is rare on one node, but happens every week on many nodes.
# shellcheck shell=bash

# Before the ranks start: forget how the last start of the job ended, and find the nodes.
begin() {
  mkdir -p "$JOB_FOLDER"
{% if resumes %}
  end_if_switched_off 0
{% endif %}
  rm -f "$JOB_FOLDER/stopped" "$JOB_FOLDER/gave_up" "$JOB_FOLDER/failed_nodes" "$JOB_FOLDER"/logs/*/last_words
  if [ "$START" -eq 0 ]; then
    rm -f "$JOB_FOLDER/failures"  # of an older job in this folder: a new submission counts from zero
  fi
  echo "start $START on $SLURM_JOB_NODELIST"
  find_addresses
{% if stops %}
  CHECKPOINT_BEFORE=$(newest_checkpoint)
  find_stop_time
{% endif %}
}
{% if stops %}

# Slurm sends USR1 once. Ranks that start after it, because one of them has failed, would not know of it, and the job
# would end with TIMEOUT. So each rank also looks at the clock when it starts. Slurm may send the signal a minute early.
find_stop_time() {
  local end seconds stop_at
  unset STOP_AT  # sbatch copies the environment, so a job that another job submits would have the other one's time
  end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)
  seconds=$(grep -o "USR1@[0-9]*" "$0" | head -n 1 | cut -d@ -f2)  # Slurm's copy of the batch file has your number
  if [[ $end == *-*T* ]]; then  # a job without a time limit has no such time
    stop_at=$(($(date +%s --date="$end") - ${seconds:-{{ stop_before }}} - 60))
    if [ "$stop_at" -gt "$(date +%s)" ]; then  # otherwise the job is too short to leave out its last minutes
      export STOP_AT=$stop_at
    fi
  fi
}
{% endif %}

# A name of a node in Slurm may mean nothing to the other nodes, so torchrun gets the addresses that Slurm uses.
# Slurm may not answer for some seconds, and does not start a job again whose batch file fails. So this tries again.
find_addresses() {
  local found
  for _ in 1 2 3; do
    found=$(scontrol --oneliner show node "$SLURM_JOB_NODELIST" | grep -o " NodeAddr=[^ ]*" | cut -d= -f2)
    if [ "$(wc -w <<< "$found")" -eq "$SLURM_NNODES" ]; then  # if one were missing, nodes would take others' addresses
      export ADDRESSES=$found
      return
    fi
    sleep 10
  done
  found=$(wc -w <<< "$found")
  tell "it ends, because scontrol show node gives $found addresses for $SLURM_NNODES nodes. Submit it again."
  exit 1
}

# Run a Python script under one torchrun on each node. The arguments are the script and its flags. srun starts a shell
# on each node, which does not have these functions, so it gets them as text.
on_all_nodes() {
  local functions names="start_node on_this_node name_network"
  names="$names note_failure first_failure errors_of_rank end_of last_words lost_a_peer"
  # shellcheck disable=SC2086  # several names
  functions=$(declare -f $names)
  # shellcheck disable=SC2086  # IN_CONTAINER and NUMA_BINDING may be several words, or none.
  srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" $IN_CONTAINER \
    bash -c "$functions; start_node \"\$@\"" torchrun $NUMA_BINDING "$@"
}

# Start the ranks of this node, if it sees the job's folder. A node that has lost the disk with this folder must not
# make a folder of its own, where nobody would look for its logs. It waits before it ends, because srun then ends the
# others, and each node that has lost the disk should be named in the output.
start_node() {
  if ! [ -d "$JOB_FOLDER" ]; then
    echo "$SLURMD_NODENAME is in $PWD and does not see the job's folder $JOB_FOLDER."
    sleep 5
    exit 1
  fi
  export -n JOB_FOLDER  # not for the ranks: a job that one of them submits would take this job's folder for its own
  on_this_node "$@"
}

# Tell gloo which network leads to another node, whose address is the argument. By itself gloo may take the loopback,
# because on Debian the machine's own name means the loopback.
name_network() {
  local other route
  if [ -z "$1" ] || [ -n "${GLOO_SOCKET_IFNAME-}" ]; then  # there is no other node, or you have named the network
    return
  fi
  other=$(getent ahosts "$1" | head -n 1 | cut -d" " -f1)
  if ! route=$(ip route get "$other"); then  # many containers have no such command
    echo "$SLURMD_NODENAME cannot ask ip which network leads to $1. Set GLOO_SOCKET_IFNAME in the batch file." >&2
    return
  fi
  route=${route#* dev }
  export GLOO_SOCKET_IFNAME=${route%% *}
}
{% if not is_check %}

# Before anything is loaded: do all ranks meet, do they add up right, and is no link slower than you accept?
preflight() {
  local check=${PREFLIGHT-}
  if [ -z "${PREFLIGHT+is set}" ] && [ -e {{ preflight }} ]; then
    check={{ preflight }}
  fi
  # shellcheck disable=SC2086  # a script and its flags
  [ -z "$check" ] || on_all_nodes --max-restarts=0 --rdzv-id="preflight.$SLURM_JOB_ID.$START" $check
}
{% endif %}

# Note that this node has failed by itself, and its last words. The argument is the node's folder of logs. When one node
# fails, the ranks of the others fail too, because they lose a connection. Only a node that failed by itself is noted,
# because the cause is there. Then each node waits, so that srun does not end another one before it has made its note.
# The note comes before the words, because on a slow disk these may take longer than the others wait.
note_failure() {
  local failure errors words
  failure=$(first_failure "$1")
  errors=$(errors_of_rank "${failure##* }" "$1")
  errors=${errors:-$1/torchrun.log}  # If no rank has failed, torchrun itself has.
  # A rank may have failed hours before another node was lost, and torchrun started it again. Then torchrun's last line
  # says that it has lost the others. With a wrong flag it may say so too, but there the rank's status is the cause.
  if [[ $failure != *"exitcode: 2)"* ]] && lost_a_peer <(tail -n 1 "$1/torchrun.log"); then
    failure=""
    errors=$1/torchrun.log
  fi
  if ! lost_a_peer "$errors"; then
    echo "$SLURMD_NODENAME" >> "$JOB_FOLDER/failed_nodes"
  fi
  words="$(last_words "$errors") ${failure#failed }"
  echo "${words% }" > "$1/last_words"
  sleep 5
}

# Print what torchrun said of the rank that was the first of this node to fail, in the last of its starts. For example:
# failed (exitcode: -6) local_rank: 3
first_failure() {
  grep -o "failed (exitcode: .*local_rank: [0-9]*" "$1/torchrun.log" | tail -n 1
}

# Print the name of the file with the stderr of a rank, in its last start. The arguments are the rank's number on this
# node, and the node's folder of logs.
errors_of_rank() {
  find "$2" -path "*/attempt_*/$1/stderr.log" -printf "%T@ %p\n" | sort -n | tail -n 1 | cut -d" " -f2-
}

# Print the end of a file without lines that only surround an error: the stacks of C++ and of Python's faulthandler, and
# what PyTorch advises after an error of CUDA. Only the end is read, because a progress bar may be one line of many MB.
end_of() {
  local noise="frame #[0-9]+:|^#[0-9]+ |Exception raised from|terminate called|omitting python frames"
  noise="$noise|Search for .cuda|CUDA kernel errors might be|CUDA_LAUNCH_BLOCKING|TORCH_USE_CUDA_DSA"
  noise="$noise|Fatal Python error: Aborted|most recent call first|^ *File \"|^Extension modules:|^\s*$"
  tail -c 200000 "$1" 2>/dev/null | tr "\r" "\n" | grep -avE "$noise"
}

# Print the last line of a file that names an error, or else the last line. Lines with warnings are left out, because
# some warnings are printed when Python ends. Those of c10d begin with [W and the date.
last_words() {
  local lines error
  lines=$(end_of "$1" | grep -aviE "warning|\[W[0-9]{4} ")
  error=$(grep -aiE "error|exception|assert|what\(\):" <<< "$lines" | tail -n 1)
  error=${error:-$(tail -n 1 <<< "$lines")}
  error=${error#"  "}  # C++ indents what(): by two spaces
  echo "${error:-nothing}" | cut -c 1-300
}

# Whether the process that has written this file says that another process was gone, or did not come. In a hang, the
# healthy ranks are those that reach a timeout. If a node does not come at all, torchrun reaches it on the healthy
# nodes.
lost_a_peer() {
  local gone="closed by peer|reset by peer|Broken pipe|likely closed|remote process exited"
  local late="Watchdog caught|Operation timed out|Timed out waiting|socket has timed out"
  local not_met="RendezvousTimeout|RendezvousConnection|RendezvousClosed|DistStoreError"
  end_of "$1" | tail -n 100 | grep -qaE "$gone|$late|$not_met"
}

{% if resumes %}
# End the job, with this status, if there is a file STOP in its folder. A colleague, who may not use scancel on this
# job, stops the training by making this file. Without this function, the batch file would start the job again.
end_if_switched_off() {
  if [ -e "$JOB_FOLDER/STOP" ]; then
    tell "it ends, because there is a file $JOB_FOLDER/STOP. To train again, remove the file and submit the job again."
    exit "$1"
  fi
}

# End the job, with this status, if another start would probably fail in the same way. There are two such failures:
# - The loss is not finite any more. The script then writes its last words to the file gave_up.
# - A flag is wrong. Python then ends with status 2 on all nodes. It also ends with 2 if it does not see the script. If
#   that is so on one node only, because JOB_FOLDER is on another disk, another start may do without this node.
end_if_hopeless() {
  local refused
  refused=$(grep -lE "\(exitcode: 2\) local_rank: [0-9]+$" "$JOB_FOLDER"/logs/*/last_words 2>/dev/null | wc -l)
  if [ "$refused" = "$SLURM_NNODES" ]; then
    cat "$JOB_FOLDER"/logs/*/last_words > "$JOB_FOLDER/gave_up"
  fi
  if [ "$1" -ne 0 ] && [ -e "$JOB_FOLDER/gave_up" ]; then
    tell "it ends, because another start would probably fail in the same way: $(head -n 1 "$JOB_FOLDER/gave_up")"
    exit "$1"
  fi
}

{% endif %}
# After the ranks have ended with this status: start again, or end.
{% if stops %}
# A script that was told to stop before its end has left the file `stopped` behind, and has usually saved. If it had to
# stop before it could save, that counts like a failure: with a --time that is too short, all starts would end so, and
# nobody would hear of it.
{% endif %}
end() {
{% if resumes %}
  end_if_switched_off "$1"
  end_if_hopeless "$1"
{% endif %}
{% if stops %}
  if [ -e "$JOB_FOLDER/stopped" ] && [ "$(newest_checkpoint)" != "$CHECKPOINT_BEFORE" ]; then
    start_again
  elif [ -e "$JOB_FOLDER/stopped" ]; then
    after_failure 1 "stopped before the first save; is --time too short?"
  elif [ "$1" -ne 0 ]; then
    after_failure "$1"
  fi
{% else %}
  [ "$1" -eq 0 ] || after_failure "$1"
{% endif %}
  exit "$1"
}

# Say what happened, in the output and to the command ON_CALL. If this command fails, the job goes on all the same.
tell() {
  local line="job $SLURM_JOB_ID ($SLURM_JOB_NAME): $1"
  echo "$line"
  if [ "$ON_CALL" ]; then
    timeout 60 bash -c "$ON_CALL" <<< "$line" || echo "ON_CALL failed: $ON_CALL"
  fi
}
{% if resumes %}

# After a failure with this status: start again, because the machine is often the cause. But a third failure with the
# same newest checkpoint ends the job, because otherwise a bug would use up the allocation. The second argument says why
# the job failed, if no rank says it.
after_failure() {
  local checkpoint nodes words
  checkpoint=$(newest_checkpoint)
  nodes=$(sort -u "$JOB_FOLDER/failed_nodes" 2>/dev/null | paste -sd,)
  words=${2:-$(words_of "$nodes")}
  echo "$checkpoint $nodes" >> "$JOB_FOLDER/failures"
  if [ "$(failures_at "$checkpoint" | wc -l)" -ge 3 ]; then
    tell "it failed three times without progress, and ends. $(where_it_failed "$checkpoint")${words:+($words)}"
    exit "$1"
  fi
  if start_again; then
    exclude_bad_node "$nodes" "$words"
  fi
}

# Print the last words of the first of these nodes, which are a list such as n1,n2. If the list is empty, because no
# node has failed by itself, print those of the first node that has some.
words_of() {
  local node=${1%%,*}
  # shellcheck disable=SC2086  # a name, or a pattern for all names
  cat "$JOB_FOLDER"/logs/${node:-*}/last_words 2>/dev/null | head -n 1
}

# Print the path of the checkpoint with the highest step, such as trainer-4711/step_00000100; "nothing" if there is
# none.
newest_checkpoint() {
  local newest
  newest=$(find "$JOB_FOLDER" -maxdepth 1 -regextype egrep -regex ".*/step_[0-9]+(\.pt)?" | sort -V | tail -n 1)
  echo "${newest:-nothing}"
}

# Print the lines of the file `failures` about this newest checkpoint, one for each failure: its path, and the nodes
# that failed.
failures_at() {
  grep -F "$1 " "$JOB_FOLDER/failures"
}

where_it_failed() {
  local nodes
  nodes=$(failures_at "$1" | cut -d" " -f2 | sed "s/^$/none/" | tr "\n" " ")
  echo "The newest checkpoint: $1. Nodes that failed: $nodes"
}

# Put this job into the queue again. Slurm ends this script then, but something is left to do. Slurm may not answer for
# some seconds, so this tries again. If Slurm did put the job into the queue and only its answer was lost, it ends this
# script after KillWait, by default 30 seconds, and so before the message.
start_again() {
  if [ "$START" -ge 100 ]; then
    tell "it was started 100 times, and ends."
    return 1
  fi
  trap "" TERM
  for _ in 1 2 3; do
    if scontrol requeue "$SLURM_JOB_ID"; then
      return
    fi
    sleep 15
  done
  tell "it should start again, but scontrol requeue failed three times, so it ends. \
Submit it again with the same flags: JOB_FOLDER=$JOB_FOLDER sbatch {{ batch_file }}"
  exit 1
}

# Slurm might give the job the same nodes, with the same broken GPU. So a node that has failed alone twice in this job is
# excluded, even if the job made progress in between: a GPU that fails every three hours is broken, too. If several nodes
# failed at once (n1,n2), the cause may be the network between them, or a bug, so none is excluded. The message has the
# rank's last words, because a bug that only one rank meets looks like a broken node.
exclude_bad_node() {
  local nodes=$1 words=$2 times excluded undo
  times=$(cut -d" " -f2 "$JOB_FOLDER/failures" | grep -cxF "$nodes")
  if [ "$nodes" ] && [[ $nodes != *,* ]] && [ "$times" -ge 2 ]; then
    excluded=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%x)
    if scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${excluded:+$excluded,}$nodes"; then
      undo="scontrol update JobId=$SLURM_JOB_ID ExcNodeList="
      tell "$nodes failed $times times, and is excluded. Its last words: ${words:-nothing}. To take it back: $undo"
    else
      tell "$nodes failed $times times, and could not be excluded. Its last words: ${words:-nothing}"
    fi
  fi
}
{% else %}

after_failure() {
  tell "it ended with status $1. The first node to fail: $(head -n 1 "$JOB_FOLDER/failed_nodes" 2>/dev/null)"
}
{% endif %}
