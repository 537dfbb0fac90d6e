"""Runs one untrusted Python program alone: `python -I -S sandbox.py PARENT LIMITS`, the program on stdin.

The program has no network but a loopback of its own, sees no other process and can signal none, cannot write
to any disk (its folder, /dev/shm, lies in memory), sees no home, /tmp and /run, and dies with everything it
started when this process dies. Linux 5.14 or newer does that for any user where user namespaces are allowed.
This file imports nothing of ours: it is run as it lies here, without any package.

Prints `setup: why` and exits with 1 if that cannot be had. Else it exits with 0 if the program did and prints
what that wrote to file descriptor 3.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY, _AT_FDCWD = 442, 0x8000, 0x1, -100
_SET_DUMPABLE, _SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 4, 1, 38
_NOBODY = 65534
_FOLDER = "/dev/shm"
_HIDDEN = ("/root", "/home", "/tmp", "/var/tmp", "/run", "/dev/shm", "/mnt", "/media")

# What the isolated interpreter runs. The tests are compiled apart from the program, so that it cannot swallow
# them in a string, and it does not succeed by ending before them.
_RUNNER = """\
import json, os, sys
def run(told):
    space = {"__name__": "__main__"}
    for part in ("program", "tests"):
        exec(compile(told[part], part, "exec"), space)
    os.write(3, told["token"].encode())
told = json.load(sys.stdin)
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
run(told)
"""


class Attributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class Kernel:
    """System calls that Python has no function for; each raises OSError with its name."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def call(self, name: str, *arguments: object) -> None:
        """A function of the C library that returns 0."""
        if getattr(self._libc, name)(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        encoded = [text.encode() if text is not None else None for text in (source, target, kind, data)]
        self.call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])

    def die_with_parent(self, parent: int) -> None:
        """A SIGKILL for this process when its parent is gone, now or later."""
        self.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _isolate(kernel: Kernel) -> None:
    """New namespaces for this process, and for its children one of processes."""
    spaces = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NET
    user, group = os.geteuid(), os.getegid()
    if user == 0:  # limits of processes do not hold for root, so the program will be nobody's: _drop_root
        kernel.call("unshare", spaces)
    else:
        kernel.call("unshare", spaces | _NEW_USER)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as stream:
                stream.write(text)
    kernel.mount("none", "/", None, _REC | _PRIVATE)
    _hide(kernel)
    read_only = Attributes(_ATTR_RDONLY, 0, 0, 0)
    kernel.call("syscall", ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), b"/", ctypes.c_uint(_AT_RECURSIVE),
                ctypes.byref(read_only), ctypes.c_size_t(ctypes.sizeof(read_only)))  # fmt: skip


def _hide(kernel: Kernel) -> None:
    """Put empty folders over what a program has no business in, and Python back into them."""
    environment = os.path.dirname(os.path.dirname(sys.executable))  # sys.prefix does not know it without site
    ours = {path for prefix in (environment, sys.base_prefix) for path in (prefix, os.path.realpath(prefix))}
    folders = {os.path.realpath(folder) for folder in (*_HIDDEN, os.path.expanduser("~")) if os.path.isdir(folder)}
    folders -= {"/"}
    opened = {
        path: os.open(path, os.O_PATH) for path in ours if any(path.startswith(f"{folder}/") for folder in folders)
    }
    for folder in sorted(folders):
        if os.path.isdir(folder):  # not one inside of a folder that is empty by now
            kernel.mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    for path, descriptor in sorted(opened.items()):
        os.makedirs(path, exist_ok=True)
        if not os.listdir(path):  # not one inside of another
            kernel.mount(f"/proc/self/fd/{descriptor}", path, None, _BIND | _REC)
        os.close(descriptor)


def _drop_root(kernel: Kernel) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _become_program(limits: dict[str, int], given: int, reports: int) -> None:
    """Replace this process by the interpreter that runs the program; never returns."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    os.chdir(_FOLDER)
    null = os.open(os.devnull, os.O_RDWR)
    for number, descriptor in enumerate((given, null, null, reports)):
        os.dup2(descriptor, number)
    os.closerange(4, 256)
    environment = {"PATH": "/usr/bin:/bin", "HOME": _FOLDER, "TMPDIR": _FOLDER, "LANG": "C.UTF-8",
                   "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    os.execve(sys.executable, [sys.executable, "-I", "-c", _RUNNER], environment)


def _first_process(kernel: Kernel, limits: dict[str, int], given: int) -> int:
    """The first process of its namespace, with which all others end. Waits for the program."""
    kernel.mount("tmpfs", _FOLDER, "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={4 * limits['FSIZE']}")
    reports, theirs = os.pipe()  # takes little: a program that writes much there stands still
    program = os.fork()
    if program == 0:
        _drop_root(kernel)
        _become_program(limits, given, theirs)
    while (ended := os.wait())[0] != program:
        pass  # orphans, which are this process's children
    if ended[1] == 0 and select.select([reports], [], [], 0)[0]:
        os.write(1, os.read(reports, 100))
    return ended[1]


def main() -> None:
    parent, limits = int(sys.argv[1]), json.loads(sys.argv[2])
    kernel = Kernel()
    kernel.die_with_parent(parent)
    given = os.memfd_create("program")
    with open(given, "wb", closefd=False) as stream:
        stream.write(sys.stdin.buffer.read())
    os.lseek(given, 0, os.SEEK_SET)
    try:
        _isolate(kernel)
        child = os.fork()
    except OSError as problem:
        print(f"setup: {problem if problem.filename else problem.strerror}", flush=True)
        os._exit(1)
    if child == 0:
        try:
            kernel.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # its parent has no number here
            os._exit(1 if _first_process(kernel, limits, given) else 0)
        except BaseException as problem:
            os.write(1, f"setup: {problem}\n".encode())
            os._exit(1)
    os._exit(0 if os.waitpid(child, 0)[1] == 0 else 1)


if __name__ == "__main__":
    main()
