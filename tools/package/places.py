"""Places without a compiler and without the build's libraries, for check_wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

NOBODY = "65534:65534"
# What manylinux takes for granted, as far as a Python without a screen loads it.
SYSTEM_LIBRARIES = [
    "libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libutil.so.1",
    "libresolv.so.2", "libnss_files.so.2", "libgcc_s.so.1", "libstdc++.so.6",
]  # fmt: skip
# Modules of the standard library that pip, numpy and torch cannot do without; their libraries too.
MODULES = ("zlib", "_bz2", "_lzma", "_ctypes")
LEFT_OUT = ("test", "tests", "__pycache__", "site-packages", "dist-packages", "config-*", "idlelib")


class CannotMakeError(Exception):
    """The place cannot be made on this machine; the message says why."""


def output_of(*command: str | Path) -> str:
    """Return what a command prints."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"code {done.returncode}"]
        raise CannotMakeError(f"{command[0]}: {lines[-1]}")
    return done.stdout


class Place:
    """The machine itself, with an empty environment.

    Attributes
    ----------
    python
        The interpreter to make a venv with, as its path is called there.
    folder
        Where the check's files and the venv are, as it is called there.
    """

    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.folder = folder

    def put(self, files: Sequence[Path]) -> None:
        """Make files readable there, by their names."""
        self._put(files, self.folder)

    def _put(self, files: Sequence[Path], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)
        for file in files:
            target = folder / file.name
            target.unlink(missing_ok=True)
            try:
                target.hardlink_to(file)
            except OSError:
                shutil.copy(file, target)

    def run(self, *command: str | Path, capture: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command there."""
        environment = {
            "PATH": str(self.folder / "venv/bin"),
            "HOME": str(self.folder),
            "USER": "nobody",
            "LANG": "C.UTF-8",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
        }
        return self._run(list(map(str, command)), environment, capture)

    def close(self) -> None:
        """Remove what is not worth keeping."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(
        self, command: list[str], environment: dict[str, str], capture: bool
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=environment, text=True, capture_output=capture, check=False, cwd="/"
        )


class Root(Place):
    """A root folder of its own, entered without rights.

    The mounts are in a namespace that ends with the command.
    """

    def __init__(self, root: Path, python: str) -> None:
        super().__init__(python, Path("/check"))
        self.root = root.resolve()
        for name in ("proc", "dev", "tmp"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "tmp").chmod(0o1777)
        shutil.rmtree(self.root / "check", ignore_errors=True)
        done = self.run(python, "-I", "-c", "", capture=True)
        if done.returncode != 0:
            raise CannotMakeError((done.stderr.strip().splitlines() or ["chroot failed"])[-1])

    def put(self, files: Sequence[Path]) -> None:
        """Make files readable there, by their names."""
        self._put(files, self.root / "check")

    def close(self) -> None:
        """Remove what is not worth keeping: the root itself is."""
        shutil.rmtree(self.root / "check", ignore_errors=True)

    def _run(
        self, command: list[str], environment: dict[str, str], capture: bool
    ) -> subprocess.CompletedProcess[str]:
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        if os.getuid() == 0:
            chroot = f"chroot --userspec={NOBODY}"
        else:
            enter += ["--user", "--map-root-user"]
            chroot = "chroot"
        script = (
            'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && '
            f'exec {chroot} "$0" "$@"'
        )
        # For unshare, mount and chroot. In the root these folders hold what it was made of.
        environment["PATH"] += ":/usr/sbin:/usr/bin:/sbin:/bin"
        return super()._run(
            [*enter, "sh", "-c", script, str(self.root), *command], environment, capture
        )


def libraries_of(*files: Path) -> set[Path]:
    """Return the loader and the libraries that files load."""
    text = "".join(output_of("ldd", file) for file in files)
    return {Path(path) for path in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", text, re.MULTILINE)}


def make_closed(root: Path, python: Path) -> Place:
    """Make a root with an interpreter, its standard library and what manylinux takes for granted.

    No shell, no compiler, no other library: not even OpenSSL, which Python's ssl module lacks then.
    """
    code = (
        "import os, sys, sysconfig; print(os.path.realpath(sys._base_executable)); "
        "print(sysconfig.get_path('stdlib')); print(sysconfig.get_path('platstdlib'))"
    )
    executable, *folders = map(Path, output_of(python, "-I", "-c", code).splitlines())
    shutil.rmtree(root, ignore_errors=True)
    # Debian's ensurepip takes pip from the last one.
    for folder in {*folders, Path("/usr/share/python-wheels")}:
        if folder.is_dir():
            shutil.copytree(
                folder,
                root / folder.relative_to("/"),
                ignore=shutil.ignore_patterns(*LEFT_OUT),
                ignore_dangling_symlinks=True,
                dirs_exist_ok=True,
            )
    modules = [
        file for folder in folders for name in MODULES for file in folder.glob(f"*/{name}.*.so")
    ]
    libraries = libraries_of(executable, *modules)
    (libc,) = (path for path in libraries if path.name == "libc.so.6")
    libraries |= {libc.parent / name for name in SYSTEM_LIBRARIES}
    for file in {executable, *libraries}:
        if file.exists():
            target = root / file.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return Root(root, str(executable))


def make_debian(root: Path) -> Place:
    """Make a minimal system of this machine's release, once, with its own Python."""
    if shutil.which("debootstrap") is None:
        raise CannotMakeError("debootstrap is not installed (apt-get install debootstrap)")
    if os.getuid() != 0:
        raise CannotMakeError("debootstrap works for root only")
    release = Path("/etc/os-release").read_text()
    suite = re.search(r"^VERSION_CODENAME=(\w+)", release, re.MULTILINE)
    if suite is None:
        raise CannotMakeError("the release has no name that debootstrap knows")
    done = root.with_suffix(".done")
    if not done.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.parent.mkdir(parents=True, exist_ok=True)
        packages = "--include=python3,python3-venv"
        output_of("debootstrap", "--variant=minbase", packages, suite[1], root.resolve())
        done.touch()
    return Root(root, "/usr/bin/python3")


def make_plain(python: Path) -> Place:
    """Take this machine as it is."""
    return Place(str(python), Path(tempfile.mkdtemp(prefix="bascule-wheel-")))
