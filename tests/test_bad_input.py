"""Bad input and poor machines: the right answer, or an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.blocks import BACKEND, FORMS, Block, compare, num_replaced, rand
from tests.cases.processes import finish, start
from tests.tolerances import assert_close_to_eager

ROOT = Path(__file__).resolve().parents[1]


def caches(folder: Path) -> dict[str, str]:
    return {
        "MOEFLEX_CACHE_DIR": str(folder / "ours"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def test_without_transformers(tmp_path: Path) -> None:
    """The library itself does not need it."""
    hide = "sys.modules['transformers'] = None"
    finish(start(tmp_path / "y.pt", caches(tmp_path), tmp_path, before=hide), tmp_path / "y.pt")


def test_quickstart_without_transformers_says_what_to_install() -> None:
    code = (
        "import runpy, sys; sys.modules['transformers'] = None; sys.argv = ['quickstart.py']\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'quickstart.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "pip install" in done.stdout
    assert "[hf]" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("cxx", ["", "no-such-compiler"])
def test_without_a_compiler(cxx: str, tmp_path: Path) -> None:
    """A clear warning, and the block runs in plain PyTorch."""
    env = {**caches(tmp_path), "CXX": cxx}
    if not cxx:
        (tmp_path / "bin").mkdir()
        env["PATH"] = str(tmp_path / "bin")
    output = finish(start(tmp_path / "y.pt", env, tmp_path), tmp_path / "y.pt")
    assert "C++ compiler" in output
    assert "CXX" in output
    assert "Traceback" not in output


def test_compiler_that_fails(tmp_path: Path) -> None:
    """It answers `--version` and nothing else: what it said is shown, and the answer is right."""
    broken = tmp_path / "broken-c++"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) echo "g++ 12.0.0" ;;\n'
        "*) echo no disk >&2; exit 1 ;; esac\n"
    )
    broken.chmod(0o755)
    env = {**caches(tmp_path), "CXX": str(broken)}
    process = start(tmp_path / "y.pt", env, tmp_path)
    output, _ = process.communicate(timeout=300)
    assert "no disk" in output
    if process.returncode == 0:
        with torch.no_grad():
            want = Block(form="gather")(rand(9, 16))
        assert_close_to_eager(torch.load(tmp_path / "y.pt"), want)
    else:  # Inductor itself cannot go on without its compiler
        assert "CppCompileError" in output or "compile" in output.lower()


@pytest.mark.parametrize("case", ["cache", "home", "both"])
def test_cache_folder_that_cannot_be_written(case: str, tmp_path: Path) -> None:
    """A path below a file cannot be made, not even by root."""
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "folder")
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "MOEFLEX_CACHE_DIR": ""}
    if case in ("home", "both"):
        env.update(HOME=below, XDG_CACHE_HOME="")
    if case in ("cache", "both"):
        env["MOEFLEX_CACHE_DIR"] = below
    output = finish(start(tmp_path / "y.pt", env, tmp_path), tmp_path / "y.pt")
    assert "MOEFLEX_CACHE_DIR" in output
    assert "Traceback" not in output


def test_cache_folder_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    env = {
        "MOEFLEX_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    finish(start(tmp_path / "y.pt", env, tmp_path), tmp_path / "y.pt")


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: Path) -> None:
    results = [tmp_path / f"{i}.pt" for i in range(2)]
    running = [(start(result, caches(tmp_path), tmp_path), result) for result in results]
    for process, result in running:
        finish(process, result)


def test_bad_switches_name_their_choices(tmp_path: Path) -> None:
    for name, value, choice in (
        ("MOEFLEX_STRICT", "perhaps", "0 or 1"),
        ("MOEFLEX_CPU_ISA", "sse9", "avx2"),
        ("MOEFLEX_DISABLE", "mach", "match"),
    ):
        process = start(tmp_path / "y.pt", {**caches(tmp_path), name: value}, tmp_path)
        output, _ = process.communicate(timeout=300)
        assert process.returncode != 0
        assert name in output
        assert choice in output


def test_everything_disabled_is_inductor(tmp_path: Path) -> None:
    env = {**caches(tmp_path), "MOEFLEX_DISABLE": "all"}
    finish(start(tmp_path / "y.pt", env, tmp_path), tmp_path / "y.pt")
    assert not (tmp_path / "ours").exists()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("grad", [False, True])
def test_model_without_experts(grad: bool) -> None:
    compare(Plain(), rand(9, 16), grad=grad, replaced=False)


def test_model_without_experts_is_bitwise_inductor() -> None:
    model, x = Plain(), rand(9, 16)
    with torch.no_grad():
        ours = torch.compile(model, backend=BACKEND)(x)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="inductor")(x), ours)


def test_strict_refuses_what_is_left_alone() -> None:
    from tests.cases.test_detection import UnequalExperts

    if BACKEND != "moeflex":
        pytest.skip("an option of moeflex")
    compiled = torch.compile(UnequalExperts(), backend=BACKEND, options={"strict": True})
    with pytest.raises(Exception, match="strict"), torch.no_grad():
        compiled(rand(9, 16))


@pytest.mark.parametrize("form", ["gather", "loop"])
def test_meta_device(form: str) -> None:
    """Shapes can be asked of a model without weights."""
    model = Block(form="gather").to("meta")
    x = torch.empty(9, 16, device="meta")
    with torch.no_grad():
        y = torch.compile(model, backend=BACKEND)(x)
    assert y.device.type == "meta"
    assert y.shape == (9, 16)


@pytest.mark.parametrize("form", FORMS)
def test_requires_grad(form: str) -> None:
    compare(Block(form=form), rand(9, 16), grad=True)


def test_second_order_gradients_are_refused_as_torch_compile_does() -> None:
    model, x = Block(form="gather"), rand(9, 16).requires_grad_()
    y = torch.compile(model, backend=BACKEND)(x)
    # Which of the two statements refuses depends on what the compiled backward was built for.
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):  # noqa: PT012
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()


@pytest.mark.parametrize("form", ["gather", "loop", "grouped"])
def test_no_tokens(form: str) -> None:
    model = Block(form=form)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        assert compiled(rand(0, 16)).shape == (0, 16)
        assert_close_to_eager(compiled(rand(3, 16)), Block(form=form)(rand(3, 16)))


class Routed(nn.Module):
    """A router that is a module, so that hooks can be put on it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 8, bias=False)
        self.block = Block(form="gather")

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.block.experts(x, ids, weights)


def test_hooks_on_the_router() -> None:
    """A hook that watches sees every call; a hook that changes the logits changes the routing."""
    seen: list[Tensor] = []
    model = Routed()

    def watch(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(output.detach().clone())

    def force(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + 50.0 * F.one_hot(torch.tensor(6), 8)

    x = rand(9, 16)
    with torch.no_grad():
        plain = model(x)
        watching = model.router.register_forward_hook(watch)
        assert_close_to_eager(torch.compile(model, backend=BACKEND)(x), plain)
        assert any(torch.allclose(logits, F.linear(x, model.router.weight)) for logits in seen)
        watching.remove()
        torch._dynamo.reset()
        model.router.register_forward_hook(force)
        forced = torch.compile(model, backend=BACKEND)(x)
        assert_close_to_eager(forced, model(x))
        assert not torch.allclose(forced, plain, atol=1e-3)


def test_hook_on_the_logits_gradient() -> None:
    """A tensor hook on the logits sees what eager's sees."""

    class Hooked(Block):
        def forward(self, x: Tensor) -> Tensor:
            logits = F.linear(x, self.gate)
            logits.register_hook(lambda grad: grad * 2)
            return self.experts(x, *self.route(logits, self.top_k))

    compare(Hooked(form="gather"), rand(9, 16), grad=True)


def test_functional_transforms_in_front() -> None:
    """`torch.func.grad` over the compiled block's eager twin is not disturbed by a compilation."""
    model, x = Block(form="gather"), rand(5, 16)
    with torch.no_grad():
        torch.compile(model, backend=BACKEND)(x)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    gradients = torch.func.grad(loss)(parameters)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_threads_that_call_one_compiled_block() -> None:
    model, x = Block(form="gather"), rand(9, 16)
    compiled = torch.compile(model, backend=BACKEND)
    with torch.no_grad():
        want = compiled(x)
        results: list[Tensor] = []

        def call() -> None:
            with torch.no_grad():
                results.extend(compiled(x) for _ in range(20))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_number_of_threads_does_not_change_the_result(num_threads: int) -> None:
    model, x = Block(form="gather", hidden=64, intermediate=40), rand(50, 64)
    compiled = torch.compile(model, backend=BACKEND)
    before = torch.get_num_threads()
    with torch.no_grad():
        want = compiled(x)
        torch.set_num_threads(num_threads)
        try:
            assert_close_to_eager(compiled(x), want)
        finally:
            torch.set_num_threads(before)


def test_fullgraph() -> None:
    """A block whose form traces comes as one graph, also when the caller insists on that."""
    compare(Block(form="gather"), rand(9, 16), fullgraph=True)
    if BACKEND == "moeflex":
        assert num_replaced() == 1
