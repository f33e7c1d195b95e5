"""What a job may ask of the kernel: every system call by name, and the filter's decision on it.

Called by seccomp.py, which lays the decisions out for the kernel. Values only. Must never allow by default: a call that
is not named here, today's or a later kernel's, is answered as if the kernel did not have it.

Allowed is what ordinary programs were seen to use (tests/toolchains/census.py measures it) and the calls of the same
kind beside them. A call is refused with EPERM where programs know this answer, and with ENOSYS where they then take
an older way. Nothing here ends a process; a foreign machine's calls do (seccomp.py).
"""

from __future__ import annotations

from typing import Final

__all__ = ["ABSENT", "ALLOWED", "DENIED", "EXECUTABLE_MEMORY", "LIMITS", "MODES", "OPENS", "OWN_PROCESS"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Allowed whatever their arguments.
ALLOWED: Final = _names(
    # Files: contents, names, attributes. What they may reach is decided by the view, Landlock and the job's uid.
    "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range "
    "stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat "
    "getdents getdents64 getcwd chdir fchdir rename renameat renameat2 rmdir link linkat unlink unlinkat "
    "symlink symlinkat umask chown fchown lchown fchownat utime utimes futimesat utimensat truncate ftruncate "
    "fallocate fadvise64 readahead fsync fdatasync sync syncfs sync_file_range msync cachestat "
    "setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr "
    "removexattr lremovexattr fremovexattr setxattrat getxattrat listxattrat removexattrat "
    "dup dup2 dup3 fcntl flock pipe pipe2 splice tee vmsplice sendfile copy_file_range "
    "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch "
    # Waiting.
    "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 "
    "eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime pause "
    # Memory. Locked memory has a limit of 0.
    "brk mmap munmap mprotect mremap mincore madvise mlock mlock2 munlock mlockall munlockall mseal "
    "pkey_alloc pkey_free pkey_mprotect map_shadow_stack membarrier "
    # Processes and threads. Whom a signal reaches is decided by the pid namespace and the uid.
    "fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp setpgid "
    "getsid setsid set_tid_address set_robust_list get_robust_list rseq arch_prctl prctl seccomp "
    "landlock_create_ruleset landlock_add_rule landlock_restrict_self pidfd_open pidfd_send_signal "
    "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo rt_sigaction rt_sigprocmask rt_sigpending "
    "rt_sigtimedwait rt_sigsuspend rt_sigreturn sigaltstack restart_syscall "
    "futex futex_waitv futex_wake futex_wait futex_requeue "
    # Ids. The job has one uid, no capability and no_new_privs: the kernel refuses any other.
    "getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid "
    "setresgid setfsuid setfsgid setgroups capget capset "
    # Scheduling and limits, as far as they only look or concern the caller.
    "sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_getattr sched_get_priority_max "
    "sched_get_priority_min sched_rr_get_interval getpriority ioprio_get getrlimit getrusage getcpu "
    # Time.
    "time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep alarm getitimer setitimer times "
    "timer_create timer_settime timer_gettime timer_getoverrun timer_delete "
    # Sockets, once made.
    "bind listen accept accept4 connect shutdown getsockname getpeername getsockopt sendto recvfrom "
    "sendmsg recvmsg sendmmsg recvmmsg "
    # System V and POSIX messages, in the attempt's own ipc namespace.
    "shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl "
    "mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr "
    # The rest.
    "uname sysinfo getrandom"
)
#: Refused with EPERM whatever their arguments.
DENIED: Final = _names(
    # Other processes' memory, descriptors and fate.
    "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd kcmp "
    # Another file tree, and handles that lead around this one.
    "mount umount2 pivot_root chroot open_tree open_tree_attr move_mount mount_setattr fsopen fsconfig fsmount "
    "fspick name_to_handle_at open_by_handle_at fanotify_init fanotify_mark setns "
    # Parts of the kernel that have given attackers most.
    "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl "
    "modify_ldt remap_file_pages "
    # The host itself.
    "kexec_load kexec_file_load init_module finit_module create_module delete_module iopl ioperm acct swapon "
    "swapoff reboot quotactl quotactl_fd nfsservctl lookup_dcookie uselib sysfs ustat _sysctl syslog vhangup "
    "sethostname setdomainname settimeofday clock_settime adjtimex clock_adjtime"
)
#: Answered with ENOSYS by name; so is every call that is named nowhere here.
ABSENT: Final = _names(
    # Their arguments lie in memory, where no filter can read them.
    "clone3 openat2 "
    # Events of asynchronous I/O are counted for the whole host: a job could use up everybody's.
    "io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents "
    # Memory policy: with EPERM libraries believe that they have it.
    "get_mempolicy set_mempolicy mbind set_mempolicy_home_node "
    # Memory that not even the host's operator can look into.
    "memfd_secret "
    # Questions about mounts, namespaces and security modules, newer than the programs that could need them.
    "statmount listmount listns lsm_get_self_attr lsm_set_self_attr lsm_list_modules file_getattr file_setattr"
)
#: Allowed, but ENOSYS for a job that may execute nothing of its own: the loader maps code from any such file.
EXECUTABLE_MEMORY: Final = "memfd_create"
#: Calls that may set mode bits: the index of their mode argument.
MODES: Final = {
    "chmod": 1,
    "fchmod": 1,
    "fchmodat": 2,
    "fchmodat2": 2,
    "creat": 1,
    "mkdir": 1,
    "mkdirat": 2,
    "mknod": 1,
    "mknodat": 2,
}
#: Calls that open files: the indexes of their flags and mode.
OPENS: Final = {"open": (1, 2), "openat": (2, 3)}
#: What makes another process or thread, or puts another program in this one's place: nothing for a reused worker.
OTHERS: Final = ("fork", "vfork", "clone", "execve", "execveat")
#: Calls that set limits. The core limit stays 1 (attack 19): setting it is answered as done, and nothing is done.
LIMITS: Final = ("prlimit64", "setrlimit")
#: Calls on a process named by argument 0, which must be the caller itself (0), attack 37.
OWN_PROCESS: Final = (
    "sched_setparam",
    "sched_setscheduler",
    "sched_setattr",
    "sched_setaffinity",
    "migrate_pages",
    "move_pages",
)
