"""Artifacts: made by `moeflex compile`, loaded in another process, and refused when they are not what was written."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import moe_compiler
from moe_compiler import ahead, cli
from moe_compiler.ahead import Request
from moe_compiler.artifact import FORMAT, Kernel, Manifest, MemberEntry, read_manifest
from moe_compiler.errors import ArtifactError, OptionError, UnsupportedError
from moe_compiler.runtime import aoti_runner, artifact_runner, container, cpu_target
from tests.cases.blocks import Block, rand
from tests.tolerances import assert_close_to_eager, assert_close_to_fp32

ROOT = Path(__file__).parents[1]
TOKENS = (1, 2, 5, 64, 200)


def block() -> tuple[Block, torch.Tensor]:
    """What the artifact of these tests is made of."""
    return Block(form="grouped"), rand(5, 16)


@dataclasses.dataclass(frozen=True)
class Made:
    path: Path
    manifest: Manifest
    sha256: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp("artifact") / "model.mflx"
    request = Request(model=f"{__file__}:block", output=str(path), tokens=(1, 200))
    manifest, sha256 = ahead.compile_model(request)
    return Made(path, manifest, sha256)


CHILD = """
import json, os, shutil, sys
import torch
import moe_compiler
assert shutil.which("g++") is None and shutil.which("c++") is None
model = moe_compiler.load(sys.argv[1], sha256=sys.argv[2])
assert "torch._inductor" not in sys.modules and "transformers" not in sys.modules
from moe_compiler.runtime import op, op_forward

def in_python(*args, **kwargs):
    raise AssertionError("Python is on the hot path")

assert not op.served_in_plain_torch("cpu")
op_forward.forward = op._save_for_backward = op._differentiate = in_python
for name in sorted(os.listdir(sys.argv[3])):
    path = os.path.join(sys.argv[3], name)
    torch.save(model(torch.load(path)), path)
"""


def test_runs_in_a_process_without_compilers(made: Made, tmp_path: Path) -> None:
    inputs = tmp_path / "x"
    inputs.mkdir()
    (tmp_path / "bin").mkdir()
    for num_tokens in TOKENS:
        torch.save(rand(num_tokens, 16, seed=num_tokens), inputs / f"{num_tokens}.pt")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": str(tmp_path / "bin"),
        "MOEFLEX_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(made.path), made.sha256, str(inputs)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()
    model, twin = Block(form="grouped").eval(), Block(form="loop").double()
    with torch.no_grad():
        for num_tokens in TOKENS:
            x = rand(num_tokens, 16, seed=num_tokens)
            found = torch.load(inputs / f"{num_tokens}.pt")
            assert_close_to_fp32(found, model(x), twin(x.double()))


def test_the_manifest_says_what_was_done(made: Made) -> None:
    manifest = read_manifest(container.Archive(made.path).manifest, "it")
    assert manifest == made.manifest
    (one,) = manifest.blocks
    assert one.target == "cpu"
    assert one.region.experts.num_experts == 8
    assert [(s.name, s.dtype, s.shape) for s in manifest.inputs] == [("x", "float32", (-1, 16))]
    assert [(s.dtype, s.shape) for s in manifest.outputs] == [("float32", (-1, 16))]
    assert {c.source for c in manifest.constants} == {"gate", "w13", "w2"}
    assert manifest.requirements.torch == torch.__version__
    assert len(manifest.kernels) == 1


def test_weights_are_replaced_and_seen_in_place(made: Made) -> None:
    loaded = moe_compiler.load(made.path)
    model, new, x = Block(form="grouped").eval(), Block(form="grouped", seed=3).eval(), rand(9, 16)
    with torch.no_grad():
        assert_close_to_eager(loaded(x), model(x))
        for name in ("gate", "w13", "w2"):
            loaded.load_weights({name: getattr(new, name)})
            getattr(model, name).copy_(getattr(new, name))
            assert_close_to_eager(loaded(x), model(x))
        loaded.weights["w2"].mul_(0.5)
        model.w2.mul_(0.5)
        assert_close_to_eager(loaded(x=x), model(x))
        # the tensors that were given are read, not copies of them
        assert loaded.weights["w2"].data_ptr() == new.w2.data_ptr()
        other = moe_compiler.load(made.path)
        assert_close_to_eager(other(x), Block(form="grouped").eval()(x))


def test_weights_that_do_not_fit_change_nothing(made: Made) -> None:
    loaded, x = moe_compiler.load(made.path), rand(9, 16)
    before = loaded(x)
    for wrong, text in (
        ({"w3": torch.zeros(1)}, "unknown \\['w3'\\]"),
        ({"w2": torch.zeros(8, 16, 9)}, r"w2 must be \[8, 16, 8\] float32; got \[8, 16, 9\]"),
        ({"w2": torch.zeros(8, 16, 8, dtype=torch.float64)}, "got .* float64"),
    ):
        with pytest.raises(ArtifactError, match=text):
            loaded.load_weights({"gate": torch.zeros_like(loaded.weights["gate"]), **wrong})
    assert torch.equal(loaded(x), before)
    with pytest.raises(ArtifactError, match="missing \\['"):
        moe_compiler.load(made.path, weights={"gate": loaded.weights["gate"]})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "missing \\['x'\\]"),
        ((rand(5, 16), rand(5, 16)), "takes 1 tensors; got 2"),
        ((rand(5, 17),), r"x must be \[T, 16\] float32 on the CPU; got \[5, 17\] float32"),
        ((rand(5, 16).double(),), "float64"),
        ((rand(1, 5, 16),), r"got \[1, 5, 16\]"),
        ((rand(201, 16),), r"one token count from 1 to 200 is needed; got \[201\]"),
        ((torch.zeros(0, 16),), r"got \[0\]"),
        (([1.0],), "x is a list"),
        ((torch.zeros(5, 16, device="meta"),), "on meta"),
    ],
)
def test_inputs_that_do_not_fit(made: Made, args: tuple[object, ...], text: str) -> None:
    with pytest.raises(ArtifactError, match=text):
        moe_compiler.load(made.path)(*args)


def test_any_strides_are_taken(made: Made) -> None:
    loaded, x = moe_compiler.load(made.path), rand(16, 16)
    assert torch.equal(loaded(x.t()), loaded(x.t().contiguous()))


def test_weights_outside(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "outside.mflx"
    arguments = ["compile", f"{__file__}:block", "-o", str(path), "--tokens", "1:200"]
    assert cli.main([*arguments, "--weights", "outside", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(path)
    assert found["manifest"]["blocks"][0]["region"]["experts"]["num_experts"] == 8
    beside = tmp_path / "outside.safetensors"
    x = rand(9, 16)
    assert found["manifest"]["weights"]["file"] == beside.name
    moe_compiler.load(path, sha256=found["sha256"])
    assert torch.equal(moe_compiler.load(path)(x), moe_compiler.load(made.path)(x))
    whole = beside.read_bytes()
    beside.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(ArtifactError, match="damaged or was changed"):
        moe_compiler.load(path)
    moe_compiler.load(path, weights=beside)  # on purpose
    beside.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match="truncated"):
        moe_compiler.load(path)
    beside.unlink()
    with pytest.raises(ArtifactError, match="pass weights=PATH"):
        moe_compiler.load(path)


# ---- files that are not what was written ----------------------------------------------------------------------------
@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def executed(*args: object, **kwargs: object) -> None:
        raise AssertionError("code of a refused artifact was loaded")

    monkeypatch.setattr(cpu_target, "use_library", executed)
    monkeypatch.setattr(cpu_target, "register", executed)
    monkeypatch.setattr(aoti_runner, "open_library", executed)
    monkeypatch.setattr(artifact_runner.tempfile, "mkdtemp", executed)


def contents(path: Path) -> dict[str, bytes]:
    archive, manifest = artifact_runner.open_archive(path)
    return {member.name: archive.read(member.name) for member in manifest.members}


def packed(manifest: Manifest, members: dict[str, bytes], path: Path) -> Path:
    """An archive with this manifest and these contents, its digests those of the contents."""
    sources = [container.of_bytes(name, content) for name, content in members.items()]
    entries = tuple(MemberEntry(**dataclasses.asdict(s.member)) for s in sources)
    container.write(path, dataclasses.replace(manifest, members=entries).to_json(), sources)
    return path


def mutants(whole: bytes, manifest: Manifest) -> list[tuple[str, bytes]]:
    """Changed copies of an artifact's bytes: 110 flips, 40 cuts, 20 ranges of noise, 30 renamed or exchanged parts."""
    generator = random.Random(7)
    found = []
    for number in range(110):
        # every second one among the records and the manifest
        place = generator.randrange(len(whole) if number % 2 else 20_000)
        changed = bytearray(whole)
        changed[place] ^= 1 << generator.randrange(8)
        found.append((f"flip at {place}", bytes(changed)))
    for _ in range(40):
        size = generator.randrange(len(whole))
        found.append((f"cut to {size}", whole[:size]))
    for _ in range(20):
        start, size = generator.randrange(len(whole) - 5000), generator.randrange(16, 5000)
        noise = generator.randbytes(size)
        found.append((f"noise at {start}", whole[:start] + noise + whole[start + size :]))
    names = [member.name.encode() for member in manifest.members]
    for _ in range(15):
        name = generator.choice(names)
        other = b"../../" + bytes(generator.choices(b"abcxyz", k=len(name)))
        found.append((f"{name!r} renamed", whole.replace(name, other[: len(name)])))
    for _ in range(15):
        first, second = generator.sample(range(0, len(whole) - 8192, 4096), 2)
        changed = bytearray(whole)
        changed[first : first + 4096] = whole[second : second + 4096]
        changed[second : second + 4096] = whole[first : first + 4096]
        found.append((f"pages {first} and {second} exchanged", bytes(changed)))
    return found


@pytest.mark.usefixtures("nothing_runs")
def test_200_mutants_are_refused_and_nothing_of_them_runs(made: Made, tmp_path: Path) -> None:
    whole = made.path.read_bytes()
    mutant, number = tmp_path / "mutant.mflx", 0
    for what, changed in mutants(whole, made.manifest):
        number += changed != whole
        mutant.write_bytes(changed)
        with pytest.raises(ArtifactError) as refused:
            moe_compiler.load(mutant)
        assert str(mutant) in str(refused.value), what
        assert len(str(refused.value)) < 2000, what
    assert number == 200


def change_manifest(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda manifest: dataclasses.replace(manifest, **changes)  # type: ignore[arg-type]


def require(**changes: object) -> Callable[[Manifest], Manifest]:
    return lambda m: dataclasses.replace(
        m,
        requirements=dataclasses.replace(m.requirements, **changes),  # type: ignore[arg-type]
    )


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (change_manifest(format=FORMAT + 1), "this moeflex reads up to"),
        (change_manifest(format=0), "format is 0"),
        (change_manifest(format="1"), "a number is needed"),
        (change_manifest(tokens=("1", 2)), "does not say what format"),
        (change_manifest(model=3), "Manifest.model is 3"),
        (change_manifest(target="sm_90a"), "is for sm_90a"),
        (change_manifest(kernels=(Kernel(member="kernels/b.so", plan="", spec=""),)), "missing"),
        (require(torch="1.13.1"), "was compiled with torch 1.13.1 .* install torch 1.13"),
        (require(system="win32 amd64"), "compiled for win32 amd64"),
        (require(cpu_features=("avx9000",)), "needs a CPU with avx9000"),
    ],
)
def test_manifests_that_do_not_fit(
    change: Callable[[Manifest], Manifest], text: str, made: Made, tmp_path: Path
) -> None:
    path = packed(change(made.manifest), contents(made.path), tmp_path / "m.mflx")
    with pytest.raises(ArtifactError, match=text):
        moe_compiler.load(path)


@pytest.mark.usefixtures("nothing_runs")
def test_a_manifest_that_is_no_table(tmp_path: Path) -> None:
    for content in (b"[1]", b"", b"\xff", b"{}", b"[" * 100_000, b'{"format": 1}'):
        container.write(tmp_path / "m.mflx", content, [])
        with pytest.raises(ArtifactError, match="manifest"):
            moe_compiler.load(tmp_path / "m.mflx")


@pytest.mark.usefixtures("nothing_runs")
def test_members_that_are_exchanged_missing_or_foreign(made: Made, tmp_path: Path) -> None:
    whole = contents(made.path)
    path = tmp_path / "m.mflx"
    swapped = {**whole, "model.so": whole["op.so"], "op.so": whole["model.so"]}
    packed(made.manifest, swapped, path)
    entries = {m.name: dataclasses.asdict(m) for m in made.manifest.members}
    archive = container.Archive(path)
    with pytest.raises(ArtifactError, match=r"changed|truncated|longer"):
        archive.check_layout([container.Member(**entry) for entry in entries.values()])
    for members in (
        {name: content for name, content in whole.items() if name != "op.so"},
        {name: content for name, content in whole.items() if name != "weights.safetensors"},
        {**whole, "run_me.py": b"print()"},
        {**whole, "kernels/run_me.py": b"print()"},
    ):
        packed(made.manifest, members, path)
        with pytest.raises(ArtifactError, match="do not belong together"):
            moe_compiler.load(path)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ["../model.so", "/tmp/x.so", "kernels/../../x.so"])
def test_names_that_leave_the_folder(
    name: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(container, "check_name", lambda name: name)
        packed(made.manifest, {**contents(made.path), name: b""}, tmp_path / "m.mflx")
    with pytest.raises(ArtifactError, match="no name of a member"):
        moe_compiler.load(tmp_path / "m.mflx")
    assert not (tmp_path.parent / "model.so").exists()


@pytest.mark.usefixtures("nothing_runs")
def test_foreign_files(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "m.mflx"
    for content in (b"", b"\x7fELF" + bytes(9000), b"PK\3\4" + bytes(9000)):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match="no moeflex artifact"):
            moe_compiler.load(path)
    with pytest.raises(ArtifactError, match="cannot be opened"):
        moe_compiler.load(tmp_path / "none.mflx")
    with pytest.raises(ArtifactError, match=r"cannot be opened|cannot be read"):
        moe_compiler.load(tmp_path)
    with pytest.raises(ArtifactError, match="another artifact than the one"):
        moe_compiler.load(made.path, sha256="0" * 64)


@pytest.mark.slow
def test_a_configuration_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
        **{"head_dim": 32, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    )
    config.save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (1, 40))
    path = tmp_path / "m.mflx"
    for origin in ("random", "the checkpoint"):
        request = Request(model=str(tmp_path), output=str(path), tokens=(1, 128), dtype="bf16")
        manifest, _ = ahead.compile_model(request)
        assert manifest.weights.origin.startswith(origin)
        assert [b.target for b in manifest.blocks] == ["cpu", "cpu"]
        torch.manual_seed(0 if origin == "random" else 5)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        if origin != "random":
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        loaded = moe_compiler.load(path)
        with torch.no_grad():
            for part in (ids, ids[:, :1], ids[:, :7]):
                found = loaded(input_ids=part)["logits"]
                assert_close_to_eager(found, model(part, use_cache=False).logits)
        torch.manual_seed(5)
        other = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        loaded.load_weights(other.state_dict())
        with torch.no_grad():
            want = other(ids, use_cache=False).logits
        assert_close_to_eager(loaded(ids)["logits"], want)
        other.save_pretrained(tmp_path)


# ---- the command ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--layouts", "ep,tp"], 3, "not built yet; --layouts takes single"),
        (["--layouts", "dp"], 2, "--layouts takes some of single, ep, tp"),
        (["--tokens", "9:2"], 2, "a range such as 1:8192"),
        (["--tokens", "100:200"], 2, "does not hold the 5 tokens"),
        (["--axis", "2"], 2, r"--axis 2 is not an axis of the first input, of shape [5, 16]"),
        (["-o", "/no/such/folder/m.mflx"], 2, "the folder /no/such/folder is not there"),
    ],
)
def test_what_the_command_refuses(
    arguments: list[str],
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compile", f"{__file__}:block", *arguments]) == code
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(OptionError, match="--cpu-isa takes one of"):
        Request(model="m", output="o", cpu_isa="sse").check()
    with pytest.raises(UnsupportedError, match="--target takes cpu"):
        Request(model="m", output="o", target="sm_90a").check()
