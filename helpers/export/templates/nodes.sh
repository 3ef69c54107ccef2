#!/bin/bash
# Without a scheduler: type one of these lines on every node. HOST is node 0, NUMBER is this node's number, 0 to {{ last }}.
#   bash {{ nodes_file }} static HOST NUMBER [flags of the script]
#   bash {{ nodes_file }} c10d HOST NUMBER [flags of the script]
if [ $# -lt 3 ]; then
  sed -n 2,4p "$0" >&2
  exit 2
fi
rendezvous=$1
host=$2
node=$3
shift 3
export OMP_NUM_THREADS=1
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0  # on nodes with several networks; `ip -br addr` lists them

# A machine's own name may mean its loopback on the machine itself, where no other node could reach it.
address=$(getent ahosts "$host" | head -n 1 | cut -d" " -f1)
case $host/$address in
127.*|localhost/*) ;;  # All nodes are this machine.
*/127.*|*/::1|*/)  # HOST means this machine itself, or nothing.
  echo "$host means ${address:-nothing} on this node. Give the address of node 0." >&2
  exit 2 ;;
esac

# The address of this node, and its interface, on the network that leads to node 0. The command `ip route get` prints,
# for example: 10.0.0.1 dev eth0 src 10.0.0.2 uid 1000
route=$(ip route get "$address")
own=${route#* src }
own=${own%% *}
interface=$(ip -brief addr | grep -F " $own/" | cut -d" " -f1)
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${interface%@*}}

case $rendezvous in
static)  # Every node is told its number. A rank that fails ends the job.
  exec torchrun --nnodes={{ nodes }} --nproc-per-node={{ gpus_per_node }} --node-rank="$node" \
    --master-addr="$host" --master-port=29500 {{ file }}{{ backend }} "$@" ;;
c10d)  # The nodes find their numbers at HOST. When a rank fails, all start again{% if resumes %}: give --checkpoint-dir and --resume{% endif %}.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # Otherwise they may read the addresses of dead ranks.
  exec torchrun --nnodes={{ nodes }} --nproc-per-node={{ gpus_per_node }} --max-restarts=3 --rdzv-id={{ label }} \
    --rdzv-backend=c10d --rdzv-endpoint="$host:29500" --local-addr="$own" \
    --rdzv-conf=is_host="$((node == 0)),read_timeout={{ late }},join_timeout={{ late }}" \
    {{ file }}{{ backend }} "$@" ;;
*)
  echo "The first word is static or c10d, not $rendezvous." >&2
  exit 2 ;;
esac
