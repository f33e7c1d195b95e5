"""The filter's decisions, from its own bytes, against the rules as the design states them."""

from __future__ import annotations

import errno
import functools
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.containment import bpf, seccomp, syscalls
from node_agent.containment.bpf import Step
from node_agent.containment.errors import ContainmentError
from node_agent.containment.sysnumbers import AUDIT_ARCH, NUMBERS

ALLOW = 0x7FFF0000
PERM = 0x00050000 | errno.EPERM
ABSENT = 0x00050000 | errno.ENOSYS
NO_PROTOCOL = 0x00050000 | errno.EPROTONOSUPPORT
KILL = 0x80000000
PRETEND = 0x00050000
MACHINES = sorted(NUMBERS)
HIGH = 0xABCD_0000_0000_0000
#: Calls that depend on their arguments, and the one that depends on the job's right to execute its own files.
CHECKED = {*syscalls.MODES, *syscalls.OPENS, *syscalls.OWN_PROCESS, *syscalls.LIMITS, "clone", "unshare"}
CHECKED |= {"setpriority", "ioprio_set", "personality", "ioctl", "socket", "socketpair", "memfd_create", "setsockopt"}
#: Numbers without a call behind them in any kernel that this runs on, and two that only the kernel itself makes.
HOLLOW = {"get_kernel_syms", "query_module", "getpmsg", "putpmsg", "afs_syscall", "tuxcall", "security", "vserver"}
HOLLOW |= {"set_thread_area", "get_thread_area", "epoll_ctl_old", "epoll_wait_old", "uretprobe", "uprobe"}
#: Where Debian-like systems keep the kernel's own numbers, by machine.
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@functools.cache
def program(machine: str, *, allow_unix: bool, allow_exec: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Return the filter's steps."""
    built = seccomp.build(allow_unix=allow_unix, allow_exec=allow_exec, machine=machine)
    steps = tuple(struct.iter_unpack("HBBI", built.code))
    assert len(steps) == built.length
    return steps


def walk(
    machine: str,
    number: int,
    *args: int,
    allow_unix: bool = True,
    allow_exec: bool = True,
    arch: int | None = None,
) -> tuple[int, int]:
    """Run the filter like the kernel does; return its answer and how many steps it took."""
    words = [word & 0xFFFF_FFFF_FFFF_FFFF for word in (*args, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("<IIQ6Q", number & 0xFFFF_FFFF, AUDIT_ARCH[machine] if arch is None else arch, 0, *words)
    return run(program(machine, allow_unix=allow_unix, allow_exec=allow_exec), data)


def run(steps: tuple[tuple[int, int, int, int], ...], data: bytes) -> tuple[int, int]:
    """Run a program on one struct seccomp_data; return its answer and how many steps it took."""
    held = at = taken = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        taken += 1
        if code == 0x20:
            held = int(struct.unpack_from("<I", data, value)[0])
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return int(value), taken
        else:
            truth = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += if_true if truth else if_false


def decide(
    machine: str,
    number: int,
    *args: int,
    allow_unix: bool = True,
    allow_exec: bool = True,
    arch: int | None = None,
) -> int:
    """Return the filter's answer."""
    return walk(machine, number, *args, allow_unix=allow_unix, allow_exec=allow_exec, arch=arch)[0]


def listed(names: frozenset[str]) -> list[tuple[str, str]]:
    """Return machine and name of each call that the machine has."""
    return [(machine, name) for machine in MACHINES for name in sorted(names) if name in NUMBERS[machine]]


def test_what_leads_out_of_a_sandbox_is_on_the_deny_list() -> None:
    """The calls that the design names stay denied, whatever a program may seem to need."""
    never = {
        *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "pidfd_getfd"),
        *("mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "mount_setattr"),
        *("fsopen", "fsconfig", "fsmount", "fspick", "name_to_handle_at", "open_by_handle_at", "setns", "kcmp"),
        *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
        *("add_key", "request_key", "keyctl", "kexec_load", "kexec_file_load", "init_module", "finit_module"),
        *("delete_module", "iopl", "ioperm", "modify_ldt", "fanotify_init", "syslog", "reboot", "swapon", "swapoff"),
        *("sethostname", "setdomainname", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "acct"),
        *("quotactl", "quotactl_fd", "vhangup"),
    }
    assert never <= syscalls.DENIED
    assert {"clone3", "openat2", "io_setup", "memfd_secret"} <= syscalls.ABSENT


@pytest.mark.parametrize(("machine", "name"), listed(syscalls.DENIED))
def test_a_denied_call_is_refused_whatever_it_says(machine: str, name: str) -> None:
    """The call answers EPERM in every form of the filter, for any arguments: no other rule comes before its own."""
    for words in ((), (1, 2, 3), (HIGH,) * 6, (2**64 - 1,) * 6):
        for unix in (True, False):
            for execute in (True, False):
                assert decide(machine, NUMBERS[machine][name], *words, allow_unix=unix, allow_exec=execute) == PERM


@pytest.mark.parametrize(("machine", "name"), listed(syscalls.ABSENT))
def test_an_absent_call_answers_enosys(machine: str, name: str) -> None:
    """The call seems not to exist, for any arguments, so that the C library takes an older one."""
    for words in ((), (1, 2, 3), (2**64 - 1,) * 6):
        assert decide(machine, NUMBERS[machine][name], *words) == ABSENT


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_has_exactly_one_decision(machine: str) -> None:
    """The lists don't overlap, name no call that does not exist, and leave none of the machine's calls undecided."""
    lists = [syscalls.ALLOWED, syscalls.DENIED, syscalls.ABSENT, frozenset(CHECKED)]
    assert sum(map(len, lists)) == len(frozenset().union(*lists))
    assert frozenset().union(*lists) <= {name for table in NUMBERS.values() for name in table}
    assert set(NUMBERS[machine]) - frozenset().union(*lists) == HOLLOW & set(NUMBERS[machine])
    assert all(
        decide(machine, NUMBERS[machine][name]) == ALLOW
        for _, name in listed(syscalls.ALLOWED)
        if name in NUMBERS[machine]
    )
    assert all(decide(machine, NUMBERS[machine][name]) == ABSENT for name in HOLLOW if name in NUMBERS[machine])


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 2**32 - 1))
def test_no_unknown_number_is_allowed(machine: str, number: int) -> None:
    """A number that no table names, such as a later kernel's call, is answered with ENOSYS, or ends an x32 program."""
    if number not in NUMBERS[machine].values():
        x32 = machine == "x86_64" and 0x4000_0000 <= number < 0x8000_0000
        assert decide(machine, number, HIGH, 1, 2) == (KILL if x32 else ABSENT)


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_around_each_table_are_unknown(machine: str) -> None:
    """The last call of a run is not the first of an allowed range that goes on."""
    known = set(NUMBERS[machine].values())
    for number in {beside for each in known for beside in (each - 1, each + 1)} - known - {-1}:
        assert decide(machine, number) == ABSENT
    assert decide(machine, -1) == ABSENT


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_the_kernels(machine: str) -> None:
    """Every number that this system's kernel headers name is ours too."""
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"no kernel headers at {header}")
    found = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", header.read_text(), re.MULTILINE))
    found["newfstatat"] = found.pop("fstatat", found.get("newfstatat", ""))
    only_32 = range(403, 424) if machine == "aarch64" else range(0)
    theirs = {name: int(number) for name, number in found.items() if int(number) not in only_32}
    other = {name for name in theirs if name in ("arch_specific_syscall", "sync_file_range2", "syscalls")}
    assert len(theirs) > 280
    assert {name: number for name, number in theirs.items() if name not in other} == {
        name: NUMBERS[machine].get(name) for name in theirs if name not in other
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_attack_45_another_abi_ends_the_process(machine: str) -> None:
    """Calls through another machine's entry (32-bit x86, AArch32, the other table) and x32 numbers are SIGSYS."""
    for arch in (0x4000_0003, 0x4000_0028, *(AUDIT_ARCH[other] for other in MACHINES if other != machine), 0):
        for number in (*NUMBERS[machine].values(), 5000):
            assert decide(machine, number, arch=arch) == KILL
    if machine == "x86_64":
        for number in (*NUMBERS[machine].values(), 512, 547):
            assert decide(machine, 0x4000_0000 + number) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_is_cheap(machine: str) -> None:
    """No call takes more than a search by halving and its own check, and the whole fits into few steps."""
    simple = [walk(machine, number)[1] for name, number in NUMBERS[machine].items() if name not in CHECKED]
    checked = [walk(machine, NUMBERS[machine][name], 0o100, 0o100)[1] for name in CHECKED if name in NUMBERS[machine]]
    assert max(simple) <= 12
    assert max(checked) <= 24
    assert len(program(machine, allow_unix=True, allow_exec=True)) <= 200


def test_a_job_without_exec_gets_no_memory_file() -> None:
    """memfd_create is there for a job that may execute its own files, and seems not to exist for one that may not."""
    for machine in MACHINES:
        number = NUMBERS[machine]["memfd_create"]
        assert [decide(machine, number, allow_exec=execute) for execute in (True, False)] == [ALLOW, ABSENT]


@given(
    edges=st.lists(st.integers(0, 2**32 - 1), max_size=24, unique=True).map(sorted),
    labels=st.lists(st.sampled_from(["a", "b", "c"]), min_size=12, max_size=12),
    probes=st.lists(st.integers(0, 2**32 - 1), max_size=20),
)
def test_a_search_finds_each_range(edges: list[int], labels: list[str], probes: list[int]) -> None:
    """For any ranges and any number, also at every edge, the jump goes to the range's label or to the default."""
    ranges = [(range(low, high), label) for low, high, label in zip(edges[::2], edges[1::2], labels, strict=False)]
    answers = {"a": 1, "b": 2, "c": 3, "none": 4}
    ends = [Step(bpf.RETURN, answer, label=label) for label, answer in answers.items()]
    searched = bpf.search(ranges, "none")
    steps = [bpf.Step(bpf.LOAD, 0), *(searched or [Step(bpf.EQUAL, 0, "none", "none")]), *ends]
    code = tuple(struct.iter_unpack("HBBI", bpf.assemble(steps)))
    for number in {*probes, *edges, *(edge - 1 for edge in edges if edge)}:
        wanted = next((label for numbers, label in ranges if number in numbers), "none")
        assert run(code, struct.pack("<I", number))[0] == answers[wanted]


@pytest.mark.parametrize(
    "step", [Step(bpf.EQUAL, 0, "behind"), Step(bpf.EQUAL, 0, "nowhere"), Step(bpf.EQUAL, 0, "far")]
)
def test_a_jump_that_can_not_be_made_is_refused(step: Step) -> None:
    """A target behind, missing or too far ahead is an error when the filter is made, never another answer."""
    steps = [bpf.arg(0, "behind"), step, *(bpf.arg(0) for _ in range(256)), Step(bpf.RETURN, 0, label="far")]
    with pytest.raises(ContainmentError, match="can't jump"):
        bpf.assemble(steps)


def test_a_label_that_stands_twice_is_refused() -> None:
    """A second rule under a name that is taken would hide the first: an error when the filter is made."""
    steps = [bpf.arg(0, "same"), bpf.arg(1, "same"), Step(bpf.RETURN, 0)]
    with pytest.raises(ContainmentError, match="one label"):
        bpf.assemble(steps)


@pytest.mark.parametrize("machine", MACHINES)
@given(mode=st.integers(0, 2**64 - 1), high=st.sampled_from([0, HIGH]))
def test_attack_09_no_mode_with_set_id_bits(machine: str, mode: int, high: int) -> None:
    """Every call that sets a mode is refused exactly when the bits are set, whatever the high half says."""
    wanted = PERM if mode & 0o6000 else ALLOW
    numbers = NUMBERS[machine]
    for name, at in syscalls.MODES.items():
        if name in numbers:
            args = [0] * 6
            args[at] = mode | high
            assert decide(machine, numbers[name], *args) == wanted, name
    for name, (flags, at) in syscalls.OPENS.items():
        if name in numbers:
            args = [0] * 6
            args[at] = mode | high
            for flag, verdict in ((0, ALLOW), (0o100, wanted), (0o20200000, wanted)):
                args[flags] = flag | high
                assert decide(machine, numbers[name], *args) == verdict, name


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=st.integers(0, 2**64 - 1))
def test_no_new_namespaces(machine: str, flags: int) -> None:
    """clone is refused exactly when a namespace flag is set, unshare for any flag but those that end a sharing."""
    new, plain = 0x7E02_0000, 0x0005_0F00
    assert decide(machine, NUMBERS[machine]["clone"], flags) == (PERM if flags & new else ALLOW)
    for some in (flags, flags & (plain | HIGH), flags & plain | 0x80, flags & plain | 0x1000_0000):
        unsafe = some & 0xFFFF_FFFF & ~plain
        assert decide(machine, NUMBERS[machine]["unshare"], some) == (PERM if unsafe else ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("high", [0, HIGH])
def test_attack_17_sockets_by_family_and_pairs_by_type(machine: str, high: int) -> None:
    """Only INET, INET6, NETLINK_ROUTE and, if allowed, UNIX; pairs only STREAM and SEQPACKET."""
    numbers = NUMBERS[machine]
    for allow_unix in (True, False):
        allowed = {
            family
            for family in range(64)
            if decide(machine, numbers["socket"], family | high, 1, 0, allow_unix=allow_unix) == ALLOW
        }
        assert allowed == {2, 10, 16} | ({1} if allow_unix else set())
    assert decide(machine, numbers["socket"], 16, 3, 12 | high) == PERM
    flags = 0o2004000 | high
    pairs = {kind for kind in range(16) if decide(machine, numbers["socketpair"], 1 | high, kind | flags) == ALLOW}
    assert pairs == {1, 5}
    assert decide(machine, numbers["socketpair"], 2, 1) == PERM
    for family in (2, 10):
        kinds = {kind: decide(machine, numbers["socket"], family | high, kind | flags, 0) for kind in range(16)}
        assert {kind for kind, answer in kinds.items() if answer == ALLOW} == {1, 2}
        plain = {
            number for number in range(300) if decide(machine, numbers["socket"], family, 1, number | high) == ALLOW
        }
        assert plain == {0, 1, 6, 17, 58}
        assert decide(machine, numbers["socket"], family, 1, 262) == NO_PROTOCOL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("high", [0, HIGH])
def test_attack_37_only_the_own_process(machine: str, high: int) -> None:
    """Limits, priorities and affinity of other processes are out of reach, by pid and by user."""
    numbers = NUMBERS[machine]
    for name in syscalls.OWN_PROCESS:
        assert decide(machine, numbers[name], 0 | high) == ALLOW, name
        assert decide(machine, numbers[name], 1 | high) == PERM, name
    assert {decide(machine, numbers["prlimit64"], 1 | high, limit, 0, 4096) for limit in range(17)} == {PERM}
    assert {decide(machine, numbers["prlimit64"], 0 | high, limit, 0, 4096) for limit in range(17)} == {ALLOW}
    for name, by_process, by_user in (("setpriority", 0, 2), ("ioprio_set", 1, 3)):
        assert decide(machine, numbers[name], by_process, 0 | high) == ALLOW
        assert decide(machine, numbers[name], by_process, 1 | high) == PERM
        assert decide(machine, numbers[name], by_user | high, 0) == PERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("high", [0, HIGH])
def test_attack_19_the_core_limit_stays(machine: str, high: int) -> None:
    """Setting RLIMIT_CORE (4) is answered as done and not done; asking for it and setting any other works."""
    numbers = NUMBERS[machine]
    for limit in range(17):
        wanted = PRETEND if limit == 4 else ALLOW
        assert decide(machine, numbers["setrlimit"], limit | high, 4096) == wanted
        for pointer in (4096, 1 << 32, 2**64 - 1):
            assert decide(machine, numbers["prlimit64"], 0 | high, limit | high, pointer) == wanted
        assert decide(machine, numbers["prlimit64"], 0 | high, limit | high, 0, 4096) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_terminals_and_personalities(machine: str) -> None:
    """No input is pushed into a terminal, no file leaves its project quota; the personality stays plain Linux."""
    numbers = NUMBERS[machine]
    refused, usual = (0x5412, 0x541C, 0x40086602, 0x40046602, 0x401C5820), (0x5413, 0x5401, 0x80086601, 0x801C581F)
    assert {decide(machine, numbers["ioctl"], 0, number | HIGH) for number in refused} == {PERM}
    assert {decide(machine, numbers["ioctl"], 0, number | HIGH) for number in usual} == {ALLOW}
    answers = [decide(machine, numbers["personality"], value) for value in (0, 0xFFFF_FFFF, 0x40000)]
    assert answers == [ALLOW, ALLOW, PERM]


@pytest.mark.parametrize("machine", MACHINES)
def test_attack_51_no_socket_lingers(machine: str) -> None:
    """SO_LINGER is taken for granted and does nothing; every other option stays."""
    numbers = NUMBERS[machine]
    asked = [decide(machine, numbers["setsockopt"], 3, level | HIGH, name | HIGH) for level, name in ((1, 13), (1, 9))]
    assert [*asked, decide(machine, numbers["setsockopt"], 3, 6, 13)] == [PRETEND, ALLOW, ALLOW]


def test_an_unknown_machine_is_refused() -> None:
    """Without a table there is no filter, and the node says so."""
    with pytest.raises(ContainmentError, match="riscv64"):
        seccomp.build(allow_unix=True, machine="riscv64")
