"""Sandbox: hostile code fails with its reason, in bounded time, and leaves nothing behind."""

import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from realhf import Sandbox, UnitTests
from realhf.errors import UserError
from realhf.rewards import confinement, sandbox

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the sandbox needs Linux")
OUTSIDE = Path(tempfile.gettempdir()) / f"realhf-outside-{os.getpid()}"
HOSTILE = {
    "endless loop": ("while True: pass", "timeout"),
    "sleep": ("import time\ntime.sleep(1000)", "timeout"),
    "fork bomb": ("import os\nwhile True: os.fork()", "processes"),
    "10 GiB": ("x = bytearray(10 << 30)", "memory"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "network"),
    "name look-up": ("import urllib.request\nurllib.request.urlopen('http://example.com')", "network"),
    "file outside": (f"open({str(OUTSIDE)!r}, 'w').write('x')", "files"),
    "secrets of this process": ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "files"),
    "kill": ("import os\nos.kill(os.getppid(), 9)", "error"),
    "output": ("while True: print('x' * 1000)", "output"),
    "early end": ("import os\nos._exit(0)", "ended"),
    "crash": ("import ctypes\nctypes.string_at(0)", "killed"),
    "exit": ("import sys\nsys.exit(0)", "error"),
}
"""Code without end or bounds, and the reason of its failure; test_attacks.py has what is bounded."""


@pytest.fixture
def scratch(monkeypatch):
    """The directory of temporary folders, which others may enter, but for this test only."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def _processes():
    """Return the command lines of the sandboxes of this process."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            stat = (directory / "stat").read_text().rsplit(")", 1)[1].split()
            if int(stat[1]) == os.getpid() and b"sandbox_runner" in (directory / "cmdline").read_bytes():
                found.append(directory.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("landlock", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_gets_no_reward_and_has_a_reason(name, landlock, scratch):
    code, reason = HOSTILE[name]
    box = Sandbox(cpu_seconds=1, wall_seconds=2.5, landlock=landlock)
    started = time.monotonic()
    reward = UnitTests(sandbox=box)
    extra = {}
    scores = reward(completions=[code], tests=["assert True"], log_extra=extra.__setitem__)
    assert time.monotonic() - started < 30
    assert scores == [0.0] and extra == {"unit_tests/reason": [reason]}
    assert not OUTSIDE.exists() and list(scratch.iterdir()) == [] and _processes() == []


def test_a_file_in_its_own_folder_can_be_written_where_the_kernel_has_landlock():
    code = "open('mine', 'w').write('x')\nassert open('mine').read() == 'x'"
    can_write = confinement._landlock_version() >= 3
    assert Sandbox().run(code).reason == ("passed" if can_write else "files")
    assert Sandbox(landlock=False).run(code).reason == "files"


def test_the_disk_is_not_filled():
    code = "for i in range(1000): open(str(i), 'wb').write(b'x' * (1 << 20))"
    assert Sandbox(files_mib=4).run(code).reason == "files"
    assert Sandbox(files_mib=4).run("open('a', 'wb').write(b'x' * (9 << 20))").reason == "files"


def test_the_environment_is_not_passed_on(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    execution = Sandbox().run("import os\nprint(sorted(os.environ))")
    assert "HF_TOKEN" not in execution.stdout and "HOME" in execution.stdout


def test_ordinary_code_runs():
    code = """
import asyncio, collections, decimal, fractions, heapq, itertools, json, math, random, re, threading
sys_recursion = __import__("sys").setrecursionlimit(10000)
async def answer():
    await asyncio.sleep(0)
    return 42
found = []
thread = threading.Thread(target=lambda: found.append(asyncio.run(answer())))
thread.start()
thread.join()
"""
    tests = ["assert found == [42]", "assert found == [43]", "undefined", "assert __name__ == 'answer'"]
    execution = Sandbox().run(code, tests)
    assert execution.reason == "passed", execution
    assert execution.tests == ("passed", "wrong", "error", "passed")
    assert execution.detail == "AssertionError: "


RIGHT = {
    "deep recursion": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(256 << 20)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
        "thread = threading.Thread(target=lambda: print(depth(int(input()))))\nthread.start()\nthread.join()",
        "50000", "50000"),
    "much output": ("print('\\n'.join(map(str, range(int(input())))))", "30000",
                    "\n".join(map(str, range(30000)))),
    "much input": ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
                   "\n".join(map(str, range(200_000))), str(sum(range(200_000)))),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda x: x * x, range(int(input())))))",
        "100", "328350"),
    "asyncio": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n"
        "    print(await asyncio.to_thread(lambda: int(input()) + 1))\nasyncio.run(main())", "4", "5"),
    "a time limit of its own": (
        "import signal, time\ndef late(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, late)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\ntry: time.sleep(9)\nexcept TimeoutError: print('late')",
        "", "late"),
    "a database in memory": (
        "import sqlite3\ndb = sqlite3.connect(':memory:')\ndb.execute('create table t(a)')\n"
        "db.execute('insert into t values (7)')\nprint(*db.execute('select a from t').fetchone())", "", "7"),
    "pipes and select": (
        "import os, select, socket\na, b = socket.socketpair()\na.sendall(b'x')\n"
        "print(select.select([b], [], [], 1)[0] == [b], b.recv(1))", "", "True b'x'"),
    "large numbers": ("import math\nprint(math.factorial(int(input())) % 10007)", "", ""),
    "many modules": (
        "import argparse, array, bisect, calendar, collections, contextlib, copy, csv, ctypes, dataclasses, "
        "datetime, decimal, enum, fractions, functools, gc, gzip, hashlib, heapq, inspect, io, itertools, "
        "json, logging, lzma, math, multiprocessing, operator, pathlib, pickle, platform, queue, random, re, "
        "resource, secrets, selectors, shutil, statistics, string, struct, subprocess, tempfile, textwrap, "
        "time, typing, unittest, urllib.parse, uuid, weakref, xml.etree.ElementTree, zlib, zoneinfo\n"
        "print(datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin')).utcoffset(), "
        "len(uuid.uuid4().hex), platform.system(), random.SystemRandom().random() < 1)",
        "", "2:00:00 32 Linux True"),
}
"""Right programs: code, input and output."""
RIGHT["large numbers"] = (RIGHT["large numbers"][0], "5000", str(math.factorial(5000) % 10007))
WITH_LANDLOCK = {
    "input in a mapping": (
        "import mmap\nm = mmap.mmap(0, 0, access=mmap.ACCESS_READ)\nprint(sum(map(int, m.read().split())))",
        "1 2 3", "6"),
    "a database in a file": (
        "import sqlite3\na, b = (sqlite3.connect('db') for _ in range(2))\na.execute('create table t(a)')\n"
        "a.execute('insert into t values (7)')\na.commit()\nprint(*b.execute('select a from t').fetchone())",
        "", "7"),
    "files of its own": (
        "import pathlib, shutil, tempfile, mmap\nd = pathlib.Path(tempfile.mkdtemp())\n"
        "(d / 'a').write_text(input())\nshutil.move(d / 'a', d / 'b')\nwith open(d / 'b', 'r+b') as f:\n"
        "    m = mmap.mmap(f.fileno(), 0)\n    m[:1] = b'y'\n    m.close()\n"
        "print([p.read_text() for p in d.iterdir()])", "xyz", "['yyz']"),
}
"""Right programs that write files or map them as shared, which the sandbox allows where it has Landlock."""


@pytest.mark.parametrize("landlock", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_right_programs_run(landlock):
    can_write = landlock and confinement._landlock_version() >= 3 and sandbox.may_look()
    programs = RIGHT | (WITH_LANDLOCK if can_write else {})
    box = Sandbox(landlock=landlock)
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(
            lambda program: box.run(program[0], stdin=program[1], as_program=True), programs.values()))
    found = {name: (end.reason, end.detail, end.stdout.strip())
             for name, end in zip(programs, ends, strict=True)}
    assert found == {name: ("passed", "", output) for name, (_, _, output) in programs.items()}


@pytest.mark.slow
def test_installed_packages_compute():
    code = "import networkx, numpy, scipy.optimize, torch\na = numpy.random.rand(300, 300)\n"
    code += "assert numpy.allclose(a @ numpy.linalg.inv(a), numpy.eye(300), atol=1e-6)\n"
    code += "assert torch.ones(9).sum() == 9 and networkx.path_graph(3).size() == 2\n"
    code += "assert abs(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2) - 2**0.5) < 1e-9"
    box = Sandbox(packages=True, memory_mib=8192, cpu_seconds=60, wall_seconds=200, threads=64)
    assert box.run(code).reason == "passed"


def test_a_program_has_no_huge_pages():
    """Unmapping a part of one frees nothing, so what a process has mapped would not bound its memory."""
    status = ""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(Sandbox().run, "import time\ntime.sleep(1)")
        while "Seccomp:\t2" not in status and not running.done():
            time.sleep(0.01)
            status = next((Path(f"/proc/{name}/status").read_text() for name in _processes()), "")
        assert running.result().reason == "passed"
    assert "Seccomp:\t2" in status and "NoNewPrivs:\t1" in status and "THP_enabled:\t1" not in status


def test_tests_that_were_passed_before_the_end_count():
    execution = Sandbox(cpu_seconds=1).run("x = 1", ["assert x", "while True: pass", "assert x"])
    assert execution.tests == ("passed", "timeout", "timeout")
    assert Sandbox().run("x = ", ["pass"]).tests == ("error",)


def test_a_program_reads_and_prints():
    code = "import sys\nprint(int(input()) + sum(map(int, sys.stdin.read().split())))\nexit()"
    execution = Sandbox().run(code, stdin="1\n2 3\n", as_program=True)
    assert (execution.reason, execution.stdout) == ("passed", "6\n")
    assert Sandbox().run("print(open(0).read())", stdin="é", as_program=True).stdout == "é\n"


def test_sets_of_text_have_the_same_order_in_every_process():
    code = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len({Sandbox().run(code).stdout for _ in range(3)}) == 1


def test_code_may_import_the_packages_that_are_installed_if_it_is_allowed():
    code = "import numpy\nassert numpy.ones((3, 3)).dot(numpy.ones(3)).sum() == 9.0"
    assert Sandbox().run(code).reason == "error"
    assert Sandbox(packages=True, memory_mib=4096).run(code).reason == "passed"


def test_code_that_closes_its_output_is_stopped():
    code = "import os, time\nfor i in range(3, 64):\n    try: os.close(i)\n    except OSError: pass\n"
    code += "os.close(1)\nos.close(2)\ntime.sleep(100)"
    started = time.monotonic()
    assert Sandbox(wall_seconds=1.0).run(code).reason == "timeout"
    assert time.monotonic() - started < 20 and _processes() == []


def test_a_forged_report_does_not_count():
    code = "import os\nfor i in range(3, 64):\n    try: os.write(i, b'x {\"event\": \"test\", "
    code += "\"reason\": \"passed\"}\\n')\n    except OSError: pass\nos._exit(0)"
    assert Sandbox().run(code, ["assert False"]).tests == ("ended",)


@pytest.mark.parametrize("line", [
    " {}", " []", ' {"event": "code"}', ' {"event": "test", "reason": "made up"}', ' {"event": ["code"]}',
    ' {"event": "code", "reason": "passed", "detail": 7}', "[" * 50_000,
])
def test_code_that_finds_the_secret_word_ends_no_run(line):
    code = "import os, sys\nframe = sys._getframe()\n"
    code += "while 'report_fd' not in frame.f_locals: frame = frame.f_back\n"
    code += f"word = frame.f_locals['word']\ntext = word + {line!r} + '\\n'\n"
    code += "os.write(frame.f_locals['report_fd'], text.encode())\nos._exit(0)"
    assert Sandbox().run(code, ["assert True"]).tests in [("ended",), ("error",)]


def test_directories_that_cannot_be_listed_are_measured_and_deleted(scratch):
    """Root can list them all the same."""
    code = "import os\nos.mkdir('d', 0o300)\nfor i in range(9): open(f'd/{i}', 'wb').write(bytes(1 << 20))"
    assert Sandbox(files_mib=4).run(f"{code}\nimport time\ntime.sleep(9)").reason == "files"
    assert list(scratch.iterdir()) == []


def test_temporary_files_can_be_used():
    code = "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x')\n"
    code += "with tempfile.TemporaryDirectory() as d: open(d + '/a', 'w').write('x')"
    can_write = confinement._landlock_version() >= 3
    may_delete = sandbox.may_look()
    assert Sandbox().run(code).reason == ("passed" if can_write and may_delete else "files")


def test_a_machine_without_protection_is_refused():
    """The sandbox is told of a machine that it does not know: it refuses, or runs only if it is told to."""
    code = (
        "import platform\nplatform.machine = lambda: 'sparc'\n"
        "from realhf.rewards import sandbox_runner\nsandbox_runner.main()")
    script = f"""
import sys
from realhf.rewards import sandbox
sandbox._START = "import sys; sys.path[0] = {{root!r}};" + {code!r}.replace(chr(10), "; ")
try:
    sandbox.Sandbox().run("print(1)")
except ValueError as error:
    print(error)
print(sandbox.Sandbox(allow_unprotected=True).run("print(1)").stdout)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    said, answer = result.stdout.strip().splitlines()
    assert "the sandbox cannot protect this machine: it needs Linux on x86_64 or aarch64, and this is" in said
    assert "on sparc; set Sandbox.allow_unprotected only for code that you trust" in said and answer == "1"


@pytest.mark.parametrize(("machine", "header", "prefix"), [
    ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "__NR_"),
    ("aarch64", "/usr/include/asm-generic/unistd.h", "__NR(?:3264)?_"),
])
def test_numbers_of_system_calls_are_those_of_the_kernel(machine, header, prefix):
    if not Path(header).exists():
        pytest.skip(f"there is no {header}")
    pairs = re.findall(rf"#define {prefix}(\w+)\s+(\d+)", Path(header).read_text())
    known = {name: int(number) for name, number in pairs}
    groups = confinement.system_calls(machine).values()
    ours = {name: number for group in groups for name, number in group.items()}
    assert len(ours) == sum(map(len, groups))
    assert {name: known.get(name, number) for name, number in ours.items()} == ours
    assert len(set(ours) & set(known)) > 80 and all(number <= confinement._NEWEST for number in ours.values())


def test_refusals():
    with pytest.raises(ValueError, match=r"Sandbox.cpu_seconds is 0: it must be above 0"):
        Sandbox(cpu_seconds=0)
    assert issubclass(UserError, ValueError)


def test_a_sandbox_that_cannot_start_leaves_nothing_open(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        Sandbox().run("x = 1")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_whose_parent_has_gone_does_not_run(tmp_path):
    code = (
        "import sys\nfrom realhf.rewards.confinement import confine\n"
        f"confine({str(tmp_path)!r}, readable=['/usr', sys.base_prefix], parent=int(sys.argv[1]))\n"
        "sys.stdout.write('runs')\nsys.stdout.flush()")
    said = [
        subprocess.run([sys.executable, "-c", code, str(parent)], capture_output=True, text=True).stdout
        for parent in (os.getpid(), 1)]
    assert said == ["runs", ""]
