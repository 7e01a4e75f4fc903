"""The file of an artifact: a zip archive whose every byte is accounted for.

Members are stored, not compressed, each at a multiple of 4096 bytes, so that they can be mapped. The first one is the
manifest, which names all others with their sizes and digests. The layout follows from these alone: the reader writes
the archive's own records anew and compares them, so that no byte of the file stays unchecked. `unzip` and Python's
`zipfile` read it too.

Source: PKWARE APPNOTE 6.3.10, sections 4.3 and 4.5.3 (zip64); differs: one fixed choice wherever it leaves one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from moe_compiler.errors import ArtifactError

MANIFEST = "manifest.json"
PAGE_BYTES = 4096
MAX_MANIFEST_BYTES = 64 << 20
MAX_MEMBERS = 4096

Chunk = bytes | memoryview

_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][A-Za-z0-9_.-]{0,99}(/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}){0,3}")
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_VERSION = 45  # zip64
_DATE = 33  # 1980-01-01
_NEVER = 0xFFFFFFFF
_PAD_ID = 0x6D70
_TAG = b"moeflex artifact, manifest sha256 "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One file of the archive.

    Attributes:
        name: lower-case relative path with `/` between its parts.
        num_bytes: its size.
        sha256: of its content, 64 hex digits.
        crc32: of its content, as zip wants it.
    """

    name: str
    num_bytes: int
    sha256: str
    crc32: int


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Content on its way into an archive: its member, and where its bytes come from."""

    member: Member
    chunks: Callable[[], Iterator[Chunk]]


def of_bytes(name: str, content: bytes) -> Source:
    """A member with this content."""
    return _source(name, lambda: iter((content,)))


def of_file(name: str, path: str | os.PathLike[str]) -> Source:
    """A member with the content of a file.

    Raises:
        ArtifactError: it cannot be read.
    """
    return _source(name, lambda: _read(Path(path)))


def of_chunks(name: str, chunks: Callable[[], Iterator[Chunk]]) -> Source:
    """A member whose content is made anew, the same each time, by every call of `chunks`."""
    return _source(name, chunks)


def _source(name: str, chunks: Callable[[], Iterator[Chunk]]) -> Source:
    sha, crc, size = hashlib.sha256(), 0, 0
    for chunk in chunks():
        sha.update(chunk)
        crc = zlib.crc32(chunk, crc)
        size += len(chunk)
    member = Member(name=check_name(name), num_bytes=size, sha256=sha.hexdigest(), crc32=crc)
    return Source(member, chunks)


def _read(path: Path) -> Iterator[Chunk]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


def check_name(name: str) -> str:
    """The name of a member, where it is one.

    Raises:
        ArtifactError: it is absolute, climbs out of its folder, or has other characters than letters, digits and `._-`.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise ArtifactError(
            f"{name!r} is no name of a member: a relative path of letters, digits and . _ - is needed"
        )
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Where things lie in the archive: records with their offsets, and the offset of each member's content."""

    records: tuple[tuple[int, bytes], ...]
    offsets: tuple[int, ...]
    num_bytes: int


def _lay_out(members: Sequence[Member]) -> _Layout:
    """The archive of these members, the manifest first."""
    records, offsets, central, at = [], [], [], 0
    for member in members:
        name = member.name.encode("ascii")
        sizes = struct.pack("<2H2Q", 1, 16, member.num_bytes, member.num_bytes)
        start = at + _LOCAL.size + len(name) + len(sizes) + 4
        padding = -start % PAGE_BYTES
        extra = sizes + struct.pack("<2H", _PAD_ID, padding) + bytes(padding)
        fields = (_VERSION, 0, 0, 0, _DATE, member.crc32, _NEVER, _NEVER, len(name), len(extra))
        records.append((at, _LOCAL.pack(b"PK\3\4", *fields) + name + extra))
        offsets.append(start + padding)
        place = struct.pack("<2H3Q", 1, 24, member.num_bytes, member.num_bytes, at)
        times = (_VERSION, _VERSION, 0, 0, 0, _DATE, member.crc32)
        lengths = (_NEVER, _NEVER, len(name), len(place), 0, 0, 0, 0, _NEVER)
        central.append(_CENTRAL.pack(b"PK\1\2", *times, *lengths) + name + place)
        at = start + padding + member.num_bytes
    table = b"".join(central)
    count, end64 = len(members), at + len(table)
    tail = table + _END64.pack(
        *(b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(table), at)
    )
    tail += _LOCATOR.pack(b"PK\6\7", 0, end64, 1)
    comment = _TAG + members[0].sha256.encode("ascii")
    tail += _END.pack(b"PK\5\6", 0, 0, count, count, _NEVER, _NEVER, len(comment)) + comment
    records.append((at, tail))
    return _Layout(tuple(records), tuple(offsets), at + len(tail))


def write(path: str | os.PathLike[str], manifest: bytes, sources: Sequence[Source]) -> str:
    """Write an archive; the file appears whole or not at all.

    Args:
        path: the file, overwritten where it exists.
        manifest: content of the first member.
        sources: the others, in their order.

    Returns:
        SHA-256 of the manifest, which stands for the whole file.

    Raises:
        ArtifactError: it cannot be written, or names are not distinct.
    """
    everything = [of_bytes(MANIFEST, manifest), *sources]
    members = [source.member for source in everything]
    if len({member.name for member in members}) != len(members):
        raise ArtifactError(f"two members of {path} have one name: this is a fault of moeflex")
    layout = _lay_out(members)

    def content() -> Iterator[Chunk]:
        for (_, record), source in zip(layout.records, everything, strict=False):
            yield record
            yield from source.chunks()
        yield layout.records[-1][1]

    _write_whole(Path(path), content(), layout.num_bytes)
    return members[0].sha256


def write_plain(path: str | os.PathLike[str], source: Source) -> None:
    """Write a member as a file of its own; it appears whole or not at all.

    Raises:
        ArtifactError: it cannot be written.
    """
    _write_whole(Path(path), source.chunks(), source.member.num_bytes)


def _write_whole(path: Path, content: Iterator[Chunk], num_bytes: int) -> None:
    try:
        handle, work = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(content)
                size = file.tell()
            if size != num_bytes:
                raise ArtifactError(f"what {path} was to hold changed while it was written")
            os.chmod(work, 0o666 & ~_umask())
            os.replace(work, path)
        except BaseException:
            os.unlink(work)
            raise
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class Archive:
    """An archive that is open for reading: the manifest is checked, other members when they are read.

    The file stays open, so that what was checked is what is read, whatever becomes of its name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file and check its first member.

        Raises:
            ArtifactError: it is missing, is no archive of this kind, or its manifest is damaged.
        """
        self.path = str(path)
        try:
            self.file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115  closed by `close`
            self.num_bytes = os.fstat(self.file.fileno()).st_size
        except OSError as error:
            raise ArtifactError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self.manifest = self._read_manifest()
        except BaseException:
            self.close()
            raise
        self._own = Member(
            name=MANIFEST,
            num_bytes=len(self.manifest),
            sha256=hashlib.sha256(self.manifest).hexdigest(),
            crc32=zlib.crc32(self.manifest),
        )
        self._offsets: dict[str, tuple[Member, int]] = {}

    @property
    def sha256(self) -> str:
        """Of the manifest: stands for the whole file once `check_layout` and `check` have passed."""
        return self._own.sha256

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def check_layout(self, members: Sequence[Member]) -> None:
        """Check that the file is an archive of exactly the manifest and these members.

        Raises:
            ArtifactError: a name is not allowed or not distinct, the file is longer or shorter, or one of the
                archive's records is not what it has to be.
        """
        everything = (self._own, *members)
        try:
            names = [check_name(member.name) for member in everything]
        except ArtifactError as error:
            raise ArtifactError(f"{self.path} is damaged or was changed: {error}") from None
        if len(members) > MAX_MEMBERS or len(set(names)) != len(names):
            raise ArtifactError(f"{self.path}: the manifest's list of members is unusable")
        if any(not 0 <= m.num_bytes <= self.num_bytes for m in everything):
            raise ArtifactError(
                f"{self.path} is truncated or its manifest was changed: a member is said to be larger than the "
                f"whole file of {self.num_bytes} bytes. Copy it again."
            )
        if any(not 0 <= m.crc32 <= _NEVER for m in everything):
            raise ArtifactError(f"{self.path}: the manifest has an impossible checksum")
        layout = _lay_out(everything)
        if layout.num_bytes != self.num_bytes:
            what = "truncated" if self.num_bytes < layout.num_bytes else "longer than it should be"
            raise ArtifactError(
                f"{self.path} is {what}: its manifest asks for {layout.num_bytes} bytes and it has "
                f"{self.num_bytes}. Copy it again."
            )
        for offset, record in layout.records:
            if self.read_at(offset, len(record)) != record:
                raise ArtifactError(
                    f"{self.path} is damaged or was changed: the archive's record at byte {offset} is not what "
                    "its manifest asks for. Copy it again."
                )
        for member, offset in zip(everything, layout.offsets, strict=True):
            self._offsets[member.name] = (member, offset)

    def offset(self, name: str) -> int:
        """Where the content of a member begins; a multiple of 4096. `check_layout` came before."""
        return self._offsets[name][1]

    def check(self, name: str) -> None:
        """Check the content of a member.

        Raises:
            ArtifactError: its digest is not the one of the manifest.
        """
        sha = hashlib.sha256()
        for chunk in self._chunks(name):
            sha.update(chunk)
        self._compare(name, sha.hexdigest())

    def read(self, name: str) -> bytes:
        """The checked content of a member.

        Raises:
            ArtifactError: its digest is not the one of the manifest.
        """
        content = b"".join(self._chunks(name))
        self._compare(name, hashlib.sha256(content).hexdigest())
        return content

    def _compare(self, name: str, found: str) -> None:
        wanted = self._offsets[name][0].sha256
        if found != wanted:
            raise ArtifactError(
                f"{self.path} is damaged or was changed: {name} has the SHA-256 {found[:16]}..., its manifest asks "
                f"for {wanted[:16]}.... Copy it again."
            )

    def _chunks(self, name: str) -> Iterator[bytes]:
        member, offset = self._offsets[name]
        left = member.num_bytes
        while left:
            chunk = self.read_at(offset, min(left, _CHUNK_BYTES))
            if not chunk:
                raise ArtifactError(f"{self.path} became shorter while it was read")
            yield chunk
            offset, left = offset + len(chunk), left - len(chunk)

    def read_at(self, offset: int, num_bytes: int) -> bytes:
        """Bytes of the file; fewer where it ends."""
        try:
            return os.pread(self.file.fileno(), num_bytes, offset)
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {error.strerror}") from error

    def _read_manifest(self) -> bytes:
        """The manifest's bytes, by what the first record alone says of it; `check_layout` compares that record."""
        name = MANIFEST.encode("ascii")
        head = self.read_at(0, _LOCAL.size + len(name) + 20)
        wanted = b"PK\3\4"
        if head[: len(wanted)] != wanted or head[_LOCAL.size : _LOCAL.size + len(name)] != name:
            raise ArtifactError(
                f"{self.path} is no moeflex artifact: a file written by `moeflex compile` begins with "
                f"{MANIFEST}. Check the path."
            )
        if len(head) < _LOCAL.size + len(name) + 20:
            raise ArtifactError(f"{self.path} is truncated: it ends inside of its first record")
        (size,) = struct.unpack_from("<Q", head, _LOCAL.size + len(name) + 4)
        if size > min(MAX_MANIFEST_BYTES, self.num_bytes):
            raise ArtifactError(
                f"{self.path} is truncated or damaged: its manifest is said to have {size} bytes"
            )
        start = _LOCAL.size + len(name) + 20 + 4
        manifest = self.read_at(start + -start % PAGE_BYTES, size)
        if len(manifest) != size:
            raise ArtifactError(f"{self.path} is truncated: it ends inside of its manifest")
        return manifest
