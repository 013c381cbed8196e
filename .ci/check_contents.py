"""Check that the sdist has every tracked file, the wheel every file of the package, and neither anything else.

python .ci/check_contents.py CLONE DIST/spmoe-VERSION-py3-none-any.whl DIST/spmoe-VERSION.tar.gz
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

GENERATED = ("PKG-INFO", "setup.cfg", "src/spmoe.egg-info/")  # by setuptools, in the sdist
NOT_IN_SDIST = (".ci/", ".gitignore")


def main() -> None:
    clone, wheel, sdist = map(Path, sys.argv[1:])
    listed = subprocess.run(["git", "ls-files"], cwd=clone, capture_output=True, text=True, check=True).stdout
    tracked = set(listed.splitlines())
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    compare("the sdist", tracked, names, ignored=(*GENERATED, *NOT_IN_SDIST))
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    with zipfile.ZipFile(wheel) as zipped:
        names = {name for name in zipped.namelist() if ".dist-info/" not in name}
    compare("the wheel", package, names)


def compare(what: str, expected: set[str], found: set[str], ignored: tuple[str, ...] = ()) -> None:
    """Exit with a list of files that are missing or too many."""
    lines = [f"{what} lacks {name}" for name in sorted(expected - found) if not name.startswith(ignored or "\0")]
    lines += [f"{what} has {name}" for name in sorted(found - expected) if not name.startswith(ignored or "\0")]
    if lines:
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
