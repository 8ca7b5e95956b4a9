"""What the testbed's machines have installed: the nodes' image, and the catalog that SkyPilot looks accelerators up in.

software.py image DIR            a Python environment with what .venv has, less areal_sky and SkyPilot
software.py catalog HOME GPU     the accelerator list, where SkyPilot would otherwise download it to
software.py bytecode CACHE       byte code of what SkyPilot runs on a node, into uv's cache (run by the node's SkyPilot)
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import py_compile
import sys
import sysconfig
from pathlib import Path

# Not in the image: what areal_sky has to bring onto the nodes by itself, and what they must do without.
LEFT_OUT = ("sky", "skypilot", "__pycache__")
COMMANDS = ("ray", "pip", "pip3")
RUN_ON_NODES = ("sky.skylet.attempt_skylet", "sky.skylet.skylet", "sky.skylet.job_lib", "sky.skylet.executor.slurm")


def make_image(folder: Path) -> None:
    """A venv of this Python whose packages are links into this one's: quick, small, and pip can add to it."""
    source, scripts = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("scripts"))
    target = folder / source.relative_to(sys.prefix)
    target.mkdir(parents=True)
    (folder / "bin").mkdir()
    python = Path(sys.executable).resolve()
    (folder / "pyvenv.cfg").write_text(f"home = {python.parent}\ninclude-system-site-packages = false\n")
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        (folder / "bin" / name).symlink_to(python)
    for entry in source.iterdir():
        if entry.name.split("-")[0] not in LEFT_OUT and "areal_sky" not in entry.name:
            (target / entry.name).symlink_to(entry)
    for name in COMMANDS:
        text = (scripts / name).read_text()
        script = folder / "bin" / name
        script.write_text(f"#!{folder}/bin/python3\n" + text.split("\n", 1)[1])
        script.chmod(0o755)


def write_catalog(home: Path, gpu: str) -> None:
    """SkyPilot takes a file that is already there, for ever, and asks nobody."""
    constants = Path(importlib.util.find_spec("sky").origin).parent / "skylet/constants.py"  # type: ignore[union-attr]
    version = next(
        ast.literal_eval(node.value)
        for node in ast.parse(constants.read_text()).body  # importing it would take seconds
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CATALOG_SCHEMA_VERSION"
    )
    folder = home / ".sky/catalogs" / version / "common"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accelerators.csv").write_text(f"AcceleratorName,Clouds\n{gpu.upper()},\"['Slurm']\"\n")
    (folder / "metadata.csv").write_text(f"GPU,MemoryGB,Manufacturer\n{gpu.upper()},16,NVIDIA\n")


def write_bytecode(cache: Path) -> None:
    """For modules whose files are links into the cache: who is linked to it later finds them compiled."""
    for name in RUN_ON_NODES:
        importlib.import_module(name)
    for module in list(sys.modules.values()):
        source = Path(getattr(module, "__file__", None) or "").resolve()
        if source.suffix == ".py" and source.is_relative_to(cache):
            py_compile.compile(str(source))


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "image":
        make_image(Path(folder))
    elif what == "catalog":
        write_catalog(Path(folder), *rest)
    elif what == "bytecode":
        write_bytecode(Path(folder).resolve())
