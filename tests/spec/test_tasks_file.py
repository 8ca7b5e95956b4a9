"""The YAML of tasks: what it says, and every mistake in it with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.errors import SpecError
from areal_sky.spec.tasks import load_tasks

NOW_S = 1_900_000_000.0


def read(text: str) -> list[dict[str, Any]]:
    return [t.fields for t in load_tasks(text, "t.yaml", NOW_S)]


def mistakes(text: str) -> list[str]:
    with pytest.raises(SpecError) as e:
        load_tasks(text, "t.yaml", NOW_S)
    return str(e.value).splitlines()


def test_every_key_says_what_it_says() -> None:
    (fields,) = read("""
run: |
  python train.py
name: grpo
kind: train
model: qwen
model_type: moe
bundles: 4
min_bundles: 2
gpus: 8
cpus: 16
memory: 64GB
priority: 7.5
deadline: 2h
if_late: refuse
estimate: 90m
group: trainer
accelerators: [H100, A100]
envs: {LR: 1e-4, DEBUG: true, WHO: 'me'}
workdir: /data
max_retries: 3
backoff: 10s
timeout: 4h
total_timeout: 1d
after: [prep, t7]
array: 5
labels: {team: rl, run: 7}
preemptible: true
submit_key: nightly-1
""")
    assert fields == {
        "entrypoint": "python train.py\n", "name": "grpo", "kind": "train", "model": "qwen", "model_type": "moe",
        "bundles": 4, "min_bundles": 2, "gpus": 8.0, "cpus": 16.0, "memory": 64.0, "priority": 7.5,
        "deadline": NOW_S + 7200, "if_late": "refuse", "estimate": 5400.0, "group": "trainer",
        "accelerators": ("H100", "A100"), "envs": {"LR": "1e-4", "DEBUG": "true", "WHO": "me"}, "workdir": "/data",
        "max_retries": 3, "backoff": 10.0, "timeout": 14400.0, "total_timeout": 86400.0, "after": ("prep", "t7"),
        "array": 5, "labels": {"team": "rl", "run": "7"}, "preemptible": True, "submit_key": "nightly-1",
    }  # fmt: skip
    assert read("run: x") == [{"entrypoint": "x"}]
    assert read("{run: x, deadline: 2020-01-01T00:00:00Z}")[0]["deadline"] == 1577836800.0  # the head warns of it


def test_the_fields_are_those_of_the_python_task() -> None:
    from areal_sky.task import Task

    (fields,) = read("run: x\nafter: a\naccelerators: H100\ngpus: 0.5\ntimeout: 1h")
    spec = Task(**fields).spec()
    assert (spec.after, spec.accelerators, spec.bundle.gpus, spec.timeout_s) == (("a",), ("H100",), 0.5, 3600.0)


def test_several_tasks_are_a_list() -> None:
    assert [f["name"] for f in read("tasks:\n- {run: a, name: prep}\n- {run: b, name: train, after: prep}")] == [
        "prep", "train"
    ]  # fmt: skip


def test_every_mistake_is_told_with_its_place() -> None:
    assert mistakes("""\
tasks:
  - run: ok
    gpus: 1.5
    bundels: 2
    timeout: 90
    retries: 2
  - name: 5
    kind: trian
    memory: lots
    after: {a: b}
    priority: 101
    min_bundles: 3
    labels: {"-x": a}
    envs: {1A: x, B: [1]}
  - plain
extra: 1
""") == [
        "t.yaml:3:11: tasks[0].gpus is `1.5`, expected a whole number of GPUs from 0 to 1,024, or a fraction below 1",
        "t.yaml:4:5: unknown key `bundels` in tasks[0], did you mean `bundles`?",
        "t.yaml:5:14: tasks[0].timeout is `90` without a unit, expected a duration such as 100ms, 30s, 2m, 1h30m or 2d,"
        " did you mean `90s`?",
        "t.yaml:6:5: unknown key `retries` in tasks[0], did you mean `max_retries`?",
        "t.yaml:7:5: tasks[1] has no `run`, expected the task's command",
        "t.yaml:7:11: tasks[1].name is `5`, expected a name of at most 64 printable characters",
        "t.yaml:8:11: tasks[1].kind is `trian`, expected one of: train, rollout, eval, reward, driver,"
        " did you mean `train`?",
        "t.yaml:9:13: tasks[1].memory is `lots`, expected a size such as 32, 32GB, 512MB or 1.5TB",
        "t.yaml:10:12: tasks[1].after is a mapping, expected a task's id or name, or a list of them",
        "t.yaml:11:15: tasks[1].priority is `101`, expected a number from 0 to 100",
        "t.yaml:12:18: tasks[1].min_bundles is `3`, expected at most `bundles`",
        "t.yaml:13:14: `-x` is no label's name",
        "t.yaml:14:12: `1A` cannot name an environment variable, expected letters, digits and _",
        "t.yaml:14:22: tasks[1].envs.B is not text, expected text: put it in quotes",
        "t.yaml:15:5: tasks[2] is `plain`, expected a mapping of keys to values, such as `run: ...`",
        "t.yaml:16:1: unknown key `extra` at the top, expected one of: tasks",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "1:1: the file is empty, expected a task"),
        ("tasks: []", "1:8: tasks is an empty list"),
        ("tasks: x", "1:8: tasks is `x`, expected a list of tasks"),
        ("- run: x", "1:1: the spec is a list, expected a mapping"),
        ("run: ''", "1:6: run is empty"),
        ("run: [a]", "1:6: run is a list, expected the task's command"),
        ("{run: x, gpus: .nan}", "gpus is `.nan`"),
        ("{run: x, gpus: -1}", "gpus is `-1`"),
        ("{run: x, gpus: 1e9}", "gpus is `1e9`"),
        ("{run: x, cpus: 0}", "1:16: cpus is `0` without `gpus`"),
        ("{run: x, array: 0}", "array is `0`, expected a whole number from 1 to 100,000"),
        ("{run: x, deadline: tomorrow}", "deadline is `tomorrow`, expected a moment"),
        ("{run: x, preemptible: maybe}", "preemptible is `maybe`, expected true or false"),
        ("{run: x, run: y}", "duplicate key `run`"),
        ("run: [", "not valid YAML"),
    ],
)
def test_single_mistakes(text: str, words: str) -> None:
    assert any(words in line for line in mistakes(text)), mistakes(text)


def test_a_skypilot_task_keeps_what_is_no_machine() -> None:
    text = (Path(__file__).parents[2] / "task_yamls" / "areal_grpo.yaml").read_text()
    (task,) = load_tasks(text, "areal_grpo.yaml", NOW_S)
    assert set(task.left_out) >= {"resources", "num_nodes"}
    assert set(task.fields) == {"entrypoint", "name", "envs"}


@given(st.text(max_size=200))
def test_any_text_is_tasks_or_mistakes(text: str) -> None:
    try:
        assert isinstance(load_tasks(text, "t.yaml", NOW_S), list)
    except SpecError as e:
        assert e.mistakes


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("run", "gpus", "cpus", "memory", "deadline", "after", "labels", "envs", "array", "timeout", "kind", "name")


@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=5))
def test_whatever_passes_here_passes_the_head(raw: dict[str, Any]) -> None:
    """A mistake that the reader does not find would be told without a place."""
    import yaml

    from areal_sky.task import Task

    try:
        tasks = load_tasks(yaml.safe_dump({**raw, "run": "x"}), "t.yaml", NOW_S)
    except SpecError:
        return
    for task in tasks:
        Task(**task.fields).spec()
