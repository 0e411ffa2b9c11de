"""What tools/package/check_wheel runs in a venv that has the wheel and nothing more.

    python inside.py README_MD VERSION [torch]

It runs the Python snippet of README.md as it stands there, and looks at every library that was
loaded for it: each must come from a wheel, from Python or from what manylinux takes for granted.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# What manylinux takes for granted.
SYSTEM_LIBRARIES = re.compile(
    r"(ld-linux.*|linux-vdso|lib(c|m|dl|rt|pthread|util|resolv|nss_\w+|stdc\+\+|gcc_s|z))\.so.*"
)
PACKAGES = Path(sysconfig.get_path("purelib"))
LOADER = glob.glob("/lib*/ld-linux-*.so.*")[0]
TELL_LIBRARIES = """
import json as _json
_lines = [line.split() for line in open("/proc/self/maps")]
print(_json.dumps(sorted({line[5] for line in _lines if len(line) > 5 and ".so" in line[5]})))
"""
USE_TORCH = """
_x = torch.ones(64, 64)
assert float((_x @ _x)[0, 0]) == 64.0
bascule.Layout.from_arrays({"x": _x}).check_destination_coverage()
"""


def fail(message: str) -> None:
    """End with the reason."""
    raise SystemExit(f"failed: {message}")


def run(*command: str) -> str:
    """Return what a command prints; its failure is the end."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        fail(f"{command[0]} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def python(code: str) -> list[str]:
    """Run code in a process of its own; what it printed, line by line."""
    return run(sys.executable, "-I", "-c", code).splitlines()


def libraries_of(file: str) -> list[str]:
    """Return the libraries that a file loads, as paths; names of those that are not found."""
    text = run(LOADER, "--list", file)
    found = re.findall(r"^\s*(\S+)(?: => (\S.*?))? \(0x", text, re.MULTILINE)
    missing = re.findall(r"^\s*(\S+) => not found", text, re.MULTILINE)
    return [path or name for name, path in found] + missing


def is_allowed(path: str, others: set[str]) -> bool:
    """Tell whether a library may be loaded."""
    return (
        Path(path).resolve().is_relative_to(PACKAGES.resolve())
        or SYSTEM_LIBRARIES.fullmatch(Path(path).name) is not None
        or os.path.realpath(path) in others
    )


def check_files() -> None:
    """Every library of the wheel finds what it needs in the wheel."""
    files = [str(path) for path in (PACKAGES / "bascule").glob("*.so*")]
    files += [str(path) for path in (PACKAGES / "bascule.libs").glob("*")]
    for file in files:
        foreign = [path for path in libraries_of(file) if not is_allowed(path, set())]
        if foreign:
            fail(f"{file} loads from outside the wheel: {', '.join(foreign)}")
    print(f"  {len(files)} libraries of the wheel load each other and the system's, no others")


def check_loaded(paths: list[str]) -> None:
    """Only Python's own modules may have brought anything else into the process."""
    base = Path(sys.base_prefix).resolve()
    modules = [path for path in paths if "lib-dynload" in path and Path(path).is_relative_to(base)]
    python_files = [os.path.realpath(sys.executable), *modules]
    others = {os.path.realpath(path) for file in python_files for path in libraries_of(file)}
    others |= {os.path.realpath(path) for path in modules}
    foreign = [path for path in paths if not is_allowed(path, others)]
    if foreign:
        fail(f"loaded from outside the wheel: {', '.join(foreign)}")
    folders = tuple(str(PACKAGES / name) for name in ("bascule/", "bascule.libs/"))
    ours = sum(path.startswith(folders) for path in paths)
    print(f"  of {len(paths)} libraries in the process, {ours} are of the wheel, none is foreign")


def run_snippet(snippet: str, before: str = "", after: str = "") -> None:
    """Run README's snippet, which prints that the weights have crossed, in one process."""
    *printed, libraries = python(before + snippet + after + TELL_LIBRARIES)
    if not printed or not printed[-1].endswith(" True"):
        fail(f"the snippet of README.md printed {printed}, and not that the weights are equal")
    check_loaded(json.loads(libraries))


def check_alone(snippet: str, version: str) -> None:
    """Without torch."""
    compilers = [name for name in ("cc", "gcc", "g++", "clang", "cmake") if shutil.which(name)]
    print(f"  user {os.getuid()}, compilers: {', '.join(compilers) or 'none'}")
    if python("import bascule; print(bascule.__version__)") != [version]:
        fail(f"bascule.__version__ is not {version}")
    script = str(Path(sys.executable).parent / "bascule")
    if run(script, "--version").strip() != f"bascule {version}":
        fail(f"{script} --version does not print {version}")
    run(script, "--help")
    check_files()
    run_snippet(snippet)


def check_beside_torch(snippet: str) -> None:
    """In one process with torch, whichever comes first; import alone leaves torch out."""
    loaded = python("import sys, bascule, bascule.layout; print('torch' in sys.modules)")
    if loaded != ["False"]:
        fail("import bascule imports torch")
    run_snippet(snippet, before="import torch\n", after=USE_TORCH)
    run_snippet(snippet, after="\nimport torch" + USE_TORCH)


def main() -> None:
    """Check, and end with the first thing that is wrong."""
    readme, version = Path(sys.argv[1]), sys.argv[2]
    found = re.search(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("failed: README.md has no Python snippet")
    if sys.argv[3:] == ["torch"]:
        check_beside_torch(found[1])
    else:
        check_alone(found[1], version)


if __name__ == "__main__":
    main()
