"""The version of the package, from its metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("bascule")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0"
