#!/bin/bash
# The only process of a user-mode Linux whose root is this machine, read-only: runs one Python program, and ends.
# Environment, from the kernel's command line: CK_PYTHON, CK_PROGRAM, CK_PATH, CK_MODULES.
mount -t proc none /proc
mount -t sysfs none /sys
mount -t tmpfs none /run
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /run/kernel/lib
ln -s "$CK_MODULES" /run/kernel/lib/modules
for module in veth bridge sch_netem sch_htb cls_u32; do
    modprobe -d /run/kernel "$module"
done
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$CK_PATH" "$CK_PYTHON" "$CK_PROGRAM"
busybox poweroff -f
