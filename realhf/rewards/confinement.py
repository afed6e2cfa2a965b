"""Confines this process for good, with what Linux offers: rights, limits, Landlock and seccomp.

The sandbox's runner calls this before it runs a stranger's code. It imports little, to start quickly.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence

from realhf.rewards.system_calls import NEWEST, system_calls

NOBODY = 65534
PROCESS_ERRNO = errno.EAGAIN
"""The error that starting a process raises, as if the process table were full."""
NETWORK_ERRNO = errno.ENETDOWN
"""The error that opening a socket raises."""
_WRITE_ERRNO = errno.EROFS
_SET_PDEATHSIG, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS, _SET_SECCOMP = 1, 8, 38, 22
_CAPABILITY_VERSION = 0x20080522
_READ_ANY_FILE = 1 << 2  # CAP_DAC_READ_SEARCH
_NEW_USER_NAMESPACE = 0x10000000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # Offsets in the data that a filter reads.
_THREAD = 0x10000 | 0x400
"""Bits of clone() for a thread (CLONE_THREAD) with the open files of the process (CLONE_FILES)."""
_DATAGRAM = 2
"""Bit of the types of sockets that can send to any address, such as that of the system's log."""
_UNNAMED_FILE = 0o20000000
"""Bit of O_TMPFILE, for files that no folder has."""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed: read a terminal's settings and size and the number of waiting bytes, and set descriptor flags."""
_FORBIDDEN_FCNTLS = (8, 10, 15, 1024, 1026)
"""These choose the process that gets signals about a descriptor, choose the signal, or lease files."""

_libc = ctypes.CDLL(None, use_errno=True)


class Unprotected(Exception):
    """An error that says what this machine lacks for a sandbox."""


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library. Raises OSError."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = getattr(_libc, name)(*converted)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def limit_resources(*, memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Set limits of memory, time on the processor, sizes of files and the number of open ones."""
    limits = {
        resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, wanted in limits.items():
        resource.setrlimit(kind, (wanted, wanted))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def confine(folder: str, *, readable: Sequence[str], landlock: bool = True, may_delete: bool = True) -> bool:
    """Take from this process all rights but to compute, to read `readable` and to write to `folder`.

    Without `may_delete`, it cannot delete files there: the space of deleted files that are still open could
    not be measured.

    Return whether it can write to the folder. Without a new enough Landlock, or with `landlock` false, it
    cannot write to any file. Raises Unprotected.
    """
    machine = platform.machine()
    numbers = system_calls(machine)
    if platform.system() != "Linux" or numbers is None:
        raise Unprotected(
            f"it needs Linux on x86_64 or aarch64, and this is {platform.system()} on {machine}")
    abi = _landlock_version() if landlock else 0
    try:
        is_hidden = _drop_rights() or abi > 0
        if not is_hidden:  # Else the code could read the environment of the user's other processes.
            _leave_user()
        _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if abi > 0:
            _restrict_paths(folder, readable, abi, may_delete=may_delete)
        can_write = abi >= 3  # Before, truncate() was not restricted.
        _filter_calls(machine, numbers, writes=can_write)
    except OSError as error:
        raise Unprotected(f"the kernel refuses its protection ({error})") from error
    return can_write


def _drop_rights() -> bool:
    """Give up the rights of root, if this is root; return whether the process now has another user."""
    if os.geteuid() != 0:
        return False
    _call("prctl", _SET_KEEPCAPS, 1, 0, 0, 0)
    is_other = True
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:  # A container may lack the right to change users; its root has few rights.
        is_other = False
    try:
        with open(os.__file__, "rb"):
            keep = 0
    except PermissionError:  # The interpreter lies in a directory of root.
        keep = _READ_ANY_FILE
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _call("capset", header, struct.pack("=6I", keep, keep, 0, 0, 0, 0))
    return is_other


def _leave_user() -> None:
    """Enter a new user namespace, in which this process has no rights over others of its user."""
    try:
        _call("unshare", _NEW_USER_NAMESPACE)
    except OSError as error:
        raise Unprotected("it needs Landlock (Linux 5.13 or newer) or user namespaces") from error
    _call("capset", struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))


def _landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if there is none."""
    try:
        return _call("syscall", _LANDLOCK_CREATE, None, 0, 1)
    except OSError:
        return 0


def _restrict_paths(folder: str, readable: Sequence[str], abi: int, *, may_delete: bool) -> None:
    """Let this process read and write to the folder, read the readable paths, and use no others."""
    execute, write, read, read_dir = 1, 2, 4, 8
    truncate = 1 << 14 if abi >= 3 else 0
    everything = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0) | truncate | (1 << 15 if abi >= 5 else 0)
    network = 3 if abi >= 4 else 0
    scoped = 3 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = struct.pack("=QQQ", everything, network, scoped)[:size]
    rules = _call("syscall", _LANDLOCK_CREATE, attributes, size, 0)
    special = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # Devices, sockets and named pipes.
    deleting = 0 if may_delete else 1 << 4 | 1 << 5
    allowed = {folder: everything & ~special & ~execute & ~deleting, "/dev/null": write | read | truncate}
    for path in (*readable, "/dev/urandom", "/dev/random", "/dev/zero"):
        allowed.setdefault(path, read | execute | read_dir)
    for path, rights in allowed.items():
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= execute | write | read | truncate
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call("syscall", _LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, descriptor), 0)
        os.close(descriptor)
    _call("syscall", _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _filter_calls(machine: str, numbers: dict[str, dict[str, int]], *, writes: bool) -> None:
    """Install the filter of system calls."""
    program = _filter_program(machine, numbers, writes=writes)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _call("prctl", _SET_SECCOMP, 2, header, 0, 0)


def _filter_program(
    machine: str, numbers: dict[str, dict[str, int]], *, writes: bool
) -> list[tuple[int, int, int, int]]:
    """Return the instructions of the filter, in classic BPF: code, jump if true, jump if false, operand."""
    refused = {"PROCESSES": PROCESS_ERRNO, "NETWORK": NETWORK_ERRNO, "FORBIDDEN": errno.EPERM,
               "MISSING": errno.ENOSYS} | ({} if writes else {"WRITES": _WRITE_ERRNO})
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL),
               (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, NEWEST + 1),
               (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for group, number in refused.items():
        for call in numbers[group].values():
            program += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ERRNO | number)]
    this_process = os.getpid()
    checks: dict[str, list[tuple[int, int, int, int]]] = {
        "clone": _argument_check(0, _EQUAL, [_THREAD], PROCESS_ERRNO, mask=_THREAD),
        "kill": _argument_check(0, _EQUAL, [this_process], errno.EPERM),
        "tgkill": _argument_check(0, _EQUAL, [this_process], errno.EPERM),
        "prlimit64": _argument_check(0, _EQUAL, [0], errno.EPERM),
        "prctl": _argument_check(0, _EQUAL, [_SET_PDEATHSIG], errno.EPERM, inverted=True),
        "socketpair": [
            (_LOAD, 0, 0, _ARGUMENT), (_EQUAL, 1, 0, 1), (_RETURN, 0, 0, _ERRNO | NETWORK_ERRNO),  # AF_UNIX.
            *_argument_check(1, _ANY_BIT, [_DATAGRAM], NETWORK_ERRNO, inverted=True)],
        "ioctl": _argument_check(1, _EQUAL, _IOCTLS, errno.ENOTTY),
        "fcntl": _argument_check(1, _EQUAL, _FORBIDDEN_FCNTLS, errno.EPERM, inverted=True),
    }
    opening = _UNNAMED_FILE | (0 if writes else 0o3 | 0o100 | 0o1000)  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC.
    error = errno.EOPNOTSUPP if writes else _WRITE_ERRNO
    checks["open"] = _argument_check(1, _ANY_BIT, [opening], error, inverted=True)
    checks["openat"] = _argument_check(2, _ANY_BIT, [opening], error, inverted=True)
    for name, check in checks.items():
        if name in numbers["CHECKED"]:
            program += [(_EQUAL, 0, len(check), numbers["CHECKED"][name]), *check]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _argument_check(
    index: int, code: int, operands: Sequence[int], number: int, *, mask: int = 0xFFFFFFFF,
    inverted: bool = False,
) -> list[tuple[int, int, int, int]]:
    """Return instructions that allow a call if an argument passes the test with any operand, else refuse it.

    With `inverted` they refuse it if it passes, else allow it. The test sees the lower half of the argument,
    of which only the bits in `mask` count.
    """
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | number)
    tests = [(code, len(operands) - i, 0, operand) for i, operand in enumerate(operands)]
    after = (allow, refuse) if inverted else (refuse, allow)
    return [(_LOAD, 0, 0, _ARGUMENT + 8 * index), (_AND, 0, 0, mask), *tests, *after]
