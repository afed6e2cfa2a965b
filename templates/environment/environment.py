"""The environment of experiment.py: a game with a tool, played in turns."""

import random

from realhf import Start, Turn

BOXES = (1, 2)


class FindCoin:
    """One of two boxes has a coin. The model must look into one of them, and then say which it is."""

    def start(self, row: dict, seed: int) -> Start:
        """Begin a game. `row` is a row of the data; all samples of a row have the same seed."""
        self.coin = random.Random(seed).choice(BOXES)
        self.has_looked = False
        return Start(f"A coin is in box 1 or 2. Game {row['game']}.", tools=[self.look])

    def look(self, box: int) -> str:
        """Look into a box.

        Args:
            box: The number of the box.
        """
        self.has_looked = True
        return "coin" if box == self.coin else "empty"

    def step(self, message: dict) -> Turn:
        """Answer the model: each call of the tool with its result, an answer with a reward."""
        calls = message.get("tool_calls", [])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": "look",
             "content": self.look(**call["function"]["arguments"])}
            for call in calls]
        if results:
            return Turn(results, metrics={"calls": len(calls)})
        answer = message["content"].strip()
        if answer not in map(str, BOXES):
            return Turn("Say 1 or 2.", reward=-0.1)
        if not self.has_looked:
            return Turn("Look first.", reward=-0.1)
        return Turn(reward=float(answer == str(self.coin)), done=True)

    def finish(self, stop: str) -> Turn:
        """Reward a game that is stopped without an answer, such as for `max_turns`."""
        return Turn(reward=-0.3)
