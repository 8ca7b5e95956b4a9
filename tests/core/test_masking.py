"""What is kept of a spec has no secret in it, and reads as the same spec otherwise."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal_sky.core.masking import masked
from areal_sky.core.tasksources import MASK

TEXT = """\
name: x  # stays
secrets:
  HF_TOKEN: hunter-two  # this too
  LATER: null
  KEY: |
    -----BEGIN-----
    abcdefgh
envs:
  WANDB_API_KEY: 'quo''ted'
  URL: http://me:pass1234@host/
  PLAIN: hello
run: echo $HF_TOKEN
"""


def test_values_go_and_all_else_stays_in_its_line() -> None:
    text = masked(TEXT)
    for secret in ("hunter-two", "BEGIN", "abcdefgh", "quo", "pass1234"):
        assert secret not in text
    for kept in ("name: x  # stays", "  # this too", "LATER: null", "PLAIN: hello", "run: echo $HF_TOKEN"):
        assert kept in text
    assert yaml.safe_load(text)["secrets"] == {"HF_TOKEN": MASK, "LATER": None, "KEY": MASK}


def test_masking_twice_changes_nothing() -> None:
    assert masked(masked(TEXT)) == masked(TEXT)


def test_a_secret_that_stands_somewhere_else_too_is_taken_out_there() -> None:
    for text in ("secrets: {A: &t hunter-two, B: *t}\nrun: x\n", "secrets: {A: hunter-two}\nrun: echo hunter-two\n"):
        assert "hunter-two" not in masked(text) and yaml.safe_load(masked(text))["secrets"]["A"] == MASK


def test_a_text_without_secrets_comes_back_as_it_is() -> None:
    for text in ("name: x\nsecrets: [A, B]\n", "a: [", "", "- 1\n", "secrets: null\n", "envs: {A: 1}\n"):
        assert masked(text) == text


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), st.text(min_size=4, max_size=30), max_size=4))
def test_no_value_survives_however_it_is_written(secrets: dict[str, str]) -> None:
    others = {"name": "n", "envs": {"PLAIN": "0"}, "run": "true"}
    for style in (None, '"', "'", "|"):
        text = yaml.dump({**others, "secrets": secrets}, default_style=style, allow_unicode=True)
        data = yaml.safe_load(masked(text))
        assert data["secrets"] == dict.fromkeys(secrets, MASK)
        assert {k: v for k, v in data.items() if k != "secrets"} == others
