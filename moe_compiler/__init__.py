"""moeflex: a `torch.compile` backend for Mixture-of-Experts models."""

__version__ = "0.1.0"
