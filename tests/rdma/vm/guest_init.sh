#!/bin/busybox sh
# /init of the guest: this machine's own root file system, read-only below a throw-away overlay, an RDMA device over a dummy
# network interface, two more with a wire between them, and then the command that the host left in /guest_out/command.sh.
/bin/busybox --install -s /bin
export PATH=/bin:/usr/sbin:/usr/bin:/sbin
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "guest: no module $module"; done < /modules/order

share="trans=virtio,version=9p2000.L,msize=512000"
mount -t 9p -o "$share,ro,cache=loose" root /host || { echo "guest: no root"; poweroff -f; }
mount -t tmpfs -o size=60% tmpfs /over && mkdir /over/upper /over/work
mount -t overlay -o lowerdir=/host,upperdir=/over/upper,workdir=/over/work overlay /new
mkdir -p /new/guest_out /new/proc /new/sys /new/dev
mount -t 9p -o "$share,cache=none" out /new/guest_out
mount -t proc proc /new/proc && mount -t sysfs sys /new/sys && mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/shm /new/dev/pts
mount -t tmpfs tmpfs /new/dev/shm && mount -t devpts devpts /new/dev/pts
mount -t tmpfs tmpfs /new/run

cat > /new/run/inside.sh <<'INSIDE'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
ulimit -l unlimited

# Two RDMA devices with a network cable between them: tests.rdma.wire cuts it. One machine would keep to itself what it sends to
# its own addresses, so rules that come before those for local addresses lead what goes from one end to the other over the cable.
# "iif lo" is what this machine sends, not what arrives.
lay_wire() {
    ip link add wire0 mtu 4200 type veth peer name wire1 mtu 4200
    for end in 0 1; do
        ip addr add "192.168.78.1$end/32" dev "wire$end"
        echo 1 > "/proc/sys/net/ipv4/conf/wire$end/accept_local"
        ip link set "wire$end" up
    done
    ip route add 192.168.78.11 dev wire0 src 192.168.78.10 table 78
    ip route add 192.168.78.10 dev wire1 src 192.168.78.11 table 78
    ip rule add pref 10 iif lo to 192.168.78.11 lookup 78
    ip rule add pref 11 iif lo from 192.168.78.11 to 192.168.78.10 lookup 78
    ip rule add pref 20 lookup local
    ip rule del pref 0
    for end in 0 1; do rdma link add "rxe_wire$end" type rxe netdev "wire$end" || echo "guest: no wire"; done
}

ip link set lo up
ip link add rdma0 type dummy
ip addr add 192.168.77.1/24 dev rdma0
ip link set rdma0 mtu 4200 up
rdma link add rxe0 type rxe netdev rdma0 || echo "guest: no RDMA device"
lay_wire
cd /guest_out
# Unbuffered to the console, so that the host can show what is going on.
bash /guest_out/command.sh < /dev/null > /dev/ttyS1 2>&1
echo $? > /guest_out/status
sync
INSIDE
chroot /new /bin/sh /run/inside.sh
poweroff -f
