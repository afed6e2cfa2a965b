"""Environments that tests start in workers: sound ones, and such as fail in every way."""

import asyncio
import mmap
import os
import random
import signal
import sys
import time

import realhf.environments.protocol as protocol
from realhf.environments.protocol import Start, Turn

HOARD = []


class Guess:
    """Guess a number, as a user would write it."""

    def start(self, row, seed):
        self.number = random.Random(seed).randint(1, row["most"])
        return Start(f"Guess a number from 1 to {row['most']}.")

    def step(self, message):
        guess = int(message["content"])
        if guess == self.number:
            return Turn(reward=1.0, done=True, metrics={"guess": guess})
        return Turn("Higher." if guess < self.number else "Lower.", reward={"near": -0.1, "far": 0.0})


class AsyncGuess(Guess):
    async def step(self, message):
        await asyncio.sleep(0.01)
        return Guess.step(self, message)


class Sleeps:
    def step(self, message):
        time.sleep(message["seconds"])
        return Turn(str(os.getpid()))


class AsyncSleeps:
    async def start(self, row, seed):
        await asyncio.sleep(row.get("seconds", 0.0))

    async def step(self, message):
        if message.get("blocks"):
            time.sleep(message["seconds"])
        await asyncio.sleep(message["seconds"])
        return Turn(str(os.getpid()))


class Global:
    """Draws from the random numbers of the process, as textarena does, and needs the main thread."""

    state = "data of a user"

    def start(self, row, seed):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return Start(str(random.random()))

    def step(self, message):
        return Turn(f"{random.random()} {os.getpid()}")


class AsyncGlobal(Global):
    async def step(self, message):
        await asyncio.sleep(0.01)
        return Global.step(self, message)


class Fails:
    """Fails in the way that the message names."""

    def start(self, row, seed):
        if "start" in row:
            raise ValueError(row["start"])

    def step(self, message):
        return getattr(self, message["content"])()

    def close(self):
        if HOARD == ["close"]:
            raise OSError("no such door")

    def works(self):
        return Turn("On.")

    def raises(self):
        raise KeyError("door")

    def leaves(self):
        sys.exit(3)

    def hangs(self):
        while True:
            time.sleep(0.01)

    def is_stuck(self):
        while True:  # Nothing interrupts this wait.
            time.sleep(3600)

    def closes_badly(self):
        HOARD.append("close")
        return Turn(done=True)

    def leaks(self):
        while True:
            HOARD.append(bytearray(1 << 26))

    def maps(self):
        while True:
            HOARD.append(mmap.mmap(-1, 1 << 24))

    def has_nothing(self):
        return Turn(str(len(HOARD)))

    def is_killed(self):
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def exits(self):
        os._exit(7)

    def is_nonsense(self):
        return "nonsense"

    def is_nan(self):
        return Turn("x", reward=float("nan"))

    def answers_itself(self):
        return Turn([{"role": "assistant", "content": "x"}])

    def is_no_json(self):
        return Turn([{"role": "user", "content": "x", "more": {1, 2}}])

    def floods(self):
        return Turn("x" * (protocol.MAX_REPLY_BYTES + 1))

    def prints(self):
        for _ in range(3000):
            print("y" * 1000)
        return Turn("On.")


class Keeps:
    """Counts in the row's steps, and can be kept."""

    def start(self, row, seed):
        self.count = 0
        self.by = row.get("by", 1)

    def step(self, message):
        self.count += self.by
        return Turn(str(self.count))

    def finish(self, stop):
        return Turn(reward={stop: self.count})

    async def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


def vague(x):
    return x


class BadTool:
    """Its tool has neither types nor a docstring."""

    def start(self, row, seed):
        return Start(tools=[vague])

    def step(self, message):
        return Turn(done=True)


class NoStep:
    pass


def tool_add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


TOOLS = protocol.Environment(tools=(tool_add,))


class Talks:
    """Answers at length or briefly, sometimes late, and is done after some answers of a certain length."""

    def start(self, row, seed):
        self.number = row["number"]
        self.turn = 0
        return Start("Q" * [1, 64, 75][self.number % 3])

    def step(self, message):
        length = len(message["content"])
        time.sleep(0.004 * (length % 4))
        self.turn += 1
        said = "abcdefghij" * 7
        reply = said[: [1, 7, 70][(self.number + self.turn + length) % 3]]
        return Turn(reply, reward={"length": length}, done=length % 5 == 0, metrics={"turn": self.turn})

    def finish(self, stop):
        return Turn(reward={"stopped": 0.5})


class Ponders(Talks):
    def step(self, message):
        time.sleep(0.2)
        return super().step(message)


class StartsLate(Talks):
    """Takes a while to start where its start is longest."""

    def start(self, row, seed):
        if row["number"] % 3 == 2:
            time.sleep(2.0)
        self.first = self.started = time.monotonic()
        return super().start(row, seed)

    def step(self, message):
        if not self.turn:
            self.first = time.monotonic()
        turn = super().step(message)
        return Turn(turn.messages, turn.reward, turn.done, {"started": self.started, "first": self.first})


class Breaks:
    """Breaks in the way that the row names, after its first answer."""

    def start(self, row, seed):
        self.way = row["number"]
        self.turn = 0
        if self.way == "start":
            raise ValueError("no such game")
        return Start("Q")

    def step(self, message):
        self.turn += 1
        if self.turn < 2 or self.way == "works":
            return Turn("a", reward=0.5, done=self.turn == 3)
        return getattr(self, self.way)()

    def raises(self):
        raise KeyError("door")

    def hangs(self):
        time.sleep(60)

    def is_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def floods(self):
        return Turn("x" * 5000)

    def is_nonsense(self):
        return "nonsense"
