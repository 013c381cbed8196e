"""Build the training corpus and the tokenizer of the bundled code models.

    python train/corpus.py build --out train/data

The text is Python source: the standard library of the running interpreter and the wheels pinned in ``packages.toml``,
downloaded with pip and read as zip files (nothing is installed or executed). Packages without a recognisable
permissive licence are refused. Files are filtered, normalised and de-duplicated, held-out packages first, so that no
held-out file and no near-copy of one is left in the training split. The steps are deterministic given the same wheels.

Written to the output directory: ``tokenizer/``, ``train.u16.xz`` and ``heldout.u16.xz`` (little-endian 16-bit token
ids, every file followed by the end-of-text id), ``heldout_files.json`` (package, path and number of tokens of each
held-out file, in order) and ``manifest.json``; ``PACKAGES.md`` beside this script lists the packages used. To train on
a part of the corpus with the tokenizer of the shipped pair:

    python train/corpus.py build --out train/data/part --training-packages 60 --tokenizer src/spmoe/pair/draft
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import json
import lzma
import os
import platform
import random
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
STDLIB = "python-stdlib"
SEED = 20240607
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
CONTEXT = 4096

# One pre-token each: a run of two or more spaces (an indentation), a word with at most one leading character
# (" name", "_name", ".name", "(name"), up to three digits, a run of punctuation, newlines. Neither an indentation nor
# a newline is glued to what precedes or follows it, so that a prompt may end before or after either of them.
SPLIT = r" {2,}|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "# {{ message['role'] }}: {{ message['content'] | replace('\\n', '\\n# ') }}\n"
    "{% endfor %}"
)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------------
# Packages and licences


@dataclass(frozen=True)
class Pin:
    name: str
    version: str
    heldout: bool

    @property
    def key(self) -> str:
        return normal_name(self.name)


@dataclass
class Source:
    """A package whose files may be used."""

    name: str
    version: str
    licence: str
    heldout: bool
    path: Path  # a wheel, or the directory of the standard library


def normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> list[Pin]:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    pins = []
    for split in ("heldout", "training"):
        for entry in table[split]:
            name, _, version = entry.partition("==")
            pins.append(Pin(name, version, split == "heldout"))
    keys = Counter(pin.key for pin in pins)
    if twice := sorted(key for key, count in keys.items() if count > 1):
        raise SystemExit(f"{path}: listed twice: {', '.join(twice)}")
    return pins


def thin_out(pins: Sequence[Pin], count: int) -> list[Pin]:
    """Return all held-out packages and ``count`` of the others, spread evenly over their list."""
    heldout = [pin for pin in pins if pin.heldout]
    training = [pin for pin in pins if not pin.heldout]
    if not 1 <= count <= len(training):
        raise SystemExit(f"--training-packages is {count}: must be 1 to {len(training)}")
    return heldout + [training[index * len(training) // count] for index in range(count)]


def wheels_in(directory: Path) -> dict[tuple[str, str], Path]:
    """Wheels by normalised name and public version (``1.0+cpu`` counts as ``1.0``)."""
    found = {}
    for path in sorted(directory.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        found[normal_name(name), version.partition("+")[0]] = path
    return found


def download(pins: Sequence[Pin], directory: Path, workers: int) -> dict[tuple[str, str], Path]:
    """Download the wheels that are not there yet; packages without a wheel are left out."""
    directory.mkdir(parents=True, exist_ok=True)
    have = wheels_in(directory)
    missing = [pin for pin in pins if (pin.key, pin.version) not in have]

    def fetch(pin: Pin) -> None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--no-cache-dir", "--dest", str(directory), f"{pin.name}=={pin.version}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            say(f"no wheel: {pin.name}=={pin.version}")

    if missing:
        say(f"downloading {len(missing)} wheels")
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(fetch, missing))
    return wheels_in(directory)


PERMISSIVE_IDS = {
    *(
        "0BSD",
        "AFL-2.1",
        "APACHE-2.0",
        "APACHE-2.0 WITH LLVM-EXCEPTION",
        "BSD",
        "BSD-3-CLAUSE-LBNL",
        "BSD-1-CLAUSE",
        "BSD-2-CLAUSE",
        "BSD-3-CLAUSE",
        "BSL-1.0",
        "CC0-1.0",
    ),
    *("CNRI-PYTHON", "HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "NCSA", "PSF-2.0", "PYTHON-2.0", "PYTHON-2.0.1"),
    *("UNLICENSE", "UPL-1.0", "WTFPL", "ZLIB", "OFL-1.1", "BLUEOAK-1.0.0", "FSFULLR", "LIBPNG-2.0"),
}
COPYLEFT = re.compile(r"\b([AL]?GPL|MPL|EPL|EUPL|CDDL|SSPL|BUSL)|general public licen|mozilla public|eclipse", re.I)
RESTRICTED = re.compile(r"non-?commercial|proprietary|business source|elastic licen|all rights reserved\.?$", re.I)
PERMISSIVE_NAMES = [  # (pattern on a short licence name or a classifier, label)
    (r"\bMIT-?CMU|\bHPND|historical permission", "HPND"),
    (r"\bMIT\b|expat", "MIT"),
    (r"\bapache\b.{0,30}\b2|\bASL\b|^apache( software)?( licen[sc]e)?$", "Apache-2.0"),
    (r"apache software licen", "Apache-2.0"),
    (r"\bBSD", "BSD"),
    (r"\bISC\b", "ISC"),
    (r"\bPSF\b|python software foundation|^python( licen[sc]e)?$", "PSF-2.0"),
    (r"unlicense", "Unlicense"),
    (r"public domain|\bCC0\b", "public domain"),
    (r"zlib", "Zlib"),
    (r"\b0BSD\b", "0BSD"),
]
PERMISSIVE_TEXTS = [  # (phrase of a full licence text, label)
    ("permission is hereby granted, free of charge, to any person", "MIT"),
    ("redistribution and use in source and binary forms", "BSD"),
    ("apache license", "Apache-2.0"),
    ("permission to use, copy, modify, and/or distribute this software", "ISC"),
    ("permission to use, copy, modify, and distribute this software", "ISC"),
    ("python software foundation license", "PSF-2.0"),
    ("this is free and unencumbered software", "Unlicense"),
]


def named_licence(text: str) -> str | None:
    return next((label for pattern, label in PERMISSIVE_NAMES if re.search(pattern, text, re.I)), None)


def licence_from_text(text: str) -> str | None:
    """Identify a full licence text by its beginning, since later parts may concern bundled files."""
    words = " ".join(text.split()).lower()
    if COPYLEFT.search(words[:300]):
        return None
    return next((label for phrase, label in PERMISSIVE_TEXTS if phrase in words), None)


def expression_is_permissive(expression: str) -> bool:
    """Return whether an SPDX expression can be satisfied with permissive licences only."""
    # The exception is that of compiler run-time libraries bundled as binaries: no Python source falls under it.
    plain = re.sub(r"GPL-3\.0[a-z-]*\s+WITH\s+GCC-exception-3\.1", "0BSD", expression, flags=re.I)
    alternatives = re.split(r"\s+OR\s+", plain.replace("(", " ").replace(")", " "), flags=re.I)
    return any(
        all(part.strip().upper() in PERMISSIVE_IDS for part in re.split(r"\s+AND\s+", alternative, flags=re.I))
        for alternative in alternatives
    )


def licence_of(wheel: zipfile.ZipFile) -> tuple[str, bool]:
    """Return the licence that a wheel declares, and whether it is permissive."""
    names = wheel.namelist()
    metadata_name = next(n for n in names if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
    metadata = HeaderParser().parsestr(wheel.read(metadata_name).decode("utf-8", "replace"))
    if expression := str(metadata.get("License-Expression", "")).strip():
        return expression, expression_is_permissive(expression)

    classifiers = [
        str(value).rpartition("::")[2].strip()
        for value in metadata.get_all("Classifier", [])
        if str(value).startswith("License ::") and not str(value).endswith("OSI Approved")
    ]
    stated = str(metadata.get("License", "")).strip()
    short = stated if len(stated) < 200 else ""
    for text in (*classifiers, short):
        if COPYLEFT.search(text) or RESTRICTED.search(text):
            return text, False
    if classifiers:
        labels = [named_licence(text) for text in classifiers]
        if None not in labels:
            return " / ".join(dict.fromkeys(str(label) for label in labels)), True
    if short and (label := named_licence(short)):
        return label, True
    if len(stated) >= 200 and (label := licence_from_text(stated)):
        return label, True
    files = [n for n in names if re.search(r"\.dist-info/(licenses/)?(LICEN[SC]E|COPYING)[^/]*$", n, re.I)]
    for name in sorted(files):
        if label := licence_from_text(wheel.read(name).decode("utf-8", "replace")):
            return label, True
    return short or " / ".join(classifiers) or "not stated", False


def open_sources(pins: Sequence[Pin], wheels: dict[tuple[str, str], Path]) -> tuple[list[Source], dict[str, str]]:
    """Return the usable packages (held-out, standard library, others), and the refused ones with reasons."""
    sources: list[Source] = []
    refused: dict[str, str] = {}
    for pin in pins:
        path = wheels.get((pin.key, pin.version))
        if path is None:
            refused[f"{pin.name}=={pin.version}"] = "no wheel"
            continue
        with zipfile.ZipFile(path) as wheel:
            licence, permissive = licence_of(wheel)
        if permissive:
            sources.append(Source(pin.name, pin.version, licence, pin.heldout, path))
        else:
            refused[f"{pin.name}=={pin.version}"] = f"licence: {licence[:80]}"
    for name, reason in refused.items():
        say(f"refused {name}: {reason}")
    first = sum(source.heldout for source in sources)
    stdlib = Source(STDLIB, platform.python_version(), "PSF-2.0", False, Path(sysconfig.get_path("stdlib")))
    sources.insert(first, stdlib)
    return sources, refused


# --------------------------------------------------------------------------------------------------------------------
# Files


@dataclass
class File:
    package: str
    path: str
    text: str
    is_test: bool
    shingles: npt.NDArray[np.uint64] = field(repr=False)

    @property
    def size(self) -> int:
        return len(self.text)


SKIPPED_DIRECTORIES = {
    *("_vendor", "_vendored", "vendor", "vendored", "_vendored_packages", "third_party", "thirdparty", "3rdparty"),
    *("extern", "external", "externals", "_external", "_extern", "node_modules", "site-packages", "lib2to3", "idlelib"),
    *("turtledemo", "pydoc_data", "ensurepip", "locale", "locales", "encodings", "__pycache__"),
}
SKIPPED_NAMES = re.compile(
    r"(_pb2(_grpc)?|parsetab|lextab|parser_table|_version|versioneer|_generated\w*|__phello__.*)\.py$"
)
MIGRATION = re.compile(r"(^|/)(migrations|versions|legacy_migrations)/.*\d{3}[^/]*\.py$")
GENERATED = re.compile(
    r"auto-?\s?generated|automatically generated|generated (by|from|with|automatically)|do not (edit|modify)|"
    r"don't edit|machine.generated|@generated|swagger.codegen|openapi.generator|autorest|autogenerated",
    re.I,
)
COPYLEFT_HEADER = re.compile(
    r"general public licen|mozilla public licen|eclipse public licen|SPDX-License-Identifier:.{0,40}\b([AL]?GPL|MPL)|"
    r"https?://mozilla\.org/MPL|noncommercial|non-commercial|\b(L|A)?GPLv[23]",
    re.I,
)
ENCODED = re.compile(r"PRIVATE KEY-----|BEGIN CERTIFICATE-----|[A-Za-z0-9+/=]{160}|(\\x[0-9a-fA-F]{2}){40}")
EDITOR_LINE = re.compile(r"^#(!|.*coding[:=]|.*\bvim?:|\s*(pylint|flake8|ruff|mypy|isort|yapf):)")
LEGAL = re.compile(r"copyright|licen[sc]e|all rights reserved|\(c\)", re.I)
TOKEN = re.compile(r"[^\W\d]\w*|\d+|[^\w\s]")
TEST_PATH = re.compile(
    r"(^|/)(tests?|testing|unittests?|functional_tests)/|(^|/)(test_[^/]*|[^/]*_tests?|conftest)\.py$"
)

SHINGLE = 8  # tokens in a shingle
SAMPLE = 4  # one shingle in so many is kept, selected by its hash


def read_stdlib(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in in_random_order(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        yield path, (root / path).read_bytes()


def read_wheel(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as wheel:
        for name in in_random_order(name for name in wheel.namelist() if name.endswith(".py")):
            yield name, wheel.read(name)


def in_random_order(paths: Iterable[str]) -> list[str]:
    ordered = sorted(paths)
    random.Random(SEED).shuffle(ordered)
    return ordered


def normalise(text: str) -> str:
    """Normalize line ends and indentation; remove trailing blanks, legal comments and more than two empty lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x0c", "").lstrip("\ufeff")
    lines = [line.rstrip() for line in text.split("\n")]
    for number, line in enumerate(lines):
        body = line.lstrip(" \t")
        indent = line[: len(line) - len(body)]
        if "\t" in indent:
            lines[number] = indent.expandtabs(4) + body
    start = "\n".join(line for line in lines[:80] if not EDITOR_LINE.search(line))
    start = re.sub(r"^(#.*\n)+", lambda block: "" if LEGAL.search(block[0]) else block[0], start, flags=re.M)
    text = "\n".join([start, *lines[80:]]).strip("\n") + "\n"
    return re.sub(r"\n{4,}", "\n\n\n", text)


def literal_lines(tree: ast.Module) -> int:
    """Count the lines of large tables (lists, dictionaries, ...) assigned in the module and in its classes."""
    total = 0
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef | ast.If | ast.Try):
            pending += node.body
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) and value is not None:
            if isinstance(value, ast.Call) and value.args:
                value = value.args[0]
            table = isinstance(value, ast.List | ast.Dict | ast.Set | ast.Tuple)
            data = isinstance(value, ast.Constant) and not isinstance(node, ast.Expr)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if (table or data) and lines > 20:
                total += lines
    return total


def import_lines(tree: ast.Module) -> int:
    """Count the lines of a module's imports and of its ``__all__``."""
    total = 0
    for node in tree.body:
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        if isinstance(node, ast.Import | ast.ImportFrom) or "__all__" in names:
            total += (node.end_lineno or node.lineno) - node.lineno + 1
    return total


def rejection(text: str) -> str | None:
    """Return the reason to leave out a file with this normalized text, or None."""
    lines = text.split("\n")
    if len(text) / len(lines) > 80 or max(map(len, lines)) > 400:
        return "long lines"
    if GENERATED.search(text, 0, 1500):
        return "generated"
    if COPYLEFT_HEADER.search(text, 0, 5000):
        return "copyleft header"
    if ENCODED.search(text):
        return "encoded data"
    if len(text.encode()) > 1.02 * len(text):
        return "not English"
    solid = len(re.sub(r"\s+", "", text))
    if len(re.findall(r"[0-9]", text)) > 0.15 * solid or len(re.findall(r"[^\w\s]", text)) > 0.42 * solid:
        return "tables"
    if len(zlib.compress(text.encode(), 6)) < 0.12 * len(text):
        return "repetitive"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "does not parse"
    if literal_lines(tree) > 0.5 * len(lines):
        return "tables"
    if import_lines(tree) > 0.6 * len(lines):
        return "only imports"
    return None


def shingles_of(text: str, cache: dict[str, int]) -> npt.NDArray[np.uint64]:
    """Return sampled 64-bit hashes of all runs of SHINGLE tokens, independent of the text's layout."""
    ids = []
    for token in TOKEN.findall(text):
        number = cache.get(token)
        if number is None:
            number = cache[token] = int.from_bytes(hashlib.blake2b(token.encode(), digest_size=8).digest(), "little")
        ids.append(number)
    count = len(ids) - SHINGLE + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    tokens = np.array(ids, np.uint64)
    total = np.zeros(count, np.uint64)
    for offset in range(SHINGLE):
        total = total * np.uint64(0x9E3779B97F4A7C15) + tokens[offset : offset + count]
        total ^= total >> np.uint64(29)
    kept: npt.NDArray[np.uint64] = np.unique(total[(total >> np.uint64(40)) % np.uint64(SAMPLE) == 0])
    return kept


def read_source(source: Source, foreign: frozenset[str], limit: float) -> tuple[list[File], Counter[str]]:
    """Return a package's accepted files and the counts of files left out; folders named in ``foreign`` are skipped.

    Only a random part of a large package is read: about ``limit`` characters, and a quarter of that of tests. The limit
    is three times as high for the standard library.
    """
    warnings.simplefilter("ignore")
    gc.disable()  # syntax trees have no cycles, and collections make parsing much slower
    if source.name == STDLIB:
        limit *= 3
    room = {False: limit, True: limit / 4}
    files: list[File] = []
    counts: Counter[str] = Counter()
    cache: dict[str, int] = {}
    entries = read_stdlib(source.path) if source.path.is_dir() else read_wheel(source.path)
    for path, raw in entries:
        folders = PurePosixPath(path).parts[:-1]
        if SKIPPED_DIRECTORIES.intersection(folders) or any(part.endswith(".data") for part in folders[:1]):
            counts["vendored or data folder"] += 1
            continue
        if foreign.intersection(folders):
            counts["held-out name"] += 1
            continue
        if SKIPPED_NAMES.search(path) or MIGRATION.search(path):
            counts["generated"] += 1
            continue
        if not 200 <= len(raw) <= 100_000:
            counts["size"] += 1
            continue
        is_test = bool(TEST_PATH.search(path))
        if room[is_test] < len(raw):
            counts["large package"] += 1
            continue
        try:
            original = raw.decode("utf-8")
        except UnicodeDecodeError:
            counts["not UTF-8"] += 1
            continue
        if GENERATED.search(original, 0, 1500):
            counts["generated"] += 1
            continue
        if COPYLEFT_HEADER.search(original, 0, 3000):
            counts["copyleft header"] += 1
            continue
        text = normalise(original)
        reason = "size" if len(text) < 200 or END_OF_TEXT in text else rejection(text)
        if reason:
            counts[reason] += 1
            continue
        counts["accepted"] += 1
        room[is_test] -= len(text)
        files.append(File(source.name, path, text, is_test, shingles_of(text, cache)))
    gc.enable()
    return sorted(files, key=lambda file: file.path), counts


def read_all(sources: Sequence[Source], limit: float, workers: int) -> tuple[list[File], dict[str, Counter[str]]]:
    # A package that carries a copy of a held-out one keeps it in a folder of that name.
    foreign = frozenset(source.name.lower() for source in sources if source.heldout)
    files: list[File] = []
    counts: dict[str, Counter[str]] = {}
    with ProcessPoolExecutor(workers) as pool:
        jobs = [
            pool.submit(read_source, source, frozenset() if source.heldout else foreign, limit) for source in sources
        ]
        for number, (source, job) in enumerate(zip(sources, jobs, strict=True), 1):
            found, counts[source.name] = job.result()
            files += found
            if number % 20 == 0 or number == len(sources):
                say(f"read {number}/{len(sources)} packages: {len(files)} files, {total_size(files) / 1e6:.1f} MB")
    return files, counts


def total_size(files: Iterable[File]) -> int:
    return sum(file.size for file in files)


# --------------------------------------------------------------------------------------------------------------------
# Duplicates and selection


def without_duplicates(files: Sequence[File], limit: float) -> tuple[list[File], Counter[str]]:
    """Drop exact copies, and files that share more than ``limit`` of their shingles with all earlier files together.

    Comparing with all earlier files, not with one at a time, also thins out files made from a template.
    """
    counts: Counter[str] = Counter()
    seen: set[bytes] = set()
    unique: list[File] = []
    for file in files:
        digest = hashlib.sha256(" ".join(file.text.split()).encode()).digest()
        if digest in seen:
            counts["exact copy"] += 1
        else:
            seen.add(digest)
            unique.append(file)
    sizes = np.array([len(file.shingles) for file in unique])
    owner = np.repeat(np.arange(len(unique)), sizes)
    every = np.concatenate([file.shingles for file in unique])
    _, first = np.unique(every, return_index=True)
    fresh = np.bincount(owner[first], minlength=len(unique))
    kept = [file for file, new, size in zip(unique, fresh, sizes, strict=True) if size - new <= limit * size]
    counts["near copy"] = len(unique) - len(kept)
    return kept, counts


def without_heldout(training: Sequence[File], heldout: Sequence[File], limit: float) -> tuple[list[File], int]:
    """Drop training files that share more than ``limit`` of their own or of a held-out file's shingles with it."""
    hashes = np.concatenate([file.shingles for file in heldout])
    owner = np.repeat(np.arange(len(heldout)), [len(file.shingles) for file in heldout])
    hashes, first = np.unique(hashes, return_index=True)
    owner = owner[first]
    sizes = np.maximum(np.bincount(owner, minlength=len(heldout)), 1)
    kept = []
    for file in training:
        place = np.minimum(np.searchsorted(hashes, file.shingles), len(hashes) - 1)
        hits = owner[place[hashes[place] == file.shingles]]
        if len(hits):
            shared = np.bincount(hits, minlength=len(heldout))
            if len(hits) > limit * len(file.shingles) or bool((shared > np.maximum(limit * sizes, 4)).any()):
                continue
        kept.append(file)
    return kept, len(training) - len(kept)


def select(files: Sequence[File], budget: float, share: float, test_share: float) -> list[File]:
    """Select about ``budget`` characters: the standard library, and packages in proportion to the root of their size.

    No package exceeds ``share`` of the total, and tests do not exceed ``test_share`` of a package. Files of a package
    are selected at random.
    """
    chance = random.Random(SEED)
    packages: dict[str, list[File]] = {}
    for file in files:
        packages.setdefault(file.package, []).append(file)
    for name, members in packages.items():
        members = sorted(members, key=lambda file: file.path)
        chance.shuffle(members)
        code = total_size(file for file in members if not file.is_test)
        tests = {id(file) for file in take((f for f in members if f.is_test), code * test_share / (1 - test_share))}
        packages[name] = [file for file in members if not file.is_test or id(file) in tests]
    sizes = np.array([total_size(members) for members in packages.values()], float)
    whole = np.array([name == STDLIB for name in packages])

    def allowances(factor: float) -> npt.NDArray[np.float64]:
        wanted = np.where(whole, sizes, np.minimum(sizes, factor * np.sqrt(sizes)))
        result: npt.NDArray[np.float64] = np.minimum(wanted, share * budget)
        return result

    low, high = 0.0, float(np.sqrt(sizes.max()))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if allowances(middle).sum() <= budget else (low, middle)
    rooms = allowances(low)
    return [file for members, room in zip(packages.values(), rooms, strict=True) for file in take(members, room)]


def take(files: Iterable[File], room: float) -> list[File]:
    taken = []
    for file in files:
        if file.size <= room:
            room -= file.size
            taken.append(file)
    return taken


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer


def train_tokenizer(texts: Iterable[str], pattern: str = SPLIT) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", config)


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint; it must have the vocabulary of these models."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise SystemExit(f"--tokenizer: {path} does not exist")
    tokenizer = Tokenizer.from_file(str(path))
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END_OF_TEXT)
    if size != VOCAB_SIZE or end != 0:
        raise SystemExit(f"{path} has {size} tokens and end-of-text {end}; the models need {VOCAB_SIZE} and 0")
    return tokenizer


def encode(tokenizer: Tokenizer, files: Sequence[File]) -> tuple[npt.NDArray[np.uint16], list[int]]:
    """Return the token ids of all files, each followed by end-of-text, and their counts; check the round trip."""
    parts: list[npt.NDArray[np.uint16]] = []
    for start in range(0, len(files), 1000):
        batch = [file.text for file in files[start : start + 1000]]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
        for file, text in zip(files[start:], tokenizer.decode_batch(encoded, skip_special_tokens=False), strict=False):
            if file.text != text:
                raise SystemExit(f"{file.package}/{file.path}: decoding does not give the text back")
        parts += [np.array([*ids, 0], "<u2") for ids in encoded]
    return np.concatenate(parts), [len(part) for part in parts]


# --------------------------------------------------------------------------------------------------------------------
# Output


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_xz(path: Path, ids: npt.NDArray[np.uint16]) -> int:
    # 16-bit values: the position within a pair of bytes is the context (lp, pb), and files are far apart (dictionary).
    lzma2 = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20, "lc": 3, "lp": 1, "pb": 1}
    with lzma.open(path, "wb", check=lzma.CHECK_SHA256, filters=[lzma2]) as stream:
        stream.write(ids.astype("<u2").tobytes())
    return path.stat().st_size


def packages_page(manifest: dict[str, Any]) -> str:
    """Return the table of packages as Markdown."""
    totals = manifest["splits"]
    lines = [
        "# Packages",
        "",
        "The Python source the bundled models and their tokenizer were trained on, and the source they are evaluated",
        "on. Written by `corpus.py`; licences are those the packages declare in their metadata.",
    ]
    for split, title in (("heldout", "Held-out packages (evaluation only)"), ("training", "Training packages")):
        total = totals[split]
        lines += [
            "",
            f"## {title}",
            "",
            f"{total['packages']} packages, {total['files']:,} files, {total['characters']:,} characters, "
            f"{total['tokens']:,} tokens.",
            "",
            "| Package | Version | Licence | Files | Characters |",
            "| --- | --- | --- | ---: | ---: |",
        ]
        for entry in manifest["packages"]:
            if entry["split"] == split and entry["files"]:
                name = "Python standard library" if entry["name"] == STDLIB else entry["name"]
                licence = entry["licence"].replace("|", "/")
                row = (name, entry["version"], licence, f"{entry['files']:,}", f"{entry['characters']:,}")
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def build(options: argparse.Namespace) -> None:
    started = time.monotonic()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    pins = read_pins(options.packages)
    if options.training_packages is not None:
        pins = thin_out(pins, options.training_packages)
    tokenizer = read_tokenizer(options.tokenizer) if options.tokenizer else None
    page: Path = options.page or (HERE if options.training_packages is None else out) / "PACKAGES.md"
    wheels = download(pins, options.wheels or out / "wheels", options.downloads)
    sources, refused = open_sources(pins, wheels)
    files, counts = read_all(sources, options.read, options.workers)

    names = {source.name for source in sources if source.heldout}
    files, dropped = without_duplicates(files, options.near)
    heldout = [file for file in files if file.package in names]
    training, overlapping = without_heldout(
        [file for file in files if file.package not in names], heldout, options.near_heldout
    )
    dropped["near copy of a held-out file"] = overlapping
    unique = total_size(training)
    say(f"after duplicates: training {len(training)} files, {unique / 1e6:.1f} MB; dropped {dict(dropped)}")
    training = select(training, options.characters, options.share, options.test_share)
    heldout = select(heldout, options.heldout_characters, 0.1, options.test_share)
    random.Random(SEED).shuffle(training)
    say(f"training: {len(training)} files, {total_size(training) / 1e6:.1f} MB")
    say(f"held out: {len(heldout)} files, {total_size(heldout) / 1e6:.1f} MB")

    if tokenizer is None:
        tokenizer = train_tokenizer(file.text for file in training)
        save_tokenizer(tokenizer, out / "tokenizer")
        say("tokenizer trained")
    splits: dict[str, dict[str, Any]] = {}
    tokens: Counter[str] = Counter()
    for split, members in (("heldout", heldout), ("training", training)):
        ids, lengths = encode(tokenizer, members)
        for file, length in zip(members, lengths, strict=True):
            tokens[file.package] += length
        size = write_xz(out / f"{'train' if split == 'training' else split}.u16.xz", ids)
        splits[split] = {
            "packages": len({file.package for file in members}),
            "files": len(members),
            "test_files": sum(file.is_test for file in members),
            "characters": total_size(members),
            "bytes": sum(len(file.text.encode()) for file in members),
            "tokens": len(ids),
            "characters_per_token": round(total_size(members) / len(ids), 3),
            "xz_bytes": size,
            "ids_sha256": hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest(),
        }
        say(f"{split}: {splits[split]}")
        if split == "heldout":
            rows = [
                {"package": file.package, "path": file.path, "tokens": length}
                for file, length in zip(members, lengths, strict=True)
            ]
            write_json(out / "heldout_files.json", rows)

    held = np.unique(np.concatenate([file.shingles for file in heldout]))
    trained = np.unique(np.concatenate([file.shingles for file in training]))
    common = len(np.intersect1d(held, trained, assume_unique=True))
    filters: Counter[str] = Counter()
    for count in counts.values():
        filters.update(count)
    per_package: dict[str, list[File]] = {}
    for file in (*heldout, *training):
        per_package.setdefault(file.package, []).append(file)
    manifest = {
        "splits": splits,
        "vocabulary": VOCAB_SIZE,
        "end_of_text": 0,
        "unique_training_characters": unique,
        "filters": dict(sorted(filters.items())),
        "duplicates": dict(dropped),
        "heldout_shingles_in_training": round(common / len(held), 5),
        "refused": refused,
        "packages": [
            {
                "name": source.name,
                "version": source.version,
                "licence": source.licence,
                "split": "heldout" if source.heldout else "training",
                "files": len(per_package.get(source.name, [])),
                "characters": total_size(per_package.get(source.name, [])),
                "tokens": tokens[source.name],
                "filters": dict(sorted(counts[source.name].items())),
            }
            for source in sorted(
                sources, key=lambda source: (not source.heldout, source.name != STDLIB, source.name.lower())
            )
        ],
    }
    write_json(out / "manifest.json", manifest)
    page.write_text(packages_page(manifest), encoding="utf-8")
    say(f"held-out shingles found in training: {100 * common / len(held):.2f} %")
    total = sum(split["xz_bytes"] for split in splits.values())
    say(f"archives: {total / 2**20:.1f} MiB; {time.monotonic() - started:.0f} s")
    if total > options.archive_limit << 20:
        raise SystemExit(f"the archives are larger than {options.archive_limit} MiB: lower --characters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="download, filter, tokenize")
    command.add_argument("--out", type=Path, default=HERE / "data", help="output directory")
    command.add_argument("--packages", type=Path, default=HERE / "packages.toml", help="pinned packages")
    command.add_argument(
        "--page",
        type=Path,
        help="table of packages to write (default: beside this script; with --training-packages: in OUT)",
    )
    command.add_argument(
        "--training-packages", type=int, metavar="N", help="a part of the training packages, evenly spread"
    )
    command.add_argument("--tokenizer", type=Path, metavar="DIR", help="take the tokenizer of this checkpoint")
    command.add_argument("--wheels", type=Path, help="where the wheels are kept (default: OUT/wheels)")
    command.add_argument("--characters", type=int, default=325_000_000, help="training text, at most")
    command.add_argument("--heldout-characters", type=int, default=4_000_000, help="held-out text, at most")
    command.add_argument("--read", type=int, default=4_000_000, help="text looked at in one package, about")
    command.add_argument("--share", type=float, default=0.03, help="largest share of one package")
    command.add_argument("--test-share", type=float, default=0.2, help="largest share of tests within a package")
    command.add_argument("--near", type=float, default=0.6, help="share of known shingles that makes a near copy")
    command.add_argument("--near-heldout", type=float, default=0.3, help="the same for copies of held-out files")
    command.add_argument("--archive-limit", type=int, default=50, help="MiB of both archives together, at most")
    command.add_argument("--workers", type=int, default=2, help="processes")
    command.add_argument("--downloads", type=int, default=3, help="downloads at a time")
    options = parser.parse_args()
    os.environ.setdefault("RAYON_NUM_THREADS", str(options.workers))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    build(options)


if __name__ == "__main__":
    main()
