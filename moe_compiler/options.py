"""What a user may write into `torch.compile(..., options={...})`, checked and frozen.

Our own names are the fields of `Options`; every other name must be a key of Inductor's
configuration and is passed on.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from moe_compiler.errors import OptionError
from moe_compiler.settings import Settings, parse_names

ABSORB_ROUTER = ("auto", "never")
LAYOUTS = ("ep", "tp")
TARGETS = ("auto", "triton")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one compilation.

    Attributes:
        strict: raise where a candidate block would be left to Inductor, or a build fails.
        batch_invariant: the experts' result of a token, given its ids and weights, may not depend on
            which other tokens are in the batch, bit for bit.
        absorb_router: "auto" computes the router inside the op where it was proven, "never" leaves
            it in the graph.
        target: "auto" takes the best target of the device, "triton" the Triton layer or none.
        dump_dir: one folder per compiled graph is written there; "" for none.
        disable: stages that are skipped, in the order of the stages.
        group: run the model over this process group ("world", or a group's name); "" for one process.
        layouts: with `group`, what the model can be switched between: "ep", "tp", or both.
        initial: with `group`, the layout of the first step; "" for the first of `layouts`.
        mode: Inductor's mode, "" for its default. torch.compile refuses `mode=` beside `options=`;
            this one it takes.
        inductor: keys of Inductor's configuration with their values, sorted by key.
    """

    strict: bool = False
    batch_invariant: bool = False
    absorb_router: str = "auto"
    target: str = "auto"
    dump_dir: str = ""
    disable: tuple[str, ...] = ()
    group: str = ""
    layouts: tuple[str, ...] = LAYOUTS
    initial: str = ""
    mode: str = ""
    inductor: tuple[tuple[str, Any], ...] = ()

    @property
    def first_layout(self) -> str:
        """The layout of the first step."""
        return self.initial or self.layouts[0]

    @property
    def cache_tag(self) -> str:
        """The part of these options that a cached graph depends on, as text."""
        return f"{self.batch_invariant=};{self.absorb_router=};{self.target=};{self.disable=}"


OPTION_NAMES: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(Options) if field.name != "inductor"
)


def resolve(
    options: Mapping[str, Any] | None,
    mode: str | None,
    settings: Settings,
    stages: Sequence[str],
) -> Options:
    """Check options and mode, and fill what they leave open from the environment switches.

    Args:
        options: what the user gave; our names and Inductor's.
        mode: what the user gave as `mode=`.
        settings: the environment switches.
        stages: the names of the stages.

    Raises:
        OptionError: an unknown name (with its near misses), or a value of the wrong type or outside
            of its choices.
    """
    given = dict(options or {})
    if mode and given.get("mode", mode) != mode:
        raise OptionError(f"mode={mode!r} and options['mode']={given['mode']!r} differ; give one")
    own = {name: given.pop(name) for name in OPTION_NAMES if name in given}
    layouts = _layouts(own.get("layouts", LAYOUTS))
    return Options(
        strict=_flag(own, "strict", settings.strict),
        batch_invariant=_flag(own, "batch_invariant", False),
        # Over a group every rank sends ids, not logits.
        absorb_router="never" if own.get("group") else _choice(own, "absorb_router", ABSORB_ROUTER),
        target=_choice(own, "target", TARGETS),
        dump_dir=_text(own, "dump_dir", settings.dump_dir),
        disable=_stages(own.get("disable"), settings.disable, stages),
        group=_text(own, "group", ""),
        layouts=layouts,
        initial=_initial(own, layouts),
        mode=_mode(mode or own.get("mode")),
        inductor=_inductor(given),
    )


def _flag(own: Mapping[str, Any], name: str, default: bool) -> bool:
    value = own.get(name, default)
    if not isinstance(value, bool):
        raise OptionError(f"option {name!r} takes True or False; got {value!r}")
    return value


def _text(own: Mapping[str, Any], name: str, default: str) -> str:
    value = own.get(name, default)
    if not (isinstance(value, str) or hasattr(value, "__fspath__")):
        raise OptionError(f"option {name!r} takes a path; got {value!r}")
    return str(value)


def _choice(own: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = own.get(name, choices[0])
    if value not in choices:
        raise OptionError(f"option {name!r} takes one of {', '.join(choices)}; got {value!r}")
    return str(value)


def _layouts(given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, (tuple, list)) or not names or set(names) - set(LAYOUTS):
        raise OptionError(f"option 'layouts' takes a tuple of {', '.join(LAYOUTS)}; got {given!r}")
    return tuple(dict.fromkeys(names))


def _initial(own: Mapping[str, Any], layouts: tuple[str, ...]) -> str:
    value = own.get("initial", "")
    if value not in ("", *layouts):
        raise OptionError(f"option 'initial' takes one of {', '.join(layouts)}; got {value!r}")
    return str(value)


def _stages(given: Any, default: tuple[str, ...], stages: Sequence[str]) -> tuple[str, ...]:
    source = "MOEFLEX_DISABLE" if given is None else "option 'disable'"
    names = default if given is None else given
    if isinstance(names, str):
        names = parse_names(names)
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise OptionError(f"{source} takes a tuple of names of stages; got {names!r}")
    if "all" in names:
        # Ours; an option comes too late for the capture, and Inductor goes only when it is named.
        late = {"inductor"} if given is None else {"inductor", "capture"}
        names = [name for name in stages if name not in late or name in names]
    if given is not None and "capture" in names:
        raise OptionError(
            "the stage 'capture' acts before options are known; set MOEFLEX_DISABLE=capture"
        )
    for name in names:
        if name not in stages:
            raise OptionError(
                f"{source} takes names of stages ({', '.join(stages)}) or 'all'; got {name!r}"
            )
    return tuple(name for name in stages if name in names)


def _mode(mode: Any) -> str:
    if not mode or mode == "default":
        return ""
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in modes:
        raise OptionError(f"mode takes one of {', '.join(sorted(modes))}; got {mode!r}")
    return str(mode)


def _inductor(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    if not given:
        return ()
    from torch._inductor import config as inductor_config

    config: Any = inductor_config

    known = config.get_config_copy()
    patches = {}
    for name, value in given.items():
        key = name.replace("-", "_") if isinstance(name, str) else name
        if key not in known:
            raise OptionError(_unknown(name, known))
        kind = config.get_type(key)
        # As torch.compile checks them: a union, or a list of something, is let through.
        if isinstance(kind, type) and get_origin(kind) is None and not isinstance(value, kind):
            raise OptionError(f"Inductor's option {key!r} takes a {kind.__name__}; got {value!r}")
        patches[key] = value
    return tuple(sorted(patches.items()))


def _unknown(name: Any, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(str(name), OPTION_NAMES, n=2, cutoff=0.55)
    near += difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(map(repr, near))}? " if near else ""
    return (
        f"unknown option {name!r}: {hint}moeflex takes {', '.join(OPTION_NAMES)}, "
        "and every key of torch._inductor.config"
    )


def inductor_patches(options: Options) -> dict[str, Any]:
    """The patches of Inductor's configuration that mode and options ask for; the options win."""
    patches: dict[str, Any] = {}
    if options.mode:
        from torch._inductor import list_mode_options

        patches.update(list_mode_options(options.mode))
    patches.update(options.inductor)
    return patches
