"""A small task of assembly, and a simulated person who helps with it, in plain Python.

A gripper with a peg starts somewhere above a table and must put the peg into a hole. In half of the episodes
it starts in a nook behind a wall and under a shelf: the way out is back, up, and over the wall. A peg that
meets the table beside the hole sticks there until it is lifted. The reward is 1 when the peg is in, else 0.
"""

from dataclasses import asdict, dataclass, field
from math import hypot, tanh
from typing import Any

import numpy as np

OBSERVATION_DIM = 16
ACTION_DIM = 4
MAX_STEPS = 40  # Steps of an episode.
TOLERANCE = 0.15  # The peg enters the hole if it is less than this away from the centre,
MAX_ANGLE = 0.4  # and turned by less than this, in radians.
DEPTH = 0.15  # The peg is in at this depth.
TOP_SPEED = (0.25, 0.25, 0.25, 0.6)  # Change of x, y, z and the angle per step at full action.
WALL = 0.3  # The wall is at this x,
HEIGHT = 0.6  # and so high.
SHELF = 0.4  # The shelf is at this height,
EDGE = 0.6  # and reaches from the wall to this x.
LEAST = (-1.0, -1.0, -1.0, -1.5)
MOST = (1.0, 1.0, 0.8, 1.5)


@dataclass
class Station:
    """A gripper above a table. Positions are x, y, z from the hole and the angle between peg and hole."""

    position: list[float] = field(default_factory=lambda: [0.0] * 4)
    velocity: list[float] = field(default_factory=lambda: [0.0] * 4)
    num_steps: int = 0

    @classmethod
    def at_random(cls, rng: np.random.Generator, *, behind: bool) -> "Station":
        """Return a station at the start of an episode, behind the wall or before it."""
        across, along, height, angle = rng.random(4).tolist()
        x = 0.35 + 0.2 * across if behind else 0.2 - 0.9 * across
        return cls([x, 1.2 * along - 0.6, 0.05 + 0.25 * height, 2.4 * angle - 1.2])

    def observation(self) -> list[float]:
        """Return positions, velocities relative to the top speed, and what sensors of nearness say."""
        x, y, z, angle = self.position
        speeds = [v / top for v, top in zip(self.velocity, TOP_SPEED, strict=True)]
        distances = (x, y, z, angle / 2, x - WALL, x - EDGE, z - SHELF, z - HEIGHT)
        return [*self.position, *speeds, *[tanh(distance / 0.1) for distance in distances]]

    def move(self, action: list[float]) -> bool:
        """Move for one step; return whether the peg is in. The arm has inertia."""
        wanted = [top * max(-1.0, min(1.0, a)) for a, top in zip(action, TOP_SPEED, strict=True)]
        velocity = [0.5 * v + 0.5 * w for v, w in zip(self.velocity, wanted, strict=True)]
        x, _, height, _ = self.position
        if height < 0:  # The hole holds the peg.
            velocity = [0.0, 0.0, velocity[2], 0.0]
        elif height == 0 and velocity[2] <= 0:  # The peg sticks to the table.
            velocity = [0.1 * velocity[0], 0.1 * velocity[1], velocity[2], 0.1 * velocity[3]]
        moved = zip(self.position, velocity, LEAST, MOST, strict=True)
        self.position = [max(least, min(most, p + v)) for p, v, least, most in moved]
        if self.position[2] < 0 <= height and not self.fits:
            self.position[2] = velocity[2] = 0.0
        if (self.position[0] - WALL) * (x - WALL) <= 0 and min(height, self.position[2]) < HEIGHT:
            self.position[0], velocity[0] = x, 0.0
        if (self.position[2] - SHELF) * (height - SHELF) <= 0 and WALL < self.position[0] < EDGE:
            self.position[2], velocity[2] = height, 0.0
        self.velocity = velocity
        self.num_steps += 1
        return self.position[2] <= -DEPTH

    @property
    def fits(self) -> bool:
        """Whether the peg is over the hole and turned like it."""
        return hypot(*self.position[:2]) < TOLERANCE and abs(self.position[3]) < MAX_ANGLE

    @property
    def distance(self) -> float:
        """Return how much is left to do, as a person sees it."""
        x, y, z, angle = self.position
        if x < WALL:
            return hypot(x, y) + 0.3 * abs(angle) + max(0.0, z + DEPTH)
        if z >= HEIGHT:
            return 3 + x
        return 4 + HEIGHT - z if x > EDGE else 5 + EDGE - x

@dataclass
class Person:
    """A simulated operator: slow, noisy, and less attentive from episode to episode.

    Looks at a share of the episodes, which falls linearly from all to `least_attention` over
    `attention_episodes`. Takes over when there has been no progress for some steps, and lets go again.
    """

    noise: float = 0.2  # Standard deviation of the hand, relative to full action.
    delay: int = 1  # The hand follows what was seen so many steps ago.
    patience: int = 6  # Steps without progress before the decision to help.
    reaction: int = 2  # Steps from the decision to the first own action.
    hold: int = 12  # Steps of an intervention.
    attention_episodes: int = 150
    least_attention: float = 0.2
    looks: bool = True
    seen: list[list[float]] = field(default_factory=list)
    """The last positions that were seen, the oldest first."""
    best: float = 0.0  # The shortest distance in this episode, or since the last intervention.
    stalled: int = 0  # Steps since then.
    waits: int = 0  # Steps until the hand moves.
    holds: int = 0  # Steps that the intervention goes on.

    def begin(self, station: Station, episode: int, rng: np.random.Generator) -> None:
        """Look at a new episode, or do not."""
        attention = max(self.least_attention, 1 - episode / self.attention_episodes)
        self.looks = bool(rng.random() < attention)
        self.seen = [station.position] * (self.delay + 1)
        self.best = station.distance
        self.stalled = self.waits = self.holds = 0

    def watch(self, station: Station) -> bool:
        """See the station before a step; return whether this person makes the step."""
        self.seen = [*self.seen[1:], station.position]
        self.stalled += 1
        if station.distance < self.best - 0.03:
            self.best = station.distance
            self.stalled = 0
        if self.holds:
            self.holds -= 1
            if not self.holds:
                self.best = station.distance
                self.stalled = 0
            return True
        if self.waits:
            self.waits -= 1
            self.holds = 0 if self.waits else self.hold
        elif self.looks and self.stalled >= self.patience:
            self.waits = self.reaction
        return False

    def act(self, rng: np.random.Generator) -> list[float]:
        """Return what the hand does: out of the nook, over the hole, turn, and down."""
        x, y, z, angle = self.seen[0]
        away = hypot(x, y)
        is_over = away < 0.6 * TOLERANCE and abs(angle) < 0.8 * MAX_ANGLE
        if x > WALL - 0.05 and z > HEIGHT:
            hand = [-0.8, -2 * y, 2 * (HEIGHT + 0.1 - z), -0.8 * angle]
        elif x > WALL:
            hand = [4 * (EDGE + 0.15 - x), -y, 0.8 if x > EDGE + 0.05 else 0.0, -0.8 * angle]
        else:
            hand = [-2 * x, -2 * y, -0.4 if is_over or z < 0 else 2 * (0.15 - z), -0.8 * angle]
        shaking = self.noise * (0.3 + min(1.0, 2 * away)) * rng.standard_normal(4)
        noisy = [max(-0.8, min(0.8, h)) + s for h, s in zip(hand, shaking.tolist(), strict=True)]
        return [max(-1.0, min(1.0, a)) for a in noisy]


@dataclass
class Scene:
    """A station with a person beside it, episode after episode.

    Random numbers follow from the seed and the number of the step or episode. While the person `shows` the
    task, all episodes begin before the wall; else every second one begins in the nook.
    """

    station: Station
    person: Person
    seed: int
    shows: bool = False
    episode: int = -1
    num_steps: int = 0

    @classmethod
    def new(cls, person: Person, seed: int, *, shows: bool = False) -> "Scene":
        scene = cls(Station(), person, seed, shows)
        scene.begin()
        return scene

    def begin(self) -> None:
        """Begin the next episode."""
        self.episode += 1
        rng = np.random.default_rng((self.seed, 1, self.episode))
        self.station = Station.at_random(rng, behind=not self.shows and self.episode % 2 == 1)
        self.person.begin(self.station, self.episode, rng)

    def advance(self, done: bool) -> bool:
        """Count a step; return whether the episode has ended, and another has begun."""
        self.num_steps += 1
        ended = done or self.station.num_steps == MAX_STEPS
        if ended:
            self.begin()
        return ended

    def random(self) -> np.random.Generator:
        """Return the random numbers of the next step."""
        return np.random.default_rng((self.seed, 0, self.num_steps))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Scene":
        parts = {"station": Station(**saved["station"]), "person": Person(**saved["person"])}
        return cls(**saved | parts)
