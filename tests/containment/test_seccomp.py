"""The filter's decisions, from its own bytes, against the rules as the design states them."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.containment import seccomp
from node_agent.containment.errors import ContainmentError
from node_agent.containment.sysnumbers import AUDIT_ARCH, NUMBERS

ALLOW = 0x7FFF0000
PERM = 0x00050000 | errno.EPERM
ABSENT = 0x00050000 | errno.ENOSYS
KILL = 0x80000000
MACHINES = sorted(NUMBERS)
HIGH = 0xABCD_0000_0000_0000


def decide(machine: str, number: int, *args: int, allow_unix: bool = True, arch: int | None = None) -> int:
    """Run the filter like the kernel does."""
    built = seccomp.build(allow_unix=allow_unix, machine=machine)
    steps = list(struct.iter_unpack("HBBI", built.code))
    words = [word & 0xFFFF_FFFF_FFFF_FFFF for word in (*args, 0, 0, 0, 0, 0, 0)[:6]]
    data = struct.pack("<iIQ6Q", number, AUDIT_ARCH[machine] if arch is None else arch, 0, *words)
    held = at = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            held = int(struct.unpack_from("<I", data, value)[0])
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return int(value)
        else:
            truth = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += if_true if truth else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_denied_calls_are_denied_whatever_they_say(machine: str) -> None:
    """Each call of the deny list answers EPERM; clone3 and openat2 do not exist."""
    numbers = NUMBERS[machine]
    assert {name: decide(machine, numbers[name], 1, 2, 3) for name in seccomp.DENIED if name in numbers} == {
        name: PERM for name in seccomp.DENIED if name in numbers
    }
    assert [decide(machine, numbers[name]) for name in ("clone3", "openat2")] == [ABSENT, ABSENT]


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_is_killed(machine: str) -> None:
    """A call through another architecture's entry ends the process; x32 numbers are refused."""
    assert decide(machine, 1, arch=0x4000_0003) == KILL
    if machine == "x86_64":
        assert decide(machine, 0x4000_0000 + 57) == PERM


@pytest.mark.parametrize("machine", MACHINES)
@given(mode=st.integers(0, 2**64 - 1), high=st.sampled_from([0, HIGH]))
def test_attack_09_no_mode_with_set_id_bits(machine: str, mode: int, high: int) -> None:
    """Every call that sets a mode is refused exactly when the bits are set, whatever the high half says."""
    wanted = PERM if mode & 0o6000 else ALLOW
    numbers = NUMBERS[machine]
    for name, at in seccomp.MODES.items():
        if name in numbers:
            args = [0] * 6
            args[at] = mode | high
            assert decide(machine, numbers[name], *args) == wanted, name
    for name, (flags, at) in seccomp.OPENS.items():
        if name in numbers:
            args = [0] * 6
            args[at] = mode | high
            for flag, verdict in ((0, ALLOW), (0o100, wanted), (0o20200000, wanted)):
                args[flags] = flag | high
                assert decide(machine, numbers[name], *args) == verdict, name


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=st.integers(0, 2**64 - 1))
def test_no_new_namespaces(machine: str, flags: int) -> None:
    """clone and unshare are refused exactly when a namespace flag is set."""
    new = 0x7E02_0000
    assert decide(machine, NUMBERS[machine]["clone"], flags) == (PERM if flags & new else ALLOW)
    assert decide(machine, NUMBERS[machine]["unshare"], flags) == (PERM if flags & (new | 0x80) else ALLOW)


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


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("high", [0, HIGH])
def test_attack_37_only_the_own_process(machine: str, high: int) -> None:
    """Limits, priorities and affinity of other processes are out of reach, by pid and by user."""
    numbers = NUMBERS[machine]
    for name in seccomp.OWN_PROCESS:
        assert decide(machine, numbers[name], 0 | high) == ALLOW, name
        assert decide(machine, numbers[name], 1 | high) == PERM, name
    for name, by_process, by_user in (("setpriority", 0, 2), ("ioprio_set", 1, 3)):
        assert decide(machine, numbers[name], by_process, 0 | high) == ALLOW
        assert decide(machine, numbers[name], by_process, 1 | high) == PERM
        assert decide(machine, numbers[name], by_user | high, 0) == PERM


@pytest.mark.parametrize("machine", MACHINES)
def test_terminals_and_personalities(machine: str) -> None:
    """No input is pushed into a terminal; the personality stays plain Linux."""
    numbers = NUMBERS[machine]
    answers = [decide(machine, numbers["ioctl"], 0, number | HIGH) for number in (0x5412, 0x541C, 0x5413)]
    assert answers == [PERM, PERM, ALLOW]
    answers = [decide(machine, numbers["personality"], value) for value in (0, 0xFFFF_FFFF, 0x40000)]
    assert answers == [ALLOW, ALLOW, PERM]


def test_an_unknown_machine_is_refused() -> None:
    """Without a table there is no filter, and the node says so."""
    with pytest.raises(ContainmentError, match="riscv64"):
        seccomp.build(allow_unix=True, machine="riscv64")
