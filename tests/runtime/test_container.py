"""The archive of an artifact: other tools read it, and no byte of it is unchecked."""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import zipfile
from pathlib import Path

import pytest
import torch

from moe_compiler.errors import ArtifactError
from moe_compiler.runtime import container, tensor_file
from moe_compiler.runtime.container import Archive

CONTENT = {"model.so": bytes(range(256)) * 40, "kernels/a.so": b"x", "empty": b""}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.mflx"
    sources = [container.of_bytes(name, content) for name, content in CONTENT.items()]
    container.write(path, b'{"format": 1}', sources)
    return path


def members() -> list[container.Member]:
    return [container.of_bytes(name, content).member for name, content in CONTENT.items()]


def test_zip_tools_read_it(archive: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        assert opened.testzip() is None
        assert opened.namelist() == [container.MANIFEST, *CONTENT]
        assert {name: opened.read(name) for name in CONTENT} == CONTENT
        digest = hashlib.sha256(b'{"format": 1}').hexdigest()
        assert opened.comment.endswith(digest.encode())


def test_members_lie_on_pages_and_read_back(archive: Path) -> None:
    opened = Archive(archive)
    opened.check_layout(members())
    for name, content in CONTENT.items():
        assert opened.offset(name) % mmap.PAGESIZE == 0
        assert opened.read(name) == content
    opened.close()


def test_equal_content_gives_equal_files(archive: Path, tmp_path: Path) -> None:
    sources = [container.of_bytes(name, content) for name, content in CONTENT.items()]
    container.write(tmp_path / "b.mflx", b'{"format": 1}', sources)
    assert archive.read_bytes() == (tmp_path / "b.mflx").read_bytes()


def read_all(path: Path) -> None:
    opened = Archive(path)
    try:
        opened.check_layout(members())
        for name in CONTENT:
            opened.read(name)
        if opened.manifest != b'{"format": 1}':
            raise ArtifactError("another manifest")
    finally:
        opened.close()


def test_every_byte_is_checked(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    generator = random.Random(0)
    # the records of the archive one by one, the rest sampled
    places = {*range(120), *range(len(whole) - 500, len(whole))}
    places |= set(generator.sample(range(len(whole)), 400))
    mutant = tmp_path / "mutant"
    for place in sorted(places):
        changed = bytearray(whole)
        changed[place] ^= 1 << generator.randrange(8)
        mutant.write_bytes(changed)
        with pytest.raises(ArtifactError):
            read_all(mutant)


def test_every_length_is_checked(archive: Path, tmp_path: Path) -> None:
    whole = archive.read_bytes()
    mutant = tmp_path / "mutant"
    for size in (0, 1, 30, 42, 43, 4095, 4096, 4100, len(whole) // 2, len(whole) - 1):
        mutant.write_bytes(whole[:size])
        with pytest.raises(ArtifactError, match=r"truncated|no moeflex artifact"):
            read_all(mutant)
    mutant.write_bytes(whole + b"\0")
    with pytest.raises(ArtifactError, match="longer"):
        read_all(mutant)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../a", "a/../b", "a//b", "", "A/b", "a\\b", "a/", ".hidden", "a\0b", "c:d"],
)
def test_names_that_leave_the_folder(name: str) -> None:
    with pytest.raises(ArtifactError, match="no name of a member"):
        container.of_bytes(name, b"")


def test_what_is_not_there_or_not_writable(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be opened"):
        Archive(tmp_path / "none")
    with pytest.raises(ArtifactError, match="cannot be read"):
        container.of_file("a", tmp_path / "none")
    with pytest.raises(ArtifactError, match="cannot be written"):
        container.write(tmp_path / "no" / "folder", b"{}", [])
    assert list(tmp_path.iterdir()) == []


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    container.write_plain(path, container.of_chunks("w", tensor_file.chunks_of(tensors)))


def map_file(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        return tensor_file.map_tensors(file.fileno(), 0, path.stat().st_size, str(path))


def test_tensors_read_back_and_are_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "odd": torch.randn(3, 5).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "wide": torch.randn(64, 32),
        "turned": torch.randn(8, 4).t(),
        "flags": torch.tensor([True, False, True]),
        "count": torch.arange(7),
    }
    path = tmp_path / "w.safetensors"
    write_tensors(path, tensors)
    found = map_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    assert found["wide"].data_ptr() % 64 == 0
    load_file = pytest.importorskip("safetensors.torch").load_file
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(path).items())


def test_a_written_tensor_leaves_its_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"w": torch.ones(64)})
    map_file(path)["w"].zero_()
    assert torch.equal(map_file(path)["w"], torch.ones(64))


def test_a_dtype_without_a_place(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="complex64"):
        tensor_file.chunks_of({"w": torch.zeros(1, dtype=torch.complex64)})


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}, "does not fit its shape"),
        ({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}, "does not fit"),
        ({"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}, "does not fit"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, "does not fit"),
        ({"dtype": "OBJECT", "shape": [4], "data_offsets": [0, 16]}, "does not know"),
        ({"dtype": "F32", "shape": [4]}, "not described"),
        ([], "not described"),
    ],
)
def test_entries_that_lie(entry: object, text: str, tmp_path: Path) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ArtifactError, match=text):
        map_file(path)


@pytest.mark.parametrize("content", [b"\0" * 4, b"\xff" * 16, b"\2" + bytes(7) + b"[]" + bytes(9)])
def test_headers_that_lie(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError):
        map_file(path)
