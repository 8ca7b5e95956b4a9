"""A whole RL run in numpy: GRPO on one-digit sums with a verifiable reward. No GPU, no framework; it really learns.

A prompt is `a + b` (digits), the policy answers with the last digit of the sum, and the reward is 1 if it is right.
Chance is 0.1; 60 iterations reach about 0.9. The three roles of one model share a directory:

    policy_gradient.py train    learns; a gang of N ranks averages its gradients over TCP
    policy_gradient.py rollout  answers prompts with the newest policy and keeps the answers for the trainer
    policy_gradient.py eval     scores the newest policy on every prompt

Each role writes down how far it has come and goes on from there when it is started again, so killing it costs
at most one iteration. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read as torchrun sets them.
"""

from __future__ import annotations

import argparse
import os
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

# One thread per process: many of these share one small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

DIGITS = 10
HIDDEN = 128
ANSWERS_PER_PROMPT = 8  # the group of GRPO: an answer is good or bad compared with its siblings
MAX_STALENESS = 2  # policy versions by which a rollout may lag, AReaL's eta
UPDATES_PER_BATCH = 4
CLIP = 0.2  # as PPO's: how far one batch may move the odds of an answer
ENTROPY = 0.3  # keeps rare answers alive; without it half of the prompts never find theirs
LEARNING_RATE = 0.02

Arrays = dict[str, np.ndarray]


# ---------------------------------------------------------------- the policy


def new_policy(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.normal(0, 0.3, (2 * DIGITS, HIDDEN)),
        "w2": rng.normal(0, 0.05, (HIDDEN, DIGITS)),
    }


def forward(policy: Arrays, prompts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inputs, hidden, probabilities of each answer) for prompts of shape (n, 2)."""
    inputs = np.concatenate([np.eye(DIGITS)[prompts[:, 0]], np.eye(DIGITS)[prompts[:, 1]]], axis=1)
    hidden = np.tanh(inputs @ policy["w1"])
    logits = hidden @ policy["w2"]
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return inputs, hidden, scores / scores.sum(axis=1, keepdims=True)


def sample(policy: Arrays, rng: np.random.Generator, prompts: int) -> Arrays:
    """Answer random prompts: (n, 2) prompts, (n, group) answers, their probabilities and rewards."""
    asked = rng.integers(0, DIGITS, (prompts, 2))
    p = forward(policy, asked)[2]
    draws = rng.random((prompts, ANSWERS_PER_PROMPT, 1))
    answers = np.minimum((draws > p.cumsum(axis=1)[:, None, :]).sum(axis=2), DIGITS - 1)
    right = asked.sum(axis=1) % DIGITS
    return {
        "prompts": asked,
        "answers": answers,
        "old_p": np.take_along_axis(p, answers, axis=1),
        "rewards": (answers == right[:, None]).astype(float),
    }


def gradient(policy: Arrays, batch: Arrays) -> Arrays:
    """Of the clipped GRPO objective with an entropy bonus, to be followed upwards."""
    rewards, answers = batch["rewards"], batch["answers"]
    advantage = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std(axis=1, keepdims=True) + 1e-6)
    inputs, hidden, p = forward(policy, batch["prompts"])
    ratio = np.take_along_axis(p, answers, axis=1) / batch["old_p"]
    inside = np.where(advantage > 0, ratio < 1 + CLIP, ratio > 1 - CLIP)
    push = advantage * ratio * inside
    chosen = np.zeros_like(p)
    np.add.at(chosen, (np.arange(len(p))[:, None], answers), push)
    log_p = np.log(p + 1e-12)
    entropy = -(p * log_p).sum(axis=1, keepdims=True)
    d_reward = (chosen - p * push.sum(axis=1, keepdims=True)) / ANSWERS_PER_PROMPT
    d_logits = (d_reward - ENTROPY * p * (log_p + entropy)) / len(p)
    d_hidden = (d_logits @ policy["w2"].T) * (1 - hidden**2)
    return {"w1": inputs.T @ d_hidden, "w2": hidden.T @ d_logits}


def adam(policy: Arrays, moments: Arrays, grad: Arrays, update: int) -> None:
    for key, g in grad.items():
        m = moments.setdefault(f"m_{key}", np.zeros_like(g))
        v = moments.setdefault(f"v_{key}", np.zeros_like(g))
        m += 0.1 * (g - m)
        v += 0.001 * (g**2 - v)
        policy[key] = policy[key] + LEARNING_RATE * (m / (1 - 0.9**update)) / (np.sqrt(v / (1 - 0.999**update)) + 1e-8)


def accuracy(policy: Arrays) -> float:
    """Expected reward over all 100 prompts."""
    prompts = np.stack(np.meshgrid(np.arange(DIGITS), np.arange(DIGITS)), axis=-1).reshape(-1, 2)
    p = forward(policy, prompts)[2]
    return float(p[np.arange(len(prompts)), prompts.sum(axis=1) % DIGITS].mean())


# ---------------------------------------------------------------- what outlives a process


def save(path: Path, arrays: Arrays) -> None:
    """Whole or not at all: a kill in the middle leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("wb") as f:
        np.savez(f, **arrays)  # type: ignore[arg-type]
    scratch.replace(path)


def load(path: Path) -> Arrays | None:
    try:
        with np.load(path) as stored:
            return {key: stored[key] for key in stored.files}
    except FileNotFoundError:
        return None


def newest_policy(folder: Path, seed: int) -> tuple[Arrays, int]:
    """The trainer's newest weights and their version; the untrained ones as version 0."""
    stored = load(folder / "policy.npz")
    if stored is None:
        return new_policy(seed), 0
    return {"w1": stored["w1"], "w2": stored["w2"]}, int(stored["step"])


# ---------------------------------------------------------------- the gang


class Gang:
    """The ranks of one training task. Rank 0 listens on MASTER_PORT; all leave a round with the mean gradient."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        address = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0")))
        key = os.environ.get("AREAL_SKY_TASK_ID", "policy-gradient").encode()
        self.peers: list[Connection] = []
        if self.size > 1 and self.rank == 0:
            with Listener(address, authkey=key) as listener:
                self.peers = [listener.accept() for _ in range(self.size - 1)]
        elif self.size > 1:
            self.peers = [_connect(address, key)]

    def mean(self, grad: Arrays) -> Arrays:
        if self.rank > 0:
            self.peers[0].send(grad)
            return self.peers[0].recv()
        grads = [grad, *(peer.recv() for peer in self.peers)]
        mean = {key: sum(g[key] for g in grads) / len(grads) for key in grad}
        for peer in self.peers:
            peer.send(mean)
        return mean


def _connect(address: tuple[str, int], key: bytes, patience_s: float = 30.0) -> Connection:
    give_up = time.monotonic() + patience_s
    while True:
        try:
            return Client(address, authkey=key)
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)


# ---------------------------------------------------------------- the roles


def train(folder: Path, seed: int, iterations: int, pace_s: float, prompts: int = 256) -> None:
    gang = Gang()
    stored = load(folder / "policy.npz") or {}
    step = int(stored.pop("step", 0))
    policy = {key: stored.pop(key) for key in ("w1", "w2")} if stored else new_policy(seed)
    if step:
        say(gang.rank, f"resumed from the checkpoint of step {step}")
    while step < iterations:
        started = time.monotonic()
        # Seeded by step and rank: a resumed run draws what the uninterrupted one would have drawn.
        batch = sample(policy, np.random.default_rng((seed, step, gang.rank)), prompts)
        reward = float(batch["rewards"].mean())
        batches = [batch, *(fresh_rollouts(folder, step) if gang.rank == 0 else [])]
        merged = {key: np.concatenate([b[key] for b in batches]) for key in batch}
        for update in range(1, UPDATES_PER_BATCH + 1):
            grads = gang.mean(gradient(policy, merged))
            adam(policy, stored, grads, step * UPDATES_PER_BATCH + update)
        step += 1
        if gang.rank == 0:
            save(folder / "policy.npz", {**policy, **stored, "step": np.array(step)})
            extra = f", {len(batches) - 1} rollout batches used" if len(batches) > 1 else ""
            say(0, f"step {step:3d}/{iterations}  reward {reward:.3f}{extra}", reward=reward, step=step)
        rest(started, pace_s)


def fresh_rollouts(folder: Path, step: int) -> list[Arrays]:
    """Take what rollout tasks have left, and drop what lags too far behind the policy."""
    taken = []
    for path in sorted((folder / "rollouts").glob("*.npz")):
        batch = load(path)
        path.unlink(missing_ok=True)
        if batch is not None and step - int(batch.pop("version")) <= MAX_STALENESS:
            taken.append(batch)
    return taken


def rollout(folder: Path, seed: int, iterations: int, pace_s: float, prompts: int = 256) -> None:
    shard = f"{os.environ.get('AREAL_SKY_TASK_ID', 'rollout')}.{os.environ.get('RANK', '0')}"
    progress = folder / "progress" / f"{shard}.npz"
    done = int((load(progress) or {"done": 0})["done"])
    if done:
        say(0, f"resumed after batch {done}")
    while done < iterations:
        started = time.monotonic()
        policy, version = newest_policy(folder, seed)
        rng = np.random.default_rng((seed, done, *shard.encode()))
        batch = sample(policy, rng, prompts)
        save(folder / "rollouts" / f"{version:06d}-{shard}-{done:06d}.npz", {**batch, "version": np.array(version)})
        done += 1
        save(progress, {"done": np.array(done)})
        reward = float(batch["rewards"].mean())
        say(0, f"batch {done:3d}/{iterations}  policy {version}  reward {reward:.3f}", reward=reward, step=done)
        rest(started, pace_s)


def evaluate(folder: Path, seed: int, iterations: int, pace_s: float) -> None:
    for n in range(1, iterations + 1):
        started = time.monotonic()
        policy, version = newest_policy(folder, seed)
        score = accuracy(policy)
        say(0, f"eval {n:3d}/{iterations}  policy {version}  accuracy {score:.3f}", accuracy=score, step=n)
        rest(started, pace_s)


def say(rank: int, text: str, **metrics: float) -> None:
    if rank == 0:
        print(text, flush=True)
        if metrics:
            print("AREAL_SKY_METRIC " + " ".join(f"{k}={v:.4g}" for k, v in metrics.items()), flush=True)


def rest(started: float, pace_s: float) -> None:
    """Half of an iteration computes, half waits, as for a device: steady load that leaves room for the others."""
    busy_until = started + pace_s / 2
    x = np.random.default_rng(0).random((96, 96))
    while time.monotonic() < busy_until:
        x = np.tanh(x @ x.T / 96)
    time.sleep(max(0.0, started + pace_s - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["train", "rollout", "eval"])
    parser.add_argument("--model", default="tiny", help="names the directory of its checkpoints")
    parser.add_argument("--dir", default=os.environ.get("CHECKPOINT_DIR", "checkpoints"), type=Path)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--pace", type=float, default=0.25, help="seconds per iteration, at least")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    role = {"train": train, "rollout": rollout, "eval": evaluate}[args.role]
    role(args.dir / args.model, args.seed, args.iterations, args.pace)


if __name__ == "__main__":
    main()
