"""Readers of public traces: what they read, and the one clear error for what they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sky.adapters.traces import read_alibaba_nodes, read_alibaba_pods, read_philly, trace_files
from areal_sky.errors import InvalidInput

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_philly_comes_in_order_of_submits(tmp_path: Path):
    path = written(tmp_path, PHILLY + "2017-10-01 00:01:00,20.0,2,40.0,a\n2017-10-01 00:00:00,10.5,1,10.5,a\n")
    first, second = read_philly(path)
    assert (first.duration_s, first.gpus, second.submitted_s - first.submitted_s) == (10.5, 1, 60.0)


def test_pods_with_shares_models_and_no_gpu(tmp_path: Path):
    path = written(tmp_path, PODS + "a,12000,2048,1,460,T4|P100,LS\nb,1000,1024,0,0,,BE\nc,8000,1024,8,1000,,LS\n")
    a, b, c = read_alibaba_pods(path)
    assert (a.cpus, a.memory_gib, a.gpu_request, a.models) == (12.0, 2.0, 0.46, ("T4", "P100"))
    assert (b.gpus, b.gpu_request, c.gpu_request) == (0, 0.0, 8.0)


def test_nodes(tmp_path: Path):
    (node,) = read_alibaba_nodes(written(tmp_path, "sn,cpu_milli,memory_mib,gpu,model\nn,96000,1024,8,G2\n"))
    assert (node.name, node.cpus, node.memory_gib, node.gpus, node.model) == ("n", 96.0, 1.0, 8, "G2")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("yesterday,1,1,1,a", ":3: Invalid isoformat"),
        ("2017-10-01 00:00:00,-1,1,1,a", ":3: duration is -1, expected a number of at least 0"),
        ("2017-10-01 00:00:00,nan,1,1,a", ":3: duration is nan"),
        ("2017-10-01 00:00:00,long,1,1,a", ":3: duration is 'long', expected a number"),
        ("2017-10-01 00:00:00,1,0,1,a", ":3: num_gpus is 0, expected a whole number of at least 1"),
        ("2017-10-01 00:00:00,1,1.5,1,a", ":3: num_gpus is 1.5"),
        ("2017-10-01 00:00:00,1", ":3: expected 5 fields"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: str, said: str):
    path = written(tmp_path, f"{PHILLY}2017-10-01 00:00:00,1,1,1,a\n{row}\n")
    with pytest.raises(InvalidInput) as e:
        read_philly(path)
    assert str(path) in str(e.value) and said in str(e.value)


@pytest.mark.parametrize(("row", "said"), [("a,1,1,1,1001,,x", "at most 1000"), ("a,1,1,2,500,,x", "whole ones")])
def test_impossible_shares(tmp_path: Path, row: str, said: str):
    with pytest.raises(InvalidInput, match=said):
        read_alibaba_pods(written(tmp_path, PODS + row + "\n"))


def test_wrong_or_empty_files(tmp_path: Path):
    with pytest.raises(InvalidInput, match="no column num_gpus"):
        read_philly(written(tmp_path, "timestamp,duration\n"))
    with pytest.raises(InvalidInput, match="no rows"):
        read_philly(written(tmp_path, PHILLY))
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_philly(tmp_path / "missing.csv")
    with pytest.raises(InvalidInput, match="no folder with"):
        trace_files(tmp_path / "missing")
