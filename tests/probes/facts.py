"""Reports what a jailed program sees of itself and of its surroundings. No attack; the tests compare."""

import json
import os
import stat
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from probe import end


def emit(name, value):
    os.write(1, (json.dumps({"name": name, "value": value}) + "\n").encode())


# First: every later open would add a descriptor. The listing's own descriptor is gone by the time it is looked at.
descriptors = {}
for number in os.listdir("/proc/self/fd"):
    try:
        descriptors[number] = os.readlink("/proc/self/fd/" + number)
    except OSError:
        pass
emit("descriptors", descriptors)
status = {}
for line in open("/proc/self/status"):
    key, _, value = line.partition(":")
    status[key] = value.strip()
emit("status", status)
emit("ids", {"uid": os.getresuid(), "gid": os.getresgid(), "groups": os.getgroups(), "uid_map": open("/proc/self/uid_map").read().split(),
             "gid_map": open("/proc/self/gid_map").read().split(), "setgroups": open("/proc/self/setgroups").read().strip()})
emit("environment", dict(os.environ))
mounts = []
for line in open("/proc/self/mountinfo"):
    before, _, after = line.partition(" - ")
    fields, kind = before.split(), after.split()
    mounts.append({"root": fields[3], "target": fields[4], "options": fields[5].split(","), "optional": fields[6:],
                   "type": kind[0], "source": kind[1], "super": kind[2].split(",")})
emit("mounts", mounts)
emit("devices", sorted(os.listdir("/dev")))
emit("processes", sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
emit("cgroup", open("/proc/self/cgroup").read().splitlines())
emit("top", sorted(os.listdir("/")))
emit("hostname", os.uname().nodename)
emit("interfaces", sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else None)
emit("network", [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]])
emit("core", open("/proc/self/limits").read().split("Max core file size")[1].split()[0:2])

# Where could a file be made? Asked of every folder that can be listed, by making one.
writable = []
seen = 0
skip = ("/proc",)
for folder, folders, files in os.walk("/"):
    if folder.startswith(skip):
        folders[:] = []
        continue
    seen += 1
    if folder.count("/") > 5:
        folders[:] = []
    if folder.startswith("/usr/") and folder.count("/") > 3:
        # One file system, mounted once: depth proves nothing further.
        folders[:] = []
    path = os.path.join(folder, "probe-of-writing")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
        os.unlink(path)
        writable.append(folder)
    except OSError:
        pass
    for name in files:
        path = os.path.join(folder, name)
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and not folder.startswith("/usr"):
                os.close(os.open(path, os.O_WRONLY))
                writable.append(path)
        except OSError:
            pass
emit("writable", writable)
emit("folders-seen", seen)

# Device nodes that can be opened, wherever they are.
nodes = []
for folder, folders, files in os.walk("/dev"):
    for name in files:
        path = os.path.join(folder, name)
        mode = os.stat(path).st_mode if os.path.exists(path) else 0
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            nodes.append(path)
emit("nodes", sorted(nodes))
end()
