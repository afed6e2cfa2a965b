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
from contextlib import suppress

NOBODY = 65534
PROCESS_ERRNO = errno.EAGAIN
"""The error that starting a process raises, as if the process table were full."""
NETWORK_ERRNO = errno.ENETDOWN
"""The error that opening a socket raises."""
_WRITE_ERRNO = errno.EROFS
_SET_PDEATHSIG, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS, _SET_SECCOMP, _SET_NO_HUGE_PAGES = 1, 8, 38, 22, 41
_CAPABILITY_VERSION = 0x20080522
_READ_ANY_FILE = 1 << 2  # CAP_DAC_READ_SEARCH
_NEW_USER_NAMESPACE = 0x10000000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # Offsets in the data that a filter reads.
_THREAD = 0x10000 | 0x400
"""Bits of clone() for a thread (CLONE_THREAD) with the open files of the process (CLONE_FILES)."""
_DATAGRAM = 2
"""Bit of the types of sockets that can send to any address, such as that of the system's log."""
_UNNAMED_FILE = 0o20000000
"""Bit of O_TMPFILE, for files that no folder has."""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed: read a terminal's settings and size and the number of waiting bytes, and set descriptor flags."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 1030, 1032)
"""Allowed: copy a descriptor, read and set its flags, look for locks, and read the size of a pipe."""
_LOCK_FCNTLS = (6, 7)
"""Lock a part of a file, or unlock it. They do nothing and succeed: such locks belong to processes, so those
of a process that is alone with its files never conflict, and the kernel keeps any number of them."""
_PRCTLS = (15, 16)
"""Allowed: set and read the name of a thread."""
_MADVICES = (0, 1, 2, 3, 4, 8, 14, 15)
"""Allowed: how memory will be used, that its contents are no longer needed, and huge pages (of no effect)."""
_SHARED_MAP, _ANONYMOUS_MAP, _HUGE_MAP = 0x01, 0x20, 0x40000
"""Bits of mmap(). Shared anonymous memory stays until its last page is unmapped, so what a process has mapped
does not bound it."""

_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, lseek 8 62, close 3 57, close_range 436 436, dup 32 23,
dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, sendfile 40 71, copy_file_range 326 285, ftruncate 77 46,
fsync 74 82, fdatasync 75 83, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291,
access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getcwd 79 17,
chdir 80 49, fchdir 81 50, umask 95 166, getdents 78 -, getdents64 217 61, statfs 137 43, fstatfs 138 44,
fadvise64 221 223, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
munmap 11 215, mremap 25 216, mprotect 10 226, msync 26 227, brk 12 214, futex 202 98,
set_robust_list 273 99, rseq 334 293, set_tid_address 218 96, gettid 186 178, sched_yield 24 124,
sched_getaffinity 204 123, getcpu 309 168, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
getpid 39 172, getppid 110 173, getpgid 121 155, getpgrp 111 -, getsid 124 156, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150,
getrlimit 97 163, setrlimit 160 164, getrusage 98 165, getpriority 140 141, uname 63 160, sysinfo 99 179,
getrandom 318 278, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
gettimeofday 96 169, time 201 -, times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -, pause 34 -,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, restart_syscall 219 128,
getsockname 51 204, getpeername 52 205, getsockopt 55 209, shutdown 48 210, sendto 44 206, recvfrom 45 207
"""
_ALLOWED_WRITES = """
creat 85 -, mkdir 83 -, mkdirat 258 34, unlink 87 -, unlinkat 263 35, rmdir 84 -, rename 82 -,
renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, truncate 76 45
"""
_CHECKED = """
clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, open 2 -, openat 257 56, socketpair 53 199,
ioctl 16 29, fcntl 72 25, prctl 157 167, mmap 9 222, madvise 28 233
"""
_PROCESSES = "fork 57 -, vfork 58 -, execve 59 221, execveat 322 281"
_NETWORK = """
socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, sendmsg 46 211,
sendmmsg 307 269, recvmsg 47 212, recvmmsg 299 243, setsockopt 54 208
"""
_MISSING = "openat2 437 437, clone3 435 435, fallocate 285 47"
_NEWEST = 450
"""The newest system call when these tables were written. The sandbox has none of those that are newer."""
_CALLS = {"ALLOWED": _ALLOWED, "WRITES": _ALLOWED_WRITES, "CHECKED": _CHECKED, "PROCESSES": _PROCESSES,
          "NETWORK": _NETWORK, "MISSING": _MISSING}
"""Groups of system calls, each with its name and its numbers on x86_64 and aarch64.

ALLOWED calls do what a program needs; WRITES are allowed where Landlock keeps them to the code's folder;
CHECKED ones depend on their arguments. All others are refused: a kernel has several hundred, gets more, and
many keep memory that no limit counts. PROCESSES, NETWORK and MISSING only choose the errors of some of those,
which tell the reason, or let the C library use an older call.
"""

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
    """Set limits of memory, time on the processor, sizes of files, and open files and waiting signals."""
    limits = {
        resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 128,
    }
    for kind, wanted in limits.items():
        resource.setrlimit(kind, (wanted, wanted))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def confine(
    folder: str, *, readable: Sequence[str], parent: int, landlock: bool = True, may_delete: bool = True
) -> bool:
    """Take from this process all rights but to compute, to read `readable` and to write to `folder`.

    It ends with the process `parent`, which has started it.

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
        if os.getppid() != parent:  # It has ended before, so there will be no signal.
            os._exit(1)
        with suppress(OSError):  # Part of a huge page that is unmapped stays, and no limit counts it.
            _call("prctl", _SET_NO_HUGE_PAGES, 1, 0, 0, 0)
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
    for path in (*readable, "/dev/urandom", "/dev/random"):
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


def system_calls(machine: str) -> dict[str, dict[str, int]] | None:
    """Return the numbers of system calls by group and name; None for a machine that is not known."""
    if machine not in _AUDIT_ARCH:
        return None
    column = 1 + list(_AUDIT_ARCH).index(machine)
    groups: dict[str, dict[str, int]] = {}
    for group, text in _CALLS.items():
        rows = [entry.split() for entry in text.split(",")]
        groups[group] = {row[0]: int(row[column]) for row in rows if row[column] != "-"}
    return groups


def _filter_calls(machine: str, numbers: dict[str, dict[str, int]], *, writes: bool) -> None:
    program = _filter_program(machine, numbers, writes=writes)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _call("prctl", _SET_SECCOMP, 2, header, 0, 0)


_Program = list[tuple[int, int, int, int]]
"""Instructions of a filter, in classic BPF: code, jump if true, jump if false, operand."""


def _filter_program(machine: str, numbers: dict[str, dict[str, int]], *, writes: bool) -> _Program:
    """Return the filter, which refuses every call that it does not name."""
    program = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL),
               (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _NEWEST + 1), _refuse(errno.ENOSYS)]
    actions = {"ALLOWED": _ALLOWED_CALL, "WRITES": _ALLOWED_CALL if writes else _refuse(_WRITE_ERRNO),
               "PROCESSES": _refuse(PROCESS_ERRNO), "NETWORK": _refuse(NETWORK_ERRNO),
               "MISSING": _refuse(errno.ENOSYS)}
    for group, action in actions.items():
        for call in numbers[group].values():
            program += [(_EQUAL, 0, 1, call), action]
    for name, check in _checks(writes=writes).items():
        if name in numbers["CHECKED"]:
            program += [(_EQUAL, 0, len(check), numbers["CHECKED"][name]), *check]
    return [*program, _refuse(errno.EPERM)]


def _checks(*, writes: bool) -> dict[str, _Program]:
    """Return for each call that depends on its arguments the instructions that allow or refuse it."""
    this_process = os.getpid()
    opening = _UNNAMED_FILE | (0 if writes else 0o3 | 0o100 | 0o1000)  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC.
    open_errno = errno.EOPNOTSUPP if writes else _WRITE_ERRNO
    shared = _SHARED_MAP | _ANONYMOUS_MAP if writes else _SHARED_MAP
    return {
        "clone": [*_argument(0, mask=_THREAD), *_allow_if(_EQUAL, [_THREAD], PROCESS_ERRNO)],
        "kill": [*_argument(0), *_allow_if(_EQUAL, [this_process], errno.EPERM)],
        "tgkill": [*_argument(0), *_allow_if(_EQUAL, [this_process], errno.EPERM)],
        "prlimit64": [*_argument(0), *_allow_if(_EQUAL, [0], errno.EPERM)],
        "prctl": [*_argument(0), *_allow_if(_EQUAL, _PRCTLS, errno.EPERM)],
        "ioctl": [*_argument(1), *_allow_if(_EQUAL, _IOCTLS, errno.ENOTTY)],
        "madvise": [*_argument(2), *_allow_if(_EQUAL, _MADVICES, errno.EINVAL)],
        "fcntl": [
            *_argument(1), *_if(_EQUAL, _LOCK_FCNTLS, _refuse(0)), *_allow_if(_EQUAL, _FCNTLS, errno.EPERM)],
        "socketpair": [
            *_argument(0), *_if_not(_EQUAL, [1], _refuse(NETWORK_ERRNO)),  # AF_UNIX.
            *_argument(1), *_refuse_if(_ANY_BIT, [_DATAGRAM], NETWORK_ERRNO)],
        "mmap": [
            *_argument(3), *_if(_ANY_BIT, [_HUGE_MAP], _refuse(errno.EPERM)),
            *_argument(3, mask=shared), *_refuse_if(_EQUAL, [shared], errno.EPERM)],
        "open": [*_argument(1), *_refuse_if(_ANY_BIT, [opening], open_errno)],
        "openat": [*_argument(2), *_refuse_if(_ANY_BIT, [opening], open_errno)],
    }


def _refuse(number: int) -> tuple[int, int, int, int]:
    """Return the instruction that lets a call fail with an error, or do nothing and succeed if it is 0."""
    return (_RETURN, 0, 0, _ERRNO | number)


_ALLOWED_CALL = (_RETURN, 0, 0, _ALLOW)


def _argument(index: int, *, mask: int = 0xFFFFFFFF) -> _Program:
    """Load the lower half of an argument, and keep the bits in `mask`."""
    return [(_LOAD, 0, 0, _ARGUMENT + 8 * index), (_AND, 0, 0, mask)]


def _if(test: int, operands: Sequence[int], action: tuple[int, int, int, int]) -> _Program:
    """Take the action if the loaded argument passes the test with any operand, else go on."""
    tests = [(test, len(operands) - i, 0, operand) for i, operand in enumerate(operands)]
    return [*tests, (_JUMP, 0, 0, 1), action]


def _if_not(test: int, operands: Sequence[int], action: tuple[int, int, int, int]) -> _Program:
    """Take the action if the loaded argument passes the test with no operand, else go on."""
    return [*[(test, len(operands) - i, 0, operand) for i, operand in enumerate(operands)], action]


def _allow_if(test: int, operands: Sequence[int], number: int) -> _Program:
    return [*_if_not(test, operands, _refuse(number)), _ALLOWED_CALL]


def _refuse_if(test: int, operands: Sequence[int], number: int) -> _Program:
    return [*_if(test, operands, _refuse(number)), _ALLOWED_CALL]
