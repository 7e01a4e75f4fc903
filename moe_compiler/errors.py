"""Every error that moeflex raises on purpose, in one tree.

A message says what is needed, what came, and what to do.
"""

from __future__ import annotations


class MoeflexError(Exception):
    """Base of every error that moeflex raises on purpose."""


class OptionError(MoeflexError, ValueError):
    """An option, switch or command-line argument has an unknown name or an unusable value."""


class NoMatchError(MoeflexError):
    """`options={"strict": True}` was given and a candidate MoE block was left alone."""


class PlanError(MoeflexError, ValueError):
    """A plan string cannot be read, or does not fit the tensors that came with it."""


class BuildError(MoeflexError):
    """A compiler was missing, failed, or produced code that the build rules refuse."""


class ToolchainError(BuildError):
    """No usable compiler was found for a target."""


class CacheError(MoeflexError):
    """The build cache can be neither read nor written."""


class InspectError(MoeflexError):
    """A command could not build or trace the model that it was given."""


class UnsupportedError(MoeflexError, NotImplementedError):
    """What was asked for is valid, and this version does not do it."""


class ArenaError(MoeflexError):
    """A rank's arena is planned wrongly, too small, or asked for a slot that it lacks."""


class LayoutError(MoeflexError):
    """A layout was asked for that the compiled model does not have, or cannot have."""


class SwitchError(MoeflexError):
    """A switch between layouts failed; the message says whether the old layout still serves."""


class PeerError(MoeflexError):
    """Ranks cannot share memory, or a rank ended, left or did not come in time."""


class CheckpointError(MoeflexError):
    """A checkpoint folder cannot be read, or does not fit the model."""


class ArtifactError(MoeflexError):
    """A compiled artifact cannot be written, is not whole, or does not fit this machine."""
