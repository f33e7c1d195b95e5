"""Attack 45 for real: foreign entries to the kernel, high halves of arguments, and calls that have led out before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.containment.rig import Rig, in_rig, python

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="these are x86-64's entries and numbers")

#: One child for each call: its errno, 0 if the call was done, or "signal N" if it was ended.
PROGRAM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define HIGH 0x7000000000000000UL
typedef unsigned long word;
static long call(word nr, word a, word b, word c, word d, word e) {
    long answer;
    register word r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = 0;
    __asm__ volatile("syscall" : "=a"(answer) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return answer;
}
static long int80(long nr) {
    long answer;
    __asm__ volatile("int $0x80" : "=a"(answer) : "a"(nr), "b"(0), "c"(0), "d"(0) : "memory");
    return answer;
}
static void *in_thread(void *unused) { return (void *)int80(20); }
static long threaded(void) {
    pthread_t thread;
    pthread_create(&thread, 0, in_thread, 0);
    pthread_join(thread, 0);
    return 0;
}
static unsigned long clone_args[11] = {0x10000000, 0, 0, 0, 17};
static const char *names[] = {"int80", "int80:thread", "x32", "x32:execve", "number:high", "clone:high", "clone3",
    "unshare:high", "family:high", "io_uring", "userfaultfd", "keyctl", "plain"};
static long attempt(int which) {
    switch (which) {
    case 0: return int80(20);
    case 1: return threaded();
    case 2: return call(0x40000000UL + 39, 0, 0, 0, 0, 0);
    case 3: return call(0x40000000UL + 520, 0, 0, 0, 0, 0);
    case 4: return call(HIGH | 101, 16, 1, 0, 0, 0);
    case 5: return call(56, HIGH | 0x10000000 | 17, 0, 0, 0, 0);
    case 6: return call(435, (unsigned long)clone_args, sizeof clone_args, 0, 0, 0);
    case 7: return call(272, HIGH | 0x10000000, 0, 0, 0, 0);
    case 8: return call(41, HIGH | 40, 1, 0, 0, 0);
    case 9: { char parameters[120] = {0}; return call(425, 4, (unsigned long)parameters, 0, 0, 0); }
    case 10: return call(323, 0, 0, 0, 0, 0);
    case 11: return call(250, 0, -3UL, 1, 0, 0);
    default: return call(39, 0, 0, 0, 0, 0);
    }
}
int main(void) {
    for (int which = 0; which < 13; which++) {
        int status;
        pid_t child = fork();
        if (child == 0) { long answer = attempt(which); _exit(answer < 0 ? -answer : 0); }
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status)) printf("%s signal %d\n", names[which], WTERMSIG(status));
        else printf("%s %d\n", names[which], WEXITSTATUS(status));
    }
    return 0;
}
"""
#: The same without a compiler: machine code in memory.
MAPPED = r"""
import ctypes, mmap, os, threading
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
# mov rax, rdi; mov rdi, rsi; mov rsi, rdx; mov rdx, rcx; mov r10, r8; mov r8, r9; syscall; ret
SYSCALL = bytes.fromhex("4889f84889f74889d64889ca4d89c24d89c80f05c3")
# mov eax, edi; xor ebx, ebx; int 0x80; ret, with rbx kept
INT80 = bytes.fromhex("5389f831dbcd805bc3")
code.write(SYSCALL.ljust(64, b"\x90") + INT80)
at = ctypes.addressof(ctypes.c_char.from_buffer(code))
call = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_ulong] * 6)(at)
int80 = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_ulong)(at + 64)
HIGH = 0x7000_0000_0000_0000
def sys(number, *args): return call(number, *(*args, 0, 0, 0, 0, 0)[:5])
def threaded():
    thread = threading.Thread(target=int80, args=(20,))
    thread.start()
    thread.join()
    return 0
arguments = (ctypes.c_ulong * 11)(0x10000000, 0, 0, 0, 17)
room = ctypes.create_string_buffer(120)
tries = {
    "int80": lambda: int80(20), "int80:thread": threaded, "x32": lambda: sys(0x40000000 + 39),
    "x32:execve": lambda: sys(0x40000000 + 520), "number:high": lambda: sys(HIGH | 101, 16, 1),
    "clone:high": lambda: sys(56, HIGH | 0x10000000 | 17),
    "clone3": lambda: sys(435, ctypes.addressof(arguments), 88), "unshare:high": lambda: sys(272, HIGH | 0x10000000),
    "family:high": lambda: sys(41, HIGH | 40, 1), "io_uring": lambda: sys(425, 4, ctypes.addressof(room)),
    "userfaultfd": lambda: sys(323), "keyctl": lambda: sys(250, 0, 2**64 - 3, 1), "plain": lambda: sys(39),
}
for name, act in tries.items():
    child = os.fork()
    if child == 0: os._exit(max(0, -act()))
    status = os.waitpid(child, 0)[1]
    print(name, f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
"""
KILLED = f"signal {int(signal.SIGSYS)}"
EPERM, ENOSYS = "1", "38"
WANTED = {
    **dict.fromkeys(("int80", "int80:thread", "x32", "x32:execve"), KILLED),
    **dict.fromkeys(("number:high", "clone:high", "unshare:high", "family:high"), EPERM),
    **dict.fromkeys(("io_uring", "userfaultfd", "keyctl"), EPERM),
    "clone3": ENOSYS,
    "plain": "0",
}


#: Ends in int 0x80 itself.
DIE = MAPPED.split("arguments =", maxsplit=1)[0] + "int80(20)\n"


def foreign() -> str:
    """Return how int 0x80 ends under the filter: a kernel without 32-bit calls ends it earlier, by SIGSEGV."""
    outside = subprocess.run([sys.executable, "-c", DIE], capture_output=True, check=False).returncode
    assert outside in (0, -signal.SIGSEGV), "counter-check: without the filter the call is done, where there is one"
    return KILLED if outside == 0 else f"signal {int(signal.SIGSEGV)}"


@pytest.mark.parametrize("form", ["compiled", "mapped"])
def test_attack_45_foreign_entries_and_high_halves(node_name: str, form: str) -> None:
    """int 0x80 and x32 end the process, high halves of numbers and arguments change nothing, none of it is done."""
    if form == "compiled" and shutil.which("cc") is None:
        pytest.skip("this machine has no C compiler; the same calls are made from machine code in memory")
    compiled = ["sh", "-ec", 'printf "%s" "$1" >a.c; cc -w -O1 -pthread -o a a.c; ./a', "sh", PROGRAM]

    wanted = WANTED | dict.fromkeys(("int80", "int80:thread"), foreign())

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(compiled if form == "compiled" else python(MAPPED))
        assert dict(line.split(" ", 1) for line in seen.out.decode().splitlines()) == wanted, seen

    in_rig(node_name, scenario)


def test_attack_45_a_job_that_uses_a_foreign_entry_is_told_as_such(node_name: str) -> None:
    """The first process's own death on the filter is a signal verdict with SIGSYS, and the slot goes on."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(python(DIE))
        assert seen.verdict.kind == "signal"
        assert f"signal {seen.verdict.signal}" == foreign()
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)
