"""Numbers of the system calls that the sandbox refuses or checks, by machine. Imports nothing."""

_X86_64 = """
PROCESSES: fork 57, vfork 58, execve 59, execveat 322
NETWORK: socket 41, connect 42, bind 49, listen 50, accept 43, accept4 288, sendmsg 46, sendmmsg 307
FORBIDDEN: ptrace 101, process_vm_readv 310, process_vm_writev 311, process_madvise 440, process_mrelease
    448, kcmp 312, pidfd_open 434, pidfd_send_signal 424, pidfd_getfd 438, rt_sigqueueinfo 129,
    rt_tgsigqueueinfo 297, tkill 200, mount 165, umount2 166, pivot_root 155, chroot 161, unshare 272,
    setns 308, move_mount 429, open_tree 428, fsopen 430, fsconfig 431, fsmount 432, fspick 433,
    mount_setattr 442, bpf 321, perf_event_open 298, userfaultfd 323, io_uring_setup 425, io_uring_enter
    426, io_uring_register 427, keyctl 250, add_key 248, request_key 249, memfd_create 319, memfd_secret
    447, shmget 29, shmat 30, shmctl 31, msgget 68, msgsnd 69, msgrcv 70,
    msgctl 71, semget 64, semop 65, semtimedop 220, semctl 66, mq_open 240, mq_unlink
    241, name_to_handle_at 303, open_by_handle_at 304, fanotify_init 300, chmod 90, fchmod 91, fchmodat
    268, chown 92, fchown 93, lchown 94, fchownat 260, utime 132, utimes 235, utimensat 280, futimesat
    261, setxattr 188, lsetxattr 189, fsetxattr 190, removexattr 197, lremovexattr 198, fremovexattr 199,
    setpriority 141, sched_setscheduler 144, sched_setattr 314, sched_setparam 142, sched_setaffinity 203,
    ioprio_set 251, migrate_pages 256, move_pages 279, personality 135, init_module 175, finit_module 313,
    delete_module 176, kexec_load 246, reboot 169, swapon 167, swapoff 168, acct 163, quotactl 179,
    settimeofday 164, clock_settime 227, adjtimex 159, clock_adjtime 305, syslog 103, uselib 134,
    modify_ldt 154, iopl 172, ioperm 173
MISSING: openat2 437, clone3 435, fallocate 285
WRITES: creat 85, mkdir 83, mkdirat 258, unlink 87, unlinkat 263, rmdir 84, rename 82, renameat 264,
    renameat2 316, link 86, linkat 265, symlink 88, symlinkat 266, truncate 76, mknod 133, mknodat 259
CHECKED: clone 56, kill 62, tgkill 234, prlimit64 302, open 2, openat 257, socketpair 53, ioctl 16,
    fcntl 72, prctl 157
"""
_AARCH64 = """
PROCESSES: execve 221, execveat 281
NETWORK: socket 198, connect 203, bind 200, listen 201, accept 202, accept4 242, sendmsg 211, sendmmsg 269
FORBIDDEN: ptrace 117, process_vm_readv 270, process_vm_writev 271, process_madvise 440, process_mrelease
    448, kcmp 272, pidfd_open 434, pidfd_send_signal 424, pidfd_getfd 438, rt_sigqueueinfo 138,
    rt_tgsigqueueinfo 240, tkill 130, mount 40, umount2 39, pivot_root 41, chroot 51, unshare 97, setns
    268, move_mount 429, open_tree 428, fsopen 430, fsconfig 431, fsmount 432, fspick 433, mount_setattr
    442, bpf 280, perf_event_open 241, userfaultfd 282, io_uring_setup 425, io_uring_enter 426,
    io_uring_register 427, keyctl 219, add_key 217, request_key 218, memfd_create 279, memfd_secret 447,
    shmget 194, shmat 196, shmctl 195, msgget 186, msgsnd 189, msgrcv 188,
    msgctl 187, semget 190, semop 193, semtimedop 192, semctl 191, mq_open 180,
    mq_unlink 181, name_to_handle_at 264, open_by_handle_at 265, fanotify_init 262, fchmod 52, fchmodat
    53, fchown 55, fchownat 54, utimensat 88, setxattr 5, lsetxattr 6, fsetxattr 7, removexattr 14,
    lremovexattr 15, fremovexattr 16, setpriority 140, sched_setscheduler 119, sched_setattr 274,
    sched_setparam 118, sched_setaffinity 122, ioprio_set 30, migrate_pages 238, move_pages 239,
    personality 92, init_module 105, finit_module 273, delete_module 106, kexec_load 104, reboot 142,
    swapon 224, swapoff 225, acct 89, quotactl 60, settimeofday 170, clock_settime 112, adjtimex 171,
    clock_adjtime 266, syslog 116
MISSING: openat2 437, clone3 435, fallocate 47
WRITES: mkdirat 34, unlinkat 35, renameat 38, renameat2 276, linkat 37, symlinkat 36, truncate 45, mknodat
    33
CHECKED: clone 220, kill 129, tgkill 131, prlimit64 261, openat 56, socketpair 199, ioctl 29,
    fcntl 25, prctl 167
"""
_TABLES = {"x86_64": _X86_64, "aarch64": _AARCH64}
"""For each machine, groups of system calls: name and number."""
NEWEST = 450
"""The newest system call that is known here. The sandbox has none of those that are newer."""


def system_calls(machine: str) -> dict[str, dict[str, int]] | None:
    """Return the numbers of system calls by group and name; None for a machine that is not known."""
    if machine not in _TABLES:
        return None
    groups = (row.split(":") for row in _TABLES[machine].replace("\n    ", " ").strip().splitlines())
    pairs = {group: (entry.split() for entry in entries.split(",")) for group, entries in groups}
    return {group: {name: int(number) for name, number in entries} for group, entries in pairs.items()}
