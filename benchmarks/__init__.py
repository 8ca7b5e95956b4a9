"""What is measured. `python -m benchmarks NAME [--json]` runs one; `--check` runs all against bounds.yaml.

Each module has `measure()`, which returns its figures: names end in their unit (`_s`, `_ms`, `_mib`, `_ratio`); and
`why_not()` where not every machine can run it: `--check` then goes on without it and says so.
Limits stand in bounds.yaml beside what was measured, so that a new number can be judged against the usual one.
"""
