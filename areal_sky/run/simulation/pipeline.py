"""A model of an asynchronous RL run in the manner of AReaL (arXiv 2505.24298): rollout replicas feed trainers.

Rollouts start trajectories as long as at most `batch` x (version + eta + 1) have been started in all (the paper's
bound on staleness); the trainer takes the oldest `batch` finished ones, and a step makes a new version of the policy.
Rollouts then stop for `update_s` to load it: in the middle of their work where generation is interruptible, else (the
paper's ablation) once all that they have begun is finished.

n GPUs with k trajectories in flight generate k / (k / (n x R) + 1 / v) tokens a second: R is what a full GPU gives, v
the speed of one trajectory alone. So where GPUs are many and the staleness bound keeps few trajectories in flight, more
GPUs help little: this is what flattens AReaL's own curves. `PROFILES` says where each number is from.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Profile:
    """Speeds of one model on one kind of GPU. Tokens per second; lengths are generated tokens per trajectory.

    Lengths are log-normal around `mean_tokens` with `sigma`, cut at `max_tokens`; the mean grows by `growth_per_step`
    of itself with each version. `step_s`: of the trainer besides its tokens.
    """

    name: str
    rollout_tokens_per_gpu_s: float
    alone_tokens_per_s: float
    train_tokens_per_gpu_s: float
    mean_tokens: float
    sigma: float = 0.6
    max_tokens: int = 27_000
    growth_per_step: float = 0.0005
    update_s: float = 5.0
    step_s: float = 2.0


# The first two speeds: fitted to AReaL's scaling figure (H800, 3/4 of the GPUs for rollouts, 512 trajectories a step,
# eta 4); docs/simulator.md has the points and how near they come. Mean lengths: tokens/s of that figure x seconds per
# step (blog AReaL_v0_3: 1,000 steps in 14.8 h on 128 GPUs for 1.5B, in 25.4 h on 192 for 7B) / 512; for 32B as for 7B.
# Trainers are assumed to keep up with some to spare on 1/4 of the GPUs; sigma and growth are assumed, too: the papers
# say that lengths vary much and grow as training goes on (DeepSeek-R1, arXiv 2501.12948, figure 3), not how.
PROFILES: Mapping[str, Profile] = {
    "1.5b": Profile("1.5b", 1330.0, 230.0, 4900.0, 10_500.0),
    "7b": Profile("7b", 445.0, 125.0, 1640.0, 8_700.0),
    "32b": Profile("32b", 100.0, 200.0, 352.0, 8_700.0),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """One run. `steps`: versions to make; `eta`: most versions that data may lag behind; `lengths`: instead of the
    profile's distribution, to draw from.
    """

    profile: Profile
    steps: int
    train_gpus: float
    batch: int = 512
    eta: int = 4
    interruptible: bool = True
    lengths: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Of a run so far. `tokens`: trained on; `lost_tokens`: generated in vain. Shares of the time with GPUs there.

    `staleness`: mean versions between the start of a trajectory and the step that used it, `max_staleness` the most.
    `rollout_idle_frac`: no trajectory may be started, or weights are loaded; `trainer_idle_frac`: it waits for data.
    """

    seconds: float
    versions: int
    tokens: float
    lost_tokens: float
    staleness: float
    max_staleness: int
    rollout_idle_frac: float
    trainer_idle_frac: float
    trajectories: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Pipeline:
    """See the module. Tell it what GPUs it has (`rollouts`, `trainer`), and `advance` it; times only go forward."""

    def __init__(self, setup: Setup, draw: random.Random, now_s: float = 0.0):
        self._setup, self._draw = setup, draw
        self._start_s = self._now_s = now_s
        self._gpus = 0.0
        self._trainer = False
        self._clock = 0.0  # tokens that a trajectory has made which was there from the start
        self._loading_s = 0.0  # until then
        self._must_load = False  # once nothing is in flight any more
        self._flying: list[tuple[float, int, int, float]] = []  # (clock at its end, number, version, tokens)
        self._number = 0
        self._begun = 0
        self._ready: deque[tuple[int, float]] = deque()
        self._training: list[tuple[int, float]] = []
        self._trained_s = math.inf
        self._tokens = self._lost = 0.0
        self._lags = self._lag_max = 0
        self._used = 0
        self._rollout_s = self._rollout_idle_s = self._trainer_s = self._trainer_idle_s = 0.0
        self.version = 0

    @property
    def finished(self) -> bool:
        return self.version >= self._setup.steps

    def rollouts(self, gpus: float, now_s: float) -> None:
        """So many GPUs generate from now on. The share of trajectories that ran on lost ones begins anew."""
        self.advance(now_s)
        if gpus < self._gpus:
            gone = round(len(self._flying) * (1.0 - gpus / self._gpus))
            victims = set(self._draw.sample(range(len(self._flying)), gone))
            for i in sorted(victims):
                end, _, _, tokens = self._flying[i]
                self._lost += max(0.0, tokens - (end - self._clock))
            self._flying = [x for i, x in enumerate(self._flying) if i not in victims]
            heapify(self._flying)
            self._begun -= gone
        self._gpus = gpus
        self._begin()

    def trainer(self, there: bool, now_s: float) -> None:
        """The trainer runs from now on, or has stopped: its step is to be done again."""
        self.advance(now_s)
        if not there and self._training:
            self._ready.extendleft(reversed(self._training))
            self._training, self._trained_s = [], math.inf
        self._trainer = there
        self._train()

    def advance(self, now_s: float) -> None:
        """Everything up to that time."""
        while not self.finished:
            speed = self._speed()
            done_s = math.inf
            if speed and self._flying:
                done_s = max(self._now_s, self._loading_s) + (self._flying[0][0] - self._clock) / speed
            next_s = min(done_s, self._trained_s)
            self._pass(min(next_s, now_s), speed)
            if next_s > now_s:
                return
            if self._trained_s <= done_s:
                self._step_done()
            else:
                self._trajectory_done()

    def figures(self) -> PipelineFigures:
        return PipelineFigures(
            seconds=self._now_s - self._start_s, versions=self.version, tokens=self._tokens, lost_tokens=self._lost,
            staleness=self._lags / self._used if self._used else 0.0, max_staleness=self._lag_max,
            rollout_idle_frac=self._rollout_idle_s / self._rollout_s if self._rollout_s else 0.0,
            trainer_idle_frac=self._trainer_idle_s / self._trainer_s if self._trainer_s else 0.0,
            trajectories=self._number,
        )  # fmt: skip

    @property
    def outstanding(self) -> int:
        """Trajectories begun and not yet part of a version: at most batch x (eta + 1)."""
        return self._begun - self.version * self._setup.batch

    # ---------------------------------------------------------------- how

    def _speed(self) -> float:
        """Tokens per second of each trajectory in flight."""
        flying = len(self._flying)
        if not self._gpus or not flying:
            return 0.0
        p = self._setup.profile
        return 1.0 / (flying / (self._gpus * p.rollout_tokens_per_gpu_s) + 1.0 / p.alone_tokens_per_s)

    def _pass(self, t_s: float, speed: float) -> None:
        span_s = t_s - self._now_s
        if span_s <= 0:
            return
        working_s = max(0.0, t_s - max(self._now_s, self._loading_s))
        self._clock += working_s * speed
        if self._gpus:
            self._rollout_s += span_s
            self._rollout_idle_s += span_s if not self._flying else span_s - working_s
        if self._trainer:
            self._trainer_s += span_s
            self._trainer_idle_s += 0.0 if self._training else span_s
        self._now_s = t_s

    def _begin(self) -> None:
        """As many trajectories as the bound on staleness allows."""
        s = self._setup
        if not self._gpus or self._must_load or self.finished:
            return
        allowed = min(s.batch * (self.version + s.eta + 1), s.batch * s.steps)
        while self._begun < allowed:
            self._begun += 1
            self._number += 1
            tokens = self._length()
            heappush(self._flying, (self._clock + tokens, self._number, self.version, tokens))

    def _length(self) -> float:
        s, p = self._setup, self._setup.profile
        if s.lengths:
            return max(1.0, float(s.lengths[self._draw.randrange(len(s.lengths))]))
        mean = p.mean_tokens * (1.0 + p.growth_per_step * self.version)
        drawn = mean * self._draw.lognormvariate(-p.sigma * p.sigma / 2, p.sigma)
        return min(max(1.0, drawn), float(p.max_tokens))

    def _trajectory_done(self) -> None:
        _, _, version, tokens = heappop(self._flying)
        self._ready.append((version, tokens))
        if self._must_load and not self._flying:
            self._load()
        self._train()

    def _train(self) -> None:
        s = self._setup
        if not self._trainer or self._training or len(self._ready) < s.batch or self.finished:
            return
        self._training = [self._ready.popleft() for _ in range(s.batch)]
        tokens = sum(tokens for _, tokens in self._training)
        self._trained_s = self._now_s + s.profile.step_s + tokens / (s.profile.train_tokens_per_gpu_s * s.train_gpus)

    def _step_done(self) -> None:
        for version, tokens in self._training:
            lag = self.version - version
            self._lags += lag
            self._lag_max = max(self._lag_max, lag)
            self._tokens += tokens
        self._used += len(self._training)
        self._training, self._trained_s = [], math.inf
        self.version += 1
        if self._setup.interruptible or not self._flying:
            self._load()
        else:
            self._must_load = True
        self._train()

    def _load(self) -> None:
        self._must_load = False
        self._loading_s = self._now_s + self._setup.profile.update_s
        self._begin()
