# Runs in a machine once its root is there: RDMA devices, then the job, then how it ended.
#
#   one machine     roce0 10.99.0.1 rxe0 === pair === roce1 10.99.1.1 rxe1
#   two machines    eth0  10.99.0.1 rxe0 === cable === eth0 10.99.0.2 rxe0
#
# Tests find the devices, their ports and GID indices in RDMA_DEVICES: "rxe0/1/1 rxe1/1/1 ".
# From the kernel's command line: MACHINES, NODE (1 or 2), JOB (a script), ROOT, BIN (of its Python).
export PATH=$BIN:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
dmesg -n 1
trap 'printf "\nended with %s\n" $?; sleep infinity' EXIT
# rxe pins what is registered.
ulimit -l unlimited

add_device() { # DEVICE LINK ADDRESS
    ip address add "$3/24" dev "$2" && ip link set "$2" mtu 9000 up &&
        rdma link add "$1" type rxe netdev "$2" || exit
    # The index of the GID that is this address, under RoCE v2; it is made a little later.
    local port=/sys/class/infiniband/$1/ports/1 index=
    until [[ $index ]]; do
        index=$(cd "$port" && grep -l "v2" gid_attrs/types/* 2>/dev/null | while read -r type; do
            grep -q ffff:0a63 gids/"${type##*/}" && echo "${type##*/}"
        done | head -n 1)
    done
    RDMA_DEVICES+="$1/1/$index "
}

# Packets between two addresses of one kernel go over lo, where there is no RDMA. These rules are asked
# before, and send them over the pair.
join_pair() {
    ip link add roce0 type veth peer name roce1 || exit
    local i other
    for i in all roce0 roce1; do
        echo 1 >/proc/sys/net/ipv4/conf/$i/accept_local
        echo 0 >/proc/sys/net/ipv4/conf/$i/rp_filter
    done
    for i in 0 1; do
        other=10.99.$((1 - i)).1
        ip rule add pref 1$i iif roce$i lookup local
        ip rule add pref 2$i from 10.99.$i.1 to $other lookup 5$i
    done
    ip rule add pref 100 lookup local
    ip rule del pref 0
}

ip link set lo up
if [[ $MACHINES == 1 ]]; then
    join_pair
    for i in 0 1; do
        add_device rxe$i roce$i 10.99.$i.1
        # Without a table's route (while its link is down) the next rule is asked; this stays.
        ip route add 10.99.$((1 - i)).1 dev roce$i table 5$i
        ip route add unreachable default metric 100 table 5$i
    done
else
    add_device rxe0 eth0 10.99.0.$NODE
    until busybox ping -c 1 -W 1 10.99.0.$((3 - NODE)) >/dev/null; do sleep 0.2; done
fi

# pyverbs alone: beside it lie Debian's versions of what is in the virtual environment.
mkdir /run/pyverbs
ln -s /usr/lib/python3/dist-packages/pyverbs /run/pyverbs/
export RDMA_DEVICES PYTHONPATH=/run/pyverbs OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default
cd "$ROOT" || exit
bash "$JOB" </dev/null || {
    code=$?
    echo "--- last lines of the kernel's log"
    dmesg | tail -n 30
    exit $code
}
