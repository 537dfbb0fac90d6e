"""Runs one untrusted Python program and its tests, each in an isolated process.

The command is `python -I -S -c SOURCE PARENT LIMITS PROGRAM TESTS [FOLDER...]`. SOURCE is the text of this
file, PARENT the id of the process that calls it, LIMITS a JSON object of RLIMIT_ values. PROGRAM and TESTS
are descriptors of files that tell the two processes what to do (`programs.py`). FOLDERs are hidden.

Both processes have no network but a private loopback, neither see nor signal processes outside, and cannot
write to any disk: their folder, /dev/shm, is in memory. They do not see home, /tmp, /run and each FOLDER.
They die, with all their descendants, when this process dies.

The program neither sees nor signals the judge, the process of the tests: it has its own PID namespace and
/proc. On Linux 5.14 or newer any user can run this, where user namespaces are allowed. This file imports
nothing of this package, because its source runs alone.

Prints `setup: REASON` and exits with 1 if the sandbox cannot be set up. Else it prints the report of the
judge, and exits with 0 if the judge did.
"""

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 0x1, 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY, _AT_FDCWD = 442, 0x8000, 0x1, -100
_SET_DUMPABLE, _SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 4, 1, 38
_NOBODY_ID = 65534
_FOLDER = "/dev/shm"
_SYSTEM = ("/", "/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")  # Python needs them
_HIDDEN = ("/root", "/home", "/tmp", "/var/tmp", "/run", "/dev/shm", "/mnt", "/media")

# The code of both isolated interpreters. It loads modules from their source, and calls a function of the
# last one.
_BOOT = """\
import json, os, sys, types
told = json.load(sys.stdin)
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
os.close(null)
for name, source in told.pop("modules").items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
getattr(module, told.pop("entry"))(**told)
"""


class Attributes(ctypes.Structure):
    """The C struct `mount_attr` of the system call mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


class Kernel:
    """Makes system calls that Python has no function for. An OSError names the call that failed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the C library. Raises OSError unless it returns 0."""
        if getattr(self._libc, name)(*arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        encoded = [text.encode() if text is not None else None for text in (source, target, kind, data)]
        self.call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])

    def die_with_parent(self, parent: int) -> None:
        """Makes the kernel kill this process when its parent ends; exits if the parent has ended already."""
        self.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _isolate(kernel: Kernel, hidden: list[str]) -> None:
    """Isolates this process: new mount, network, IPC and host-name namespaces, and read-only disks.

    Its children get a new PID namespace. hidden: folders over which an empty one is mounted.
    """
    spaces = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NET
    user, group = os.geteuid(), os.getegid()
    if user == 0:  # the limit of processes does not hold for root, so the program runs as nobody (_drop_root)
        kernel.call("unshare", spaces)
    else:
        kernel.call("unshare", spaces | _NEW_USER)
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as stream:
                stream.write(text)
    kernel.mount("none", "/", None, _REC | _PRIVATE)
    _hide(kernel, hidden)
    read_only = Attributes(_ATTR_RDONLY, 0, 0, 0)
    kernel.call("syscall", ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), b"/", ctypes.c_uint(_AT_RECURSIVE),
                ctypes.byref(read_only), ctypes.c_size_t(ctypes.sizeof(read_only)))  # fmt: skip


def _hide(kernel: Kernel, hidden: list[str]) -> None:
    """Mounts empty folders over `hidden` and over private folders such as /home, but keeps Python's own
    folders visible."""
    environment = os.path.dirname(os.path.dirname(sys.executable))  # with -S, sys.prefix is not the virtualenv's
    python_folders = {path for prefix in (environment, sys.base_prefix) for path in (prefix, os.path.realpath(prefix))}
    candidates = (*_HIDDEN, os.path.expanduser("~"), *hidden)
    folders = {os.path.realpath(folder) for folder in candidates if os.path.isdir(folder)} - set(_SYSTEM)
    opened = {
        path: os.open(path, os.O_PATH)
        for path in python_folders
        if any(path.startswith(f"{folder}/") for folder in folders)
    }
    for folder in sorted(folders):
        if os.path.isdir(folder):  # it is gone if a folder above it is hidden already
            kernel.mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    for path, descriptor in sorted(opened.items()):
        os.makedirs(path, exist_ok=True)
        if not os.listdir(path):  # it has files if a folder above it is mounted already
            kernel.mount(f"/proc/self/fd/{descriptor}", path, None, _BIND | _REC)
        os.close(descriptor)


def _drop_root(kernel: Kernel) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY_ID, _NOBODY_ID, _NOBODY_ID)
        os.setresuid(_NOBODY_ID, _NOBODY_ID, _NOBODY_ID)
    kernel.call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _become_python(limits: dict[str, int], *inherited: int) -> None:
    """Replaces this process by a Python interpreter with resource limits; never returns.

    inherited: file descriptors; the first becomes stdin, the others become 3, 4 and so on.
    """
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in inherited]  # above the target numbers
    null = os.open(os.devnull, os.O_RDWR)
    for number, descriptor in enumerate((high[0], null, null, *high[1:])):
        os.dup2(descriptor, number)
    os.closerange(2 + len(high), 1024)
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    os.chdir(_FOLDER)
    environment = {"PATH": "/usr/bin:/bin", "HOME": _FOLDER, "TMPDIR": _FOLDER, "LANG": "C.UTF-8",
                   "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    os.execve(sys.executable, [sys.executable, "-I", "-c", _BOOT], environment)


def _own_proc(kernel: Kernel) -> None:
    """Mounts /proc for this PID namespace, or an empty folder if the container forbids that."""
    try:
        kernel.mount("proc", "/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    except OSError:
        kernel.mount("tmpfs", "/proc", "tmpfs", _RDONLY | _NOSUID | _NODEV, "mode=555,size=4k")


def _run_program(kernel: Kernel, limits: dict[str, int], program: int, connection: int) -> None:
    """Runs the program in a child process, waits for it, and exits; never returns.

    This process is the first of the program's PID namespace, so the kernel ends the whole namespace with it.
    program, connection: file descriptors.
    """
    kernel.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    kernel.call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)  # else the program, of the same user, could read this process
    _own_proc(kernel)
    child = os.fork()
    if child == 0:
        _drop_root(kernel)
        _become_python(limits, program, connection)
    os.closerange(3, 1024)
    while os.wait()[0] != child:
        pass  # orphaned processes, which become children of this one
    os._exit(0)


def _first_process(kernel: Kernel, limits: dict[str, int], program: int, tests: int) -> int:
    """Starts the judge and the program, waits for the judge, and returns the judge's exit status.

    This process is the first of its PID namespace, so the kernel ends all others with it. program, tests:
    file descriptors.
    """
    kernel.mount("tmpfs", _FOLDER, "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={4 * limits['FSIZE']}")
    judge_end, program_end = socket.socketpair()
    reports, written = os.pipe()
    judge = os.fork()
    if judge == 0:
        _drop_root(kernel)
        _become_python(limits, tests, judge_end.fileno(), written)
    for descriptor in (tests, judge_end.detach(), written):
        os.close(descriptor)
    kernel.call("unshare", _NEW_PIDS)
    if os.fork() == 0:
        os.close(reports)
        _run_program(kernel, limits, program, program_end.fileno())
    program_end.close()
    while (status := os.wait())[0] != judge:
        pass  # the program's process, and orphaned processes
    if status[1] == 0 and select.select([reports], [], [], 0)[0]:
        os.write(1, os.read(reports, 100))
    return status[1]


def main() -> None:
    parent, limits, program, tests = int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    kernel = Kernel()
    kernel.die_with_parent(parent)
    try:
        _isolate(kernel, sys.argv[5:])
        child = os.fork()
    except OSError as problem:
        print(f"setup: {problem if problem.filename else problem.strerror}", flush=True)
        os._exit(1)
    if child == 0:
        try:
            kernel.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the parent has no PID in this namespace
            os._exit(1 if _first_process(kernel, limits, program, tests) else 0)
        except BaseException as problem:
            os.write(1, f"setup: {problem}\n".encode())
            os._exit(1)
    os._exit(0 if os.waitpid(child, 0)[1] == 0 else 1)


if __name__ == "__main__":
    main()
