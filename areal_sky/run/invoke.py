"""`python -m areal_sky.run.invoke FILE` calls the pickled callable in FILE; an int that it returns is the exit code."""

from __future__ import annotations

import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m areal_sky.run.invoke FILE", file=sys.stderr)
        return 2
    import cloudpickle

    try:
        call = cloudpickle.loads(Path(argv[1]).read_bytes())
    except Exception as e:
        # Mostly a module that only the submitting machine has, or another Python version.
        print(f"cannot load the submitted callable on this node: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    result = call()
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
